from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, RunInterrupted, simulate
from fedclade.algorithms import State
from fedclade.core.tree import ParameterTree
from fedclade.runs.checkpointer import TIMES_A_SAVE, CheckpointPolicy, TrainingState
from fedclade.runs.history import History
from fedclade.tasks import FittedTask
from tests.tiny import federation_of, linear

FEDERATION = federation_of([0, 1])


@dataclass
class Clock:
    """A clock that the test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def after(number: int, entries: int = 28) -> TrainingState:
    return TrainingState(
        number,
        State(ParameterTree.root_only([0, 1], torch.zeros(entries))),
        History(FEDERATION, FittedTask()),
    )


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (5, []), (0, [])])
def test_a_number_of_rounds_is_kept_to(every, due):
    pace = CheckpointPolicy(every)
    assert [number for number in (1, 2, 3, 4) if pace.due(after(number))] == due


def test_auto_lets_pass_60_times_what_the_slowest_save_took():
    clock = Clock()
    pace = CheckpointPolicy("auto", clock)
    for took, wait in ((0.5, 30.0), (2.0, 120.0), (1.0, 120.0)):
        with pace.saving():
            clock.now += took
        clock.now += wait - 0.1
        assert not pace.due(after(1))
        clock.now += 0.1
        assert pace.due(after(1))
    assert 1 / (1 + TIMES_A_SAVE) < 0.02


def test_the_first_save_of_auto_waits_for_what_its_size_costs():
    """A model of 25 million entries is 100 MB: 1 s, and 50 ms, 60 times."""
    clock = Clock()
    pace = CheckpointPolicy("auto", clock)
    clock.now += 62.9
    assert not pace.due(after(1, entries=25_000_000))
    assert pace.due(after(1))
    clock.now += 0.2
    assert pace.due(after(1, entries=25_000_000))


def test_without_a_folder_a_run_can_stop_but_nothing_is_kept():
    settings = {"local": LocalTraining(batch_size=10), "rounds": 4, "engine": "loop"}
    seen = []
    with pytest.raises(
        RunInterrupted, match=r"^interrupted after round 2; the run has no folder, so its state"
    ):
        simulate(
            FedAvg(),
            linear(),
            FEDERATION,
            **settings,
            stop=lambda: seen.append(1) or len(seen) == 2,
        )
    run = simulate(FedAvg(), linear(), FEDERATION, **settings | {"rounds": 1}, stop=lambda: True)
    assert run.summary["rounds"] == 1, "after the last round there is nothing to stop"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"rounds": 1, "seed": 0, "engine": "loop", "model": {"name": "mine"}}, "lacks algorithm"),
        (
            {"rounds": "1", "seed": 0, "engine": "loop"},
            ": rounds should be a whole number of at least 0, got '1'",
        ),
    ],
)
def test_a_config_to_note_is_that_of_a_whole_run(config, problem):
    with pytest.raises(
        ConfigError,
        match=f"^the config to record for a run ?{problem}; pass the config of a complete run, or leave",
    ):
        simulate(FedAvg(), linear(), FEDERATION, rounds=1, config=config)
