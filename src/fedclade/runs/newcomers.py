"""Newcomers to a finished run: assignment of a model to each, and its scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import isnan
from operator import methodcaller
from typing import Any, TypeVar

from torch import Tensor, nn

from fedclade.algorithms import Algorithm, Local, build_algorithm, without_labels
from fedclade.channel import Signature, mechanism_of
from fedclade.clustering import Assignment, require_updates
from fedclade.core import (
    ConfigError,
    Evaluation,
    LocalTraining,
    ParameterTree,
    Round,
    RunError,
    checked,
    reading_folder,
)
from fedclade.data import Federation, name_differences, show_some
from fedclade.models import PARTS, Parts
from fedclade.runs.backend import Backend
from fedclade.runs.models import Maker, module_for
from fedclade.runs.store import Run
from fedclade.runs.store.contents import Row
from fedclade.runs.store.newcomers import Newcomers, score_columns
from fedclade.tasks import Task, build_task, read_metrics
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
    """Assign one of a run's models to each newcomer, and evaluate it.

    Newcomers train as the run's clients did, with the run's local training, signatures and
    permutation. For comparison, each newcomer also trains a model alone, for as many rounds as the
    run had, and fine-tunes its assigned model for one epoch. If a part of the model is personal,
    newcomers are assigned with the personal part of the initial model. Each then fits its personal
    part to the assigned model, alone, for as many epochs as a client of the run trained.

    Parameters
    ----------
    run
        A finished run. If it was loaded from a folder and its config names something by
        ``module:name``, load it with ``Run.load(folder, trust=True)``, or give that thing here.
    newcomers
        For example ``Federation.newcomers`` of the run's federation. Their true clusters, if known,
        must be numbered as in the run; they are used for scoring only.
    algorithm, model, task, local
        Those of the run, if its config cannot name them: a model or a metric that is an object, a
        loss or an optimizer of the script that ran.
    device, memory
        See :func:`fedclade.simulate`.
    engine
        Engine for the newcomers; by default that of the run, or ``auto`` if that was ``ray``.
    only_fitting
        Whether to give a newcomer the deepest model on its path that fits it, or the root's if none
        does. By default it gets the model of the leaf at the end of its path, as in CFL's Algorithm
        4, and the result only reports whether that model fits.
    members
        The run's own clients. If they are given, newcomers need no labels to be assigned: they join
        the leaf whose members' data is most similar to theirs, as the root's model sees it. Labels
        are still used for scoring.

    Raises
    ------
    ConfigError
        If the run's algorithm, model, task or local training must be given, the task's metrics are
        not those of the run, or a name or a value is unknown.
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
    rows = [
        _row(each, path, newcomers, truth, {column: values[i] for column, values in scores.items()})
        for i, (each, path) in enumerate(zip(assignments, paths, strict=True))
    ]
    return Newcomers(assignments, rows, arrival.last.number, only_fitting, arrival.metric)


@dataclass(frozen=True, eq=False)
class Arrival:
    """Newcomers to a run's tree, on a simulated backend with the settings of that run.

    See :func:`assign`.

    Parameters
    ----------
    tree
        The run's tree, as the server of the backend sees it.
    algorithm
        The run's algorithm.
    backend
        Simulated backend whose clients are the newcomers.
    last
        The round that the run's models are from.
    """

    tree: ParameterTree
    algorithm: Algorithm
    backend: Backend
    last: Round

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
        """Build the backend for newcomers to a run; see :func:`assign` for the parameters.

        Code that the run's config names by ``module:name`` is imported only if the run is trusted.

        Raises
        ------
        ConfigError, RunError
            See :func:`assign`.
        """
        run.check_readable()
        _check_columns(run, newcomers)
        config = run.config
        seed = run.summary["seed"]
        name = run.config["model"]["name"]
        named = dict(config["algorithm"])  # the oracle assigns without true clusters
        algorithm = algorithm or _noted(
            run, "algorithm", build_algorithm, named.pop("name"), named, {}
        )
        task = (
            build_task(task) if task else _noted(run, "task", build_task, **config.get("task", {}))
        )
        local = local or _noted(run, "local", LocalTraining, **config["local"])
        parts = Parts.of(config["model"])
        arguments = {
            key: value for key, value in config["model"].items() if key not in ("name", *PARTS)
        }

        def build_noted_model(seed: int) -> nn.Module:
            return _noted(run, "model", module_for, name, newcomers.pool.schema, seed, arguments)

        backend = Backend.simulated_by(
            newcomers,
            model or build_noted_model,
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
            task=task.as_noted(run.summary),
            memory=memory,
        )
        entries = run.tree.nodes[0].params.numel()
        theirs = backend.initial.shape[-1]
        if entries != theirs:
            raise RunError(
                f"the run's models have {entries:,} entries, but a {name} for the newcomers' data "
                f"({newcomers}) has {theirs:,}; newcomers need inputs and labels like those of the "
                f"run: {run.summary['data']}"
            )
        metrics, own = (
            [metric.name for metric in of]
            for of in (backend.task.metrics, read_metrics(run.summary))
        )
        if metrics != own:
            raise ConfigError(
                f"task should be that of the run, whose metrics are {own}, got {metrics}"
            )
        tree = backend.closed(run.tree.map_vectors(*[methodcaller("to", backend.initial)] * 2))
        return cls(tree, algorithm, backend, Round(run.model_round, local, seed))

    @property
    def metric(self) -> str:
        """Name of the metric that counts, the first of the task."""
        return self.backend.task.metrics[0].name

    def assignments(self) -> list[Assignment]:
        """Return the assignment of each newcomer."""
        return list(
            self.algorithm.assign(
                self.tree, self.backend.clients.ids, self.backend.clients, self.last
            )
        )

    def without_labels(self, members: Arrival) -> list[Assignment]:
        """Return the assignment of each newcomer without labels, given the run's own clients."""
        clients = self.backend.clients
        return without_labels(
            self.tree, clients.ids, clients, members.backend.clients, self.last.seed
        )

    def scores(
        self, assignments: Sequence[Assignment], nodes: Sequence[int]
    ) -> dict[str, list[float | None]]:
        """Return the columns of :func:`score_columns`, for newcomers with some assigned nodes.

        Personal parameters, if the model has any, are fitted to a model before it is scored. If
        clients of the run fine-tune the model that they receive, newcomers do so before the first
        column. If clients are evaluated with a mixture of the leaves' models, newcomers at a leaf
        are too; the fine-tuning for one epoch trains the model of the leaf alone.

        Parameters
        ----------
        assignments
            Assignment of each newcomer.
        nodes
            For each newcomer, the node whose model it gets.

        Returns
        -------
        dict
            A list with a score of each newcomer, by column; None where the metric is undefined.
        """
        clients = self.backend.clients
        ids = [each.client for each in assignments]
        (models, rows), root = self.tree.models(nodes, served=True), self.tree.nodes[0].model[None]
        each_its_own, to_root = list(range(len(ids))), [0] * len(ids)
        self._fit_personal(ids, models, rows)
        at_home = replace(self.last, purpose="finetune", communicates="nothing")
        # personal parts were fitted in round last.number, and this training comes after it
        at_home = replace(at_home, number=self.last.number + self._is_parted)

        def tuned(spec: LocalTraining) -> list[float | None]:
            made = require_updates(
                ids, clients.train(ids, models, rows, replace(at_home, spec=spec))
            ).required_deltas
            return self._score(ids, models[rows] + made, each_its_own)

        own = self.algorithm.tunes(self.last.spec)
        got = (
            self._by_mixture(ids, nodes, self._score(ids, models, rows))
            if own is None
            else tuned(own)
        )
        fine_tuned = tuned(self.last.spec.in_epochs(1))
        self._fit_personal(ids, root, to_root)
        of_root = self._score(ids, root, to_root)
        self._forget()
        alone = self._trained_alone(ids)
        return dict(zip(score_columns(self.metric), (got, of_root, alone, fine_tuned), strict=True))

    @property
    def _is_parted(self) -> bool:
        return bool(self.backend.workers.layout.personal)

    def _score(self, ids: Sequence[int], models: Tensor, rows: Sequence[int]) -> list[float | None]:
        return _known(self.backend.clients.evaluate(ids, models, rows, "test"))

    def _by_mixture(
        self, ids: Sequence[int], nodes: Sequence[int], scores: list[float | None]
    ) -> list[float | None]:
        """Return newcomers' scores, with the mixture of the leaves' models if there is one."""
        if (mixture := self.algorithm.mixture(None)) is None:
            return scores
        models, _ = self.tree.models([leaf.id for leaf in self.tree.leaves])
        found = self.backend.clients.evaluate(ids, models, [0] * len(ids), "test", mixture=mixture)
        mixed = _known(found)
        return [
            mine if node else score for mine, node, score in zip(mixed, nodes, scores, strict=True)
        ]

    def _forget(self) -> None:
        if self.backend.store is not None:
            self.backend.store.clear()

    def _fit_personal(self, ids: Sequence[int], models: Tensor, rows: Sequence[int]) -> None:
        """Fit clients' personal parameters to their models, for as many epochs as the run had."""
        if self._is_parted:
            self._forget()
            epochs = self.last.number * (self.last.spec.epochs or 1)
            fitting = replace(self.last, personal_epochs=epochs, communicates="nothing")
            self.backend.clients.train(ids, models, rows, fitting)

    def _trained_alone(self, ids: Sequence[int]) -> list[float | None]:
        """Return scores of models that clients train alone, in as many rounds as the run."""
        method = Local()
        clients = self.backend.clients
        initial = self.backend.initial.view(-1, self.backend.initial.shape[-1])[:1]
        state = method.init(initial[0], clients)
        for number in range(1, self.last.number + 1):
            state, _ = method.step(state, ids, clients, replace(self.last, number=number))
        return self._score(ids, initial, state.rows(ids))


def _known(evaluation: Evaluation) -> list[float | None]:
    """Return each client's score by the metric that counts; None if it is undefined."""
    return [None if isnan(score) else score for score in evaluation.scores[:, 0].tolist()]


def _noted(run: Run, what: str, build: Callable[..., T], *values: Any, **options: Any) -> T:
    """Build an object that a run's config names, or say in a ConfigError how to pass it."""
    try:
        with reading_folder(trust=run.is_trusted):
            return build(*values, **options)
    except ConfigError as error:
        raise type(error)(
            f"give fedclade.assign the {what} of the run, as {what}=...: {error}"
        ) from error


def _check_columns(run: Run, newcomers: Federation) -> None:
    """Check that a table of newcomers has the encoding of the run's table."""
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
    if found:
        raise RunError(
            f"the newcomers' data is encoded otherwise than the run's: {show_some(found)}; give "
            "both the same schema, by data.schema in their configs or by schema= in Python"
        )


def _true_clusters_of_leaves(run: Run) -> Mapping[int, int]:
    """Return the true cluster of most members of each node, if known."""
    truth = {
        row["client"]: row["true_cluster"]
        for row in run.client_rows
        if row["true_cluster"] is not None
    }
    inside = {
        node.id: Counter(truth[c] for c in node.members if c in truth) for node in run.tree.nodes
    }
    return {node: counts.most_common(1)[0][0] for node, counts in inside.items() if counts}


def _row(
    each: Assignment,
    path: Sequence[int],
    newcomers: Federation,
    truth: Mapping[int, int],
    scores: Mapping[str, float | None],
) -> Row:
    true_cluster = (
        None
        if newcomers.true_clusters is None or not truth
        else newcomers.true_clusters[each.client]
    )
    return {
        "client": each.client,
        "name": newcomers.by_id[each.client].name,
        "path": list(path),
        "node": path[-1],
        "fits": each.fits,
        "leaf": each.node,
        "by": each.steps[0].by if each.steps else None,
        "scores": [step.score for step in each.steps],
        "others": [step.other for step in each.steps],
        "margins": [step.margin for step in each.steps],
        "margin": each.margin,
        "true_cluster": true_cluster,
        "right": None
        if true_cluster is None
        else path[-1] == each.node and truth.get(each.node) == true_cluster,
        **scores,
    }
