"""Gains of the clients of a network, measured by the server from the clients' replies.

Each client computes its own scores and gains, see :class:`~fedclade.flower.gain_query.GainQuery`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedclade.core import Clients, UpdateError
from fedclade.flower.gain_query import INTERVALS, NUMBERS, GainQuery
from fedclade.runs import (
    ALONE,
    CLUSTER,
    ONE_MODEL,
    OWN,
    ClientGains,
    Gains,
    Run,
    explain_missing_cluster_model,
    serves_mixtures,
    serves_own,
)
from fedclade.tasks import FittedTask, Interval
from fedclade.training import INTERVAL_KINDS

NO_REFERENCES = (
    "a network trains no reference; to compare, run fedavg and local with the same clients"
)
"""Reason why the comparison has no models that need further training, such as ``alone``."""


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
        for place, (is_gain, name) in enumerate(INTERVALS):
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
