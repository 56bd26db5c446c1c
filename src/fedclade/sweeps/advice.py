"""The class :class:`Advice`: what each client should be served with, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.algorithms import MODEL_KINDS
from fedclade.report import count, percent, shortened, significant
from fedclade.runs import to_toml, without_nan
from fedclade.tasks import Metric, mean_and_interval

ONE_MODEL = "fedavg"
GROUPS = "rcfl"
CHOICE = "auto"
METHODS = (ONE_MODEL, GROUPS, CHOICE, "local")
"""Methods that are compared: one model, a model for each group, auto, and own models only."""

KINDS = tuple(MODEL_KINDS.values())
"""Kinds of models that clients may be served with, from general to special."""

OWN = KINDS[-1]
"""Kind of a model that a client trains alone."""

PLURALS = {
    "personal head": "personal heads",
    "fine-tuned one model": "fine-tuned copies of one model",
    "fine-tuned": "fine-tuned copies of a group's model",
    "own": "models that a client trains alone",
}
"""Kinds of own models, as sentences name them."""

MOST_WORDS = 8
"""Largest number of sizes of groups in a sentence."""

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Gain:
    """Share by which a method lowers the mean loss of one model for all clients.

    Parameters
    ----------
    mean
        The share; negative if the method raises the loss.
    low, high
        Ends of the 95 % interval (Student's t), from the differences of each client's losses.
    error
        Standard error of the share.
    """

    mean: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, base: Scores, other: Scores) -> Gain:
        """Estimate the gain of one method over another one, from losses of the same clients.

        Parameters
        ----------
        base, other
            Loss of each of n clients with both methods in R repetitions, ``[R, n]``.
        """
        if not np.isfinite(other).all():
            return cls(-math.inf, -math.inf, -math.inf, 0.0)
        typical = float(base.mean())
        if typical <= 0:  # no loss can be lowered
            return cls(0.0, 0.0, 0.0, 0.0)
        # The repetitions of a client have the same data, so they count as one observation.
        differences = (base - other).mean(axis=0) / typical
        mean, half = mean_and_interval(differences.tolist())
        assert half is not None  # there are at least two clients
        error = float(differences.std(ddof=1) / math.sqrt(len(differences)))
        # A loss that is at least 0 cannot be lowered by more than all of it.
        highest = 1.0 if (other >= 0).all() else math.inf
        return cls(mean, mean - half, min(mean + half, highest), error)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the gain exceeds its standard error."""
        return self.mean > self.error

    @property
    def has_zero(self) -> bool:
        """Whether the interval includes 0."""
        return self.low <= 0 <= self.high


@dataclass(frozen=True, eq=False)
class Measured:
    """Results of all runs on held-out training data, for n clients and R repetitions.

    Parameters
    ----------
    names
        Names of the clients, ``[n]``.
    losses, scores
        Loss, and score by the metric, of each client with each method, ``[R, n]`` by method. Scores
        may be NaN.
    metric
        The main metric of the task.
    groups
        Cluster of each client in each repetition, ``[R, n]``, by method.
    kinds
        Number in :data:`KINDS` of the model that ``auto`` served to each client, ``[R, n]``.
    """

    names: tuple[str, ...]
    losses: Mapping[str, Scores]
    scores: Mapping[str, Scores]
    metric: Metric
    groups: Mapping[str, NDArray[np.int64]]
    kinds: NDArray[np.int64]

    @property
    def gains(self) -> dict[str, Gain]:
        """Gain of each other method over one model for all clients."""
        base = self.losses[ONE_MODEL]
        return {name: Gain.of(base, self.losses[name]) for name in METHODS if name != ONE_MODEL}

    def choose_method(self) -> str:
        """Return the simplest method that explains the gain, see :func:`fedclade.advise`.

        Groups explain it only if most clients share their group with others.
        """
        gains = self.gains
        over_groups = Gain.of(self.losses[GROUPS], self.losses[CHOICE])
        groups = self.list_groups(GROUPS)
        together = sum(len(group) for group in groups if len(group) > 1)
        has_groups = len(groups) > 1 and 2 * together > len(self.names)
        if has_groups and gains[GROUPS].is_beyond_noise and not over_groups.is_beyond_noise:
            return GROUPS
        if gains[CHOICE].is_beyond_noise:
            return CHOICE
        return ONE_MODEL

    def served_by(self, method: str) -> dict[str, str]:
        """Return the kind of model that each client is served with, by the client's name.

        For ``auto`` it is the most frequent kind over the repetitions; of equally frequent ones,
        the most general. The model of a group that has only one client is the client's own.
        """
        if method == ONE_MODEL:
            return dict.fromkeys(self.names, KINDS[0])
        frequent = [1] * len(self.names)
        if method == CHOICE:
            frequent = [int(np.bincount(column).argmax()) for column in self.kinds.T]
        kinds = {name: KINDS[kind] for name, kind in zip(self.names, frequent, strict=True)}
        single = {group[0] for group in self.list_groups(method) if len(group) == 1}
        return {
            name: OWN if kind == KINDS[1] and name in single else kind
            for name, kind in kinds.items()
        }

    def list_groups(self, method: str) -> list[list[str]]:
        """Return the names of the clients in each group that a method finds, the largest first.

        The groups are those of the repetition whose groups are the most frequent.
        """
        found = [self._group_names(labels) for labels in self.groups[method]]
        return max(found, key=found.count)  # the first one of equally frequent ones

    def _group_names(self, labels: NDArray[np.int64]) -> list[list[str]]:
        groups: dict[int, list[str]] = {}
        for name, label in zip(self.names, labels.tolist(), strict=True):
            groups.setdefault(label, []).append(name)
        return sorted(groups.values(), key=lambda group: (-len(group), group))


@dataclass(frozen=True, eq=False, kw_only=True)
class Advice:
    """Advice about the models that clients should be served with, by :func:`fedclade.advise`.

    ``str(advice)`` has the three sentences.

    Parameters
    ----------
    sentences
        Three sentences: which kinds of models for how many clients, the method, and the gain.
    method
        Name of the recommended method: ``fedavg``, ``rcfl`` or ``auto``.
    served
        Number of clients that are served with each kind of model, by the name of the kind.
    clients
        Kind of model of each client, by the name of the client.
    groups
        Names of the clients in each group that the method finds; a single group for ``fedavg``.
    gain_of
        Method that has the gain: the recommended one; for ``fedavg``, the best other method.
    gain, interval
        Share by which this method lowers the mean loss on held-out data in comparison with one
        model for all clients, and the ends of the 95 % interval (paired over clients).
    is_certain
        Whether the interval does not include 0.
    metric
        Name of the main metric.
    losses, scores
        Mean loss, and mean score by the metric, on held-out data, by method.
    gains
        Gain of each other method over one model for all clients, by method.
    left_out
        Names of clients that have too few examples, and were left out.
    steps
        Number of training steps of all runs, as a multiple of one run of FedAvg.
    seconds
        Duration of all runs.
    config
        Config of the recommended run.
    """

    sentences: tuple[str, str, str]
    method: str
    served: Mapping[str, int]
    clients: Mapping[str, str]
    groups: Sequence[Sequence[str]]
    gain_of: str
    gain: float
    interval: tuple[float, float]
    is_certain: bool
    metric: str
    losses: Mapping[str, float]
    scores: Mapping[str, float]
    gains: Mapping[str, Gain]
    left_out: Sequence[str]
    steps: float
    seconds: float
    config: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        measured: Measured,
        method: str,
        config: Mapping[str, Any],
        left_out: Sequence[str],
        *,
        steps: float,
        seconds: float,
    ) -> Advice:
        """Write the advice to use ``method``, from all measurements."""
        gains = measured.gains
        gain_of = method
        if method == ONE_MODEL:
            gain_of = max((GROUPS, CHOICE), key=lambda name: gains[name].mean)
        gain = gains[gain_of]
        clients = measured.served_by(method)
        kinds = list(clients.values())
        served = {kind: kinds.count(kind) for kind in KINDS if kind in kinds}
        groups = measured.list_groups(method)
        scores = {
            name: float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
            for name, values in measured.scores.items()
        }
        return cls(
            sentences=(
                _write_served(method, served, groups),
                _write_method(method, gain),
                _write_gain(method, gain_of, gain, scores, measured),
            ),
            method=method,
            served=served,
            clients=clients,
            groups=groups,
            gain_of=gain_of,
            gain=gain.mean,
            interval=(gain.low, gain.high),
            is_certain=not gain.has_zero,
            metric=measured.metric.name,
            losses={name: float(values.mean()) for name, values in measured.losses.items()},
            scores=scores,
            gains=gains,
            left_out=tuple(left_out),
            steps=round(steps, 2),
            seconds=round(seconds, 2),
            config=config,
        )

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as dictionaries, lists, texts and numbers, for JSON.

        Numbers that are NaN or infinite are None.
        """
        found = asdict(self)
        return {key: without_nan(value) for key, value in found.items()}

    def to_toml(self) -> str:
        """Return the config of the recommended run as TOML text, with the sentences as comments."""
        lines = [f"# {sentence}" for sentence in self.sentences]
        return "\n".join(["# Made by 'fedclade advise':", *lines, "", to_toml(self.config)])


def _write_served(method: str, served: Mapping[str, int], groups: Sequence[Sequence[str]]) -> str:
    """Return the sentence about the kinds of models, and the number of clients for each."""
    total = sum(served.values())
    several = [str(len(group)) for group in groups if len(group) > 1]
    if method == ONE_MODEL:
        return f"Serve all {total} clients with one model."
    parts: list[str] = []
    if n := served.get("cluster", 0):
        found = f"{count(len(several), 'group')} of {_join(several)} clients"
        parts.append(f"{_name_share(n, total)} with the model of their group ({found})")
    own = {kind: n for kind, n in served.items() if kind in PLURALS}
    if own:
        kinds = _join([f"{n} {PLURALS[kind]}" for kind, n in own.items()])
        parts.append(f"{_name_share(sum(own.values()), total)} with own models ({kinds})")
    if n := served.get("one model", 0):
        parts.append(f"{_name_share(n, total)} with one model for all")
    return f"Serve {_join(parts)}."


def _name_share(n: int, total: int) -> str:
    """Return a number of clients as text, such as "all 9 clients" or "3 of 9 clients"."""
    return f"all {n} clients" if n == total else f"{n} of {total} clients"


def _join(words: Sequence[str]) -> str:
    """Join words by commas and "and"; of many words, the remaining ones are only counted."""
    if len(words) > MOST_WORDS or len(words) < 2:
        return shortened(words, MOST_WORDS)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _write_method(method: str, gain: Gain) -> str:
    """Return the sentence about the method."""
    if method == ONE_MODEL:
        return (
            "Use the method fedavg, which trains one model for all clients: no other method has a "
            "gain beyond noise (one standard error)."
        )
    if method == GROUPS:
        return (
            "Use the method rcfl, which finds the groups and trains a model for each: they explain "
            "the gain, and auto adds none beyond noise (one standard error)."
        )
    return (
        "Use the method auto, which chooses a model for each client by the losses on the client's "
        "validation data."
    )


def _write_gain(
    method: str, gain_of: str, gain: Gain, scores: Mapping[str, float], measured: Measured
) -> str:
    """Return the sentence about the gain, with its interval."""
    n = len(measured.names)
    if not math.isfinite(gain.mean):
        return f"There is no gain to expect: the training of {gain_of} diverged."
    interval = f"95 % interval {percent(gain.low)} to {percent(gain.high)}, paired over {n} clients"
    score = _write_scores(gain_of, scores, measured.metric)
    if method == ONE_MODEL:
        doubt = ""
        if gain.has_zero:
            doubt = (
                "; the interval includes 0: there is no gain, or the data is too small to show it"
            )
        return (
            f"Expect no gain from other methods: the gain of {gain_of}, the best of them, is "
            f"{percent(gain.mean)} of the loss of one model for all on held-out data "
            f"({interval}){score}{doubt}."
        )
    doubt = "; the interval includes 0, so the data is too small to tell" if gain.has_zero else ""
    return (
        f"Expect a gain of {percent(gain.mean)} of the loss over one model for all, on new data of "
        f"the same clients ({interval}){score}{doubt}."
    )


def _write_scores(method: str, scores: Mapping[str, float], metric: Metric) -> str:
    """Return the part of a sentence about the metric; empty if it has no score."""
    write = percent if metric.share else significant
    if math.isnan(scores[method]) or math.isnan(scores[ONE_MODEL]):
        return ""
    return f", with {metric.name} {write(scores[method])} instead of {write(scores[ONE_MODEL])}"
