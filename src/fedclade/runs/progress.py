"""The bar of a run, where somebody looks at it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from fedclade.core import at_prompt, drawn
from fedclade.runs.callbacks import Callback, Callbacks, OnRound, RoundRecord


@contextmanager
def progress_shown(progress: bool | None, name: str, rounds: int, following: Callbacks) -> Generator[Callbacks]:
    """Show a bar while the block runs, and give what is to follow the run: the bar, and what follows it anyway.

    ``progress`` says whether to; None: in a notebook and at Python's prompt.
    """
    if not (at_prompt() if progress is None else progress):
        yield following
        return
    bars = drawn("progress_bars")
    with bars.shown():
        yield following.joined(_Bar(bars.start(name, rounds)))


@dataclass(frozen=True, eq=False)
class _Bar(Callback):
    show: OnRound

    def on_round(self, record: RoundRecord, /) -> None:
        self.show(record.metrics, record.tree)
