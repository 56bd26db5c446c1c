"""What a finished run shows on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedclade.errors import MissingExtraError
from fedclade.report.figures import save_figures
from fedclade.report.tables import decision_tables, run_table, tree_view
from fedclade.store import Run


def add_figures(run: Run, folder: Path, console: Console) -> None:
    """Draw the figures of a run folder; without matplotlib it goes without them, and that is said."""
    try:
        save_figures(run, folder / "figures")
    except MissingExtraError as error:
        console.print(f"[yellow]no figures:[/] {escape(str(error))}", soft_wrap=True)


def show_run(run: Run, console: Console) -> None:
    """Print the tables of a run: its figures, its splits or checks, its tree."""
    console.print(run_table(run))
    for table in decision_tables(run):
        console.print(table)
    console.print(tree_view(run.tree, run))
