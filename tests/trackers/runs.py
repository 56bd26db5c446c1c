"""A small run in two parts, as trackers follow it, and records by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedclade import (
    CFL,
    Callback,
    EndRecord,
    LocalTraining,
    RoundRecord,
    Run,
    RunInterrupted,
    simulate,
)
from fedclade.core import ParameterTree
from tests.tiny import federation_of, linear

CONFIG = {
    "seed": 0,
    "algorithm": {"name": "cfl", "eps2": 0.8},
    "data": {"name": "tiny"},
    "local": {"seed": None},
}


class StopAt(Callback):
    """Interrupts a run after a round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_round(self, record: RoundRecord, /) -> bool:
        return record.round == self.number


def run_with(*callbacks: Callback, **settings: Any) -> Run:
    """Run four clients for four rounds, in the second of which they part."""
    algorithm, spec = (
        CFL(eps2=1e-3, split_rounds=(2,)),
        LocalTraining(epochs=2, batch_size=10, lr=0.2),
    )
    settings = {"local": spec, "rounds": 4, "engine": "loop", "callbacks": callbacks} | settings
    return simulate(algorithm, linear(), federation_of((0, 1, 0, 1)), **settings)


def run_in_two_parts(folder: Path, first: Callback, second: Callback) -> Run:
    """Run with a tracker for each part, of which the first is told of three rounds and the checkpoint has two."""
    with pytest.raises(RunInterrupted):
        run_with(first, StopAt(3), folder=folder)
    kept = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in kept][-1] == "round-000003"
    return run_with(second, folder=folder)


def round_record(
    number: int, folder: Path | None = None, sizes: tuple[int, ...] = (2,), **metrics: Any
) -> RoundRecord:
    """Return the record of a round with these metrics, in clusters of these sizes."""
    members, tree = (
        iter(range(sum(sizes))),
        ParameterTree.root_only(range(sum(sizes)), torch.zeros(1)),
    )
    if len(sizes) > 1:
        tree = ParameterTree.star(
            [[next(members) for _ in range(size)] for size in sizes], torch.zeros(1)
        )
    return RoundRecord(
        config=CONFIG,
        folder=folder,
        round=number,
        metrics={"round": number, "phase": "train", "clusters": len(sizes), **metrics},
        tree=tree,
        events=(),
        last=False,
        so_far=lambda: None,
    )


def end_record(folder: Path | None = None, run: Run | None = None) -> EndRecord:
    """Return that of a run that was interrupted, or that finished."""
    return EndRecord(
        config=CONFIG, folder=folder, reason="interrupted" if run is None else "finished", run=run
    )
