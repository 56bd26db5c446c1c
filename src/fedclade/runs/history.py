"""What is kept of every round: rows for tables, events, similarity matrices, and the summary at the end."""

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

# Which clusters of a round came out of one.

Members = Mapping[int, tuple[int, ...]]
"""Of clusters, by node."""


def splits_of(
    before: ParameterTree, after: ParameterTree, events: Sequence[Event]
) -> list[tuple[int, Members, Event | None]]:
    """Return the splits of a round: of each the node, the members of what it became, and the event, if there is one.

    See :meth:`fedclade.Callback.on_split` for what is a split.
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


# What the summary of a run says of privacy, by the events that count what clients sent or the
# server was given.


def spent(section: Mapping[str, Any], events: Sequence[Row]) -> dict[str, Any] | None:
    """Return what was spent of the privacy that the ``[privacy]`` section of a config asks for; None without any."""
    privacy = mechanism_of(section)
    if privacy is None:
        return None
    if isinstance(privacy, CentralPrivacy):
        return privacy.spent(_releases(events))
    if isinstance(privacy, ExamplePrivacy):
        return privacy.spent(_steps(events), _most_releases(events))
    return privacy.spent(_most_releases(events))


def _releases(events: Iterable[Row]) -> list[Release]:
    """Return what was released with noise on sums, or as choices."""
    names = [each.name for each in fields(Release)]
    rows = [event for event in events if event["kind"] == PrivateRelease.kind]
    return [Release(**{name: row[name] for name in names if name in row}) for row in rows]


def _most_releases(events: Iterable[Row]) -> int:
    """Return how many updates the client sent that sent most."""
    sent: Counter[str] = Counter()
    for event in events:
        sent.update(event.get("clients", {}) if event["kind"] == Released.kind else {})
    return max(sent.values(), default=0)


def _steps(events: Iterable[Row]) -> Mapping[str, Counter[float]]:
    """Return how many noisy steps each client took, by their rate."""
    steps: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for event in events:
        for client, count in (
            event.get("clients", {}).items() if event["kind"] == Stepped.kind else ()
        ):
            steps[client][event["rate"]] += count
    return steps


# Scores on validation data, and the round that they choose.
#
# Validation examples are a client's own, and it never trains on them: it sets them aside from its
# training data (``data.validation_fraction``), or brings them itself, see
# :func:`fedclade.federation`. Test data have no part in the choice, so that the test score of the
# chosen round is one of a model that was not picked for it; the best test score of all rounds would
# not be.


def check_validation(federation: Federation, what: str = "evaluate_validation = true") -> None:
    """Check that every client has validation data, which something needs; a ConfigError if not."""
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
    """Return the means over the clients of an evaluation on validation data, as columns of ``metrics.parquet``.

    Clients without a score are left out of the mean by that metric, which is None if no client has
    one.
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
    """Return the metric of a task by its name, or the loss; the first metric if it has no name.

    Raises
    ------
    ConfigError
        If the task has no such metric; it names the ``setting``.
    """
    if name is None:
        return metrics[0]
    known = {metric.name: metric for metric in (LOSS, *metrics)}
    if name not in known:
        raise ConfigError(unknown(f"metric: {setting} =", name, known))
    return known[name]


LOSS = Metric("loss", higher_is_better=False)
"""The loss as a metric by which a round is chosen."""


def column_of(metric: str) -> str:
    """Return the column of ``metrics.parquet`` with the mean score on validation data by a metric."""
    return f"validation_{metric}"


def chosen_round(rows: Iterable[Row], metric: Metric) -> Row | None:
    """Return the row of the round with the best mean score on validation data, the first of equals; None without any.

    ``rows`` are those of ``metrics.parquet``, of which those count that have a score on test data
    too.
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
    """Return what ``summary.json`` says of the round that validation data chooses; nothing without validation data.

    Under ``chosen`` are the metric that chooses, the round, and its mean scores on validation and
    on test data. If the run keeps the models of that round (``is_kept``), the scores of the last
    round with any are under ``last``.
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
"""Columns of each cluster, of which a round has the largest over its clusters; of α_cross^max the smallest."""


@dataclass(eq=False)
class History:
    """The rows, events and similarities of a run, round by round; ``target`` is what to reach of a metric, if any."""

    registry: ClientRegistry
    task: FittedTask
    target: tuple[str, float] | None = None
    adversaries: Adversaries | None = None
    least: int = 1  # members of a cluster that anything is said of
    metrics: list[Row] = field(default_factory=list[Row])
    clusters: list[Row] = field(default_factory=list[Row])
    clients: Sequence[Row] = field(default_factory=RowTable)
    events: list[Row] = field(default_factory=list[Row])
    similarities: dict[int, SimilarityMatrix] = field(default_factory=dict[int, SimilarityMatrix])
    # the metric that chooses a round by validation data; the first of the task
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
        """Add round ``number``, from 1; return its row of ``metrics.parquet``.

        ``cost`` is bytes and seconds by column; ``evaluation`` is on test data, if there was one,
        of each client with the model of the node that it was ``served`` with, and ``validation``
        the same on validation data.
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
        # Clients with secure aggregation tell no loss; with a count of clients they were asked all
        # the same.
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
        """Add an evaluation to the last round, which had none; see :meth:`add`.

        ``cost`` adds to that of the round; ``columns`` are further ones of its row.
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
        """Return the run of the rounds so far; later rounds do not change it.

        Of a run that keeps the ``best`` round, all tables but the metrics end with that round, as
        does the tree: later rows would be of clusters that the tree does not have. Its summary
        counts what all rounds cost.
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
        """Return the history up to a round, but with the metrics of all."""
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
        """Return the summary of all rounds; what it says of clients and clusters is of the round that is ``shown``."""
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
        if self.task.balanced and self.task.weights is not None:  # by which newcomers weigh too
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
        # NaN: withheld
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
        """Whether a cluster, and those of it that answered, are as many as is asked for."""
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
        """Return the columns of an evaluation; a round without one has the same, empty."""
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
        """Return the scores of each client, by the names of the metrics."""
        names = [metric.name for metric in self.task.metrics]
        return [dict(zip(names, mine, strict=True)) for mine in evaluation.scores.tolist()]

    def _is_reached(self, row: Row, suffix: str = "") -> bool:
        """Whether the score in a row is as good as the target."""
        if self.target is None or (score := row[f"{self.target[0]}{suffix}"]) is None:
            return False
        metric = next(metric for metric in self.task.metrics if metric.name == self.target[0])
        return metric.reached(score, self.target[1])

    def _share_at_target(self, rows: Sequence[Row]) -> float | None:
        """Return the share of clients with a score that have reached the target, given a row of scores of each.

        None if there is no target, or no client has a score.
        """
        if self.target is None:
            return None
        name = self.target[0]
        scored = [row for row in rows if not isnan(row[name])]
        return sum(self._is_reached(row) for row in scored) / len(scored) if scored else None


def counting(row: Row) -> tuple[str, float | None]:
    """Return the metric that counts, by its name, and its mean over the clients, from a row of ``metrics.parquet``."""
    column = next(name for name in row if name.endswith("_mean"))
    return column.removesuffix("_mean"), row[column]


def _inputs(schema: DataSpec) -> dict[str, Any]:
    """Return what a model is given: the shape of an input, and mean and std by which pixels in [0, 1] are scaled."""
    return {
        "shape": list(schema.input_shape),
        "scaled": None if schema.scaled is None else list(schema.scaled),
    }


def _sizes(tree: ParameterTree) -> list[int]:
    """Return how many members each current cluster has, in descending order; an empty one does not count."""
    return sorted((len(leaf.members) for leaf in tree.leaves if leaf.members), reverse=True)


def _mean_loss(losses: Iterable[float]) -> float | None:
    """Return the mean of the losses that clients report; NaN is that of a client that reports none."""
    known = [loss for loss in losses if isfinite(loss)]
    return sum(known) / len(known) if known else None


def _weighted(evaluation: Evaluation, tree: ParameterTree) -> float | None:
    """Return the mean score over all targets of clients in a current cluster (FedGroup section IV-A).

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
    """Look the versions up, once: that reads a file for each package."""
    packages = ("fedclade", "torch", "numpy", "scipy", "scikit-learn")
    return {
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
    }


def version_of(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # used from a source folder
        return "unknown"
