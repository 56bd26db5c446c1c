"""Results of a strategy in Flower's form: metrics of rounds, and the models of clusters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedclade.core import FedcladeError, LeftOut, Node, ParameterTree, RunError
from fedclade.flower.flwr_internals import aggregate_metricrecords
from fedclade.flower.strategy.app_deployment import AppDeployment
from fedclade.flower.strategy.array_model import ArrayModel
from fedclade.runs import Callback, RoundRecord

AggregateMetrics = Callable[[list[RecordDict], str], MetricRecord]
"""Function that combines the metrics of replies, weighted by the metric of the given name."""

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Function that evaluates a model at the server, given the number of the round and its arrays."""

_log = logging.getLogger("flwr")


def clusters_of(tree: ParameterTree) -> list[Node]:
    """Return the current clusters: the leaves of the tree that have members."""
    return [leaf for leaf in tree.leaves if leaf.members]


def arrays_by_cluster(tree: ParameterTree, model: ArrayModel) -> dict[int, ArrayRecord]:
    """Return the arrays of each current cluster's model, by the cluster's node in the tree."""
    return {leaf.id: model.record(leaf.model) for leaf in clusters_of(tree)}


def largest_cluster(tree: ParameterTree) -> int:
    """Return the node of the cluster with the most clients; the oldest of several."""
    return min(clusters_of(tree), key=lambda leaf: (-len(leaf.members), leaf.id)).id


@dataclass(eq=False, kw_only=True)
class ResultBuilder(Callback):
    """Callback that collects the results of rounds in Flower's form, and logs a line for each.

    Parameters
    ----------
    deployment
        Deployment of the run, with the replies of the current round.
    rounds
        Number of rounds of the run.
    aggregate_train, aggregate_evaluate
        Functions that combine the metrics of clients.
    weight
        Name of the metric by which metrics are weighted.
    evaluate_fn
        Function that evaluates each cluster's model at the server; None to leave it out.

    Attributes
    ----------
    result
        The results so far.
    central
        Metrics by ``evaluate_fn`` for each cluster, by round and node of the tree. Round 0 has the
        initial model, as node 0.
    """

    deployment: AppDeployment
    rounds: int
    aggregate_train: AggregateMetrics
    aggregate_evaluate: AggregateMetrics
    weight: str
    evaluate_fn: EvaluateFn | None
    result: Result = field(default_factory=Result)
    central: dict[int, dict[int, MetricRecord]] = field(
        default_factory=dict[int, dict[int, MetricRecord]]
    )

    def start(self, arrays: ArrayRecord) -> None:
        """Evaluate the initial model at the server, before round 1."""
        found = self._evaluate(0, arrays)
        if found is not None:
            self.central[0] = {0: found}
            self.result.evaluate_metrics_serverapp[0] = found

    def on_round(self, record: RoundRecord, /) -> None:
        """Collect the metrics of a round, and log one line about it."""
        number = record.round
        replies = self.deployment.workers.replies
        trained = self._aggregate(self.aggregate_train, replies.train)
        if trained is not None:
            self.result.train_metrics_clientapp[number] = trained
        evaluated = self._aggregate(self.aggregate_evaluate, replies.evaluate)
        if evaluated is not None:
            self.result.evaluate_metrics_clientapp[number] = evaluated
        self._evaluate_clusters(number, record.tree)
        _log.info("%s", self._line(record))

    def finish(self, tree: ParameterTree) -> Result:
        """Return the results, with the arrays of the largest cluster's model."""
        arrays = arrays_by_cluster(tree, self.deployment.model)
        chosen = largest_cluster(tree)
        self.result.arrays = arrays[chosen]
        if len(arrays) > 1:
            _log.info(
                "Result.arrays is the model of cluster %d, the largest of %d; the models of all "
                "clusters are in strategy.arrays_by_cluster()",
                chosen,
                len(arrays),
            )
        return self.result

    def _aggregate(
        self, aggregate: AggregateMetrics, replies: list[RecordDict]
    ) -> MetricRecord | None:
        """Combine the metrics of replies; None if there are none or they cannot be combined."""
        if not replies:
            return None
        try:
            return aggregate(replies, self.weight)
        except Exception as error:  # a user's function may raise anything
            _log.warning(
                "the metrics of %d clients cannot be combined: %s: %s; return the same metrics "
                "from all clients",
                len(replies),
                type(error).__name__,
                error,
            )
            return None

    def _evaluate(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate a model at the server; None if there is no function, or it returns None.

        Raises
        ------
        RunError
            If the function fails.
        """
        if self.evaluate_fn is None:
            return None
        try:
            return self.evaluate_fn(number, arrays)
        except FedcladeError:
            raise
        except Exception as error:  # otherwise the run would go on without these metrics
            raise RunError(
                f"evaluate_fn failed in round {number}: {type(error).__name__}: {error}; correct "
                "the function, and start the run again"
            ) from error

    def _evaluate_clusters(self, number: int, tree: ParameterTree) -> None:
        """Evaluate the model of each cluster at the server.

        Flower's result has one record for a round: the mean over clusters, weighted by their
        numbers of clients.
        """
        if self.evaluate_fn is None:
            return
        members = {leaf.id: len(leaf.members) for leaf in clusters_of(tree)}
        found: dict[int, MetricRecord] = {}
        for node, arrays in arrays_by_cluster(tree, self.deployment.model).items():
            metrics = self._evaluate(number, arrays)
            if metrics is not None:
                found[node] = metrics
        if not found:
            return
        self.central[number] = found
        weight = "fedclade-clients"
        weighted = [
            RecordDict({"metrics": MetricRecord({**metrics, weight: members[node]})})
            for node, metrics in found.items()
        ]
        self.result.evaluate_metrics_serverapp[number] = aggregate_metricrecords(weighted, weight)

    def _line(self, record: RoundRecord) -> str:
        """Return the line about a round: clusters, score and replies."""
        sizes = ", ".join(str(len(leaf.members)) for leaf in clusters_of(record.tree))
        words = [f"[ROUND {record.round}/{self.rounds}] clients by cluster: {sizes}"]
        name = record.scored_by[0].name
        score = record.metrics.get(f"{name}_mean")
        if score is not None:
            words.append(f"{name} {score:.4f}")
        words.append(f"{len(self.deployment.workers.replies.train)} replies to training")
        left_out = {
            client
            for event in record.events
            if isinstance(event, LeftOut)
            for client in event.clients
        }
        if left_out:
            words.append(f"{len(left_out)} clients left out")
        return "; ".join(words)
