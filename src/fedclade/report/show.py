"""What a finished run shows on a terminal."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedclade.core import FedcladeError
from fedclade.report.decisions import decision_tables
from fedclade.report.figures import save_figures
from fedclade.report.tables import run_table, tree_view
from fedclade.runs import Run


@contextmanager
def without_figures_if_need_be(console: Console) -> Generator[None]:
    """Warn of figures that cannot be drawn or written in the block; nothing else is lost with them."""
    try:
        yield
    except Exception as error:  # whatever it is: what the figures are of is finished and kept
        reason = str(error) if isinstance(error, FedcladeError | OSError) else f"{type(error).__name__}: {error}"
        console.print(Text.assemble(("no figures: ", "yellow"), reason), soft_wrap=True)


def add_figures(run: Run, folder: Path, console: Console) -> bool:
    """Draw the figures of a run folder, and return whether that was possible; why not is printed."""
    with without_figures_if_need_be(console):
        save_figures(run, folder / "figures")
        return True
    return False


def show_run(run: Run, console: Console) -> None:
    """Print the tables of a run: its figures, its splits or checks, its tree."""
    console.print(run_table(run))
    for table in decision_tables(run):
        console.print(table)
    console.print(tree_view(run.tree, run))
