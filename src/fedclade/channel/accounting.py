"""Privacy accounting: the joint ε at δ of a client's releases, composed by dp-accounting.

Two federations are neighbours if the data of one client are replaced (``REPLACE_ONE``). Every ε is
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

# The joint ε at δ of a client's releases, and the file in which the client counts them.

FORMAT = 1
"""Version of a ledger's layout."""

LEVELS = ("client", "example")
"""Levels of protection: all data of a client, or each example."""

E = TypeVar("E")

SENSITIVITY = 2.0
"""Largest distance between two clipped updates, in clip norms."""


def epsilon_of(releases: Mapping[float, int], delta: float) -> float:
    """Return the joint ε of some releases of one client at δ.

    A release is an update clipped to norm C, plus Gaussian noise of standard deviation z·C. All the
    data of the client are protected: with any other data its clipped update would differ by at most
    2C. So a release is a Gaussian mechanism of multiplier z/2, or 2/z-GDP. Together, n_z releases
    of each z are exactly one Gaussian mechanism of multiplier 1/√(Σ n_z (2/z)²), even if the server
    chose its queries by earlier replies (Dong, Roth, Su 2019, arXiv:1905.02383, Corollary 3.3). The
    ε of that mechanism is given by Balle and Wang 2018 (arXiv:1805.06530, Theorem 8).

    Parameters
    ----------
    releases
        Number of releases n_z by noise multiplier z. Without releases ε is 0; with a z of 0 it is
        infinite.
    delta
        δ, in (0, 1).

    Returns
    -------
    float
        ε.

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
    """Return the noise multiplier z with which some releases cost ε at δ; 0 for infinite ε.

    It is the inverse of :func:`epsilon_of`, and raises the same errors.
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
    """Privacy budget of a client over its lifetime.

    Parameters
    ----------
    epsilon
        Largest ε, greater than 0; infinity is no bound.
    delta
        δ, in (0, 1).
    level
        ``client``: the budget is for all the client's data. ``example``: for each example.

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
    """Releases of one round of a run, with one noise multiplier."""

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
    """Ledger of one client's releases over all its clusters and runs, as a JSON file.

    A release is booked before it leaves, and the file is replaced as a whole. So a crash may count
    a release that did not take place, and never misses one. Only one process at a time may write
    the file. A missing file means that the client has released nothing. It cannot be distinguished
    from a deleted file, so store it with the client's identity and keys. Beyond the budget nothing
    is released.

    Parameters
    ----------
    path
        The JSON file.
    budget
        Largest ε at δ that the client may spend; None for no limit.
    steps
        Ledger file of the client's earlier DP-SGD steps, if it may have taken some. Such steps
        bound what is revealed about one example, but not about all the client's data together, so a
        single step makes the client-level ε infinite.
    """

    path: Path
    budget: Budget | None = None
    steps: Path | None = None

    def entries(self) -> tuple[Entry, ...]:
        """Read the booked releases; raises a PrivacyError if the file is damaged."""
        return read_entries(self.path, Entry)

    def spent(self, delta: float) -> float:
        """Return the ε of all booked releases at δ.

        Raises as :func:`epsilon_of` and :meth:`entries`.
        """
        return self._epsilon(self.entries(), delta)

    def counted(self) -> Counter[float]:
        """Return the number of releases by noise multiplier; raises as :meth:`entries`."""
        return _counted(self.entries())

    def book(self, noise_multiplier: float, run: str, number: int, releases: int = 1) -> None:
        """Book releases before they leave. If this raises an error, nothing may leave the client.

        Parameters
        ----------
        noise_multiplier
            z of the releases.
        run, number
            Name of the run, and number of its round.
        releases
            Number of releases.

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
    """Return the entries of a ledger file; none if there is no file.

    Raises
    ------
    PrivacyError
        If the file is damaged.
    """
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
    """Replace a ledger file as a whole by these entries, with ``told`` as further fields.

    Raises an OSError if that fails.
    """
    text = json.dumps(
        {"format": FORMAT, **told, "entries": [asdict(entry) for entry in entries]}, indent=1
    )
    appear(path, lambda beside: beside.write_text(text), private=True)


def check_budget(budget: Budget | None, spent: Callable[[float], float]) -> None:
    """Raise a PrivacyError if a client would have spent more than its budget.

    ``spent`` returns the client's ε at a given δ.
    """
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
"""Grid to which privacy losses are rounded up; coarser if there is very little noise."""


@dataclass(frozen=True)
class Release:
    """Release of a sum with Gaussian noise, or of randomized responses.

    Parameters
    ----------
    noise_multiplier
        Standard deviation of the noise, divided by half the distance by which replacing one client
        can move the sum.
    sampling
        Probability with which each client is sampled, independently of others (Poisson sampling).
    epsilon, options
        For a response: its ε, and the number of options.
    """

    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None

    def event(self, *, sampled: bool) -> Any:
        """Return dp-accounting's event of the release.

        Without ``sampled``, the observer knows the sampled clients, so that sampling does not
        amplify privacy.
        """
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
    """Return the share of random replies in k-ary randomized response, k / (e^ε + k − 1).

    All other clients report the truth, so the likelihoods of a reply under any two truths differ by
    at most a factor e^ε (Kairouz, Bonawitz, Ramage 2016, arXiv:1602.07387). Without an ε all
    clients report the truth.
    """
    return 0.0 if epsilon is None else options / (math.exp(epsilon) + options - 1)


def composed_epsilon(releases: Iterable[Release], delta: float, *, sampled: bool) -> float:
    """Return the joint ε of all releases at δ, with or without amplification by sampling.

    Privacy loss distributions are composed and rounded up. Gaussian releases without sampling are
    first joined to one.

    Parameters
    ----------
    releases
        The releases.
    delta
        δ, in (0, 1).
    sampled
        True: towards parties that do not know which clients were sampled. False: towards parties
        that know.

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
    # Each response is added by itself: dp-accounting 0.6 counts a self-composed response only once.
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
