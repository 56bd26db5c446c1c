"""Trials of a sweep as tasks of a Ray cluster, with an object that stands for Ray."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedclade import RunError
from fedclade.core import RunInterrupted
from fedclade.sweeps.places import RayExecutor
from fedclade.training import Cluster


class RayError(Exception):
    """Ray's own, where a task has died."""


class StandInForRay:
    """Ray whose tasks are values that are there at once, errors, or None for what never ends."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.cancelled: list[Any] = []

    def wait(self, tasks: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done = [task for task in tasks if task is not None]
        return done, [task for task in tasks if task is None]

    def get(self, task: Any) -> Any:
        if isinstance(task, Exception):
            raise task
        return task

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append((task, force))


def place_on(ray: StandInForRay) -> RayExecutor:
    place = object.__new__(RayExecutor)  # without a cluster
    place._cluster = cast("Cluster", SimpleNamespace(ray=ray))  # pyright: ignore[reportPrivateUsage]
    return place


def test_the_outcome_of_a_task_is_what_it_returns():
    assert place_on(StandInForRay()).outcome("done", stop=lambda: True) == "done"


def test_a_task_that_is_stopped_is_cancelled():
    ray = StandInForRay()
    with pytest.raises(RunInterrupted) as interrupted:
        place_on(ray).outcome(None, stop=lambda: True)
    assert interrupted.value.happened == "the sweep was stopped during a trial"
    assert ray.cancelled == [(None, True)]


def test_a_task_that_dies_is_an_error_that_says_how_to_continue():
    with pytest.raises(
        RunError, match="a Ray task of the sweep has died: no memory; continue with --resume"
    ):
        place_on(StandInForRay()).outcome(RayError("no memory"), stop=lambda: False)
