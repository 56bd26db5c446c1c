"""The command ``report``: a run, or several, as tables, figures and a page for the browser."""

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
from fedclade.runs import Run, export_adapter, export_model, is_finished, is_unfinished, read_newcomers
from fedclade.tasks import read_metrics

# Commands that look at something, or hand it out: ``tree``, ``export``, ``validate``, ``cite``.


def tree(folder: options.RunFolder) -> None:
    """Print the parameter tree of a run: its clusters, their members, and how they were split."""
    run = Run.load(folder)
    new_console().print(tree_view(run.tree, run))


def export(
    folder: options.RunFolder,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.safetensors", help="File (or folder) to make; must not exist yet.")
    ],
    client: Annotated[int | None, typer.Option("--client", metavar="ID", help="Whose model to export.")] = None,
    node: Annotated[int | None, typer.Option("--node", metavar="ID", help="Or which node's of the tree.")] = None,
    level: Annotated[
        int | None,
        typer.Option(
            "--level",
            help="On the client's path: 0 is the root, -1 its leaf. Default: what the client was served with.",
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Its adapter alone, as a folder that peft and fedclade.load_adapter read.")
    ] = False,
) -> None:
    """Write one model of a run as a state dict for plain PyTorch, with a model card beside it.

    Example: fedclade export RUN --client 3 --out client-3.safetensors; then, in Python,
    model.load_state_dict(safetensors.torch.load_file("client-3.safetensors"))
    """
    if adapter:
        written = export_adapter(Run.load(folder), out, client=client, node=node, level=level)
        say(new_console(), f"adapter: {written}")
        return
    written = export_model(Run.load(folder), out, client=client, node=node, level=level)
    cards = " and ".join(str(written.with_suffix(suffix)) for suffix in (".json", ".md"))
    say(new_console(), f"model: {written}; its card: {cards}")


def validate(config: options.ConfigFile) -> None:
    """Check a config without running it, and say everything that is wrong with it at once."""
    path = find_config(config)
    if is_scenario(path):
        for scale in (None, *known_scales(path)):
            read_scenarios(path, scale=scale)
    else:
        read_config(path)
    say(new_console(), f"{path} is fine")


def cite(
    name: Annotated[str, typer.Argument(help="An algorithm, a dataset, a partition, a model, or fedclade.")],
) -> None:
    """Print the BibTeX entry of what you have used."""
    typer.echo(cite_name(name))


NEWCOMERS = "newcomers.json"
"""What ``fedclade assign`` leaves in a run folder."""


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A run folder; or several, or the folder of a comparison, to compare them on one page.",
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN", help="A run of the same clients to measure by, such as FedAvg's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="Where to write the page: RUN/report.html for one run if left out, ./report.html for several.",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the report of a run as one HTML page that needs no network, print its tables, and draw its figures anew.

    Several runs, or the folder of 'fedclade compare' or 'fedclade demo', are compared on one page.

    Examples: fedclade report RUN --against FEDAVG_RUN --open; fedclade report A B C --out comparison.html
    """
    if out is not None and out.suffix != ".html":
        raise RunError(f"--out should end in .html, got {out}")
    options.made_for(out)
    runs, console = _run_folders(folders), new_console()
    if len(runs) == 1:
        page = _report_of_one(runs[0], against, out, console)
    elif against is not None:
        raise RunError("--against is for the report of one run; of several, each is measured by FedAvg if it is there")
    else:
        page = _report_of_several(runs, out, console)
    say(console, f"report: {page}")
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def _report_of_one(folder: Path, against: Path | None, out: Path | None, console: Console) -> Path:
    run, written = Run.load(folder), folder / NEWCOMERS
    newcomers = read_newcomers(written) if written.exists() else None
    other, label = (None, "") if against is None else _measure(run, folder, against)
    subject = RunView(run, other, label, newcomers, folder)
    console.print(run_table(run))
    console.print(cluster_table(run))
    for table in decision_tables(run):
        console.print(table)
    if add_figures(run, folder, console):
        say(console, f"figures: {folder / 'figures'}")
    return write_page(run_page(subject), out or folder / REPORT)


def _measure(run: Run, folder: Path, against: Path) -> tuple[Run, str]:
    """Return the run to measure by, and what to call it."""
    other = Run.load(against)
    theirs = {row["client"] for row in other.client_rows}
    if missing := {row["client"] for row in run.client_rows} - theirs:
        raise RunError(
            f"--against should be a run of the same clients: {against} has no client {min(missing)} ({folder} has)"
        )
    metric = read_metrics(run.summary)[0].name
    if metric not in [each.name for each in read_metrics(other.summary)]:
        raise RunError(f"--against should be a run of the same task: {against} has no {metric} ({folder} has)")
    subjects = [RunView(run, folder=folder), RunView(other, folder=against)]
    return other, run_labels(subjects)[1]


def _report_of_several(folders: Sequence[Path], out: Path | None, console: Console) -> Path:
    target = out or Path(REPORT)
    subjects = [RunView(Run.load(folder), folder=folder) for folder in folders]
    page = comparison_page(subjects, target.parent)
    runs = {label: [each.run] for label, each in zip(run_labels(subjects), subjects, strict=True)}
    console.print(Comparison(runs).table(console.width))
    return write_page(page, target)


def _run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders that are meant: those given, and in place of a comparison's folder those in it."""
    found: list[Path] = []
    for folder in folders:
        is_run = is_finished(folder) or is_unfinished(folder)
        within = [] if is_run else sorted(path.parent for path in folder.glob("*/seed-*/summary.json"))
        if not is_run and not within and (scenarios := sorted({*folder.glob("*/*/seed-*/")})):
            inside = sorted({str(path.parent.parent) for path in scenarios})
            if len(inside) > 1:
                raise RunError(
                    f"{folder} compares several tasks, each of which has a report of its own; take one of "
                    f"{shortened(inside)}"
                )
            within = [path for path in scenarios if is_finished(path)]
        found += within or [folder]
    places = [folder.resolve() for folder in found]  # one folder can be written in several ways
    if twice := [folder for i, folder in enumerate(found) if places[i] in places[:i]]:
        raise RunError(f"each run can be compared once, got {twice[0]} more than once")
    return found
