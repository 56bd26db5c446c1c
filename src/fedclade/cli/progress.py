"""Progress of a run on a terminal: rounds, clusters, scores."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedclade.core import ParameterTree
from fedclade.report import label_of, significant
from fedclade.runs import OnRound, Row, counting

SHOWN = 12
"""Bars that are on the screen at a time, so that the one that moves is always among them."""


class RunProgress:
    """A bar for every run; nothing at all when quiet or where there is no terminal."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self.quiet = quiet
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the bars while the block runs."""
        with self._bars:
            yield

    def start(self, name: str, rounds: int) -> OnRound:
        """Add a bar for a run, and return what is to be called after each of its rounds."""
        bar = self._bars.add_task(name, total=rounds, state="loading data")
        for task in self._bars.tasks[:-SHOWN]:
            self._bars.update(task.id, visible=False)

        def on_round(row: Row, tree: ParameterTree) -> None:
            metric, score = counting(row)
            state = "" if score is None else f"{label_of(metric)} {significant(score)}  "
            self._bars.update(bar, completed=row["round"], state=f"{state}clusters {len(tree.leaves)}")

        return on_round
