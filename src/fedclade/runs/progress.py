"""Bars of a run, where somebody looks at them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fedclade.core import ParameterTree, at_prompt, drawn
from fedclade.runs.rounds import OnRound
from fedclade.runs.store.run import Row


@contextmanager
def progress_shown(
    progress: bool | None, name: str, rounds: int, on_round: OnRound | None
) -> Generator[OnRound | None]:
    """Show a bar while the block runs, and give what is to be called after each round, ``on_round`` with it.

    ``progress`` says whether to; None: in a notebook and at Python's prompt.
    """
    if not (at_prompt() if progress is None else progress):
        yield on_round
        return
    bars = drawn("progress_bars")
    with bars.shown():
        show = bars.start(name, rounds)

        def both(row: Row, tree: ParameterTree) -> None:
            show(row, tree)
            if on_round is not None:
                on_round(row, tree)

        yield both
