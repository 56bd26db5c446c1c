"""The round loop: sample a cohort, let the algorithm step, evaluate, keep the record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from fedclade.algorithms import Algorithm
from fedclade.core import (
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

_log = logging.getLogger(__name__)

OnRound = Callable[[Row, ParameterTree], None]

Follow = Callable[[Callable[[], Run]], None]
"""Called after a round with what makes a run of the rounds so far, which is to be called before the next if at all."""


def run_rounds(
    algorithm: Algorithm,
    world: Backend,
    clients: ComingAndGoing,
    keeper: Checkpointer,
    record: History,
    settings: RunSettings,
    on_round: OnRound | None = None,
    stop: Callable[[], bool] | None = None,
    follow: Follow | None = None,
) -> Run:
    """Run an algorithm over the clients of a world, from the start or from where its folder says that it stood.

    Parameters
    ----------
    algorithm, world
        What is run.
    clients
        Those of the world who are there.
    keeper
        Keeps the run.
    record
        An empty book.
    settings, on_round, stop, follow
        See :func:`fedclade.simulate`.

    Raises
    ------
    UpdateError
        If nobody answers in a round.
    RunError
        If a cluster's model is no longer finite, or the run's folder cannot be written.
    CheckpointError
        If there is a checkpoint of another model, or one cannot be written.
    RunInterrupted
        If ``stop`` said so.
    """
    if missed := algorithm.too_short(settings.rounds):
        _log.warning(missed)
    tell = _unfailing(on_round)
    progress = keeper.progress(algorithm, world, record)
    if progress is None:
        algorithm.check_clients(len(clients.ids))
        progress = TrainingState(0, algorithm.init(world.initial, clients), record)
    keeper.begin()

    def so_far() -> Run:
        config = {**keeper.config, **world.settled}
        return progress.record.finish(config, progress.state.tree, world.device)

    try:
        for number in range(progress.number + 1, settings.rounds + 1):
            if algorithm.finished(progress.state):
                break
            row = run_round(algorithm, world, clients, progress, settings, number)
            tell(row, progress.state.tree)
            if follow is not None and progress.record.clients:
                follow(so_far)
            keeper.after_round(progress, world)
            over = number == settings.rounds or algorithm.finished(progress.state)
            if stop is not None and not over and stop():
                keeper.stop(progress, world)
    except (CheckpointError, RunInterrupted):  # which saved what it could
        raise
    except Exception:
        keeper.rescue(progress, world)
        raise
    tree = world.opened(progress.state.tree)
    run = progress.record.finish({**keeper.config, **world.settled}, tree, world.device, world.workers.layout)
    keeper.finish(run)
    return run


def run_round(
    algorithm: Algorithm,
    world: Backend,
    clients: ComingAndGoing,
    progress: TrainingState,
    settings: RunSettings,
    number: int,
) -> Row:
    """Run one round, and book it; return its row of ``metrics.parquet``.

    Parameters
    ----------
    algorithm, world, clients, settings
        As in :func:`run_rounds`.
    progress
        The run before the round, and afterwards after it.
    number
        The round, from 1.
    """
    meter, start = world.meter, perf_counter()
    before = meter.readings()
    evaluated = number % settings.evaluate_every == 0 or number == settings.rounds
    this_round = Round(number, settings.local, settings.seed, evaluated=evaluated, min_clients=settings.min_clients)
    state, came_and_went = clients.begin(algorithm, progress.state, this_round)
    cohort = algorithm.cohort(state, settings.client_fraction, this_round.generator("cohort"))
    state, log = algorithm.step(state, cohort, clients, this_round)
    check_models(number, progress.state.tree, state.tree)
    events = (*came_and_went, *world.attendance.closed(number), *log.events)
    evaluation, served = None, dict[int, int]()
    if evaluated or algorithm.finished(state):
        served = dict(algorithm.serve(state, clients))
        models, rows = state.tree.models([served[client] for client in clients.ids])
        answered = clients.evaluate(clients.ids, models, rows, "test")
        evaluation = answered if answered.ids else None
        _warn_of_losses(number, answered)
    log = replace(log, events=(*events, *world.attendance.told()))
    cost = meter.since(before, perf_counter() - start)
    row = progress.record.add(number, state, log, cost, evaluation, served)
    progress.number, progress.state = number, state
    return row


def check_models(number: int, before: ParameterTree, after: ParameterTree) -> None:
    """Check that the models that a round has moved are still finite.

    Single updates that are not were left out where they came in; what is left is what the algorithm does with them.

    Raises
    ------
    RunError
        If one is not; names the round and the cluster.
    """
    for node in after.nodes:
        if node.id < len(before.nodes) and before.nodes[node.id].params is node.params:
            continue
        if bad := int((~node.params.isfinite()).sum()):
            raise RunError(
                f"round {number}: the model of cluster {node.id} has diverged: {bad} of its {len(node.params)} entries "
                f"are NaN or infinite; its clients are {shown(list(node.members))}; lower the step size local.lr, or "
                "algorithm.eta_g where there is one"
            )


def _warn_of_losses(number: int, evaluation: Evaluation) -> None:
    if bad := [
        c for c, finite in zip(evaluation.ids, evaluation.losses.isfinite().tolist(), strict=True) if not finite
    ]:
        _log.warning(
            "round %d: the test losses of %d of %d clients are NaN or infinite, first of client %d; if training "
            "diverged, lower local.lr",
            number,
            len(bad),
            len(evaluation.ids),
            bad[0],
        )


def _unfailing(on_round: OnRound | None) -> OnRound:
    """Return what to call after a round: where that fails, a run is worth more, and goes on.

    An error of fedclade's own, such as :class:`~fedclade.core.errors.RunInterrupted`, does end the run.
    """
    failed = False

    def tell(row: Row, tree: ParameterTree) -> None:
        nonlocal failed
        if on_round is None:
            return
        try:
            on_round(row, tree)
        except FedcladeError:
            raise
        except Exception:
            if not failed:
                _log.warning("on_round failed in round %d; the run goes on", row["round"], exc_info=True)
            failed = True

    return tell
