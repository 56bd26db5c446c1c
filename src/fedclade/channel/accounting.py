"""What releases of different kinds cost a client together, in ε at δ, by dp-accounting's own composition.

Neighbours are two federations of which one client's data are replaced: ``REPLACE_ONE``. Every ε is
at client level.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedclade.core import PrivacyError, alone, appear, import_extra, require

# What a client's releases cost it together, in ε at δ; and the file in which it keeps count of
# them.

FORMAT = 1
"""Version of a ledger's layout."""

LEVELS = ("client", "example")
"""Whom noise protects."""

E = TypeVar("E")

SENSITIVITY = 2.0
"""How far two clipped updates can lie apart, in clip norms."""


def epsilon_of(releases: Mapping[float, int], delta: float) -> float:
    """Return the ε that some releases of one client cost together, at a δ.

    A release is an update clipped to norm C, plus Gaussian noise of standard deviation z·C. What is
    protected is all the data of the client: with any other data its clipped update would lie at
    most 2C away. So a release is a Gaussian mechanism of multiplier z/2, or 2/z-GDP, and n_z
    releases each are together, however the server chose its queries by earlier answers, one
    Gaussian mechanism of multiplier 1/√(Σ n_z (2/z)²), exactly (Dong, Roth, Su 2019,
    arXiv:1905.02383, Corollary 3.3). Its ε is that of Balle and Wang 2018 (arXiv:1805.06530,
    Theorem 8).

    Parameters
    ----------
    releases
        How many n_z there were with each noise multiplier z: without one ε is 0, with a z of 0
        infinite.
    delta
        δ, in (0, 1).

    Raises
    ------
    ConfigError
        If δ is out of range.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    accounting = import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    if any(z == 0 for z in releases):
        return math.inf
    precision = sum(n * (SENSITIVITY / z) * (SENSITIVITY / z) for z, n in releases.items())
    if math.isinf(precision):
        return math.inf
    return (
        float(accounting.get_epsilon_gaussian(1 / math.sqrt(precision), delta))
        if precision
        else 0.0
    )


def multiplier_for(epsilon: float, releases: int, delta: float) -> float:
    """Return the noise multiplier z with which so many releases cost ε together, at a δ: see :func:`epsilon_of`.

    It is 0 for an infinite ε. Raises as :func:`epsilon_of`.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    accounting = import_extra(
        "dp_accounting", "dp-accounting", "privacy", "finding the noise for an ε"
    )
    if math.isinf(epsilon):
        return 0.0
    return SENSITIVITY * math.sqrt(releases) * float(accounting.get_sigma_gaussian(epsilon, delta))


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a client may spend in its life: ε at δ; an ε of infinity is no bound.

    ``level`` says whom it is of: the ``client`` with all its data, or each ``example`` of it.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    epsilon: float
    delta: float = 1e-5
    level: str = "client"

    def __post_init__(self) -> None:
        require(
            ("budget.level", self.level, self.level in LEVELS, " or ".join(LEVELS)),
            ("budget.epsilon", self.epsilon, self.epsilon > 0, "greater than 0"),
            ("budget.delta", self.delta, 0 < self.delta < 1, "greater than 0 and less than 1"),
        )


@dataclass(frozen=True)
class Entry:
    """The releases of one round of a run, with one noise multiplier."""

    run: str
    round: int
    noise_multiplier: float
    releases: int

    def __post_init__(self) -> None:
        z = self.noise_multiplier
        n = self.releases
        if not (z >= 0 and math.isfinite(z) and isinstance(n, int) and n > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{n!r} releases with noise multiplier {z!r}")


@dataclass(frozen=True)
class Ledger:
    """One client's releases, over all the clusters and runs that it passed through, as a JSON file.

    A release is booked before it leaves, and the file is replaced whole. So a crash may count a
    release that did not take place, and never misses one. One process at a time may write it. A
    file that is not there is a client that has released nothing: nobody can tell it from one that
    was deleted, so keep it where identity and keys are kept. Beyond the budget nothing is released.

    ``steps`` is the file of the client's earlier DP-SGD steps, if it may have taken some: these
    bound what is learned of one example, and not of all its data together, so with a single one of
    them the client-level ε is infinite.
    """

    path: Path
    budget: Budget | None = None
    steps: Path | None = None

    def entries(self) -> tuple[Entry, ...]:
        """Read what has been booked; raises a PrivacyError if the file is damaged."""
        return read_entries(self.path, Entry)

    def spent(self, delta: float) -> float:
        """Return the ε, at a δ, of all releases so far; raises as :func:`epsilon_of` and :meth:`entries`."""
        return self._epsilon(self.entries(), delta)

    def counted(self) -> Counter[float]:
        """Return how many releases there were with each noise multiplier; raises as :meth:`entries`."""
        return _counted(self.entries())

    def book(self, noise_multiplier: float, run: str, number: int, releases: int = 1) -> None:
        """Book releases that are about to leave, in a round of a run; if this raises, nothing may leave.

        Raises
        ------
        PrivacyError
            If the file is damaged, or the release would exceed the budget.
        OSError
            If the file cannot be written.
        """
        with alone(self.path):
            entries = {(e.run, e.round, e.noise_multiplier): e for e in self.entries()}
            key = run, number, noise_multiplier
            before = entries[key].releases if key in entries else 0
            entries[key] = Entry(*key, releases=before + releases)
            check_budget(self.budget, lambda delta: self._epsilon(entries.values(), delta))
            write_entries(self.path, entries.values(), level="client", towards="everybody")

    def _epsilon(self, entries: Iterable[Entry], delta: float) -> float:
        if self.steps is not None and read_entries(self.steps, dict):
            return math.inf
        return epsilon_of(_counted(entries), delta)


def read_entries(path: Path, kind: type[E]) -> tuple[E, ...]:
    """Return what a ledger holds, of no file nothing; raises a PrivacyError if it is damaged."""
    try:
        written: Any = json.loads(path.read_bytes())
        if (found := written["format"]) != FORMAT:
            raise ValueError(f"format {found!r}, expected {FORMAT}")
        return tuple(kind(**entry) for entry in written["entries"])
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:
        raise PrivacyError(
            f"the privacy ledger {path} is damaged, so what this client has spent is not known and "
            f"no update leaves it; restore the file from a backup ({type(error).__name__}: {error})"
        ) from error


def write_entries(path: Path, entries: Iterable[Any], **told: str) -> None:
    """Replace a ledger by these entries, and what is told of them, as a whole; raises an OSError if that fails."""
    text = json.dumps(
        {"format": FORMAT, **told, "entries": [asdict(entry) for entry in entries]}, indent=1
    )
    appear(path, lambda beside: beside.write_text(text), private=True)


def check_budget(budget: Budget | None, spent: Callable[[float], float]) -> None:
    """Raise a PrivacyError if a client would have spent more than its budget, given what that is in ε at a δ."""
    if (
        budget is None
        or budget.epsilon == math.inf
        or (epsilon := spent(budget.delta)) <= budget.epsilon
    ):
        return
    raise PrivacyError(
        f"with this update the client would have spent ε = {epsilon:.4g} at δ = {budget.delta:g}, "
        f"more than its budget of {budget.epsilon:g}; it sends no more updates unless its owner "
        "raises the budget"
    )


def _counted(entries: Iterable[Entry]) -> Counter[float]:
    counted: Counter[float] = Counter()
    for entry in entries:
        counted[entry.noise_multiplier] += entry.releases
    return counted


INTERVAL = 1e-4
"""Into whose multiples privacy losses are rounded up, wherever the noise is not far too small to protect anybody."""


@dataclass(frozen=True)
class Release:
    """A sum with Gaussian noise, of clients that are each sampled with some probability; or a randomized response.

    Parameters
    ----------
    noise_multiplier
        Standard deviation of the noise, over half the distance that replacing one client can move
        the sum by.
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
            return accounting.RandomizedResponseDpEvent(
                share_at_random(self.epsilon, self.options), self.options
            )
        gaussian = accounting.GaussianDpEvent(self.noise_multiplier)
        if not sampled or self.sampling in (None, 1.0):
            return gaussian
        return accounting.PoissonSampledDpEvent(self.sampling, gaussian)


def share_at_random(epsilon: float | None, options: int) -> float:
    """Return the share of clients that answer at random: of k-ary randomized response, k / (e^ε + k − 1).

    All others tell the truth, so the likelihood of an answer under any two truths differs by a
    factor e^ε at most (Kairouz, Bonawitz, Ramage 2016, arXiv:1602.07387). Without an ε all tell the
    truth.
    """
    return 0.0 if epsilon is None else options / (math.exp(epsilon) + options - 1)


def composed_epsilon(releases: Iterable[Release], delta: float, *, sampled: bool) -> float:
    """Return the ε of all releases at δ: towards those who know which clients were ``sampled``, or do not.

    Privacy loss distributions are composed, rounded up. Gaussian releases without sampling are
    joined to one first.

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
    if any(
        r.noise_multiplier == 0 or (r.options is not None and r.epsilon is None) for r in counted
    ):
        return math.inf
    plain = {
        r: n
        for r, n in counted.items()
        if r.options is None and (not sampled or r.sampling in (None, 1.0))
    }
    events = [
        accounting.SelfComposedDpEvent(r.event(sampled=sampled), n)
        for r, n in counted.items()
        if r.options is None and r not in plain
    ]
    # Each by itself: dp-accounting 0.6 counts a response that is composed with itself once.
    events += [
        r.event(sampled=sampled)
        for r, n in counted.items()
        if r.options is not None
        for _ in range(n)
    ]
    smallest = min((r.noise_multiplier or 1.0 for r in counted), default=1.0)
    if plain:
        smallest = min(
            smallest, sum(n / (r.noise_multiplier or 1.0) ** 2 for r, n in plain.items()) ** -0.5
        )
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
