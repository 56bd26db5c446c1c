"""Gains of the clients of a network: how much better a client's model is than simpler models.

Each client compares the model that it uses after the run with the model of its cluster and with a
trivial predictor, on its own test rows. The test rows never leave the client, so the client itself
computes the scores, their confidence intervals and the gains, and reports only these numbers. They
reveal more than an evaluation, such as how often the most frequent label occurs, so clients with a
privacy budget refuse the query.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclade.core import Clients, DataSpec, LocalData, LocalStore, RowQuery, UpdateError, rng
from fedclade.runs import (
    ALONE,
    CLUSTER,
    ONE_MODEL,
    OWN,
    TRIVIAL,
    ClientGains,
    Gains,
    Run,
    explain_missing_cluster_model,
    predict_in_parts,
    predict_trivially,
    serves_mixtures,
    serves_own,
    without_unfit_baseline,
)
from fedclade.tasks import FittedTask, Interval
from fedclade.training import INTERVAL_KINDS, ClientRows

MOST_ROWS = 2**53
"""Largest number of test rows in a reply: float64 represents all integers up to it exactly."""

NUMBERS = 3
"""How many numbers of a reply describe one interval: the value, and the two ends."""

NO_REFERENCES = (
    "a network trains no reference; to compare, run fedavg and local with the same clients"
)
"""Reason why the comparison has no models that need further training, such as ``alone``."""


@dataclass(frozen=True, eq=False)
class GainQuery(RowQuery):
    """Query for the scores and gains of a client's models on its own test rows.

    A reply is a row of 17 float64 numbers: the number of test rows; the index of the kind of
    intervals in :data:`~fedclade.training.INTERVAL_KINDS`; and five intervals of three numbers, the
    value with the lower and the upper end. The first three intervals are the scores of the trivial
    predictor, of the model of the client's cluster and of the client's own model. The other two are
    the gains of the client's deployed model over the trivial predictor and over the model of its
    cluster. Unknown numbers are NaN.

    Parameters
    ----------
    model
        Shared model of the client's cluster, ``[S]`` with S entries.
    has_cluster_model
        Whether ``model`` is usable without personal parameters of the client.
    has_own_model
        Whether the client's deployed model is its own: a model that the client stores, or else
        ``model`` with the client's personal parameters.
    seed
        Seed of the run, by which test rows are assigned to the groups of the jackknife that
        estimates the intervals.
    """

    kind = "gains"
    mechanism = "none"
    discloses = "gains"
    reveals = "scores of several models on their test rows"
    dtype = torch.float64
    counts_as = "evaluations"
    needs_min_part = False

    model: Tensor
    has_cluster_model: bool
    has_own_model: bool
    seed: int

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        """Return the shape of a reply: one row of 17 numbers."""
        return (2 + NUMBERS * len(_INTERVALS),)

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Return a client's reply: scores and gains of its models on its own test rows."""
        inputs, targets = data.test_examples
        spec = data.spec
        trivial = predict_trivially(
            spec.task, data.targets, targets, spec.outputs, scale=data.task.target_scale
        )
        outputs = {TRIVIAL: trivial}
        shared = data.load_model(self.model)
        if self.has_cluster_model:
            outputs[CLUSTER] = predict_in_parts(shared, inputs, inputs.device)
        if self.has_own_model:
            own = data.load_own_model()
            if own is None and not self.has_cluster_model:
                own = shared  # with the client's personal parameters
            if own is not None:
                outputs[OWN] = predict_in_parts(own, inputs, inputs.device)
        outputs = without_unfit_baseline(data.task, outputs)
        draw = rng.generator(self.seed, "groups of test rows", self.ids[0])
        rows = ClientRows(data.task, targets, outputs, draw)
        deployed = OWN if OWN in outputs else CLUSTER
        found: list[float] = [len(targets), INTERVAL_KINDS.index(rows.kind)]
        for is_gain, name in _INTERVALS:
            if name not in outputs or (is_gain and (deployed not in outputs or name == deployed)):
                interval = Interval(math.nan)
            elif is_gain:
                interval = rows.gain(deployed, name)
            else:
                interval = rows.score(name)
            found += _numbers_of(interval)
        return torch.tensor(found, dtype=self.dtype)

    def is_valid(self, row: Tensor) -> bool:
        """Return whether a reply is plausible.

        The number of test rows and the index of the kind of intervals must be in their ranges, and
        each score and gain must lie within its confidence interval.
        """
        n_rows, kind, *rest = row.tolist()
        if not (n_rows.is_integer() and 0 <= n_rows <= MOST_ROWS):
            return False
        if kind not in range(len(INTERVAL_KINDS)):
            return False
        return all(_is_ordered(rest[at : at + NUMBERS]) for at in range(0, len(rest), NUMBERS))


_INTERVALS: tuple[tuple[bool, str], ...] = (
    (False, TRIVIAL),
    (False, CLUSTER),
    (False, OWN),
    (True, TRIVIAL),
    (True, CLUSTER),
)
"""Intervals of a reply: whether the interval is a gain over a model, and the model's name."""


def measure_network_gains(
    run: Run, clients: Clients, connected: Collection[int], task: FittedTask
) -> Gains:
    """Measure the gains of a finished run: each client compares models on its own test rows.

    For a client that does not reply, since its policy forbids the query or it is not connected, the
    result contains only the score that the client reported in the last evaluation.

    Parameters
    ----------
    run
        The finished run, with the models of all clusters.
    clients
        Clients that reply to queries.
    connected
        Ids of the connected clients. Only these clients are queried.
    task
        Task of the run, with the metric of the scores as its first metric.

    Raises
    ------
    UpdateError
        If no client replies.
    """
    last = [row for row in run.client_rows if row["round"] == run.model_round]
    without_cluster = explain_missing_cluster_model(run)
    # A client without a shared model uses a model that the tree stores for this client only.
    shares_none = bool(without_cluster) and not serves_mixtures(run)
    has_own = serves_own(run) or shares_none
    replies = dict[int, _Reply]()
    for node, members in _clients_by_node(last, connected).items():
        query = GainQuery(
            members,
            model=run.tree.nodes[node].model,
            has_cluster_model=not without_cluster,
            has_own_model=has_own,
            seed=run.summary["seed"],
        )
        rows = clients.ask(query).tolist()
        for client, row in zip(members, rows, strict=True):
            if any(row):  # a row of zeros stands for no reply
                replies[client] = _Reply.read(row)
    if not replies:
        raise UpdateError(
            "no client has replied to the query for gains on its test rows; keep the SuperNodes "
            "connected until the run has ended"
        )
    metric = task.metrics[0]
    deployed = OWN if has_own or without_cluster else CLUSTER
    measured: list[ClientGains] = []
    for client_row in last:
        reply = replies.get(client_row["client"])
        measured.append(_gains_of(client_row, deployed, client_row[metric.name], reply))
    missing: dict[str, str] = dict.fromkeys((ALONE, ONE_MODEL), NO_REFERENCES)
    if without_cluster:
        missing[CLUSTER] = without_cluster
    return Gains(
        metric=metric,
        round=run.model_round,
        intervals=next(iter(replies.values())).intervals,
        clients=tuple(measured),
        missing=missing,
    )


@dataclass(frozen=True)
class _Reply:
    """Client's reply to a :class:`GainQuery`, with its intervals by the name of the model.

    Unknown intervals are left out.
    """

    n_test: int
    intervals: str
    scores: Mapping[str, Interval]
    gains: Mapping[str, Interval]

    @classmethod
    def read(cls, row: Sequence[float]) -> _Reply:
        """Return the reply in a row of numbers that :meth:`GainQuery.is_valid` has accepted."""
        n_test, kind, *numbers = row
        scores: dict[str, Interval] = {}
        gains: dict[str, Interval] = {}
        for place, (is_gain, name) in enumerate(_INTERVALS):
            value, low, high = numbers[place * NUMBERS : (place + 1) * NUMBERS]
            if math.isfinite(value):
                ends = (low, high) if math.isfinite(low) else (None, None)
                intervals = gains if is_gain else scores
                intervals[name] = Interval(value, *ends)
        return cls(int(n_test), INTERVAL_KINDS[int(kind)], scores, gains)


def _gains_of(
    row: Mapping[str, Any], deployed: str, reported: float, reply: _Reply | None
) -> ClientGains:
    """Return the gains of a client.

    Parameters
    ----------
    row
        Row of the client in the table of the last evaluation.
    deployed
        Name of the model that the client uses after the run.
    reported
        Score that the client reported in the last evaluation.
    reply
        Reply to the query for gains; None if the client has not replied.
    """
    scores: dict[str, Interval] = {}
    if reply is not None:
        scores.update(reply.scores)
        # A client without a model of its own uses the model of its cluster.
        if deployed == OWN and OWN not in scores and CLUSTER in scores:
            deployed = CLUSTER
    if deployed not in scores:
        scores[deployed] = Interval(reported)
    return ClientGains(
        client=row["client"],
        name=row["name"],
        cluster=row["cluster"],
        n_train=row.get("n_train"),
        n_test=None if reply is None else reply.n_test,
        deployed=deployed,
        scores=scores,
        gains={} if reply is None else reply.gains,
    )


def _clients_by_node(
    rows: Sequence[Mapping[str, Any]], connected: Collection[int]
) -> dict[int, list[int]]:
    """Return the ids of the connected clients, grouped by the tree node of their model.

    The node is the one whose model was evaluated on the client in the last evaluation.
    """
    found: dict[int, list[int]] = {}
    for row in rows:
        if row["client"] in connected:
            found.setdefault(row["served_by"], []).append(row["client"])
    return found


def _numbers_of(interval: Interval) -> list[float]:
    """Return the value and the two ends of an interval; NaN for unknown ends."""
    ends = (interval.low, interval.high)
    return [interval.value, *(math.nan if end is None else end for end in ends)]


def _is_ordered(numbers: Sequence[float]) -> bool:
    """Return whether a value lies within its confidence interval, or has none.

    Parameters
    ----------
    numbers
        The value, the lower end and the upper end of its interval; both ends are NaN if there is no
        interval. The result is False if any of the three is infinite.
    """
    value, low, high = numbers
    if any(math.isinf(number) for number in numbers):
        return False
    if math.isnan(low) or math.isnan(high):
        return math.isnan(low) and math.isnan(high)
    return low <= value <= high
