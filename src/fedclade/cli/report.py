"""Commands ``report``, ``tree`` and ``export`` for runs; ``validate`` and ``cite``."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedclade.cli import options
from fedclade.cli.options import new_console, say
from fedclade.config import find_config, is_scenario, known_scales, read_config, read_scenarios
from fedclade.core import RunError
from fedclade.report import (
    Comparison,
    add_figures,
    cite_name,
    cluster_table,
    decision_tables,
    run_table,
    shortened,
    tree_view,
)
from fedclade.report.page import REPORT, RunView, comparison_page, run_labels, run_page, write_page
from fedclade.runs import (
    Run,
    export_adapter,
    export_model,
    is_finished,
    is_unfinished,
    read_newcomers,
)
from fedclade.tasks import read_metrics


def tree(folder: options.RunFolder) -> None:
    """Print the parameter tree of a run: its clusters, their members and the splits."""
    run = Run.load(folder)
    new_console().print(tree_view(run.tree, run))


def export(
    folder: options.RunFolder,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE.safetensors",
            help="File to write, or folder with --adapter; it must not exist yet.",
        ),
    ],
    client: Annotated[
        int | None, typer.Option("--client", metavar="ID", help="Client whose model is exported.")
    ] = None,
    node: Annotated[
        int | None, typer.Option("--node", metavar="ID", help="Tree node whose model is exported.")
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            "--level",
            help="Level on the client's path: 0 is the root, -1 its leaf. Default: the model that "
            "the client was evaluated with.",
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help="Export only the adapter, as a folder for peft and fedclade.load_adapter.",
        ),
    ] = False,
) -> None:
    """Write one model of a run as a state dict for plain PyTorch, with a model card.

    Example: fedclade export RUN --client 3 --out client-3.safetensors; then, in Python,
    model.load_state_dict(safetensors.torch.load_file("client-3.safetensors"))
    """
    run = Run.load(folder)
    if adapter:
        written = export_adapter(run, out, client=client, node=node, level=level)
        say(new_console(), f"adapter: {written}")
        return
    written = export_model(run, out, client=client, node=node, level=level)
    cards = " and ".join(str(written.with_suffix(suffix)) for suffix in (".json", ".md"))
    say(new_console(), f"model: {written}; model card: {cards}")


def validate(config: options.ConfigFile) -> None:
    """Check a config without running it, and report all its errors at once."""
    path = find_config(config)
    if is_scenario(path):
        for scale in (None, *known_scales(path)):
            read_scenarios(path, scale=scale)
    else:
        read_config(path)
    say(new_console(), f"{path} is valid")


def cite(
    name: Annotated[
        str, typer.Argument(help="Name of an algorithm, data set, partition or model, or fedclade.")
    ],
) -> None:
    """Print the BibTeX entry of an algorithm, a data set or a model."""
    typer.echo(cite_name(name))


NEWCOMERS = "newcomers.json"
"""Result of ``fedclade assign`` in a run folder."""


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folder; or, to compare runs, several of them or the folder of a comparison.",
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Run of the same clients to compare scores with, such as one of FedAvg.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="File to write. Default: RUN/report.html for one run, ./report.html for several.",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run as one HTML page, print its tables, and draw its figures again.

    The page needs no network connection. Several runs, or the folder of 'fedclade compare' or
    'fedclade demo', are compared on one page.

    Examples: fedclade report RUN --against FEDAVG_RUN --open; fedclade report A B C --out abc.html
    """
    if out is not None and out.suffix != ".html":
        raise RunError(f"--out should end in .html, got {out}")
    options.make_parent_folder(out)
    runs = _find_run_folders(folders)
    console = new_console()
    if len(runs) == 1:
        page = _report_run(runs[0], against, out, console)
    elif against is not None:
        raise RunError(
            "--against needs a report of one run; several runs are compared with FedAvg if it is "
            "among them"
        )
    else:
        page = _report_comparison(runs, out, console)
    say(console, f"report: {page}")
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def _report_run(folder: Path, against: Path | None, out: Path | None, console: Console) -> Path:
    """Print the tables of a run, draw its figures and write its page; return the page's path."""
    run = Run.load(folder)
    newcomers_file = folder / NEWCOMERS
    newcomers = read_newcomers(newcomers_file) if newcomers_file.exists() else None
    other = None
    label = ""
    if against is not None:
        other, label = _load_baseline(run, folder, against)
    console.print(run_table(run))
    console.print(cluster_table(run))
    for table in decision_tables(run):
        console.print(table)
    if add_figures(run, folder, console):
        say(console, f"figures: {folder / 'figures'}")
    view = RunView(run, other, label, newcomers, folder=folder)
    return write_page(run_page(view), out or folder / REPORT)


def _load_baseline(run: Run, folder: Path, against: Path) -> tuple[Run, str]:
    """Return the run of ``--against`` with its label, after a check that it can be compared."""
    baseline = Run.load(against)
    clients = {row["client"] for row in run.client_rows}
    baseline_clients = {row["client"] for row in baseline.client_rows}
    if missing := clients - baseline_clients:
        raise RunError(
            f"--against should be a run of the same clients: {against} has no client "
            f"{min(missing)} ({folder} has)"
        )
    metric = read_metrics(run.summary)[0].name
    baseline_metrics = [entry.name for entry in read_metrics(baseline.summary)]
    if metric not in baseline_metrics:
        raise RunError(
            f"--against should be a run of the same task: {against} has no {metric} ({folder} has)"
        )
    views = [RunView(run, folder=folder), RunView(baseline, folder=against)]
    return baseline, run_labels(views)[1]


def _report_comparison(folders: Sequence[Path], out: Path | None, console: Console) -> Path:
    """Print the comparison of several runs and write its page; return the page's path."""
    target = out or Path(REPORT)
    views = [RunView(Run.load(folder), folder=folder) for folder in folders]
    page = comparison_page(views, target.parent)
    runs = {label: [view.run] for label, view in zip(run_labels(views), views, strict=True)}
    console.print(Comparison(runs).table(console.width))
    return write_page(page, target)


def _find_run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders; the folder of a comparison is replaced by the runs in it."""
    found: list[Path] = []
    for folder in folders:
        if is_finished(folder) or is_unfinished(folder):
            found.append(folder)
        else:
            # A folder without runs is kept: to load it fails with an error that names it.
            found += _list_compared_runs(folder) or [folder]
    resolved = [folder.resolve() for folder in found]  # one folder can have several paths
    for i, folder in enumerate(found):
        if resolved[i] in resolved[:i]:
            raise RunError(f"each run can be compared once, got {folder} more than once")
    return found


def _list_compared_runs(folder: Path) -> list[Path]:
    """Return the finished runs in the folder of a comparison; nothing if it is not one."""
    runs = sorted(path.parent for path in folder.glob("*/seed-*/summary.json"))
    if runs:
        return runs
    scenario_runs = sorted({*folder.glob("*/*/seed-*/")})
    scenarios = sorted({str(path.parent.parent) for path in scenario_runs})
    if len(scenarios) > 1:
        raise RunError(
            f"{folder} compares several tasks, each of which has a report of its own; choose one "
            f"of {shortened(scenarios)}"
        )
    return [path for path in scenario_runs if is_finished(path)]
