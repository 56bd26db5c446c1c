"""Round loop: in each round, sample a cohort, run a step of the algorithm, evaluate, and record.

The cohort of a round is the set of clients that train in it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from fedclade.algorithms import Algorithm, RoundLog, RunFacts, State
from fedclade.channel import Absence, Channel
from fedclade.core import (
    CheckpointError,
    Clients,
    ConfigError,
    Diverged,
    Evaluation,
    Event,
    ParameterTree,
    PrivateRelease,
    RoundPlan,
    RunError,
    RunInterrupted,
    ServerSteps,
    TooFew,
    files_of_rows_in,
    release_pages,
    shown,
)
from fedclade.runs.backend import Backend
from fedclade.runs.best_round import chosen_round, metric_named
from fedclade.runs.callbacks import Callbacks, Following
from fedclade.runs.checkpointer import Checkpointer, TrainingState
from fedclade.runs.churn import ComingAndGoing
from fedclade.runs.divergence import ADVICE
from fedclade.runs.evaluation import RoundScores, evaluate_round
from fedclade.runs.history import History
from fedclade.runs.reference_log import RunLog
from fedclade.runs.settings import RunSettings
from fedclade.runs.small_batches import with_smallest_batch
from fedclade.runs.small_clusters import merge_small, with_common
from fedclade.runs.stopping import Stopped
from fedclade.runs.store import KeptRound, Run
from fedclade.runs.store.contents import Row
from fedclade.training import OWN_MODEL

Kept = dict[int, dict[str, Tensor]]
"""Tensors that clients store, by client id and name of the tensor."""

_log = RunLog(logging.getLogger(__name__))


def run_rounds(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    checkpointer: Checkpointer,
    history: History,
    settings: RunSettings,
    callbacks: Callbacks | None = None,
) -> Run:
    """Run an algorithm on the available clients, from round 1 or from the last checkpoint.

    See :func:`fedclade.simulate` for the errors that are raised.

    Parameters
    ----------
    algorithm
        The algorithm.
    backend
        Middleware, initial models and execution settings of the run.
    clients
        The clients of the backend, which may join, leave or be unavailable.
    checkpointer
        Writer of the run's folder, and reader of its last checkpoint.
    history
        Empty history of the run.
    settings
        Settings of the run.
    callbacks
        Callbacks that follow the run; none if left out.
    """
    settings = with_smallest_batch(settings, backend.smallest_batch, history.registry.sizes)
    _log_warnings(algorithm.check(RunFacts(rounds=settings.rounds)))
    training = checkpointer.restored(algorithm, backend, history)
    if training is None:
        _log_warnings(algorithm.check(RunFacts(clients=len(clients.ids))))
        training = TrainingState(0, first_state(algorithm, backend, clients), history)
    checkpointer.begin()

    def config() -> Mapping[str, Any]:
        return {**checkpointer.config, **backend.settled}

    def so_far() -> Run | None:
        history = training.history
        return (
            history.finish(
                config(),
                training.state.tree,
                backend.device,
                fallback=backend.workers.engine_fallback,
            )
            if history.clients
            else None
        )

    following = Following(
        callbacks or Callbacks(),
        config,
        checkpointer.path,
        so_far,
        rows=lambda: tuple(training.history.metrics),
        scored_by=history.task.metrics,
    )
    try:
        with files_of_rows_in(checkpointer.path):
            _train_rounds(algorithm, backend, clients, checkpointer, training, settings, following)
        if settings.keep_best and training.best is None:
            _log.warning(
                "keep_best = true: no round has a finite score on validation data, so the models "
                "of the last round are stored"
            )
        run = _build_run(backend, training, config())
        checkpointer.finish(run)
    except BaseException as error:
        following.ended(error)
        raise
    following.finished(run)
    return run


def _train_rounds(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    checkpointer: Checkpointer,
    training: TrainingState,
    settings: RunSettings,
    following: Following,
) -> None:
    """Run the remaining rounds, and evaluate clients after the last one.

    A checkpoint is saved if a callback interrupts the run or an error ends it.
    """
    restored = training.number
    try:
        if training.stopped is None:
            training.stopped = _stopped_before(training, settings)
        if settings.rounds == 0:
            evaluate_initial_models(algorithm, backend, clients, training, settings)
        while training.number < settings.rounds and training.stopped is None:
            if algorithm.finished(training.state):
                break
            number = training.number + 1
            before = training.state.tree
            row, events = run_round(algorithm, backend, clients, training, settings, number)
            note_best(backend, training, settings)
            last = number == settings.rounds or algorithm.finished(training.state)
            answer = following.round(before, training.state.tree, row, events, last=last)
            if isinstance(answer, Stopped) and not last:
                training.stopped = answer
            checkpointer.after_round(training, backend)
            release_pages()
            if answer is True and not last:
                checkpointer.stop(training, backend)
        if training.stopped is not None and not training.history.is_evaluated:
            if training.number == restored:
                clients.stay(training.number, training.state.tree)
            evaluate_last_round(algorithm, backend, clients, training, settings)
        if algorithm.requires.own_models and training.clients_with_own is None:
            training.clients_with_own = _find_clients_with_own(
                algorithm, backend, clients, training
            )
        checkpointer.after_last_round(training, backend)
    except (CheckpointError, RunInterrupted):  # a checkpoint was already saved, or cannot be
        raise
    except Exception:
        checkpointer.rescue(training, backend)
        raise


def _find_clients_with_own(
    algorithm: Algorithm, backend: Backend, clients: Clients, training: TrainingState
) -> Collection[int]:
    """Return the clients with models of their own, for a run that is continued at its very end.

    In other runs, the last evaluation has determined these clients. If a run is continued after its
    last evaluation, the algorithm determines the clients from its state. All clients are marked as
    unavailable meanwhile, so that the algorithm sends no queries: perhaps no client is connected
    any more.
    """
    absence = Absence(backend.workers.layout.n_parameters, training.history.registry.schema)
    absence.away = frozenset(clients.ids)
    return algorithm.models_for(training.state, Channel(clients, absence)).own


def _log_warnings(warnings: Sequence[str]) -> None:
    """Log the warnings that an algorithm's check of the run returns."""
    for warning in warnings or ():  # the check of a user's own algorithm may return None
        _log.warning(warning)


def _stopped_before(training: TrainingState, settings: RunSettings) -> Stopped | None:
    """Return the reason if early stopping ends a continued run without another round.

    The result is None if the run should continue, or its settings have no early stopping.
    """
    stopping = settings.early_stopping
    if stopping is None or not 0 < training.number < settings.rounds:
        return None
    metric = metric_named(training.history.task.metrics, stopping.metric, "stop.metric")
    why = stopping.reason_in(training.history.metrics, metric)
    return None if why is None else Stopped(training.number, type(stopping).__name__, why)


def _end_now(backend: Backend, training: TrainingState) -> KeptRound:
    """Return the results with which the run would end if the current round were its last."""
    clients_with_own = set(training.clients_with_own or ())
    return KeptRound(
        round=training.number,
        tree=training.state.tree,
        kept=_drop_unused_models(backend.kept, clients_with_own),
        own_models=len(clients_with_own),
        similarities=tuple(training.history.similarities.values()),
    )


def _build_run(backend: Backend, training: TrainingState, config: Mapping[str, Any]) -> Run:
    """Build the finished run: its history, the models to store, and the tensors of its clients.

    The models are from the best round in a run with ``keep_best``, otherwise from the last round.
    """
    end = training.best or _end_now(backend, training)
    run = training.history.finish(
        config,
        backend.opened(end.tree),
        backend.device,
        backend.workers.layout,
        stopped=training.stopped,
        best=training.best,
        fallback=backend.workers.engine_fallback,
    )
    served = {"own_models": end.own_models} if end.own_models else {}
    return replace(run, kept=end.kept, summary={**run.summary, **served})


def first_state(algorithm: Algorithm, backend: Backend, clients: Clients) -> State:
    """Return the state of the algorithm before round 1.

    An algorithm may start from the clusters of an earlier run, which is then loaded from its
    folder.

    Raises
    ------
    ConfigError
        If the algorithm starts from the clusters of an earlier run, and the two runs differ in the
        number of entries of a model or in their clients.
    """
    folder = algorithm.requires.clusters_of
    if folder is None:
        return algorithm.init(backend.initial, clients)
    tree = Run.load(folder).tree
    found = tree.nodes[0].params.shape[-1]
    expected = backend.initial.shape[-1]
    if found != expected:
        raise ConfigError(
            f"the models of the run in {folder} have {found} entries, but the models of this run "
            f"have {expected}; start from the clusters of a run with the same model"
        )
    if odd := sorted(set(tree.leaf_of) ^ set(clients.ids)):
        raise ConfigError(
            f"the run in {folder} should have the same clients as this run; clients that are in "
            f"only one of the two runs: {shown(odd)}"
        )

    def here(vector: Tensor) -> Tensor:
        return vector.to(backend.initial.device)

    init: Callable[..., State] = algorithm.init  # takes a third argument here, see Algorithm.init
    return init(backend.initial, clients, backend.closed(tree.map_vectors(here, here)))


def run_round(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    training: TrainingState,
    settings: RunSettings,
    number: int,
) -> tuple[Row, tuple[Event, ...]]:
    """Run a round: train, evaluate if it is due, and add the results to the training state.

    Parameters
    ----------
    algorithm, backend, clients, settings
        See :func:`run_rounds`.
    training
        Progress of the run, which is updated in place.
    number
        Number of the round, from 1.

    Returns
    -------
    tuple
        The round's row of ``metrics.parquet``, and its events.
    """
    meter = backend.meter
    start = perf_counter()
    before = meter.readings()
    evaluated = number % settings.evaluate_every == 0 or number == settings.rounds
    this_round = RoundPlan(
        number,
        settings.local.in_round(number, settings.rounds),
        settings.seed,
        evaluated=evaluated,
        min_clients=settings.min_clients,
        rounds=settings.rounds,
    )
    state, came_and_went = clients.begin(algorithm, training.state, this_round)
    # Before the step too: clusters can be small from the start, or because clients have left.
    state, withheld = merged(state, settings.min_cluster_size)
    server = ServerSteps(settings.server, training.server, backend.workers.layout.n_parameters)
    state, log = step(algorithm, backend, clients, state, settings, this_round, server)
    state, told = merged(state, settings.min_cluster_size, log.events)
    log = replace(log, events=(*withheld, *told))
    check_models(number, training.state.tree, state.tree)
    events = (*came_and_went, *log.events)
    scores = RoundScores()
    if evaluated or algorithm.finished(state):
        scores = evaluate_round(algorithm, backend, clients, state, settings, number)
        training.clients_with_own = scores.own
        # Checked once, after the first evaluation.
        if scores.test is not None and not training.history.clients:
            _warn_of_scores(number, scores.test, [metric.name for metric in backend.task.metrics])
        if settings.needs_validation and not training.history.has_validation:
            metric = metric_named(backend.task.metrics, settings.chosen_by, "stop.metric")
            is_first = metric is backend.task.metrics[0]
            scores.check_validation(
                number, settings.needs_validation, None if is_first else metric.name
            )
    events = (*events, *backend.retrying.told(), *report_divergence(training.history, scores))
    log = replace(log, events=events)
    cost = meter.since(before, perf_counter() - start)
    cost |= {} if clients.present is None else {"clients_present": clients.present}
    cost |= _columns_of_adversaries(backend, training.history, number, state, scores)
    row = training.history.add(
        number, state, log, cost, scores.test, scores.nodes, scores.validation
    )
    training.number = number
    training.state = state
    training.server = server.moments
    return row, log.events


def _columns_of_adversaries(
    backend: Backend, history: History, number: int, state: State, scores: RoundScores
) -> Mapping[str, Any]:
    """Return the columns of ``metrics.parquet`` about an attack, with their values in a round.

    Empty if all clients are honest.
    """
    if backend.adversaries is None:
        return {}
    truth = history.registry.in_round(number).true_clusters
    return backend.adversaries.columns(scores.test, state.tree, truth, scores.success)


def report_divergence(history: History, scores: RoundScores) -> tuple[Event, ...]:
    """Log a warning if clients have newly diverged, and return the event that reports them.

    The result is empty if no client has newly diverged. ``history`` has the earlier losses,
    ``scores`` the scores of the current evaluation.
    """
    events = history.diverged(scores.test)
    for event in events:
        assert isinstance(event, Diverged)
        _log.warning(
            "training diverges: the loss of %d of %d clients grew a thousandfold, first of client "
            "%d; %s",
            len(event.clients),
            len(history.registry.ids),
            event.clients[0],
            ADVICE,
        )
    return events


def evaluate_last_round(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    training: TrainingState,
    settings: RunSettings,
) -> None:
    """Evaluate the last round of a run that ends early, if this round was not evaluated.

    See :func:`run_rounds` for the parameters; ``training`` is updated in place.
    """
    history = training.history
    number = training.number
    start = perf_counter()
    before = backend.meter.readings()
    this_round = RoundPlan(
        number,
        settings.local.in_round(number, settings.rounds),
        settings.seed,
        evaluated=True,
        min_clients=settings.min_clients,
        rounds=number,
    )
    state = algorithm.tune(training.state, clients, this_round)
    scores = evaluate_round(algorithm, backend, clients, state, settings, number)
    cost = backend.meter.since(before, perf_counter() - start)
    columns = _columns_of_adversaries(backend, history, number, state, scores)
    events = (
        *algorithm.tuning_events(state),
        *backend.retrying.told(),
        *report_divergence(history, scores),
    )
    history.evaluate_last(
        state,
        scores.test,
        scores.nodes,
        scores.validation,
        cost=cost,
        columns=columns,
        events=events,
    )
    training.state = state
    training.clients_with_own = scores.own
    note_best(backend, training, settings)


def evaluate_initial_models(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    training: TrainingState,
    settings: RunSettings,
) -> None:
    """Evaluate the models of a run without rounds, and record the scores as those of round 0.

    See :func:`run_rounds` for the parameters; ``training`` is updated in place.
    """
    history = training.history
    meter = backend.meter
    start = perf_counter()
    before = meter.readings()
    clients.stay(0, training.state.tree)
    scores = evaluate_round(algorithm, backend, clients, training.state, settings, 0)
    cost = meter.since(before, perf_counter() - start)
    log = RoundLog({}, {}, events=(*backend.retrying.told(), *report_divergence(history, scores)))
    history.add(0, training.state, log, cost, scores.test, scores.nodes, scores.validation)
    training.clients_with_own = scores.own


def note_best(backend: Backend, training: TrainingState, settings: RunSettings) -> None:
    """Store the results of the current round if it is the best so far, for ``keep_best``.

    Rounds are compared by scores on validation data. Without ``keep_best`` nothing is stored.
    """
    if not settings.keep_best:
        return
    history = training.history
    metric = metric_named(history.task.metrics, settings.chosen_by, "stop.metric")
    best = chosen_round(history.metrics, metric)
    if best is None or best is not history.metrics[-1]:
        return
    training.best = _end_now(backend, training)


def merged(state: State, least: int, events: Sequence[Event] = ()) -> tuple[State, Sequence[Event]]:
    """Merge clusters with fewer than ``least`` members into larger clusters.

    Returns
    -------
    tuple
        The state after merging; and the events of the round that may be reported. Events that
        would reveal something about a small cluster are left out, and one event counts the merged
        clusters (see :func:`merge_small <fedclade.runs.small_clusters.merge_small>`).
    """
    if least <= 1:
        return state, events
    tree, told = merge_small(state.tree, least, events)
    return (state if tree is state.tree else replace(state, tree=tree)), told


def step(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    state: State,
    settings: RunSettings,
    this_round: RoundPlan,
    server: ServerSteps | None = None,
) -> tuple[State, RoundLog]:
    """Sample a cohort from the available clients, and run a step of the algorithm with it.

    If no client is available, the state does not change.

    Parameters
    ----------
    algorithm, backend, clients, settings
        See :func:`run_rounds`.
    state
        State of the algorithm before the step.
    this_round
        Number, local training and random generators of the round.
    server
        Optimizers that make the steps of the clusters' models; None: models move by mean updates.

    Returns
    -------
    tuple
        The state after the step, and the algorithm's report of the round.
    """
    # With central privacy, noise must move the models even then, see below.
    if clients.present == 0 and not settings.is_central:
        _log.warning("round %d: no client is available, so no model changes", this_round.number)
        return state, RoundLog({}, {}, events=(*backend.retrying.told(), TooFew(0, 0)))
    fraction = settings.client_fraction
    draw = this_round.generator("cohort")
    noisy_sums = backend.noisy_sums
    if settings.is_central:
        # The accounting assumes that every client of the population is drawn with the same
        # probability, and that sums are divided by a number that does not depend on who is
        # available. Drawn clients that are unavailable send nothing.
        drawn, expected = sampled_singly(
            state.tree, algorithm.sample_cohort(state, 1.0, draw), fraction, draw
        )
        cohort = tuple(client for client in drawn if client not in clients.away)
    else:
        cohort = algorithm.sample_cohort(clients.there(state), fraction, draw)
        expected = dict[int, float]()
    backend.counting.add_cohort(cohort, this_round)
    after = state
    log = RoundLog({}, {}, events=(TooFew(0, 0),))
    if cohort or not settings.is_central:
        if noisy_sums is not None and settings.is_central:
            noisy_sums.expected = expected
        with nullcontext() if server is None else server.active():
            after, log = algorithm.step(state, cohort, clients, this_round)
    released: tuple[PrivateRelease, ...] = ()
    if noisy_sums is not None:
        noisy_sums.expected = None  # queries after the step are not sent to a random sample
        released = noisy_sums.told()
        if not cohort or any(event.about == "updates" for event in released):
            trained = {state.tree.leaf_of[client] for client in cohort}
            # The model of a cluster without sampled clients is also moved, by noise alone: an
            # unchanged model would reveal that none of its clients was sampled.
            nobody = {
                node: n
                for c, n in expected.items()
                if (node := state.tree.leaf_of[c]) not in trained
            }
            tree, more = noisy_sums.moved_by_noise(after.tree, nobody, released, this_round)
            after = replace(after, tree=tree)
            released = (*released, *more)
    if backend.common is not None:
        after = replace(
            after, tree=with_common(after.tree, backend.common, clients.weigh(clients.sizes))
        )
    named = {event.node for event in log.events if isinstance(event, TooFew)}
    alone = [
        event for event in clients.left_alone(state.tree, after.tree) if event.node not in named
    ]
    has_others = clients.present is not None and not set(cohort).issuperset(clients.reachable)
    closed = backend.retrying.closed(this_round.number, has_others=has_others)
    events = (*closed, *released, *alone, *log.events)
    return after, replace(log, events=events)


def sampled_singly(
    tree: ParameterTree, all_of_them: Sequence[int], fraction: float, draw: np.random.Generator
) -> tuple[tuple[int, ...], Mapping[int, float]]:
    """Sample each client independently (Poisson sampling).

    The privacy accounting of central differential privacy assumes this kind of sampling.

    Parameters
    ----------
    tree
        The clusters.
    all_of_them
        Clients to sample from.
    fraction
        Probability with which each client is sampled.
    draw
        Random generator.

    Returns
    -------
    tuple
        The sampled clients; and for each client in ``all_of_them``, the expected number of sampled
        clients in its cluster.
    """
    sizes = Counter(tree.leaf_of[client] for client in all_of_them)
    expected = {client: fraction * sizes[tree.leaf_of[client]] for client in all_of_them}
    drawn = draw.random(len(all_of_them)) < fraction
    return tuple(
        client for client, is_in in zip(all_of_them, drawn, strict=True) if is_in
    ), expected


def _drop_unused_models(kept: Kept, clients_with_own: Collection[int]) -> Kept:
    """Return the tensors that clients store, without models that are not used for evaluation.

    A client may store a model of its own and still be evaluated with a cluster's model; its stored
    model is then left out.
    """
    served: Kept = {}
    for client, stored in kept.items():
        tensors = dict(stored)
        if client not in clients_with_own:
            tensors.pop(OWN_MODEL, None)
        if tensors:
            served[client] = tensors
    return served


def check_models(number: int, before: ParameterTree, after: ParameterTree) -> None:
    """Check that the models that changed in a round are finite.

    Client updates with NaN or infinite entries were already left out when they arrived, so this
    check finds models that the aggregation or the algorithm itself has made NaN or infinite.

    Parameters
    ----------
    number
        Number of the round, from 1.
    before, after
        The trees before and after the round.

    Raises
    ------
    RunError
        If an entry of a model is NaN or infinite.
    """
    for node in after.nodes:
        if node.id < len(before.nodes) and before.nodes[node.id].model is node.model:
            continue
        if bad := int((~node.model.isfinite()).sum()):
            raise RunError(
                f"round {number}: the model of cluster {node.id} has diverged: {bad} of its "
                f"{len(node.model)} entries are NaN or infinite; its clients are "
                f"{shown(list(node.members))}; lower the step size local.lr, or algorithm.eta_g if "
                "the algorithm has this setting"
            )


def _warn_of_scores(number: int, evaluation: Evaluation, metrics: Sequence[str]) -> None:
    """Log a warning for each metric by which no client has a score; its columns will stay empty."""
    for name, scores in zip(metrics, evaluation.scores.T, strict=True):
        if len(scores) and bool(scores.isnan().all()):
            _log.warning(
                "round %d: no client has a score by %s, which is undefined for the test data of "
                "all %d clients; choose another metric, or give clients more test data",
                number,
                name,
                len(scores),
            )
