"""What makes a real client private: noise that nobody knows, and a ledger that all that leaves it is booked in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedclade.channel import (
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
)
from fedclade.core import ConfigError


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
    of_releases, of_steps = folder / "privacy.json", folder / "example-privacy.json"
    if isinstance(privacy, ExamplePrivacy):
        ledger = StepLedger(of_steps, budget, beside=Ledger(of_releases))
        return booked_steps(privacy, ledger, "network", sizes)
    return booked(privacy, Ledger(of_releases, budget, of_steps), "network")
