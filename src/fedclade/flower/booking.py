"""What makes a real client private: noise that nobody knows, and a ledger that all that leaves it is booked in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from fedclade.channel import (
    SENSITIVITY,
    Budget,
    ExamplePrivacy,
    Ledger,
    Mechanism,
    PrivateExamples,
    Privatizing,
    StepLedger,
    booked,
    booked_steps,
    check_local,
    multiplier_for,
)
from fedclade.core import ConfigError
from fedclade.flower.closed_scores import ScoreNoise

SCORES_SHARE = 0.1
"""Share of a client's ε that its scores may cost, unless its policy says what they may."""

SCORES_EPSILON = 1.0
"""What they may cost where the client's own ε has no bound."""


def privatizing_of(
    privacy: Mechanism | None, budget: Budget | None, folder: Path | None, sizes: Mapping[int, int]
) -> Privatizing | PrivateExamples | None:
    """Return what the replies of a client with so many training examples pass; None where it is not private.

    Raises
    ------
    ConfigError
        If it has a budget and the run no noise, or the run noise and it no budget, no folder, or a budget of another
        level: else whoever writes the run's config could have examples protected in place of the client.
    """
    privacy = check_local(privacy)
    if privacy is None:
        if budget is not None:  # or whoever writes the run's config could turn the noise off
            raise ConfigError(
                f"this client may spend ε = {budget.epsilon:g}, and an update without noise has no bound; set "
                "privacy.clip_norm and privacy.noise_multiplier"
            )
        return None
    if folder is None:
        raise ConfigError("a private client needs a folder for its ledger; set folder in its node config")
    if budget is None:  # the noise is the run's to set: without a limit of its own nothing is promised
        raise ConfigError(
            "privacy.clip_norm is set, and this client does not say what it may spend; set epsilon in its node "
            "config, or epsilon=inf for no bound"
        )
    level = privacy.level if isinstance(privacy, ExamplePrivacy) else "client"
    if budget.level != level:
        raise ConfigError(
            f"this client may spend ε = {budget.epsilon:g} of level {budget.level!r}, and the run's privacy.level is "
            f"{level!r}; to take part, set level={level!r} in its node config"
        )
    if isinstance(privacy, ExamplePrivacy):
        return booked_steps(privacy, _step_ledger(folder, budget), "network", sizes)
    return booked(privacy, _ledger(folder, budget), "network")


def score_noise_of(
    budget: Budget, folder: Path, *, most: int, epsilon: float | None = None, examples: int = 1
) -> ScoreNoise:
    """Return the noise with which ``most`` scores cost a client an ε together.

    A score lies in [0, 1]. With other data in place of all that the client has, it may be any other number there; with
    one of its ``examples`` of held-out data counted or not, a mean over them moves by their inverse.

    Parameters
    ----------
    epsilon
        What the scores may cost; None: :data:`SCORES_SHARE` of the budget.
    """
    if epsilon is None:
        epsilon = SCORES_EPSILON if math.isinf(budget.epsilon) else SCORES_SHARE * budget.epsilon
    z = multiplier_for(epsilon, most, budget.delta)
    multiplier = z / SENSITIVITY  # standard deviation for a sensitivity of 1
    if budget.level == "example":
        steps = _step_ledger(folder, budget)
        book = lambda count: steps.book(multiplier, {1.0: count}, "scores", 0)  # noqa: E731
        return ScoreNoise(multiplier / max(1, examples), book)
    releases = _ledger(folder, budget)
    return ScoreNoise(multiplier, lambda count: releases.book(z, "scores", 0, count))


def _ledger(folder: Path, budget: Budget) -> Ledger:
    return Ledger(folder / "privacy.json", budget, folder / "example-privacy.json")


def _step_ledger(folder: Path, budget: Budget) -> StepLedger:
    return StepLedger(folder / "example-privacy.json", budget, beside=Ledger(folder / "privacy.json"))
