"""Newcomers to a finished run: assignment of a model of the run to each newcomer, and its scores.

A newcomer is a client that did not train in the run. It is assigned to a path in the parameter tree
of clusters, from the root to a leaf, and gets the model of a node on this path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from operator import methodcaller
from typing import TypeVar

from torch import Tensor, nn

from fedclade.algorithms import Algorithm, Local, OwnModels, without_labels
from fedclade.channel import Signature, mechanism_of
from fedclade.clustering import Assignment, require_updates
from fedclade.core import (
    OWN,
    ClientWork,
    ConfigError,
    Evaluation,
    HeadThenBody,
    LocalModel,
    LocalTraining,
    NoReply,
    ParameterTree,
    Round,
    RoundPlan,
    RunError,
    checked,
)
from fedclade.data import Federation, name_differences, scale_as_in_run, show_some
from fedclade.runs.backend import Backend
from fedclade.runs.models import Maker
from fedclade.runs.noted import NotedRun
from fedclade.runs.store import Run
from fedclade.runs.store.contents import Row
from fedclade.runs.store.newcomers import Newcomers, score_columns
from fedclade.runs.target_scale import clip_by_default, target_scale_of
from fedclade.tasks import Task, read_metrics
from fedclade.training import float32_products, here

T = TypeVar("T")


@checked()
def assign(
    run: Run,
    newcomers: Federation,
    *,
    algorithm: Algorithm | None = None,
    model: nn.Module | str | Maker | None = None,
    task: Task | str | None = None,
    local: LocalTraining | None = None,
    device: str = "auto",
    engine: str | None = None,
    memory: int | str | None = None,
    only_fitting: bool = False,
    members: Federation | None = None,
) -> Newcomers:
    """Assign one of a run's models to each newcomer, and evaluate the model on the newcomer's data.

    A newcomer is a client that did not train in the run. Newcomers train as the run's clients did,
    with the same local training, signatures and permutation. For comparison, each newcomer also
    trains a model alone, for as many rounds as the run had, and fine-tunes its assigned model for
    one epoch.

    If a part of the model is personal, newcomers are assigned with the personal part of the initial
    model. Each newcomer then fits its personal part to the assigned model, alone, for as many
    epochs as a client of the run trained.

    Parameters
    ----------
    run
        A finished run. If it was loaded from a folder and its config names an object by
        ``module:name``, load the run with ``Run.load(folder, trust=True)``, or pass the object.
    newcomers
        For example ``Federation.newcomers`` of the run's federation. Their true clusters, if known,
        must be numbered as in the run; they are used for scoring only.
    algorithm, model, task, local
        Algorithm, model, task and local training of the run. They are needed only if the run's
        config cannot name them, such as a model, metric, loss or optimizer that was defined in the
        script of the run.
    device, memory
        See :func:`fedclade.simulate`.
    engine
        Engine that trains the newcomers; by default the run's engine, or ``auto`` if the run's
        engine was ``ray``.
    only_fitting
        Whether to give a newcomer the model of the deepest node on its path that fits the newcomer,
        or the root's model if no node fits. By default a newcomer gets the model of the leaf at the
        end of its path, as in CFL's Algorithm 4, and the result only reports whether it fits.
    members
        The clients that trained in the run. If they are given, newcomers need no labels to be
        assigned: each joins the leaf whose members' data is most similar to its own data, according
        to the root's model. Labels are still used for scoring.

    Raises
    ------
    ConfigError
        If the run's algorithm, model, task or local training must be passed, the metrics of the
        task differ from the metrics of the run, or a name or a value is unknown.
    RunError
        If the run's models do not fit the newcomers' data, or are permuted by a secret of a
        network's clients.
    UpdateError
        If a newcomer's training diverges.
    """
    last = run.model_round
    newcomers = newcomers.in_round(last)
    given = (algorithm, model, task, local)
    arrival = Arrival.of(run, newcomers, *given, device=device, engine=engine, memory=memory)
    with float32_products(run.config.get("tf32", False)), closing(arrival.backend):
        if members is None:
            assignments = arrival.assignments()
        else:
            theirs = Arrival.of(
                run, members.in_round(last), *given, device=device, engine=engine, memory=memory
            )
            with closing(theirs.backend):
                assignments = arrival.without_labels(theirs)
        paths = [each.fitting if only_fitting else each.path for each in assignments]
        scores = arrival.scores(assignments, [path[-1] for path in paths])
    truth = _true_clusters_of_leaves(run)
    rows: list[Row] = []
    for i, (assignment, path) in enumerate(zip(assignments, paths, strict=True)):
        row = _describe_assignment(assignment, path, newcomers, truth)
        rows.append(row | {column: values[i] for column, values in scores.items()})
    return Newcomers(
        assignments,
        rows,
        rounds_alone=arrival.last.number,
        only_fitting=only_fitting,
        metric=arrival.metric,
    )


@dataclass(frozen=True, eq=False)
class Arrival:
    """Newcomers to a run's parameter tree, on a simulated backend with the settings of the run.

    :func:`assign` uses this class to train and evaluate newcomers.

    Parameters
    ----------
    tree
        The run's tree, with its models in the order of entries that the backend uses.
    algorithm
        The run's algorithm.
    backend
        Simulated backend whose clients are the newcomers.
    last
        The round after which the run's models were stored.
    local, rounds
        Local training of the run, with its schedule of the step size, and its number of rounds.
    """

    tree: ParameterTree
    algorithm: Algorithm
    backend: Backend
    last: Round
    local: LocalTraining
    rounds: int

    @classmethod
    def of(
        cls,
        run: Run,
        newcomers: Federation,
        algorithm: Algorithm | None = None,
        model: nn.Module | str | Maker | None = None,
        task: Task | str | None = None,
        local: LocalTraining | None = None,
        *,
        device: str = "auto",
        engine: str | None = None,
        memory: int | str | None = None,
    ) -> Arrival:
        """Build the backend for the newcomers to a run.

        See :func:`assign` for the parameters. Code that the run's config names by ``module:name``
        is imported only if the run is trusted.

        Raises
        ------
        ConfigError, RunError
            See :func:`assign`.
        """
        run.check_readable()
        check_columns(run, newcomers)
        newcomers = scale_as_in_run(newcomers, run.summary.get("inputs", {}))
        config = run.config
        seed = run.summary["seed"]
        noted = NotedRun(run, "fedclade.assign")
        algorithm = noted.algorithm(algorithm)
        task = noted.task(task)
        local = noted.local(local)
        if target_scale_of(newcomers) is not None:
            local = clip_by_default(local, algorithm)
        parts = noted.parts
        backend = Backend.simulated_by(
            newcomers,
            model or partial(noted.build_model, newcomers.pool.schema),
            algorithm,
            device=device,
            engine=engine or here(config.get("engine", "auto")),
            seed=seed,
            permute=config.get("privacy", {}).get("permute", False),
            privacy=mechanism_of(config.get("privacy", {})),
            freeze=parts.freeze,
            personal=parts.personal,
            adapter=parts.adapter,
            signature=Signature(**config.get("signature", {})),
            stream=False,
            task=task,
            memory=memory,
        )
        entries = run.tree.nodes[0].params.numel()
        theirs = backend.initial.shape[-1]
        if entries != theirs:
            raise RunError(
                f"the run's models have {entries:,} entries, but a {config['model']['name']} for "
                f"the newcomers' data ({newcomers}) has {theirs:,}; newcomers need data with the "
                f"same inputs and labels as the run's data: {run.summary['data']}"
            )
        metrics = [metric.name for metric in backend.task.metrics]
        own = [metric.name for metric in read_metrics(run.summary)]
        if metrics != own:
            raise ConfigError(
                f"task should be the task of the run, with the metrics {own}, got a task with the "
                f"metrics {metrics}"
            )
        tree = backend.closed(run.tree.map_vectors(*[methodcaller("to", backend.initial)] * 2))
        number = run.model_round
        rounds = max(number, config.get("rounds", number))
        last = Round(number, local.in_round(number, rounds), seed)
        return cls(tree, algorithm, backend, last, local, rounds)

    @property
    def metric(self) -> str:
        """Name of the metric by which newcomers are scored: the first metric of the task."""
        return self.backend.task.metrics[0].name

    def assignments(self) -> list[Assignment]:
        """Assign each newcomer to a path in the tree, by the run's algorithm.

        The algorithm uses the newcomers' labels. The result has one assignment for each newcomer.
        """
        return list(
            self.algorithm.assign(
                self.tree, self.backend.clients.ids, self.backend.clients, self.last
            )
        )

    def without_labels(self, members: Arrival) -> list[Assignment]:
        """Assign each newcomer to a path in the tree without using labels.

        ``members`` are the clients that trained in the run; a newcomer joins the leaf whose
        members' data is most similar to its own data.
        """
        clients = self.backend.clients
        return without_labels(
            self.tree, clients.ids, clients, members=members.backend.clients, seed=self.last.seed
        )

    def scores(
        self, assignments: Sequence[Assignment], nodes: Sequence[int]
    ) -> dict[str, list[float | None]]:
        """Score four models of each newcomer on its test data.

        The four models are the assigned model, the root's model, a model that the newcomer trains
        alone, and the assigned model after fine-tuning for one epoch. Personal parameters, if the
        model has any, are first fitted to the model that is scored. The assigned model is scored in
        the way in which clients of the run are evaluated: after fine-tuning if the algorithm
        fine-tunes models for evaluation, or, at a node below the root, as the mixture of the
        leaves' models if the algorithm uses mixtures.

        Parameters
        ----------
        assignments
            Assignment of each newcomer.
        nodes
            For each newcomer, the node whose model is assigned to it.

        Returns
        -------
        dict
            For each column of :func:`score_columns`, a list with a score for each newcomer, or None
            if the metric is undefined for its test data.
        """
        clients = self.backend.clients
        ids = [each.client for each in assignments]
        models, rows = self.tree.models(nodes, served=True)
        root = self.tree.nodes[0].model[None]
        to_root = [0] * len(ids)
        self._fit_personal(ids, models, rows)
        # Personal parts were fitted with the random draws of round last.number, so the training
        # below uses those of the next round.
        number = self.last.number + self._is_parted
        # Models that a newcomer trains for these scores are stored at the newcomer, not sent.
        work = ClientWork(store=LocalModel(state=False), reply=NoReply())

        def score_after(local: LocalTraining) -> list[float | None]:
            tuning = replace(self.last, number=number, local=local, purpose="finetune")
            updates = clients.train(
                ids, models, rows, this_round=tuning, work=work, sent_before=True
            )
            require_updates(ids, updates)
            return self._evaluate(ids, models, [OWN] * len(ids))

        own = None
        if isinstance(self.algorithm, OwnModels):
            own = self.algorithm.tuning(self.last.local)
        if own is None:
            got = self._by_mixture(ids, nodes, self._evaluate(ids, models, rows))
        else:
            got = score_after(own)
        fine_tuned = score_after(self.last.local.in_epochs(1))
        self._fit_personal(ids, root, to_root)
        of_root = self._evaluate(ids, root, to_root)
        self._clear_stores()
        alone = self._trained_alone(ids)
        return dict(zip(score_columns(self.metric), (got, of_root, alone, fine_tuned), strict=True))

    @property
    def _is_parted(self) -> bool:
        """Whether a part of the model is personal, so that each newcomer must fit its own."""
        return bool(self.backend.workers.layout.personal)

    def _evaluate(
        self, ids: Sequence[int], models: Tensor, rows: Sequence[int]
    ) -> list[float | None]:
        """Evaluate newcomers on their test data, and return their scores by the first metric.

        A score is None if it is undefined. ``models`` has one model in each row, and ``rows`` has
        the index of a row of ``models`` for each newcomer.
        """
        return _list_scores(self.backend.clients.evaluate(ids, models, rows, "test"))

    def _by_mixture(
        self, ids: Sequence[int], nodes: Sequence[int], scores: list[float | None]
    ) -> list[float | None]:
        """Return newcomers' scores with a mixture of the leaves' models, if clients use mixtures.

        Without a mixture, the given ``scores`` are returned. Newcomers at the root keep their
        score, since they are evaluated with the root's model alone.
        """
        if (mixture := self.algorithm.requires.mixture) is None:
            return scores
        models, _ = self.tree.models([leaf.id for leaf in self.tree.leaves])
        found = self.backend.clients.evaluate(ids, models, [0] * len(ids), "test", mixture=mixture)
        mixed = _list_scores(found)
        # Node 0 is the root; a newcomer there is evaluated with the root's model alone.
        return [
            mine if node else score for mine, node, score in zip(mixed, nodes, scores, strict=True)
        ]

    def _clear_stores(self) -> None:
        """Delete the models and personal parameters that the newcomers have stored."""
        if self.backend.store is not None:
            self.backend.store.clear()

    def _fit_personal(self, ids: Sequence[int], models: Tensor, rows: Sequence[int]) -> None:
        """Fit newcomers' personal parameters to fixed models, for as many epochs as in the run.

        Nothing happens if no part of the model is personal.
        """
        if self._is_parted:
            self._clear_stores()
            epochs = math.ceil(self.last.number * (self.last.local.epochs or 1))
            work = ClientWork(steps=HeadThenBody(epochs), reply=NoReply())
            self.backend.clients.train(
                ids, models, rows, this_round=self.last, work=work, sent_before=True
            )

    def _trained_alone(self, ids: Sequence[int]) -> list[float | None]:
        """Return scores of models that newcomers train alone, in as many rounds as the run had."""
        method = Local()
        clients = self.backend.clients
        initial = self.backend.initial.view(-1, self.backend.initial.shape[-1])[:1]
        state = method.init(initial[0], clients)
        for number in range(1, self.last.number + 1):
            local = self.local.in_round(number, self.rounds)
            this_round = RoundPlan(number, local, self.last.seed)
            state, _ = method.step(state, ids, clients, this_round)
        return self._evaluate(ids, initial, state.rows(ids))


def _list_scores(evaluation: Evaluation) -> list[float | None]:
    """Return each client's score by the task's first metric; None if it is undefined."""
    return [None if isnan(score) else score for score in evaluation.scores[:, 0].tolist()]


def check_columns(run: Run, newcomers: Federation) -> None:
    """Check that the newcomers' table is encoded in the same way as the run's table.

    Raises
    ------
    RunError
        If columns, labels, or the values that fill empty cells differ.
    """
    columns = newcomers.pool.columns
    inputs = run.summary.get("inputs", {})
    if columns is None:
        return
    here = "the newcomers' data"
    there = "the run"
    found: list[str] = []
    for what, noted, names in (
        ("column", "columns", columns.inputs),
        ("label", "labels", columns.labels),
    ):
        if noted in inputs:
            found += name_differences(what, names, inputs[noted], here=here, there=there)
    newcomer_fill = list(columns.fill)
    if newcomer_fill and inputs.get("fill", []) != newcomer_fill:
        found.append("empty cells are filled with different values")
    if found:
        raise RunError(
            "the newcomers' data and the run's data are encoded differently: "
            f"{show_some(found)}; use the same schema for both (data.schema in a config, schema= "
            "in Python)"
        )


def _true_clusters_of_leaves(run: Run) -> Mapping[int, int]:
    """Return the true cluster of most members of each node, by node id.

    Nodes without members whose true cluster is known are left out.
    """
    truth = {
        row["client"]: row["true_cluster"]
        for row in run.client_rows
        if row["true_cluster"] is not None
    }
    majority: dict[int, int] = {}
    for node in run.tree.nodes:
        counts = Counter(truth[client] for client in node.members if client in truth)
        if counts:
            majority[node.id] = counts.most_common(1)[0][0]
    return majority


def _describe_assignment(
    assignment: Assignment, path: Sequence[int], newcomers: Federation, truth: Mapping[int, int]
) -> Row:
    """Return a newcomer's row of the result table, without its scores.

    Parameters
    ----------
    assignment
        Assignment of the newcomer.
    path
        Nodes from the root to the node whose model the newcomer gets.
    newcomers
        All newcomers.
    truth
        True cluster of most members of each node; empty if unknown.
    """
    client = assignment.client
    true_cluster = None
    is_right = None
    if newcomers.true_clusters is not None and truth:
        true_cluster = newcomers.true_clusters[client]
        is_right = path[-1] == assignment.node and truth.get(assignment.node) == true_cluster
    steps = assignment.steps
    return {
        "client": client,
        "name": newcomers.by_id[client].name,
        "path": list(path),
        "node": path[-1],
        "fits": assignment.fits,
        "leaf": assignment.node,
        "by": steps[0].by if steps else None,
        "scores": [step.score for step in steps],
        "others": [step.other for step in steps],
        "margins": [step.margin for step in steps],
        "margin": assignment.margin,
        "true_cluster": true_cluster,
        "right": is_right,
    }
