"""Records of a run: rows of the tables, events, similarity matrices, and the final summary."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, isnan
from typing import Any

import numpy as np

from fedclade.algorithms import RoundLog, State
from fedclade.channel import CentralPrivacy, ExamplePrivacy, Release, mechanism_of
from fedclade.clustering import SplitCriteria, separation_gap
from fedclade.core import (
    ClientRegistry,
    Clustered,
    ClusterSplit,
    ConfigError,
    DataSpec,
    Evaluation,
    Event,
    Layout,
    ParameterTree,
    PrivateRelease,
    Regrouped,
    Released,
    Stepped,
    shown,
    unknown,
)
from fedclade.data import Federation
from fedclade.runs.adversaries import Adversaries
from fedclade.runs.stopping import Stopped
from fedclade.runs.store.contents import Block, Row, RowTable, plain
from fedclade.runs.store.kept_round import KeptRound
from fedclade.runs.store.run import FORMAT, Run
from fedclade.runs.store.tree_files import LARGEST_KEPT, SimilarityMatrix
from fedclade.tasks import SPREAD, FittedTask, Metric, cluster_scores, mean_score, spread

# Splits: the clusters of a round that were one cluster before.

Members = Mapping[int, tuple[int, ...]]
"""Client ids of the members of each cluster, by node id."""


def splits_of(
    before: ParameterTree, after: ParameterTree, events: Sequence[Event]
) -> list[tuple[int, Members, Event | None]]:
    """List the splits of a round.

    See :meth:`fedclade.Callback.on_split` for the definition of a split.

    Parameters
    ----------
    before, after
        The trees before and after the round.
    events
        Events of the round.

    Returns
    -------
    list
        One tuple for each split: the node that was split, the members of each new cluster by node,
        and the event that reports the split, or None if no event does.
    """
    found: list[tuple[int, Members, Event | None]] = [
        (event.node, dict(zip(event.children, event.clusters, strict=False)), event)
        for event in events
        if isinstance(event, ClusterSplit)
    ]
    if found:
        return found
    was = (
        {leaf.id for leaf in before.leaves if leaf.members} if len(before.nodes) > 1 else set[int]()
    )
    regrouped = [event for event in events if isinstance(event, Regrouped)]
    if was and not regrouped:
        return []
    now = {leaf.id: leaf.members for leaf in after.leaves if leaf.members}
    if len(now) < 2 or now.keys() <= was:
        return []
    if regrouped:
        leaves = [[after.leaf_of[cluster[0]] for cluster in event.clusters] for event in regrouped]
        pairs = zip(regrouped, leaves, strict=True)
        return [
            (event.node, dict(zip(to, event.clusters, strict=True)), event) for event, to in pairs
        ]
    clustered = [event for event in events if isinstance(event, Clustered)]
    return [(0, now, clustered[-1] if clustered else None)]


# Privacy budget in the summary of a run, from the events that count the updates that clients sent
# or the noisy sums that the server received.


def spent(section: Mapping[str, Any], events: Sequence[Row]) -> dict[str, Any] | None:
    """Compute the privacy budget that a run has spent, for its summary.

    Parameters
    ----------
    section
        The ``[privacy]`` section of the config.
    events
        Rows of all events of the run.

    Returns
    -------
    dict or None
        The spent budget as the mechanism reports it; None if the section sets no mechanism.
    """
    privacy = mechanism_of(section)
    if privacy is None:
        return None
    if isinstance(privacy, CentralPrivacy):
        return privacy.spent(_releases(events))
    if isinstance(privacy, ExamplePrivacy):
        return privacy.spent(_steps(events), _most_releases(events))
    return privacy.spent(_most_releases(events))


def _releases(events: Iterable[Row]) -> list[Release]:
    """Return the noisy releases, of sums or of private choices, from the rows of events."""
    names = [each.name for each in fields(Release)]
    rows = [event for event in events if event["kind"] == PrivateRelease.kind]
    return [Release(**{name: row[name] for name in names if name in row}) for row in rows]


def _most_releases(events: Iterable[Row]) -> int:
    """Return the largest number of updates that any single client sent."""
    sent: Counter[str] = Counter()
    for event in events:
        sent.update(event.get("clients", {}) if event["kind"] == Released.kind else {})
    return max(sent.values(), default=0)


def _steps(events: Iterable[Row]) -> Mapping[str, Counter[float]]:
    """Count the noisy steps of each client, by the sampling rate of the steps."""
    steps: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for event in events:
        for client, count in (
            event.get("clients", {}).items() if event["kind"] == Stepped.kind else ()
        ):
            steps[client][event["rate"]] += count
    return steps


# Scores on validation data, and the round that they choose.
#
# Each client has its own validation examples and never trains on them. They are set aside from its
# training data (``data.validation_fraction``), or the user provides them, see
# :func:`fedclade.federation`. Test data do not influence the choice: the test score of the chosen
# round is therefore not biased by the choice, as the best test score of all rounds would be.


def check_validation(federation: Federation, what: str = "evaluate_validation = true") -> None:
    """Check that every client has validation data.

    Parameters
    ----------
    federation
        All clients.
    what
        The setting that needs validation data, for the error message.

    Raises
    ------
    ConfigError
        If at least one client has no validation data.
    """
    if missing := federation.without_validation:
        some = (
            "no client has any"
            if len(missing) == len(federation)
            else f"these have none: {shown(list(missing))}"
        )
        raise ConfigError(
            f"{what} needs validation data of every client, and {some}; set "
            "data.validation_fraction above 0, such as 0.2, or give clients validation data of "
            "their own"
        )


def validation_columns(metrics: Sequence[Metric], evaluation: Evaluation | None) -> Row:
    """Return mean scores and the mean loss on validation data, as columns of ``metrics.parquet``.

    Means are over clients. A client without a score by a metric is left out of the mean by that
    metric; the mean is None if no client has a score. Without an evaluation there are no columns.
    """
    if evaluation is None:
        return {}
    scores = evaluation.scores.double()
    columns: Row = {}
    for metric, mean, of_clients in zip(metrics, scores.mean(0).tolist(), scores.T, strict=True):
        columns[column_of(metric.name)] = mean_score(of_clients.tolist()) if isnan(mean) else mean
    losses = evaluation.known_losses.double()
    return columns | {column_of("loss"): losses.mean().item() if len(losses) else None}


def metric_named(metrics: Sequence[Metric], name: str | None, setting: str) -> Metric:
    """Return a metric of the task by its name.

    Parameters
    ----------
    metrics
        The metrics of the task.
    name
        The name of one of them, or ``loss``; None for the first metric of the task.
    setting
        The setting that gives the name, for the error message.

    Raises
    ------
    ConfigError
        If the task has no metric of this name.
    """
    if name is None:
        return metrics[0]
    known = {metric.name: metric for metric in (LOSS, *metrics)}
    if name not in known:
        raise ConfigError(unknown(f"metric: {setting} =", name, known))
    return known[name]


LOSS = Metric("loss", higher_is_better=False)
"""The loss as a metric that can choose a round."""


def column_of(metric: str) -> str:
    """Return the name of the column with the mean score on validation data by a metric."""
    return f"validation_{metric}"


def chosen_round(rows: Iterable[Row], metric: Metric) -> Row | None:
    """Return the row of the round with the best mean score on validation data.

    Parameters
    ----------
    rows
        Rows of ``metrics.parquet``. Rows without a score on test data are ignored, as are rows
        whose score on validation data is NaN or infinite.
    metric
        The metric that is compared, in its own direction.

    Returns
    -------
    Row or None
        The first of equally good rows; None if no row counts.
    """
    best: Row | None = None
    column = column_of(metric.name)
    sign = 1 if metric.higher_is_better else -1
    for row in rows:
        score = row.get(column)
        if score is None or not isfinite(score) or row.get(f"{metric.name}_mean") is None:
            continue
        if best is None or sign * score > sign * best[column]:
            best = row
    return best


def chosen(
    rows: Sequence[Row], metrics: Sequence[Metric], metric: Metric, *, is_kept: bool = False
) -> dict[str, Any]:
    """Return the entries of ``summary.json`` about the round that validation data chooses.

    Parameters
    ----------
    rows
        Rows of ``metrics.parquet``.
    metrics
        The metrics of the task.
    metric
        The metric that chooses the round.
    is_kept
        Whether the run stores the models of the chosen round rather than those of the last.

    Returns
    -------
    dict
        ``chosen``: the metric that chooses, the round, and its mean scores on validation and on
        test data. With ``is_kept`` also ``last``: the scores of the last evaluated round. Empty
        without scores on validation data.
    """
    row = chosen_round(rows, metric)
    if row is None:
        return {}
    metrics = [*metrics, *([] if metric in metrics else [metric])]
    facts: dict[str, Any] = {"chosen": {"metric": metric.name, **_scores(row, metrics)}}
    if is_kept:
        facts["chosen"]["kept"] = True
        evaluated = [each for each in rows if each.get(f"{metric.name}_mean") is not None]
        facts["last"] = _scores(evaluated[-1], metrics)
    return facts


def _scores(row: Row, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the mean scores of a round on validation and on test data, by metric."""
    return {
        "round": row["round"],
        "validation": {metric.name: row.get(column_of(metric.name)) for metric in metrics},
        "test": {metric.name: row.get(f"{metric.name}_mean") for metric in metrics},
    }


CRITERIA = ("mean_norm", "max_norm", "alpha_cross_max", "gamma_bound", "separation_gap")
"""Split criteria, columns of ``clusters.parquet`` and ``metrics.parquet``.

A row of ``metrics.parquet`` has the largest value over the clusters of its round, and of
α_cross^max the smallest.
"""


@dataclass(eq=False)
class History:
    """Rows, events and similarity matrices of a run, collected round by round.

    Parameters
    ----------
    registry
        Ids, names, training set sizes and true clusters of all clients.
    task
        Loss and metrics of the run.
    target
        Name of a metric and the score to reach by it; None without a target.
    adversaries
        Adversaries of a simulation; None if all clients are honest.
    least
        Smallest number of members of a cluster for which rows and similarities are recorded.
    metrics, clusters, clients, events
        Rows of the tables so far.
    similarities
        The latest similarity matrix of each cluster, by node.
    chosen_by
        The metric that chooses a round by validation data; None for the first of the task.
    """

    registry: ClientRegistry
    task: FittedTask
    target: tuple[str, float] | None = None
    adversaries: Adversaries | None = None
    least: int = 1  # smallest number of members of a cluster that may be reported
    metrics: list[Row] = field(default_factory=list[Row])
    clusters: list[Row] = field(default_factory=list[Row])
    clients: Sequence[Row] = field(default_factory=RowTable)
    events: list[Row] = field(default_factory=list[Row])
    similarities: dict[int, SimilarityMatrix] = field(default_factory=dict[int, SimilarityMatrix])
    # the metric that chooses a round by validation data; None: the first of the task
    chosen_by: str | None = None

    def add(
        self,
        number: int,
        state: State,
        log: RoundLog,
        cost: Mapping[str, float],
        evaluation: Evaluation | None,
        served: Mapping[int, int],
        validation: Evaluation | None = None,
    ) -> Row:
        """Add a round.

        Parameters
        ----------
        number
            Number of the round, from 1.
        state
            State of the algorithm after the round.
        log
            The algorithm's report of the round.
        cost
            Bytes and seconds of the round, by column.
        evaluation
            Scores on test data; None if the round was not evaluated or no client replied.
        served
            For each client, the node whose model it was evaluated with.
        validation
            Scores on validation data, with the same models; None if there are none.

        Returns
        -------
        Row
            The row of ``metrics.parquet`` of this round.
        """
        self.events += [plain(event.to_row(number)) for event in log.events]
        said = {
            node: each
            for node, each in log.criteria.items()
            if self._may_say(state.tree, node, each)
        }
        rows = [self._cluster_row(number, node, criteria, log) for node, criteria in said.items()]
        self.clusters += rows
        self._keep_similarities(number, said)
        if evaluation is not None:
            block = self._client_columns(number, state.tree, evaluation, served)
            self.clients = RowTable.of(self.clients).with_block(block)
        leaf_of = state.tree.leaf_of
        truth = self.registry.in_round(number).true_clusters
        present = {client: leaf_of[client] for client in self.registry.ids if client in leaf_of}
        scores = cluster_scores(present, truth)
        if state.tree.stragglers:
            inside = {client for leaf in state.tree.leaves for client in leaf.members}
            present = {client: leaf for client, leaf in present.items() if client in inside}
            assigned = cluster_scores(present, truth)["ari"] if present else None
        else:
            assigned = scores["ari"]
        row: Row = {
            "round": number,
            "phase": log.phase,
            **self._evaluation_columns(evaluation),
            **validation_columns(self.task.metrics, validation),
            f"{self.task.metrics[0].name}_weighted": None
            if evaluation is None
            else _weighted(evaluation, state.tree),
            "train_loss": _mean_loss(log.losses.values()),
            "discrepancy": log.discrepancy,
            "clusters": len(_sizes(state.tree)),
            **scores,
            "ari_assigned": assigned,
            **{column: _extreme(rows, column) for column in CRITERIA},
            "clients_trained": len(log.losses),
            **log.numbers,
            **cost,
        }
        self.metrics.append(row)
        return row

    @property
    def is_evaluated(self) -> bool:
        """Whether clients were evaluated after the last round."""
        row = self.metrics[-1]
        # Clients with secure aggregation report no loss. A count of clients shows that they were
        # evaluated nevertheless.
        return (
            row["loss_mean"] is not None
            or row.get(f"{self.task.metrics[0].name}_clients") is not None
        )

    @property
    def has_validation(self) -> bool:
        """Whether clients have been evaluated on validation data in any round."""
        return any(column_of("loss") in row for row in self.metrics)

    def evaluate_last(
        self,
        state: State,
        evaluation: Evaluation | None,
        served: Mapping[int, int],
        validation: Evaluation | None,
        *,
        cost: Mapping[str, float],
        columns: Mapping[str, Any],
        events: Sequence[Event],
    ) -> None:
        """Add an evaluation to the last round, which was not evaluated; see :meth:`add`.

        Parameters
        ----------
        state, evaluation, served, validation
            See :meth:`add`.
        cost
            Bytes and seconds of the evaluation, by column; added to those of the round.
        columns
            Further columns of the round's row.
        events
            Events of the evaluation.
        """
        row = self.metrics[-1]
        number = row["round"]
        self.events += [plain(event.to_row(number)) for event in events]
        weighted: float | None = None
        if evaluation is not None:
            block = self._client_columns(number, state.tree, evaluation, served)
            self.clients = RowTable.of(self.clients).with_block(block)
            weighted = _weighted(evaluation, state.tree)
        self.metrics[-1] = {
            **row,
            f"{self.task.metrics[0].name}_weighted": weighted,
            **self._evaluation_columns(evaluation),
            **validation_columns(self.task.metrics, validation),
            **{name: value + row[name] for name, value in cost.items()},
            **columns,
        }

    def finish(
        self,
        config: Mapping[str, Any],
        tree: ParameterTree,
        device: str,
        layout: Layout | None = None,
        *,
        stopped: Stopped | None = None,
        best: KeptRound | None = None,
    ) -> Run:
        """Return a run that consists of the rounds so far; later rounds do not change it.

        Parameters
        ----------
        config
            Config of the run.
        tree
            The clusters and their models: after the last round, or after the ``best``.
        device
            Device of the server's models.
        layout
            Layout of the model's entries; None if it is not needed.
        stopped
            Why the run was finished before its last round; None if it was not.
        best
            The stored round, in a run that stores the best round. All tables but the metrics then
            end with that round, as does the tree: later rows would be about clusters that are not
            in the tree. The summary counts the cost of all rounds.
        """
        shown = self if best is None else self._until(best)
        summary = self._summary(config, tree, device, shown, best)
        return Run(
            summary=summary if stopped is None else {**summary, "stopped": stopped.as_dict()},
            config={**config, "versions": versions()},
            tree=tree,
            metric_rows=list(self.metrics),
            cluster_rows=list(shown.clusters),
            client_rows=shown.clients,
            events=list(shown.events),
            similarities=tuple(shown.similarities.values()),
            layout=layout,
        )

    def _until(self, best: KeptRound) -> History:
        """Return the history up to a stored round, but with the metrics of all rounds."""
        blocks = RowTable.of(self.clients).blocks
        return replace(
            self,
            clusters=[row for row in self.clusters if row["round"] <= best.round],
            clients=RowTable(block for block in blocks if block["round"][0] <= best.round),
            events=[row for row in self.events if row["round"] <= best.round],
            similarities={each.node: each for each in best.similarities},
        )

    def _summary(
        self,
        config: Mapping[str, Any],
        tree: ParameterTree,
        device: str,
        shown: History,
        best: KeptRound | None,
    ) -> dict[str, Any]:
        """Return the summary: costs of all rounds, clients and clusters of ``shown``."""
        number = len(self.metrics) if best is None else best.round
        last = self.metrics[number - 1]
        final = RowTable.of(shown.clients).last
        truth = self.registry.in_round(number).true_clusters
        metric = metric_named(self.task.metrics, self.chosen_by, "stop.metric")
        phases = ("train", "evaluate", "server")
        reached = [r for r in self.metrics if self._is_reached(r, "_mean")]
        until = [r for r in self.metrics if reached and r["round"] <= reached[0]["round"]]
        summary: dict[str, Any] = {
            "format": FORMAT,
            "algorithm": config["algorithm"]["name"],
            "data": self.registry.description,
            "inputs": {**_inputs(self.registry.schema), **self.registry.columns},
            "model": config["model"]["name"],
            "seed": config["seed"],
            "rounds": len(self.metrics),
            "clients": len(self.registry),
            "task": self.task.kind,
            "metrics": [metric.noted for metric in self.task.metrics],
            **{
                metric.name: spread(
                    final.column(metric.name), lower_is_better=not metric.higher_is_better
                )
                for metric in self.task.metrics
            },
            **chosen(self.metrics, self.task.metrics, metric, is_kept=best is not None),
            "clusters": {
                "found": len(_sizes(tree)),
                "true": None if truth is None else len(set(truth.values())),
                "ari": last["ari"],
                **(
                    {"ari_assigned": assigned}
                    if (assigned := last.get("ari_assigned")) != last["ari"]
                    else {}
                ),
                "nmi": last["nmi"],
                "sizes": _sizes(tree),
            },
            "target": {
                **dict([self.target or (self.task.metrics[0].name, None)]),
                "share_of_clients": self._share_at_target(final),
                "rounds_to_target": reached[0]["round"] if reached else None,
                "bytes_to_target": sum(r["bytes_up"] + r["bytes_down"] for r in until)
                if reached
                else None,
            },
            "bytes_up": sum(row["bytes_up"] for row in self.metrics),
            "bytes_down": sum(row["bytes_down"] for row in self.metrics),
            "seconds": {
                "total": sum(row["seconds"] for row in self.metrics),
                **{phase: sum(row[f"seconds_{phase}"] for row in self.metrics) for phase in phases},
            },
            "device": device,
            "engine": config["engine"],
            "versions": versions(),
        }
        if self.task.balanced and self.task.weights is not None:  # newcomers use the same weights
            summary["class_weights"] = self.task.weights.tolist()
        if self.adversaries is not None:
            summary["adversary"] = self.adversaries.summary(last, final, tree, truth)
        section = config.get("privacy", {})
        if privacy := spent(section, self.events):
            summary["privacy"] = privacy
        if section.get("min_cluster_size", 1) > 1:
            summary["clusters"]["min_size"] = section["min_cluster_size"]
        return summary

    def _cluster_row(self, number: int, node: int, criteria: SplitCriteria, log: RoundLog) -> Row:
        row: Row = {"round": number, "node": node, "clients": len(criteria.members)}
        row |= dict.fromkeys(CRITERIA, None)
        # NaN marks a number that is withheld
        row |= {name: value for name, value in criteria.numbers.items() if isfinite(value)}
        truth = self.registry.in_round(number).true_clusters
        bipartition = criteria.bipartition
        if truth is not None and bipartition is not None and criteria.similarity is not None:
            labels = [truth[client] for client in criteria.members]
            row["separation_gap"] = separation_gap(
                criteria.similarity, labels, bipartition.alpha_cross_max
            )
        row["train_loss"] = _mean_loss(
            log.losses[client] for client in criteria.members if client in log.losses
        )
        return row

    def _may_say(self, tree: ParameterTree, node: int, criteria: SplitCriteria) -> bool:
        """Whether at least ``least`` clients of a cluster are members, and as many replied."""
        return (
            self.least <= 1
            or min(len(criteria.members), len(tree.nodes[node].members)) >= self.least
        )

    def _keep_similarities(self, number: int, said: Mapping[int, SplitCriteria]) -> None:
        for node, criteria in said.items():
            if 1 < len(criteria.members) <= LARGEST_KEPT and criteria.similarity is not None:
                self.similarities[node] = SimilarityMatrix(
                    node, number, criteria.members, criteria.similarity
                )

    def _client_columns(
        self, number: int, tree: ParameterTree, evaluation: Evaluation, served: Mapping[int, int]
    ) -> Block:
        clients = evaluation.ids
        registry = self.registry.in_round(number)
        truth = registry.true_clusters
        scores = evaluation.scores.double().numpy()
        return {
            "round": np.full(len(clients), number),
            "client": np.array(clients),
            "name": [registry.names[client] for client in clients],
            "cluster": np.array([tree.leaf_of[client] for client in clients]),
            "true_cluster": [None] * len(clients)
            if truth is None
            else np.array([truth[client] for client in clients]),
            "served_by": np.array([served[client] for client in clients]),
            "n_train": np.array([registry.sizes[client] for client in clients]),
            **{metric.name: scores[:, j].copy() for j, metric in enumerate(self.task.metrics)},
            "loss": evaluation.losses.double().numpy().copy(),
        }

    def _evaluation_columns(self, evaluation: Evaluation | None) -> Row:
        """Return the columns of an evaluation; all are None if the round was not evaluated."""
        names = [f"{metric.name}_{number}" for metric in self.task.metrics for number in SPREAD]
        columns: Row = dict.fromkeys([*names, "loss_mean", "share_at_target"], None)
        if evaluation is None:
            return columns
        for metric, scores in zip(self.task.metrics, evaluation.scores.T.tolist(), strict=True):
            numbers = spread(scores, lower_is_better=not metric.higher_is_better)
            columns |= {f"{metric.name}_{number}": value for number, value in numbers.items()}
        losses = evaluation.known_losses.tolist()
        rows = self._scores(evaluation)
        mean = sum(losses) / len(losses) if losses else None
        return columns | {"loss_mean": mean, "share_at_target": self._share_at_target(rows)}

    def _scores(self, evaluation: Evaluation) -> list[Row]:
        """Return a row of scores for each client, by the names of the metrics."""
        names = [metric.name for metric in self.task.metrics]
        return [dict(zip(names, mine, strict=True)) for mine in evaluation.scores.tolist()]

    def _is_reached(self, row: Row, suffix: str = "") -> bool:
        """Whether the score in a row is as good as the target."""
        if self.target is None or (score := row[f"{self.target[0]}{suffix}"]) is None:
            return False
        metric = next(metric for metric in self.task.metrics if metric.name == self.target[0])
        return metric.reached(score, self.target[1])

    def _share_at_target(self, rows: Sequence[Row]) -> float | None:
        """Return the share of clients that reach the target, among the clients with a score.

        ``rows`` has one row of scores for each client. None if there is no target, or no client has
        a score.
        """
        if self.target is None:
            return None
        name = self.target[0]
        scored = [row for row in rows if not isnan(row[name])]
        return sum(self._is_reached(row) for row in scored) / len(scored) if scored else None


def counting(row: Row) -> tuple[str, float | None]:
    """Return the name of the task's first metric, and its mean over the clients.

    ``row`` is a row of ``metrics.parquet``; the mean is None if the round was not evaluated.
    """
    column = next(name for name in row if name.endswith("_mean"))
    return column.removesuffix("_mean"), row[column]


def _inputs(schema: DataSpec) -> dict[str, Any]:
    """Return the shape of a model's input, and the mean and std that scale pixels in [0, 1]."""
    return {
        "shape": list(schema.input_shape),
        "scaled": None if schema.scaled is None else list(schema.scaled),
    }


def _sizes(tree: ParameterTree) -> list[int]:
    """Return the numbers of members of all clusters that have any, in descending order."""
    return sorted((len(leaf.members) for leaf in tree.leaves if leaf.members), reverse=True)


def _mean_loss(losses: Iterable[float]) -> float | None:
    """Return the mean of the finite losses; a client that reports no loss has NaN."""
    known = [loss for loss in losses if isfinite(loss)]
    return sum(known) / len(known) if known else None


def _weighted(evaluation: Evaluation, tree: ParameterTree) -> float | None:
    """Return the mean score over all targets of clients in a cluster (FedGroup section IV-A).

    Clients without a score are left out.
    """
    assigned = {client for leaf in tree.leaves for client in leaf.members}
    scores = zip(
        evaluation.ids, evaluation.scores[:, 0].tolist(), evaluation.examples.tolist(), strict=True
    )
    counted = [
        (score * n, n) for client, score, n in scores if client in assigned and not isnan(score)
    ]
    return sum(total for total, _ in counted) / sum(n for _, n in counted) if counted else None


def _extreme(rows: list[Row], column: str) -> float | None:
    values = [row[column] for row in rows if row[column] is not None]
    return (min if column == "alpha_cross_max" else max)(values, default=None)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result can depend on."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    """Look up the versions once, since each lookup reads a file of the package."""
    packages = ("fedclade", "torch", "numpy", "scipy", "scikit-learn")
    return {
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
    }


def version_of(package: str) -> str:
    """Return the version of an installed package, or "unknown" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:  # used from a source folder
        return "unknown"
