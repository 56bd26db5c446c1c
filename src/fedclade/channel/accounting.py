"""What releases of different kinds cost a client together, in ε at δ, by dp-accounting's own composition.

Neighbours are two federations of which one client's data are replaced: ``REPLACE_ONE``. Every ε is at client level.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedclade.core import import_extra, require

INTERVAL = 1e-4
"""Into whose multiples privacy losses are rounded up, wherever the noise is not far too small to protect anybody."""


@dataclass(frozen=True)
class Release:
    """A sum with Gaussian noise, of clients that are each sampled with some probability; or a randomized response.

    Parameters
    ----------
    noise_multiplier
        Standard deviation of the noise, over half the distance that replacing one client can move the sum by.
    sampling
        The probability, independently for each client (Poisson sampling).
    epsilon, options
        Of a response: its own ε, and among how many.
    """

    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None

    def event(self, *, sampled: bool) -> Any:
        """Return dp-accounting's event; without ``sampled`` who was is known, so that it hides nobody."""
        accounting = _accounting()
        if self.options is not None:
            return accounting.RandomizedResponseDpEvent(share_at_random(self.epsilon, self.options), self.options)
        gaussian = accounting.GaussianDpEvent(self.noise_multiplier)
        if not sampled or self.sampling in (None, 1.0):
            return gaussian
        return accounting.PoissonSampledDpEvent(self.sampling, gaussian)


def share_at_random(epsilon: float | None, options: int) -> float:
    """Return the share of clients that answer at random: of k-ary randomized response, k / (e^ε + k − 1).

    All others tell the truth, so the likelihood of an answer under any two truths differs by a factor e^ε at most
    (Kairouz, Bonawitz, Ramage 2016, arXiv:1602.07387). Without an ε all tell the truth.
    """
    return 0.0 if epsilon is None else options / (math.exp(epsilon) + options - 1)


def composed_epsilon(releases: Iterable[Release], delta: float, *, sampled: bool) -> float:
    """Return the ε of all releases at δ: towards those who know which clients were ``sampled``, or do not.

    Privacy loss distributions are composed, rounded up. Gaussian releases without sampling are joined to one first.

    Raises
    ------
    ConfigError
        If δ is out of range.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    accounting = _accounting()
    counted = Counter(releases)
    if not counted:
        return 0.0
    if any(r.noise_multiplier == 0 or (r.options is not None and r.epsilon is None) for r in counted):
        return math.inf
    plain = {r: n for r, n in counted.items() if r.options is None and (not sampled or r.sampling in (None, 1.0))}
    events = [
        accounting.SelfComposedDpEvent(r.event(sampled=sampled), n)
        for r, n in counted.items()
        if r.options is None and r not in plain
    ]
    # Each by itself: dp-accounting 0.6 counts a response that is composed with itself once.
    events += [r.event(sampled=sampled) for r, n in counted.items() if r.options is not None for _ in range(n)]
    smallest = min((r.noise_multiplier or 1.0 for r in counted), default=1.0)
    if plain:
        smallest = min(smallest, sum(n / (r.noise_multiplier or 1.0) ** 2 for r, n in plain.items()) ** -0.5)
        joint = sum(n / (r.noise_multiplier or 1.0) ** 2 for r, n in plain.items()) ** -0.5
        if not events:
            return float(accounting.get_epsilon_gaussian(joint / 2, delta))
        events.append(accounting.GaussianDpEvent(joint))
    pld = import_extra("dp_accounting.pld", "dp-accounting", "privacy", "stating ε")
    interval = INTERVAL * max(1.0, smallest**-2)
    accountant = pld.PLDAccountant(accounting.NeighboringRelation.REPLACE_ONE, interval)
    return float(accountant.compose(accounting.ComposedDpEvent(events)).get_epsilon(delta))


def _accounting() -> Any:
    return import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
