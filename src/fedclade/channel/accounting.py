"""Privacy accounting: the joint ε at δ of all releases of a client, and the ledger of releases.

A release is a noisy update, sum or choice that leaves a client or the aggregator. Two federations
are neighbours if the data of one client are replaced (``REPLACE_ONE``), so that every ε protects
all data of a client. The package dp-accounting composes the releases.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedclade.core import PrivacyError, alone, appear, check_extra, import_extra, require

# The joint ε at δ of a client's releases, and the file in which the client counts them.

FORMAT = 1
"""Version of the format of ledger files."""

LEVELS = ("client", "example")
"""Levels of protection: all data of a client, or each example."""

E = TypeVar("E")

SENSITIVITY = 2.0
"""Largest distance between two clipped updates, in clip norms."""


def epsilon_of(releases: Mapping[float, int], delta: float) -> float:
    """Return the joint privacy loss ε, at δ, of several noisy updates that one client released.

    A release is an update clipped to norm C, plus Gaussian noise of standard deviation z·C. All the
    data of the client are protected: with any other data its clipped update would differ by at most
    2C. So a release is a Gaussian mechanism with noise multiplier z/2; its parameter of Gaussian
    differential privacy (GDP) is 2/z. Together, n_z releases of each z are exactly one Gaussian
    mechanism with multiplier 1/√(Σ n_z (2/z)²), even if the server's queries depend on earlier
    replies (Dong, Roth, Su 2019, arXiv:1905.02383, Corollary 3.3). The ε of that mechanism is given
    by Balle and Wang 2018 (arXiv:1805.06530, Theorem 8).

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
        ε, at least 0; may be infinite.

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
    """Return the noise multiplier z with which several releases have a given joint ε at δ.

    This function is the inverse of :func:`epsilon_of`, and raises the same errors.

    Parameters
    ----------
    epsilon
        Joint ε of all releases. If ε is infinite, the multiplier is 0.
    releases
        Number of releases, all with the same multiplier.
    delta
        δ, in (0, 1).
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
    """Entry of a privacy ledger: releases of one round of a run, with one noise multiplier."""

    run: str
    round: int
    noise_multiplier: float
    releases: int

    def __post_init__(self) -> None:
        z = self.noise_multiplier
        n = self.releases
        if not (z >= 0 and math.isfinite(z) and isinstance(n, int) and n > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                "an entry of a privacy ledger should have at least 1 release and a finite noise "
                f"multiplier of at least 0, got {n!r} releases with noise multiplier {z!r}"
            )


@dataclass(frozen=True)
class Ledger:
    """Ledger (JSON file) of the noisy updates that one client has released, over all its runs.

    A release is booked before it leaves the client, and the file is replaced as a whole. So after a
    crash the ledger may contain a release that did not take place, but never misses a release. Only
    one process at a time may write the file. A missing file means that the client has released
    nothing. A file that was never written cannot be distinguished from a deleted file, so store the
    file with the client's identity and keys. Beyond the budget nothing is released.

    Parameters
    ----------
    path
        The JSON file.
    budget
        Largest ε at δ that the client may spend; None for no limit.
    steps
        Ledger file of the DP-SGD steps that the client has taken earlier. None or a missing file:
        no steps. DP-SGD bounds what is revealed about one example, but not what is revealed about
        all the client's data together. A single step therefore makes the ε for all the client's
        data infinite.
    """

    path: Path
    budget: Budget | None = None
    steps: Path | None = None

    def entries(self) -> tuple[Entry, ...]:
        """Return the releases in the ledger file; raise a PrivacyError if the file is damaged."""
        return read_entries(self.path, Entry)

    def spent(self, delta: float) -> float:
        """Return the joint ε, at δ, of all releases in the ledger.

        The method raises the errors of :func:`epsilon_of` and :meth:`entries`.
        """
        return self._epsilon(self.entries(), delta)

    def counted(self) -> Counter[float]:
        """Return the number of releases in the ledger, by noise multiplier.

        The method raises the errors of :meth:`entries`.
        """
        return _count_releases(self.entries())

    def book(self, noise_multiplier: float, run: str, number: int, releases: int = 1) -> None:
        """Book releases in the ledger before they leave the client.

        If this method raises an error, nothing may leave the client.

        Parameters
        ----------
        noise_multiplier
            Noise multiplier z of the releases.
        run, number
            Name of the run, and number of its round.
        releases
            Number of releases.

        Raises
        ------
        PrivacyError
            If the file is damaged, or the releases would exceed the budget.
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
        """Return the joint ε, at δ, of ledger entries; infinite if there are DP-SGD steps."""
        if self.steps is not None and read_entries(self.steps, dict):
            return math.inf
        return epsilon_of(_count_releases(entries), delta)


def read_entries(path: Path, kind: type[E]) -> tuple[E, ...]:
    """Return the entries of a ledger file; an empty tuple if the file does not exist.

    Raises
    ------
    PrivacyError
        If the file is damaged.
    """
    try:
        written: Any = json.loads(path.read_bytes())
        if (found := written["format"]) != FORMAT:
            raise ValueError(
                f"the format version of a privacy ledger should be {FORMAT}, got {found!r}; if "
                "another version of fedclade wrote the ledger, use that version"
            )
        return tuple(kind(**entry) for entry in written["entries"])
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError, KeyError) as error:
        raise PrivacyError(
            f"the privacy ledger {path} is damaged, so it is unknown how much of its privacy "
            "budget this client has spent, and the client sends no update; restore the file from "
            f"a backup ({type(error).__name__}: {error})"
        ) from error


def write_entries(path: Path, entries: Iterable[Any], **told: str) -> None:
    """Write entries to a ledger file, which is replaced as a whole.

    Parameters
    ----------
    path
        The file.
    entries
        All entries of the ledger.
    told
        Further fields of the file, by name.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    text = json.dumps(
        {"format": FORMAT, **told, "entries": [asdict(entry) for entry in entries]}, indent=1
    )
    appear(path, lambda beside: beside.write_text(text), private=True)


def check_budget(budget: Budget | None, spent: Callable[[float], float]) -> None:
    """Raise a PrivacyError if a client would have spent more than its privacy budget.

    Parameters
    ----------
    budget
        The budget; None for no limit.
    spent
        Function of δ that returns the ε that the client would have spent.
    """
    if (
        budget is None
        or budget.epsilon == math.inf
        or (epsilon := spent(budget.delta)) <= budget.epsilon
    ):
        return
    raise PrivacyError(
        f"with this update the client would have spent ε = {epsilon:.4g} at δ = {budget.delta:g}, "
        f"more than its budget of {budget.epsilon:g}; the client sends no more updates unless its "
        "owner raises the budget"
    )


def _count_releases(entries: Iterable[Entry]) -> Counter[float]:
    """Return the number of releases in ledger entries, by noise multiplier."""
    counted: Counter[float] = Counter()
    for entry in entries:
        counted[entry.noise_multiplier] += entry.releases
    return counted


INTERVAL = 1e-4
"""Grid to which privacy losses are rounded up; it is coarser if there is very little noise."""


@dataclass(frozen=True)
class Release:
    """Release of a sum with Gaussian noise, or of clients' choices by randomized response.

    Parameters
    ----------
    noise_multiplier
        For a sum: standard deviation of the noise, divided by half the largest distance by which
        the sum changes if the data of one client are replaced.
    sampling
        For a sum: probability with which each client is sampled, independently of other clients
        (Poisson sampling); None if clients are not sampled.
    epsilon, options
        For choices: ε of a response, and the number of options. Without an ε, all clients report
        their true choice.
    """

    noise_multiplier: float | None = None
    sampling: float | None = None
    epsilon: float | None = None
    options: int | None = None

    def event(self, *, sampled: bool) -> Any:
        """Return the release as an event of the package dp-accounting.

        Parameters
        ----------
        sampled
            Whether the privacy amplification by sampling counts. It does not if the observer knows
            which clients were sampled.
        """
        accounting = _import_accounting()
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

    A client replies with a random option with this probability, and with the truth otherwise. So
    the likelihoods of a reply under any two truths differ by at most a factor e^ε (Kairouz,
    Bonawitz, Ramage 2016, arXiv:1602.07387).

    Parameters
    ----------
    epsilon
        ε of a reply. If None, all clients report the truth, and the share is 0.
    options
        Number k of options.
    """
    return 0.0 if epsilon is None else options / (math.exp(epsilon) + options - 1)


def composed_epsilon(releases: Iterable[Release], delta: float, *, sampled: bool) -> float:
    """Return the joint ε of sums and choices at δ, with or without amplification by sampling.

    Privacy loss distributions are composed and rounded up. All Gaussian releases without sampling
    are first combined into a single Gaussian release.

    Parameters
    ----------
    releases
        All releases of a run.
    delta
        δ, in (0, 1).
    sampled
        True: ε towards parties that do not know which clients were sampled. False: ε towards
        parties that know this.

    Raises
    ------
    ConfigError
        If δ is out of range.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    accounting = _import_accounting()
    counted = Counter(releases)
    if not counted:
        return 0.0
    if any(_has_no_noise(release) for release in counted):
        return math.inf
    plain = {r: n for r, n in counted.items() if _is_plain_gaussian(r, sampled=sampled)}
    others = {r: n for r, n in counted.items() if r not in plain}
    events = _list_events(others, sampled=sampled)
    smallest = min(r.noise_multiplier or 1.0 for r in counted)
    if plain:
        joint = _join_gaussians(plain)
        smallest = min(smallest, joint)
        if not events:
            return float(accounting.get_epsilon_gaussian(joint / 2, delta))
        events.append(accounting.GaussianDpEvent(joint))
    pld = import_extra("dp_accounting.pld", "dp-accounting", "privacy", "stating ε")
    interval = INTERVAL * max(1.0, smallest**-2)
    accountant = pld.PLDAccountant(accounting.NeighboringRelation.REPLACE_ONE, interval)
    return float(accountant.compose(accounting.ComposedDpEvent(events)).get_epsilon(delta))


def _has_no_noise(release: Release) -> bool:
    """Return whether a release is exact, so that its ε is infinite."""
    has_true_choices = release.options is not None and release.epsilon is None
    return release.noise_multiplier == 0 or has_true_choices


def _is_plain_gaussian(release: Release, *, sampled: bool) -> bool:
    """Return whether a release is a noisy sum that gains no privacy from sampling of clients."""
    is_sum = release.options is None
    return is_sum and (not sampled or release.sampling in (None, 1.0))


def _list_events(releases: Mapping[Release, int], *, sampled: bool) -> list[Any]:
    """Convert releases, each with the number of times that it occurs, to dp-accounting events."""
    accounting = _import_accounting()
    events = [
        accounting.SelfComposedDpEvent(release.event(sampled=sampled), count)
        for release, count in releases.items()
        if release.options is None
    ]
    # Each response is added by itself: dp-accounting 0.6 counts a self-composed response only once.
    for release, count in releases.items():
        if release.options is not None:
            events += [release.event(sampled=sampled) for _ in range(count)]
    return events


def _join_gaussians(releases: Mapping[Release, int]) -> float:
    """Return the noise multiplier of one Gaussian release with the joint ε of all releases."""
    precision = sum(n / (r.noise_multiplier or 1.0) ** 2 for r, n in releases.items())
    return float(precision**-0.5)


def check_accounting() -> None:
    """Raise a MissingExtraError if the optional package dp-accounting is not installed."""
    check_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")


def _import_accounting() -> Any:
    """Import the optional package dp-accounting, or raise a MissingExtraError."""
    return import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
