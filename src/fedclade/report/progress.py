"""Progress bars of runs for terminals and notebooks, with rounds, clusters and scores."""

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
from fedclade.report.terminal import Terminal
from fedclade.runs import OnRound, Row, counting

SHOWN = 12
"""Largest number of visible bars.

The bars that were added last are visible, so that the bar of the current run is among them.
"""

OFTEN = 0.1
"""Smallest number of seconds between two updates of the bars in a notebook."""


def progress_bars() -> RunProgress | NotebookProgress:
    """Return progress bars for the current environment: a notebook cell or a terminal.

    The bars are hidden if the program runs in neither.
    """
    if in_notebook():
        return NotebookProgress()
    return RunProgress(Terminal(), quiet=False)


class RunProgress:
    """Progress bars in a terminal, one for every run.

    Parameters
    ----------
    console
        Console on which the bars are drawn; without a terminal, the bars are hidden.
    quiet
        Whether to hide the bars.
    """

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
        """Show the progress bars while the ``with`` block runs."""
        with self._bars:
            yield

    def start(self, name: str, rounds: int) -> OnRound:
        """Add a progress bar for a run, and return the callback that updates the bar each round."""
        bar = self._bars.add_task(name, total=rounds, state="loading data")
        for task in self._bars.tasks[:-SHOWN]:
            self._bars.update(task.id, visible=False)

        def on_round(row: Row, tree: ParameterTree) -> None:
            """Advance the progress bar to the end of a round."""
            self._bars.update(bar, completed=row["round"], state=_describe_state(row, tree))

        return on_round


@dataclass
class _Bar:
    """Progress bar of one run in a notebook; it measures the time from ``since`` to ``until``."""

    name: str
    rounds: int
    since: float
    until: float
    done: int = 0
    state: str = ""


class NotebookProgress:
    """Progress bars in a notebook cell, one for every run, drawn as HTML.

    They need no notebook widgets, so that a saved notebook still contains their final state.
    """

    def __init__(self) -> None:
        self._bars: list[_Bar] = []
        self._place: Any = None
        self._last = 0.0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the progress bars while the ``with`` block runs, and then their final state."""
        from IPython.display import display  # installed wherever a notebook runs

        self._place = display(self._render_bars(), raw=True, display_id=True)
        try:
            yield
        finally:
            self._show()

    def start(self, name: str, rounds: int) -> OnRound:
        """Add a progress bar for a run, and return the callback that updates the bar each round."""
        bar = _Bar(name, rounds, perf_counter(), perf_counter())
        self._bars.append(bar)

        def on_round(row: Row, tree: ParameterTree) -> None:
            """Advance the progress bar to the end of a round, and redraw all bars at intervals."""
            bar.done = row["round"]
            bar.state = _describe_state(row, tree)
            bar.until = perf_counter()
            if bar.until - self._last >= OFTEN:
                self._show()

        return on_round

    def _show(self) -> None:
        """Replace the displayed progress bars by their current state."""
        self._last = perf_counter()
        self._place.update(self._render_bars(), raw=True)

    def _render_bars(self) -> dict[str, str]:
        """Return the progress bars in both formats that notebooks display: plain text and HTML."""
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
    """Return a text with the mean score, if there was an evaluation, and the number of clusters."""
    metric, score = counting(row)
    clusters = f"clusters {len(tree.leaves)}"
    if score is None:
        return clusters
    return f"{label_of(metric)} {significant(score)}  {clusters}"
