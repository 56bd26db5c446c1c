"""The round loop: sample a cohort, let the algorithm step, evaluate, keep the history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from time import perf_counter

from torch import Tensor

from fedclade.algorithms import Algorithm
from fedclade.core import (
    OWN,
    CheckpointError,
    Evaluation,
    FedcladeError,
    ParameterTree,
    Round,
    RunError,
    RunInterrupted,
    shown,
)
from fedclade.runs.backend import Backend
from fedclade.runs.checkpointer import Checkpointer, TrainingState
from fedclade.runs.churn import ComingAndGoing
from fedclade.runs.history import History
from fedclade.runs.settings import RunSettings
from fedclade.runs.store import Run
from fedclade.runs.store.run import Row
from fedclade.training import OWN_MODEL

Kept = dict[int, dict[str, Tensor]]
"""What clients keep, by name."""

_log = logging.getLogger(__name__)

OnRound = Callable[[Row, ParameterTree], None]

Follow = Callable[[Callable[[], Run]], None]
"""Called after a round with a function that makes a run of the rounds so far; it may be called before the next."""


def run_rounds(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    checkpointer: Checkpointer,
    history: History,
    settings: RunSettings,
    on_round: OnRound | None = None,
    stop: Callable[[], bool] | None = None,
    follow: Follow | None = None,
) -> Run:
    """Run an algorithm over those clients of a backend that are there, from the start or from where its folder stands.

    ``history`` is empty; see :func:`fedclade.simulate` for the others, and for what is raised.
    """
    if missed := algorithm.too_short(settings.rounds):
        _log.warning(missed)
    on_round = _unfailing(on_round) if on_round else None
    training = checkpointer.restored(algorithm, backend, history)
    if training is None:
        algorithm.check_clients(len(clients.ids))
        training = TrainingState(0, algorithm.init(backend.initial, clients), history)
    checkpointer.begin()

    def so_far() -> Run:
        config = {**checkpointer.config, **backend.settled}
        return training.history.finish(config, training.state.tree, backend.device)

    try:
        for number in range(training.number + 1, settings.rounds + 1):
            if algorithm.finished(training.state):
                break
            row = run_round(algorithm, backend, clients, training, settings, number)
            if on_round is not None:
                on_round(row, training.state.tree)
            if follow is not None and training.history.clients:
                follow(so_far)
            checkpointer.after_round(training, backend)
            over = number == settings.rounds or algorithm.finished(training.state)
            if stop is not None and not over and stop():
                checkpointer.stop(training, backend)
    except (CheckpointError, RunInterrupted):  # which saved what it could
        raise
    except Exception:
        checkpointer.rescue(training, backend)
        raise
    tree = backend.opened(training.state.tree)
    config, layout = {**checkpointer.config, **backend.settled}, backend.workers.layout
    run = training.history.finish(config, tree, backend.device, layout)
    keepers = set(algorithm.keepers(training.state))
    served = {"own_models": len(keepers)} if keepers else {}
    run = replace(run, kept=_served(backend.kept, keepers), summary={**run.summary, **served})
    checkpointer.finish(run)
    return run


def run_round(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    training: TrainingState,
    settings: RunSettings,
    number: int,
) -> Row:
    """Run round ``number``, from 1, and add it to the training state; return its row of ``metrics.parquet``."""
    meter, start = backend.meter, perf_counter()
    before = meter.readings()
    evaluated = number % settings.evaluate_every == 0 or number == settings.rounds
    this_round = Round(number, settings.local, settings.seed, evaluated=evaluated, min_clients=settings.min_clients)
    state, came_and_went = clients.begin(algorithm, training.state, this_round)
    cohort = algorithm.cohort(state, settings.client_fraction, this_round.generator("cohort"))
    state, log = algorithm.step(state, cohort, clients, this_round)
    check_models(number, training.state.tree, state.tree)
    events = (*came_and_went, *backend.retrying.closed(number), *log.events)
    evaluation, served = None, dict[int, int]()
    if evaluated or algorithm.finished(state):
        served = dict(algorithm.serve(state, clients))
        models, rows = state.tree.models([served[client] for client in clients.ids], served=True)
        own = set(algorithm.keepers(state))
        rows = [OWN if client in own else row for client, row in zip(clients.ids, rows, strict=True)]
        answered = clients.evaluate(clients.ids, models, rows, "test")
        evaluation = answered if answered.ids else None
        _warn_of_losses(number, answered)
    log = replace(log, events=(*events, *backend.retrying.told()))
    cost = meter.since(before, perf_counter() - start)
    row = training.history.add(number, state, log, cost, evaluation, served)
    training.number, training.state = number, state
    return row


def _served(kept: Kept, keepers: Collection[int]) -> Kept:
    """Return what clients keep, without the models of their own of those that are not served with theirs."""
    left = {c: mine if c in keepers else {n: t for n, t in mine.items() if n != OWN_MODEL} for c, mine in kept.items()}
    return {client: mine for client, mine in left.items() if mine}


def check_models(number: int, before: ParameterTree, after: ParameterTree) -> None:
    """Check that the models that a round has moved are still finite.

    Single updates that are not were left out where they came in; what is left is what the algorithm does with them.
    """
    for node in after.nodes:
        if node.id < len(before.nodes) and before.nodes[node.id].model is node.model:
            continue
        if bad := int((~node.model.isfinite()).sum()):
            raise RunError(
                f"round {number}: the model of cluster {node.id} has diverged: {bad} of its {len(node.model)} entries "
                f"are NaN or infinite; its clients are {shown(list(node.members))}; lower the step size local.lr, or "
                "algorithm.eta_g where there is one"
            )


def _warn_of_losses(number: int, evaluation: Evaluation) -> None:
    finite = evaluation.losses.isfinite().tolist()
    if bad := [client for client, holds in zip(evaluation.ids, finite, strict=True) if not holds]:
        _log.warning(
            "round %d: the test losses of %d of %d clients are NaN or infinite, first of client %d; if training "
            "diverged, lower local.lr",
            number,
            len(bad),
            len(evaluation.ids),
            bad[0],
        )


def _unfailing(on_round: OnRound) -> OnRound:
    """Return what to call after a round: a run outlives its failures, unless they are errors of fedclade's own."""
    failed = False

    def call(row: Row, tree: ParameterTree) -> None:
        nonlocal failed
        try:
            on_round(row, tree)
        except FedcladeError:
            raise
        except Exception:
            if not failed:
                _log.warning("on_round failed in round %d; the run goes on", row["round"], exc_info=True)
            failed = True

    return call
