"""Progress bars of runs for terminals and notebooks: rounds, clusters, scores."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedclade.core import ParameterTree, in_notebook
from fedclade.report import markup
from fedclade.report.formats import duration, significant
from fedclade.report.score import label_of
from fedclade.report.tables import Terminal
from fedclade.runs import OnRound, Row, counting

SHOWN = 12
"""Number of visible bars, the last ones, so that the bar of the current run is among them."""

OFTEN = 0.1
"""Least number of seconds between two updates in a notebook."""


def progress_bars() -> RunProgress | NotebookProgress:
    """Return progress bars for a notebook or a terminal; without either, they are not shown."""
    return NotebookProgress() if in_notebook() else RunProgress(Terminal(), quiet=False)


class RunProgress:
    """Progress bars in a terminal, one for every run; hidden if quiet or without a terminal."""

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
        """Add a bar for a run, and return the callback for the end of each round."""
        bar = self._bars.add_task(name, total=rounds, state="loading data")
        for task in self._bars.tasks[:-SHOWN]:
            self._bars.update(task.id, visible=False)

        def on_round(row: Row, tree: ParameterTree) -> None:
            self._bars.update(bar, completed=row["round"], state=_describe_state(row, tree))

        return on_round


@dataclass
class _Bar:
    name: str
    rounds: int
    since: float
    until: float
    done: int = 0
    state: str = ""


class NotebookProgress:
    """Progress bars in a notebook cell, without widgets, so that a saved notebook shows the end."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []
        self._place: Any = None
        self._last = 0.0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the bars while the block runs, and keep them in the output."""
        from IPython.display import display  # installed wherever a notebook runs

        self._place = display(self._content(), raw=True, display_id=True)
        try:
            yield
        finally:
            self._show()

    def start(self, name: str, rounds: int) -> OnRound:
        """Add a bar for a run, and return the callback for the end of each round."""
        bar = _Bar(name, rounds, perf_counter(), perf_counter())
        self._bars.append(bar)

        def on_round(row: Row, tree: ParameterTree) -> None:
            bar.done = row["round"]
            bar.state = _describe_state(row, tree)
            bar.until = perf_counter()
            if bar.until - self._last >= OFTEN:
                self._show()

        return on_round

    def _show(self) -> None:
        self._last = perf_counter()
        self._place.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        bars = self._bars[-SHOWN:]
        lines: list[str] = []
        rows: list[list[str]] = []
        for bar in bars:
            rounds = f"{bar.done}/{bar.rounds}"
            time = duration(bar.until - bar.since)
            lines.append(f"{bar.name} {rounds} {bar.state} {time}")
            element = f'<progress max="{bar.rounds}" value="{bar.done}"></progress>'
            name = markup.escape_text(bar.name)
            rows.append([name, element, rounds, markup.escape_text(bar.state), time])
        return {"text/plain": "\n".join(lines), "text/html": markup.whole(markup.lines(rows))}


def _describe_state(row: Row, tree: ParameterTree) -> str:
    """Return the mean score and the number of clusters after a round."""
    metric, score = counting(row)
    clusters = f"clusters {len(tree.leaves)}"
    if score is None:
        return clusters
    return f"{label_of(metric)} {significant(score)}  {clusters}"
