"""Records of a run: rows of the result tables, events, similarity matrices, and the summary.

:class:`History` collects them round by round. The module also sums up the privacy budget.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from math import isfinite, isnan
from typing import Any

import numpy as np

from fedclade.algorithms import RoundLog, State
from fedclade.channel import CentralPrivacy, ExamplePrivacy, Release, mechanism_of
from fedclade.clustering import SplitCriteria, separation_gap
from fedclade.core import (
    ClientRegistry,
    ConfigError,
    DataSpec,
    Diverged,
    Evaluation,
    Event,
    Layout,
    ParameterTree,
    PrivateRelease,
    Released,
    Served,
    Stepped,
    numbers_of,
    shown,
    version_of,
)
from fedclade.data import DataSchema, Federation
from fedclade.runs.adversaries import Adversaries
from fedclade.runs.best_round import chosen, column_of, metric_named, validation_columns
from fedclade.runs.divergence import LossWatch, diverged_clients, known_losses
from fedclade.runs.stable_groups import summarize_stable_groups
from fedclade.runs.stopping import Stopped
from fedclade.runs.store.contents import Block, Row, RowTable, plain
from fedclade.runs.store.event_rows import events_of
from fedclade.runs.store.kept_round import KeptRound
from fedclade.runs.store.run import FORMAT, Run
from fedclade.runs.store.tree_files import LARGEST_KEPT, SimilarityMatrix
from fedclade.tasks import SPREAD, FittedTask, PairCounts, spread


def _count_served(events: Sequence[Row]) -> dict[str, int]:
    """Return the number of clients that are served with each kind of model, by the kind's name.

    The numbers are from the last choice of models; empty if no models were chosen.
    """
    choices = events_of(events, Served)
    if not choices:
        return {}
    return {kind: len(clients) for kind, clients in choices[-1][1].clients.items()}


# Privacy budget in the summary of a run, from the events that count the updates that clients sent
# or the noisy sums that the server received.


def spent(section: Mapping[str, Any], events: Sequence[Row]) -> dict[str, Any] | None:
    """Compute the privacy budget that a run has spent, for ``summary.json``.

    Parameters
    ----------
    section
        The ``[privacy]`` section of the config.
    events
        Rows of all events of the run.

    Returns
    -------
    dict or None
        The spent budget, such as ε and δ, as the privacy mechanism reports it; None if the section
        sets no mechanism.
    """
    privacy = mechanism_of(section)
    if privacy is None:
        return None
    if isinstance(privacy, CentralPrivacy):
        return privacy.spent(_read_releases(events))
    if isinstance(privacy, ExamplePrivacy):
        return privacy.spent(_count_steps(events), _most_releases(events))
    return privacy.spent(_most_releases(events))


def _read_releases(events: Iterable[Row]) -> list[Release]:
    """Return the noisy results that the server received, from the rows of events.

    A result is a noisy sum of updates, or the choices that clients made at random for privacy.
    """
    return [_read_release(event) for event in events if event["kind"] == PrivateRelease.kind]


def _read_release(event: Row) -> Release:
    """Return the noisy result of a private query, from the row of its event."""
    names = [each.name for each in fields(Release)]
    return Release(**{name: event[name] for name in names if name in event})


def _most_releases(events: Iterable[Row]) -> int:
    """Return the largest number of updates that any single client sent, from the rows of events."""
    sent: Counter[str] = Counter()
    for event in events:
        if event["kind"] == Released.kind:
            sent.update(event.get("clients", {}))
    return max(sent.values(), default=0)


def _count_steps(events: Iterable[Row]) -> Mapping[str, Counter[float]]:
    """Count the DP-SGD steps of each client, by the sampling rate of the steps.

    ``events`` are rows of events. The result has a counter of sampling rates for each client.
    """
    steps: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for event in events:
        if event["kind"] == Stepped.kind:
            for client, count in event.get("clients", {}).items():
                steps[client][event["rate"]] += count
    return steps


# Scores on validation data, and the choice of the best round by these scores.
#
# Each client has its own validation examples and never trains on them. They are set aside from its
# training data (``data.validation_fraction``), or the user provides them, see
# :func:`fedclade.federation`. Test data do not influence the choice: the test score of the chosen
# round is therefore not biased by the choice, as the best test score of all rounds would be.


def check_validation(federation: Federation, what: str = "evaluate_validation = true") -> None:
    """Check that all clients have validation data.

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
        some = f"these clients have none: {shown(list(missing))}"
        if len(missing) == len(federation):
            some = "no client has any"
        raise ConfigError(
            f"{what} needs validation data of every client, but {some}; set "
            "data.validation_fraction above 0, such as 0.2, or give clients validation data of "
            "their own"
        )


CRITERIA = ("mean_norm", "max_norm", "alpha_cross_max", "gamma_bound", "separation_gap")
"""Split criteria: columns of ``clusters.parquet`` and ``metrics.parquet``.

A row of ``metrics.parquet`` contains the largest value over the clusters of its round, but the
smallest value of ``alpha_cross_max`` (α_cross^max).
"""


@dataclass(eq=False)
class History:
    """Rows of the result tables, events and similarity matrices of a run, added round by round.

    Parameters
    ----------
    registry
        Ids, names, training set sizes and true clusters of all clients.
    task
        Loss and metrics of the run.
    target
        Name of a metric, and the score to reach by this metric; None without a target.
    adversaries
        Adversaries of a simulation; None if all clients are honest.
    least
        Smallest number of members of a cluster for which rows and similarities are recorded.
    metrics, clusters, clients, events
        Rows of the tables so far.
    similarities
        The latest similarity matrix of each cluster, by node.
    chosen_by
        Name of the metric by which the best round is chosen; None for the task's first metric.
    schema
        Schema by which the clients' tables or texts are encoded; None for other data.
    warnings
        Warnings about the run's clients, which the summary repeats.
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
    # name of the metric that chooses the best round; None: the first metric of the task
    chosen_by: str | None = None
    schema: DataSchema | None = None  # encoding of the clients' tables or texts
    warnings: Sequence[str] = ()  # for the summary
    # leaves of the clients, true clusters, and the scores of their agreement in the last round
    _agreement: tuple[Mapping[int, int], Mapping[int, int], Row] | None = field(
        default=None, init=False, repr=False
    )

    @cached_property
    def watch(self) -> LossWatch:
        """Detector of diverging clients, which has been given the losses of all rounds so far."""
        watch = LossWatch(self.task, self.registry.schema)
        watch.add_earlier_rows(RowTable.of(self.clients).blocks, diverged_clients(self.events))
        return watch

    def diverged(self, evaluation: Evaluation | None) -> tuple[Event, ...]:
        """Return an event that names the clients that an evaluation shows as newly diverged.

        Call it before the evaluation is added with :meth:`add`. No event is returned if no client
        has newly diverged or there was no evaluation.
        """
        if evaluation is None:
            return ()
        clients = self.watch.add_losses(*known_losses(evaluation))
        if not clients:
            return ()
        return (Diverged(0, tuple(clients)),)

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
        """Add the results of a round: its events, cluster rows, client rows and metrics.

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
            For each client, the node of the tree whose model was evaluated.
        validation
            Scores of the evaluated models on validation data; None if clients report no such
            scores.

        Returns
        -------
        Row
            The row of ``metrics.parquet`` of this round.
        """
        self.events += [plain(event.to_row(number)) for event in log.events]
        reported = {
            node: criteria
            for node, criteria in log.criteria.items()
            if self._may_report(state.tree, node, criteria)
        }
        rows = [
            self._cluster_row(number, node, criteria, log) for node, criteria in reported.items()
        ]
        self.clusters += rows
        self._keep_similarities(number, reported)
        weighted: float | None = None
        if evaluation is not None:
            block = self._client_columns(number, state.tree, evaluation, served)
            self.clients = RowTable.of(self.clients).with_block(block)
            weighted = _weighted_mean_score(evaluation, state.tree)
        row: Row = {
            "round": number,
            "phase": log.phase,
            **self._evaluation_columns(evaluation),
            **validation_columns(self.task.metrics, validation),
            f"{self.task.metrics[0].name}_weighted": weighted,
            "train_loss": _mean_loss(log.losses.values()),
            "discrepancy": log.discrepancy,
            "clusters": len(_list_cluster_sizes(state.tree)),
            **self._score_agreement(number, state.tree),
            **{column: _find_extreme(rows, column) for column in CRITERIA},
            "clients_trained": len(log.losses),
            **log.numbers,
            **cost,
        }
        self.metrics.append(row)
        return row

    def _score_agreement(self, number: int, tree: ParameterTree) -> Row:
        """Return scores of the agreement between the clusters and the true clusters.

        The scores include ``ari_assigned``, the adjusted Rand index without stragglers. A straggler
        is a client that is assigned to a leaf for evaluation, but is not a member of the leaf's
        cluster.
        """
        truth = self.registry.in_round(number).true_clusters
        leaf_of = tree.leaf_of
        if truth is None:
            return {"ari": None, "nmi": None, "ari_assigned": None}
        known = self._agreement
        if known is not None and known[0] is leaf_of and known[1] is truth:
            return known[2]
        ids = self.registry.ids
        if len(leaf_of) < len(ids):
            ids = [client for client in ids if client in leaf_of]
        pairs = PairCounts.of(numbers_of(truth, ids), numbers_of(leaf_of, ids))
        ari, nmi = pairs.scores
        assigned = pairs.select([leaf.id for leaf in tree.leaves])
        ari_assigned: float | None = ari
        if len(assigned.counts) < len(pairs.counts):
            ari_assigned = assigned.scores[0] if len(assigned.counts) else None
        scores: Row = {"ari": ari, "nmi": nmi, "ari_assigned": ari_assigned}
        self._agreement = (leaf_of, truth, scores)
        return scores

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
        """Whether clients were evaluated on validation data in at least one round."""
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
        """Add an evaluation to the last round, which was recorded without an evaluation.

        Parameters
        ----------
        state, evaluation, served, validation
            See :meth:`add`.
        cost
            Bytes, steps and seconds of the evaluation, by column; they are added to the round's cost.
        columns
            Further columns of the round's row of ``metrics.parquet``.
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
            weighted = _weighted_mean_score(evaluation, state.tree)
        self.metrics[-1] = {
            **row,
            f"{self.task.metrics[0].name}_weighted": weighted,
            **self._evaluation_columns(evaluation),
            **validation_columns(self.task.metrics, validation),
            # A round of an earlier version's checkpoint lacks some columns.
            **{name: value + row.get(name, 0) for name, value in cost.items()},
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
        fallback: str | None = None,
    ) -> Run:
        """Return the results of the rounds so far as a :class:`~fedclade.Run`.

        Rounds that are added later do not change the returned object.

        Parameters
        ----------
        config
            Config of the run.
        tree
            The clusters and their models: after the last round, or after the round ``best``.
        device
            Device of the server's models.
        layout
            Mapping between a model vector and the module's tensors; None if it is not needed.
        stopped
            Reason for finishing the run before its last round; None if all rounds were run.
        best
            The best round, in a run that stores its best round; None in other runs. All tables but
            the metrics then end with this round: later rows would be about clusters that are not in
            the tree. The summary counts the cost of all rounds.
        fallback
            Engine that trains in place of a faster one, and the reason, see
            :attr:`Clients.engine_fallback <fedclade.core.Clients.engine_fallback>`; None if there
            is none.
        """
        shown = self if best is None else self._cut_after(best)
        summary = self._build_summary(
            config, tree, device, shown=shown, best=best, fallback=fallback
        )
        if stopped is not None:
            summary["stopped"] = stopped.as_dict()
        return Run(
            summary=summary,
            config={**config, "versions": versions()},
            tree=tree,
            metric_rows=list(self.metrics),
            cluster_rows=list(shown.clusters),
            client_rows=shown.clients,
            events=list(shown.events),
            similarities=tuple(shown.similarities.values()),
            layout=layout,
            schema=self.schema,
        )

    def _cut_after(self, best: KeptRound) -> History:
        """Return the history up to the best round, but with the metrics of all rounds."""
        blocks = RowTable.of(self.clients).blocks
        return replace(
            self,
            clusters=[row for row in self.clusters if row["round"] <= best.round],
            clients=RowTable(block for block in blocks if block["round"][0] <= best.round),
            events=[row for row in self.events if row["round"] <= best.round],
            similarities={each.node: each for each in best.similarities},
        )

    def _build_summary(
        self,
        config: Mapping[str, Any],
        tree: ParameterTree,
        device: str,
        *,
        shown: History,
        best: KeptRound | None,
        fallback: str | None,
    ) -> dict[str, Any]:
        """Build the content of ``summary.json``.

        Parameters
        ----------
        config, tree, device, best, fallback
            See :meth:`finish`.
        shown
            History whose clients and clusters are summarized: ``self``, or the history up to the
            best round. Costs are summed over all rounds.
        """
        number = len(self.metrics) if best is None else best.round
        last = self.metrics[number - 1]
        final = RowTable.of(shown.clients).last
        truth = self.registry.in_round(number).true_clusters
        metric = metric_named(self.task.metrics, self.chosen_by, "stop.metric")
        seconds = {"total": sum(row["seconds"] for row in self.metrics)}
        for phase in ("train", "evaluate", "server"):
            seconds[phase] = sum(row[f"seconds_{phase}"] for row in self.metrics)
        summary: dict[str, Any] = {
            "format": FORMAT,
            "algorithm": config["algorithm"]["name"],
            "data": self.registry.description,
            "inputs": {**_describe_inputs(self.registry.schema), **self.registry.columns},
            "model": config["model"]["name"],
            "seed": config["seed"],
            "rounds": self.metrics[-1]["round"],
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
                **_cluster_facts(tree, truth, last),
                **summarize_stable_groups(shown.events),
            },
            "target": self._target_facts(final),
            "bytes_up": sum(row["bytes_up"] for row in self.metrics),
            "bytes_down": sum(row["bytes_down"] for row in self.metrics),
            **_describe_steps(self.metrics),
            "seconds": seconds,
            "device": device,
            "engine": config["engine"],
            "versions": versions(),
        }
        if fallback is not None:
            summary["engine_fallback"] = fallback
        if self.warnings:
            summary["warnings"] = list(self.warnings)
        if diverged := shown.divergence:
            summary["diverged"] = diverged
            # Clusters that were formed by diverged models carry no information.
            summary["clusters"] |= {"found": 0, "ari": None, "nmi": None, "sizes": []}
            for name in ("ari_assigned", "stability", "stable_sizes"):
                summary["clusters"].pop(name, None)
        if served := _count_served(shown.events):
            summary["served"] = served
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

    def _target_facts(self, final: Sequence[Row]) -> dict[str, Any]:
        """Return the section ``target`` of the summary: when it was reached, by how many clients.

        ``final`` has the rows of the last evaluation, one for each client.
        """
        name, score = self.target or (self.task.metrics[0].name, None)
        first = next((row["round"] for row in self.metrics if self._is_reached(row, "_mean")), None)
        traffic = None
        if first is not None:
            until = [row for row in self.metrics if row["round"] <= first]
            traffic = sum(row["bytes_up"] + row["bytes_down"] for row in until)
        return {
            name: score,
            "share_of_clients": self._share_at_target(final),
            "rounds_to_target": first,
            "bytes_to_target": traffic,
        }

    @property
    def divergence(self) -> Row | None:
        """Section ``diverged`` of the summary; None if the run as a whole has not diverged.

        The section has the first ``round`` with a diverged client, the number of diverged
        ``clients``, and the number ``of`` all clients with a known loss.
        """
        if not self.watch.has_diverged:
            return None
        far, known = self.watch.counts
        # A checkpoint of an earlier version has the losses of its rounds, but no such events.
        last = self.metrics[-1]["round"]
        first = min(diverged_clients(self.events).values(), default=last)
        return {"round": first, "clients": far, "of": known}

    def _cluster_row(self, number: int, node: int, criteria: SplitCriteria, log: RoundLog) -> Row:
        """Return a cluster's row of ``clusters.parquet``: its split criteria and training loss."""
        row: Row = {"round": number, "node": node, "clients": len(criteria.members)}
        row |= dict.fromkeys(CRITERIA, None)
        # NaN marks a number that privacy rules withhold; it is recorded as None
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

    def _may_report(self, tree: ParameterTree, node: int, criteria: SplitCriteria) -> bool:
        """Return whether a cluster is large enough for its split criteria to be recorded.

        At least ``least`` clients must be members of the cluster, and at least ``least`` members
        must have replied. Numbers about fewer clients are withheld for privacy.
        """
        return (
            self.least <= 1
            or min(len(criteria.members), len(tree.nodes[node].members)) >= self.least
        )

    def _keep_similarities(self, number: int, reported: Mapping[int, SplitCriteria]) -> None:
        """Store the similarity matrices of a round's clusters, which replace earlier matrices."""
        for node, criteria in reported.items():
            if 1 < len(criteria.members) <= LARGEST_KEPT and criteria.similarity is not None:
                self.similarities[node] = SimilarityMatrix(
                    node, number, criteria.members, criteria.similarity
                )

    def _client_columns(
        self, number: int, tree: ParameterTree, evaluation: Evaluation, served: Mapping[int, int]
    ) -> Block:
        """Return an evaluation's rows of ``clients.parquet``, as a block of columns."""
        clients = evaluation.ids
        registry = self.registry.in_round(number)
        truth = registry.true_clusters
        true_column: list[None] | np.ndarray = [None] * len(clients)
        if truth is not None:
            true_column = np.array([truth[client] for client in clients])
        scores = evaluation.scores.double().numpy()
        return {
            "round": np.full(len(clients), number),
            "client": np.array(clients),
            "name": [registry.names[client] for client in clients],
            "cluster": np.array([tree.leaf_of[client] for client in clients]),
            "true_cluster": true_column,
            "served_by": np.array([served[client] for client in clients]),
            "n_train": np.array([registry.sizes[client] for client in clients]),
            **{metric.name: scores[:, j].copy() for j, metric in enumerate(self.task.metrics)},
            "loss": evaluation.losses.double().numpy().copy(),
        }

    def _evaluation_columns(self, evaluation: Evaluation | None) -> Row:
        """Return the columns of ``metrics.parquet`` about scores and losses on test data.

        All values are None if the round was not evaluated.
        """
        names = [f"{metric.name}_{number}" for metric in self.task.metrics for number in SPREAD]
        columns: Row = dict.fromkeys([*names, "loss_mean", "share_at_target"], None)
        if evaluation is None:
            return columns
        for metric, scores in zip(self.task.metrics, evaluation.scores.T.tolist(), strict=True):
            numbers = spread(scores, lower_is_better=not metric.higher_is_better)
            columns |= {f"{metric.name}_{number}": value for number, value in numbers.items()}
        losses = evaluation.known_losses.tolist()
        rows = self._scores_by_client(evaluation)
        if losses:
            columns["loss_mean"] = sum(losses) / len(losses)
        columns["share_at_target"] = self._share_at_target(rows)
        return columns

    def _scores_by_client(self, evaluation: Evaluation) -> list[Row]:
        """Return the scores of an evaluation as one dict for each client, by metric name."""
        names = [metric.name for metric in self.task.metrics]
        return [dict(zip(names, mine, strict=True)) for mine in evaluation.scores.tolist()]

    def _is_reached(self, row: Row, suffix: str = "") -> bool:
        """Return whether the score in a row is at least as good as the target.

        ``suffix`` is the end of the column's name, such as ``_mean``. The result is False without a
        target.
        """
        if self.target is None or (score := row[f"{self.target[0]}{suffix}"]) is None:
            return False
        metric = next(metric for metric in self.task.metrics if metric.name == self.target[0])
        return metric.reached(score, self.target[1])

    def _share_at_target(self, rows: Sequence[Row]) -> float | None:
        """Return the share of clients that reach the target, among clients with a score.

        ``rows`` has one row of scores for each client. The result is None if there is no target, or
        no client has a score.
        """
        if self.target is None:
            return None
        name = self.target[0]
        scored = [row for row in rows if not isnan(row[name])]
        if not scored:
            return None
        return sum(self._is_reached(row) for row in scored) / len(scored)


def counting(row: Row) -> tuple[str, float | None]:
    """Return the name of the task's main metric, and its mean over the clients in a round.

    The main metric is the first of the task. ``row`` is a row of ``metrics.parquet``; the mean is
    None if the round was not evaluated.
    """
    column = next(name for name in row if name.endswith("_mean"))
    return column.removesuffix("_mean"), row[column]


def _describe_steps(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the section ``steps`` of the summary: the clients' training steps in all rounds.

    It has the total number of steps, the number of steps if each sampled client had trained once in
    each round, as in FedAvg (``of_cohorts``), and the ratio of both (None if no client was
    sampled). Without a number for each round, as in a run of plain ClientApps, whose steps are
    unknown, or one that an earlier version began, the section is left out.
    """
    if not all("steps" in row and "cohort_steps" in row for row in rows):
        return {}
    total = sum(row["steps"] for row in rows)
    of_cohorts = sum(row["cohort_steps"] for row in rows)
    ratio = total / of_cohorts if of_cohorts else None
    return {"steps": {"total": total, "of_cohorts": of_cohorts, "ratio": ratio}}


def _describe_inputs(schema: DataSpec) -> dict[str, Any]:
    """Describe a model's inputs and outputs for ``summary.json``.

    The description has the shape of an input, the scaling of pixels, the number of outputs and, for
    texts, the size of the vocabulary. The scaling is the mean and the standard deviation of pixels
    in [0, 1], or None. For inputs of several tensors, the description also states their names,
    types and shapes.
    """
    described: dict[str, Any] = {
        "shape": list(schema.input_shape),
        "scaled": None if schema.scaled is None else list(schema.scaled),
        "outputs": schema.outputs,
        **({"vocabulary_size": schema.vocabulary_size} if schema.vocabulary_size else {}),
    }
    if schema.structure is not None:
        described["structure"] = schema.structure.described
    return described


def _cluster_facts(
    tree: ParameterTree, truth: Mapping[int, int] | None, last: Row
) -> dict[str, Any]:
    """Return the section ``clusters`` of ``summary.json``: number, sizes and agreement with truth.

    ``last`` is the last row of ``metrics.parquet``, ``truth`` the true cluster of each client.
    """
    sizes = _list_cluster_sizes(tree)
    facts: dict[str, Any] = {
        "found": len(sizes),
        "true": None if truth is None else len(np.unique(numbers_of(truth, truth))),
        "ari": last["ari"],
    }
    assigned = last.get("ari_assigned")
    if assigned != last["ari"]:
        facts["ari_assigned"] = assigned
    return {**facts, "nmi": last["nmi"], "sizes": sizes}


def _list_cluster_sizes(tree: ParameterTree) -> list[int]:
    """Return the numbers of members of all clusters with members, in descending order."""
    return sorted((len(leaf.members) for leaf in tree.leaves if leaf.members), reverse=True)


def _mean_loss(losses: Iterable[float]) -> float | None:
    """Return the mean of all finite losses; None if no loss is finite.

    A client that reports no loss has the loss NaN, so NaN is left out.
    """
    known = [loss for loss in losses if isfinite(loss)]
    if not known:
        return None
    return sum(known) / len(known)


def _weighted_mean_score(evaluation: Evaluation, tree: ParameterTree) -> float | None:
    """Return the mean score over all test targets of all clusters (FedGroup section IV-A).

    Unlike a mean over clients, it weights each client by its number of test targets. Clients
    that belong to no cluster or have no score are left out; the result is None if no client is left.
    """
    scores = zip(
        tree.has_leaf(evaluation.ids).tolist(),
        evaluation.scores[:, 0].tolist(),
        evaluation.examples.tolist(),
        strict=True,
    )
    counted = [(score * n, n) for is_held, score, n in scores if is_held and not isnan(score)]
    if not counted:
        return None
    return sum(total for total, _ in counted) / sum(n for _, n in counted)


def _find_extreme(rows: list[Row], column: str) -> float | None:
    """Summarize a split criterion over all clusters of a round by its extreme value.

    This is the smallest value for ``alpha_cross_max``, and the largest value for all other
    criteria. The result is None if no cluster has a value.
    """
    values = [row[column] for row in rows if row[column] is not None]
    if column == "alpha_cross_max":
        return min(values, default=None)
    return max(values, default=None)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result can depend on."""
    return dict(_look_up_versions())


@cache
def _look_up_versions() -> dict[str, str]:
    """Look up the package versions once, since each lookup reads a file of the package."""
    packages = ("fedclade", "torch", "numpy", "scipy", "scikit-learn")
    return {
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
    }
