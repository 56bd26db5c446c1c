"""Commands ``report``, ``tree`` and ``export`` for runs; ``cite``."""

from __future__ import annotations

import json
import re
import time
import webbrowser
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console

from fedclade.cli import arguments
from fedclade.cli.options import interruptible, is_from_program, new_console, say
from fedclade.cli.references import references_announced
from fedclade.config import read_config
from fedclade.core import ConfigError, RunError, UntrustedNameError, reading_folder
from fedclade.data import read_attributes
from fedclade.report import (
    Comparison,
    add_figures,
    cite_name,
    cite_runs,
    cluster_table,
    decision_tables,
    gain_tables,
    known_citations,
    run_table,
    save_figures,
    shortened,
    tree_view,
    with_attributes,
)
from fedclade.report.page import (
    REPORT,
    Dashboard,
    RunView,
    comparison_page,
    run_labels,
    run_page,
    write_page,
)
from fedclade.runs import (
    CONFIG,
    FollowedRun,
    Run,
    export_adapter,
    export_model,
    export_onnx,
    is_finished,
    is_unfinished,
    read_newcomers,
)
from fedclade.tasks import read_metrics


def tree(*, folder: Path) -> None:
    """Carry out the command ``fedclade tree``."""
    run = Run.load(folder, unfinished=True)
    console = new_console()
    console.print(tree_view(run.tree, run))
    _announce_unfinished(run, folder, console)


def _announce_unfinished(run: Run, folder: Path, console: Console) -> None:
    """Print that a run is unfinished, if it is, and how to continue it."""
    if run.is_unfinished:
        progress = run.summary["unfinished"]
        advice = f"continue with: fedclade resume {folder}"
        if is_from_program(run.config):
            advice = f"to continue, run its Python program again with folder={str(folder)!r}"
        say(
            console,
            f"unfinished: state after round {progress['round']} of {progress['of']}; {advice}",
        )


def export(
    *,
    folder: Path,
    out: Path,
    client: str | None,
    node: int | None,
    level: int | None,
    adapter: bool,
    trust: bool,
) -> None:
    """Carry out the command ``fedclade export``."""
    run = Run.load(folder, trust=trust)
    if out.suffix == ".onnx" and not adapter:
        written = export_onnx(run, out, client=client, node=node, level=level)
        say(new_console(), f"model: {written}; its model card is in the file's metadata")
        return
    if adapter:
        written = export_adapter(run, out, client=client, node=node, level=level)
        say(new_console(), f"adapter: {written}")
        return
    written = export_model(run, out, client=client, node=node, level=level)
    cards = " and ".join(str(written.with_suffix(suffix)) for suffix in (".json", ".md"))
    say(new_console(), f"model: {written}; model card: {cards}")


def cite(*, name: str) -> None:
    """Carry out the command ``fedclade cite``."""
    folder = Path(name)
    if folder.is_dir() and name not in known_citations():
        runs = [Run.load(each, unfinished=True) for each in _find_run_folders([folder])]
        typer.echo(cite_runs(runs))
        return
    typer.echo(cite_name(name))


GAINS_CSV = "gains.csv"
"""Name of the file in a run folder with the table of clients."""

NEWCOMERS = "newcomers.json"
"""Name of the file in a run folder with the result of ``fedclade assign``."""


def report(
    *,
    folders: list[Path],
    against: Path | None,
    out: Path | None,
    references: bool,
    attributes: Path | None,
    figures: Path | None,
    latex: bool,
    data_dir: Path | None,
    device: str,
    trust: bool,
    open_it: bool,
    live: bool,
    port: int,
) -> None:
    """Carry out the command ``fedclade report``."""
    if out is not None and out.suffix != ".html":
        raise RunError(f"--out should end in .html, got {out}")
    if latex:
        of_pages = {
            "--out": out is not None,
            "--against": against is not None,
            "--attributes": attributes is not None,
            "--references": references,
            "--open": open_it,
            "--live": live,
        }
        for option, is_set in of_pages.items():
            if is_set:
                raise RunError(f"--latex prints a table and writes no page; leave out {option}")
    console = new_console()
    if live:
        others = {
            "--against": against is not None,
            "--out": out is not None,
            "--references": references,
            "--attributes": attributes is not None,
            "--figures": figures is not None,
        }
        unused = [name for name, is_set in others.items() if is_set]
        _serve_report(folders, unused, port, open_it=open_it, console=console)
        return
    arguments.make_parent_folder(out)
    runs = _find_run_folders(folders)
    if latex:
        comparison = _compare_by_seed(runs)
        if figures is not None:
            with _naming_figures(figures):
                comparison.save_figures(figures)
        typer.echo(comparison.latex(), nl=False)
        return
    if len(runs) == 1:
        if references:
            arguments.check_machine(device, None)
            with references_announced(console):
                _train_references(runs[0], data_dir, device, trust=trust)
        page = _report_run(runs[0], against, out, attributes=attributes, console=console)
    elif references or attributes is not None:
        option = "--references" if references else "--attributes"
        raise RunError(
            f"{option} needs a report of one run, got {len(runs)} runs; name the folder of a single "
            "run"
        )
    elif against is not None:
        raise RunError(
            f"--against needs a report of one run, got {len(runs)} runs; name one run, or leave "
            "--against out: the report of several runs compares them with FedAvg if one of them is "
            "a run of FedAvg"
        )
    else:
        page = _report_comparison(runs, out, console)
    if figures is not None:
        _write_pdfs(runs, figures)
        say(console, f"figures as PDF: {figures}")
    say(console, f"report: {page}")
    if open_it:
        webbrowser.open(page.resolve().as_uri())


POLL_SECONDS = 1.0
"""Seconds between two looks at the folder of a run that is on."""


def _serve_report(
    folders: Sequence[Path], unused: Sequence[str], port: int, *, open_it: bool, console: Console
) -> None:
    """Serve the report of a run that is on, until Ctrl-C.

    ``unused`` has the names of the given options that do not go with ``--live``.
    """
    if len(folders) != 1 or unused:
        found = " and ".join(unused) or f"{len(folders)} runs"
        raise RunError(f"--live shows one run, without further options, got {found}; leave it out")
    (folder,) = folders
    followed = FollowedRun(folder)
    rounds = followed.progress().rounds
    with (
        suppress(KeyboardInterrupt),  # the way to end the page
        Dashboard(folder.resolve().name, rounds, folder, port) as dashboard,
    ):
        say(console, f"live report: {dashboard.url} (Ctrl-C ends it, but not the run)")
        if open_it:
            webbrowser.open(dashboard.url)
        while True:
            dashboard.follow(followed)
            time.sleep(POLL_SECONDS)


def _train_references(folder: Path, data_dir: Path | None, device: str, *, trust: bool) -> None:
    """Train the references of a finished run in its folder, and compute its gains again.

    References are models of each client alone, and one model of all clients.
    """
    run = Run.load(folder)
    if "network" in run.config:
        raise RunError(
            f"{folder} is the run of a network, whose clients' data never leaves them, so the "
            "references cannot be trained here; run fedavg and local over the same network, and "
            "compare the runs with --against"
        )

    if "client_app" in run.config:
        raise RunError(
            f"{folder} is the run of plain ClientApps, whose data are not here, so the references "
            "cannot be trained; run ClusteredStrategy('fedavg') with the same clients, save it too, "
            "and compare both: fedclade report RUN FEDAVG_RUN"
        )

    def advise_after_interrupt() -> str:
        return "continue with the same command"

    with reading_folder(trust=trust):
        try:
            config = read_config(folder / CONFIG)
        except UntrustedNameError:
            raise
        except ConfigError as error:
            raise RunError(
                f"{folder} was not made from a config, so its data cannot be loaded again; in "
                "Python, repeat the call of fedclade.simulate with folder= and references=True "
                f"({str(error).splitlines()[0]})"
            ) from error
        with interruptible(advise_after_interrupt) as stop:
            federation = config.federation(data_dir)
            config.run(
                federation, device=device, folder=folder, stop=stop, progress=False, references=True
            )


def _report_run(
    folder: Path,
    against: Path | None,
    out: Path | None,
    *,
    attributes: Path | None,
    console: Console,
) -> Path:
    """Print the tables of a run, draw its figures and write its page; return the page's path."""
    run = Run.load(folder, unfinished=True)
    if attributes is not None:
        run = with_attributes(run, read_attributes(attributes))
    newcomers_file = folder / NEWCOMERS
    newcomers = read_newcomers(newcomers_file) if newcomers_file.exists() else None
    other = None
    label = ""
    if against is not None:
        other, label = _load_baseline(run, folder, against)
    console.print(run_table(run))
    if not run.has_diverged:
        console.print(cluster_table(run))
        for table in decision_tables(run):
            console.print(table)
    for table in gain_tables(run):
        console.print(table)
    if run.gains is not None:
        say(console, f"clients: {run.gains.save_csv(folder / GAINS_CSV)}")
    if add_figures(run, folder, console):
        say(console, f"figures: {folder / 'figures'}")
    _announce_unfinished(run, folder, console)
    view = RunView(run, other, label, newcomers, folder=folder)
    difference, _ = view.difference
    if difference:
        say(console, f"mean {view.score.label} of the clients: {difference}")
    return write_page(run_page(view), out or folder / REPORT)


def _load_baseline(run: Run, folder: Path, against: Path) -> tuple[Run, str]:
    """Load the run of the option ``--against``, and check that it can be compared.

    Returns
    -------
    tuple of Run and str
        The run, and its label in the report.
    """
    baseline = Run.load(against)
    clients = {row["client"] for row in run.client_rows}
    baseline_clients = {row["client"] for row in baseline.client_rows}
    if missing := clients - baseline_clients:
        raise RunError(
            f"--against should be a run of the same clients: {against} has no client "
            f"{min(missing)}, which {folder} has"
        )
    metric = read_metrics(run.summary)[0].name
    baseline_metrics = [entry.name for entry in read_metrics(baseline.summary)]
    if metric not in baseline_metrics:
        raise RunError(
            f"--against should be a run of the same task: {against} has no metric {metric}, which "
            f"{folder} has"
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


def _write_pdfs(folders: Sequence[Path], target: Path) -> None:
    """Write the figures of a run, or of the comparison of several runs, as PDF to a folder."""
    with _naming_figures(target):
        if len(folders) == 1:
            save_figures(Run.load(folders[0], unfinished=True), target, "pdf")
        else:
            _compare_by_seed(folders).save_figures(target)


@contextmanager
def _naming_figures(target: Path) -> Generator[None]:
    """Raise a RunError if the figures cannot be written to the folder of ``--figures``."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write the figures to {target}: {error}; name another folder with --figures"
        ) from error


def _compare_by_seed(folders: Sequence[Path]) -> Comparison:
    """Return the comparison of several runs, in which runs that differ only in seed share a row.

    A row has the name of its method, or, if the runs are in folders ``LABEL/seed-N`` as after
    ``fedclade compare``, their label.
    """
    views = [RunView(Run.load(folder), folder=folder) for folder in folders]
    rows: dict[tuple[str, str], list[RunView]] = {}
    for view in views:
        settings = {**view.run.config}
        for key in ("seed", "engine", "stream", "checkpoint_every", "versions"):
            settings.pop(key, None)
        name = view.run.summary["algorithm"]
        if view.folder is not None and re.fullmatch(r"seed-\d+", view.folder.resolve().name):
            name = view.folder.resolve().parent.name
        rows.setdefault((name, json.dumps(settings, sort_keys=True, default=str)), []).append(view)
    names = [name for name, _ in rows]
    unique = run_labels([row[0] for row in rows.values()])
    runs: dict[str, list[Run]] = {}
    for (name, _), label, row in zip(rows, unique, rows.values(), strict=True):
        runs[name if names.count(name) == 1 else label] = [view.run for view in row]
    return Comparison(runs)


def _find_run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders; the folder of a comparison is replaced by the runs in it."""
    found: list[Path] = []
    for folder in folders:
        if is_finished(folder) or is_unfinished(folder):
            found.append(folder)
        else:
            # A folder without runs remains in the list: loading it fails with a clear error.
            found += _list_compared_runs(folder) or [folder]
    resolved = [folder.resolve() for folder in found]  # one folder can have several paths
    for i, folder in enumerate(found):
        if resolved[i] in resolved[:i]:
            raise RunError(f"each run can be compared only once, got {folder} more than once")
    return found


def _list_compared_runs(folder: Path) -> list[Path]:
    """Return the finished runs in the folder of a comparison; empty for any other folder."""
    runs = sorted(path.parent for path in folder.glob("*/seed-*/summary.json"))
    if runs:
        return runs
    scenario_runs = sorted({*folder.glob("*/*/seed-*/")})
    scenarios = sorted({str(path.parent.parent) for path in scenario_runs})
    if len(scenarios) > 1:
        raise RunError(
            f"{folder} compares several tasks, each of which needs a separate report; choose one "
            f"of the folders {shortened(scenarios)}"
        )
    return [path for path in scenario_runs if is_finished(path)]
