"""Schedules of the step size of local training over the rounds of a run.

A schedule is a function of the number t of a round, from 1, and the number T of rounds of the run.
It returns the factor by which the step size ``local.lr`` is multiplied in round t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from fedclade.core.errors import ConfigError, shown, unknown
from fedclade.core.plugins import imported

Schedule = Callable[[int, int], float]
"""Function of the number of a round, from 1, and the number of rounds, that returns a factor."""

WARM_UP = 0.1
"""Share of the rounds in which ``warmup_cosine`` raises the step size."""

STEP_FACTOR = 0.1
STEPS_AT = (0.5, 0.75)
"""Factor of each step of the schedule ``step``, and the shares of the rounds before each step."""


def cosine(number: int, rounds: int) -> float:
    """Return ½(1 + cos(π(t − 1)/T)) (SGDR, Loshchilov & Hutter 2017, eq. 5, with η_min = 0)."""
    return 0.5 * (1 + math.cos(math.pi * (number - 1) / rounds))


def step(number: int, rounds: int) -> float:
    """Return 1, then 1/10 after half of the rounds, and 1/100 after three quarters.

    The steps are those of ResNet's training on CIFAR-10 (He et al. 2016, section 4.2).
    """
    passed = sum(number - 1 >= share * rounds for share in STEPS_AT)
    return STEP_FACTOR**passed


def warmup_cosine(number: int, rounds: int) -> float:
    """Return t/W in the first W = ⌈T/10⌉ rounds, then a cosine over the remaining rounds.

    The linear warm-up is that of Goyal et al. 2017, section 2.2.
    """
    warm = math.ceil(WARM_UP * rounds)
    if number <= warm:
        return number / warm
    return cosine(number - warm, rounds - warm)


SCHEDULES: Mapping[str, Schedule] = {"cosine": cosine, "step": step, "warmup_cosine": warmup_cosine}
"""Schedules by their names in ``local.lr_schedule``."""


def find_schedule(given: Any) -> Schedule:
    """Return a schedule, given by its name, as ``module:function``, or as a function.

    Raises
    ------
    ConfigError
        If there is no such schedule, or the object is no function.
    """
    if isinstance(given, str):
        if ":" not in given:
            if given not in SCHEDULES:
                raise ConfigError(unknown("schedule in local.lr_schedule:", given, SCHEDULES))
            return SCHEDULES[given]
        given = imported(given, "schedule")
    if not callable(given):
        raise ConfigError(
            "local.lr_schedule should be a function of the round and the number of rounds, got "
            f"{shown(given)}"
        )
    return cast("Schedule", given)


def name_schedule(given: Any) -> str:
    """Return the name by which a run's config records a schedule."""
    if isinstance(given, str):
        return given
    name = getattr(given, "__qualname__", type(given).__qualname__)
    return f"{getattr(given, '__module__', '')}:{name}"


def factor_in(given: Any, number: int, rounds: int) -> float:
    """Return the factor of a schedule in a round, after checking it.

    Parameters
    ----------
    given
        The schedule; see :func:`find_schedule`.
    number
        Number of the round, from 1.
    rounds
        Number of rounds of the run.

    Raises
    ------
    ConfigError
        If a user's function fails, or does not return a finite number greater than 0.
    """
    schedule = find_schedule(given)
    called = f"{name_schedule(given)}({number}, {rounds})"
    try:
        factor: Any = schedule(number, rounds)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(
            f"local.lr_schedule: {called} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        value = float(factor)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"local.lr_schedule: {called} should return a finite number greater than 0, by which "
            f"local.lr is multiplied, got {shown(factor)}"
        )
    return value
