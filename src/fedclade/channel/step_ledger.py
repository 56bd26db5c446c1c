"""What noisy steps of one client cost together, in ε at δ for one of its examples; and the file that counts them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fedclade.channel.ledger import SENSITIVITY, Budget, Ledger, check_budget, read_entries, write_entries
from fedclade.core import alone, import_extra, require

GRID = 1e-3
"""Of the privacy losses: they are rounded up to its points, so that ε is an upper bound, of 0.1 % or so."""

Steps = Mapping[tuple[float, float], int]
"""How many steps there were of each sampling rate q and noise multiplier σ."""


def epsilon_of_steps(steps: Steps, delta: float, releases: Mapping[float, int] | None = None) -> float:
    """Return the ε, for one example of a client, that its steps cost together, at a δ.

    A step is a Gaussian mechanism of multiplier σ on a Poisson sample: each example is in it with probability q, and
    adds at most C to the sum. ``dp-accounting`` composes their privacy loss distributions, for the example that counts
    in one of two data sets and adds nothing in the other.

    Parameters
    ----------
    steps
        Without one ε is 0, with a σ of 0 infinite.
    delta
        δ, in (0, 1).
    releases
        How many whole updates the client sent besides with each noise multiplier, see
        :func:`~fedclade.channel.ledger.epsilon_of`: with one example for another they lie two clip norms apart, too.

    Raises
    ------
    ConfigError
        If δ is out of range.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    counted = tuple(sorted((rate, sigma, n) for (rate, sigma), n in steps.items() if n))
    whole = tuple(sorted((z, n) for z, n in (releases or {}).items() if n))
    if any(sigma == 0 for _, sigma, _ in counted) or any(z == 0 for z, _ in whole):
        return math.inf
    return _epsilon(counted, whole, delta) if counted or whole else 0.0


@lru_cache(maxsize=1024)
def _epsilon(
    steps: tuple[tuple[float, float, int], ...], releases: tuple[tuple[float, int], ...], delta: float
) -> float:
    accounting = import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    least = min([*(sigma for _, sigma, _ in steps), *(z / SENSITIVITY for z, _ in releases)])
    # With little noise losses reach far, as 1/σ², and a grid of as many points is coarser.
    grid = GRID * max(1.0, (0.5 / least) ** 2)
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=grid)
    for rate, sigma, count in steps:
        event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(sigma))
        accountant.compose(event, count)
    for z, count in releases:
        accountant.compose(accounting.GaussianDpEvent(z / SENSITIVITY), count)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class StepEntry:
    """The noisy steps of one round of a run, of one sampling rate and noise multiplier."""

    run: str
    round: int
    noise_multiplier: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        z, n = self.noise_multiplier, self.steps
        right = z >= 0 and math.isfinite(z) and 0 < self.rate <= 1
        if not (right and isinstance(n, int) and n > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{n!r} steps of rate {self.rate!r} with noise multiplier {z!r}")


@dataclass(frozen=True)
class StepLedger:
    """One client's noisy steps, over all its runs, as a JSON file; as :class:`~fedclade.channel.ledger.Ledger` is.

    Steps are booked before they are taken. Whole updates in the ledger of client-level privacy, ``beside``, cost an
    example as much as they cost the client, and count here too.
    """

    path: Path
    budget: Budget | None = None
    beside: Ledger | None = None

    def entries(self) -> tuple[StepEntry, ...]:
        """Read what has been booked; raises a PrivacyError if the file is damaged."""
        return read_entries(self.path, StepEntry)

    def spent(self, delta: float) -> float:
        """Return the ε, at a δ, of all steps so far; raises as :func:`epsilon_of_steps` and :meth:`entries`."""
        return self._epsilon(self.entries(), delta)

    def book(self, noise_multiplier: float, rates: Mapping[float, int], run: str, number: int) -> None:
        """Book steps that are about to be taken, in a round of a run, by rate; if this raises, nothing may leave.

        Raises
        ------
        PrivacyError
            If the file is damaged, or the steps would exceed the budget.
        OSError
            If the file cannot be written.
        """
        with alone(self.path):
            entries = {(e.run, e.round, e.noise_multiplier, e.rate): e for e in self.entries()}
            for rate, steps in rates.items():
                key = run, number, noise_multiplier, rate
                before = entries[key].steps if key in entries else 0
                entries[key] = StepEntry(*key, steps=before + steps)
            check_budget(self.budget, lambda delta: self._epsilon(entries.values(), delta))
            write_entries(self.path, entries.values())

    def _epsilon(self, entries: Iterable[StepEntry], delta: float) -> float:
        counted = Counter[tuple[float, float]]()
        for entry in entries:
            counted[entry.rate, entry.noise_multiplier] += entry.steps
        return epsilon_of_steps(counted, delta, self.beside.counted() if self.beside else None)
