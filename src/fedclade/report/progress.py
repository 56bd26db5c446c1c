"""Progress of runs, on a terminal and in a notebook: rounds, clusters, scores."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedclade.core import ParameterTree, in_notebook
from fedclade.report import markup
from fedclade.report.formats import duration, significant
from fedclade.report.score import label_of
from fedclade.report.tables import Terminal
from fedclade.runs import OnRound, Row, counting

SHOWN = 12
"""Bars that are on the screen at a time, so that the one that moves is always among them."""

OFTEN = 0.1
"""Seconds from one picture in a notebook to the next, at least."""


def progress_bars() -> RunProgress | NotebookProgress:
    """Return bars for where this is: for a notebook, or for a terminal, and nothing at all where there is neither."""
    return NotebookProgress() if in_notebook() else RunProgress(Terminal(), quiet=False)


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
            self._bars.update(bar, completed=row["round"], state=_state(row, tree))

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
    """The same in the output of a notebook's cell, without widgets: a notebook that is kept shows how it ended."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []
        self._place: Any = None
        self._last = 0.0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the bars while the block runs, and leave them there."""
        from IPython.display import display  # there is one in a notebook

        self._place = display(self._content(), raw=True, display_id=True)
        try:
            yield
        finally:
            self._show()

    def start(self, name: str, rounds: int) -> OnRound:
        """Add a bar for a run, and return what is to be called after each of its rounds."""
        bar = _Bar(name, rounds, perf_counter(), perf_counter())
        self._bars.append(bar)

        def on_round(row: Row, tree: ParameterTree) -> None:
            bar.done, bar.state, bar.until = row["round"], _state(row, tree), perf_counter()
            if bar.until - self._last >= OFTEN:
                self._show()

        return on_round

    def _show(self) -> None:
        self._last = perf_counter()
        self._place.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        bars = self._bars[-SHOWN:]
        lines = [f"{b.name} {b.done}/{b.rounds} {b.state} {duration(b.until - b.since)}" for b in bars]
        rows = [
            [
                markup.shown_as_is(bar.name),
                f'<progress max="{bar.rounds}" value="{bar.done}"></progress>',
                f"{bar.done}/{bar.rounds}",
                markup.shown_as_is(bar.state),
                duration(bar.until - bar.since),
            ]
            for bar in bars
        ]
        return {"text/plain": "\n".join(lines), "text/html": markup.whole(markup.lines(rows))}


def _state(row: Row, tree: ParameterTree) -> str:
    """Say how a run stands after a round."""
    metric, score = counting(row)
    state = "" if score is None else f"{label_of(metric)} {significant(score)}  "
    return f"{state}clusters {len(tree.leaves)}"
