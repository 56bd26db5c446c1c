"""What replicated clustering carries from round to round."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedclade.algorithms.state import State


@dataclass(frozen=True, eq=False)
class ReplicatedState(State):
    """What was checked so far, and at what cost."""

    checks: int = 0  # after the first rounds
    halves: int = 0  # checks of halves
    changes: int = 0  # tests of parts that had changed
    trained: int = 0  # clients that trained, over all rounds
    asked: int = 0  # clients that were asked besides
    parts: int = 0  # of the data of each client; 0 if they cannot be parted
    part_size: int = 0  # examples of each part
    initial: Tensor | None = None  # the model [S] at which parts are asked for again
    tested: tuple[int, ...] = ()  # clients, of whose parts at that model these are the cosines
    cosines: Tensor | None = None
    keepers: tuple[int, ...] = ()  # clients that are served with models of their own
    on_cohorts: bool = False  # whether nobody is asked but the cohort
    early: tuple[int, ...] = ()  # then: clients that trained before there were clusters
