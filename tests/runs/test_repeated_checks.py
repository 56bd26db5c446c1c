"""Runs whose clients answer repeated checks from memory equal runs whose clients train again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fedclade import (
    Adversary,
    DifferentialPrivacy,
    Faults,
    Federation,
    LocalTraining,
    ReplicatedCFL,
    Run,
    RunInterrupted,
    Signature,
    load_federation,
    simulate,
)
from fedclade.channel import ReplyMemory
from fedclade.data.drift import Drift
from tests.tiny import federation_of, linear

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
FEDERATION = federation_of([0, 1] * 3, [60, 62, 75, 80, 100, 121])
ROUNDS = 9
CHECKS = (4, 6, 8)  # with few clients, all of them are checks of changed data


def run_of(federation: Federation = FEDERATION, model: Any = None, **settings: Any) -> Run:
    settings = {"local": SPEC, "rounds": ROUNDS, "engine": "loop", "seed": 1} | settings
    algorithm = ReplicatedCFL(check_every=2, level=0.05)
    return simulate(algorithm, model or linear(), federation, **settings)


@contextmanager
def forgetful() -> Generator[None]:
    """Let clients forget all replies."""
    with mock.patch.object(ReplyMemory, "recall", return_value=None):
        yield


def steps_of(run: Run) -> list[int]:
    return [row["steps"] for row in run.metric_rows]


def check_equal(one: Run, other: Run) -> None:
    """Check that two runs are the same to the last bit, except for their steps and seconds."""
    assert one.events == other.events
    for ours, theirs in zip(one.tree.nodes, other.tree.nodes, strict=True):
        assert ours.members == theirs.members
        assert torch.equal(ours.params, theirs.params)
        assert torch.equal(ours.model, theirs.model)
    for ours, theirs in zip(one.metric_rows, other.metric_rows, strict=True):
        names = [name for name in ours if "steps" not in name and "seconds" not in name]
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"permute": True},
        {"stream": True, "signature": Signature(kind="projected", dim=64)},
        {"faults": Faults(dropout=0.1, corrupt=0.1)},
        {"engine": "stacked"},
    ],
    ids=str,
)
def test_clients_train_for_no_check_that_repeats_round_1(settings: dict[str, Any]):
    run = run_of(**settings)
    with forgetful():
        again = run_of(**settings)
    check_equal(run, again)
    assert run.summary["steps"]["total"] < again.summary["steps"]["total"]
    if "faults" not in settings:
        spared = [more - less for less, more in zip(steps_of(run), steps_of(again), strict=True)]
        assert [number for number, steps in enumerate(spared, 1) if steps] == [*CHECKS]


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy": DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)},
        {"adversary": Adversary(kind="sign_flip", share=0.2)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_clients_with_noise_and_adversaries_train_for_every_check(settings: dict[str, Any]):
    with mock.patch.object(ReplyMemory, "recall", side_effect=AssertionError):
        run = run_of(**settings)
    assert all(steps > steps_of(run)[4] for steps in (steps_of(run)[k - 1] for k in CHECKS))


def test_clients_train_again_once_data_has_changed():
    drift = Drift(rounds=(5,), examples="same", share=0.5)
    federation = load_federation(
        "digits", clients=6, samples_per_client=60, shift="label_swap", clusters=2, drift=drift
    )
    run = run_of(federation, "mclr")
    with forgetful():
        again = run_of(federation, "mclr")
    check_equal(run, again)
    quiet = steps_of(run)[4]
    assert steps_of(run)[5] > quiet, "in round 6 data has changed"
    assert steps_of(run)[7] == quiet, "in round 8 nothing has changed since"


@pytest.mark.parametrize("last", [3, 4, 5, 7])
def test_a_continued_run_has_the_same_steps(last: int, tmp_path: Path):
    whole = run_of(folder=tmp_path / "whole")
    rounds: list[int] = []

    def stop() -> bool:
        rounds.append(len(rounds) + 1)
        return len(rounds) == last

    with pytest.raises(RunInterrupted):
        run_of(folder=tmp_path / "run", stop=stop)
    run = run_of(folder=tmp_path / "run")
    check_equal(run, whole)
    assert steps_of(run) == steps_of(whole)
    assert run.summary["steps"] == whole.summary["steps"]
