"""The round loop: sample a cohort, let the algorithm step, evaluate, keep the record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from time import perf_counter
from typing import Any

from fedclade.algorithms import ALGORITHMS, Algorithm, Oracle
from fedclade.channel import (
    DifferentialPrivacy,
    Signature,
    refusal,
)
from fedclade.core import (
    CheckpointError,
    ConfigError,
    Evaluation,
    FedcladeError,
    LocalSpec,
    ParameterTree,
    Round,
    RunError,
    RunInterrupted,
    require,
    shown,
)
from fedclade.runs.backend import Backend, Stream
from fedclade.runs.checkpointer import Checkpointer, TrainingState
from fedclade.runs.churn import ComingAndGoing
from fedclade.runs.history import History
from fedclade.runs.store import Run
from fedclade.runs.store.run import Row
from fedclade.training import check_engine, float32_products

_log = logging.getLogger(__name__)

OnRound = Callable[[Row, ParameterTree], None]

Follow = Callable[[Callable[[], Run]], None]
"""Called after a round with what makes a run of the rounds so far, which is to be called before the next if at all."""


@dataclass(frozen=True)
class Schedule:
    """What is done in how many rounds; see :func:`fedclade.simulate` for each."""

    rounds: int
    local: LocalSpec
    seed: int = 0
    client_fraction: float = 1.0
    evaluate_every: int = 1
    min_clients: int = 1
    tf32: bool = False


def run_rounds(
    algorithm: Algorithm,
    world: Backend,
    clients: ComingAndGoing,
    keeper: Checkpointer,
    record: History,
    schedule: Schedule,
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
    schedule, on_round, stop, follow
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
    if schedule.rounds < algorithm.rounds_needed:
        _log.warning(
            "%s needs %d rounds until it has clustered the clients, and this run has %d: it will be federated "
            "averaging; set more rounds%s",
            type(algorithm).__name__,
            algorithm.rounds_needed,
            schedule.rounds,
            f", or a smaller algorithm.{algorithm.waits_by}" if algorithm.waits_by else "",
        )
    tell = _unfailing(on_round)
    progress = keeper.progress(world, record)
    if progress is None:
        progress = TrainingState(0, algorithm.init(world.initial, clients), record)
    keeper.begin()

    def so_far() -> Run:
        config = {**keeper.config, **world.settled}
        return progress.record.finish(config, progress.state.tree, world.device)

    try:
        with float32_products(schedule.tf32):
            for number in range(progress.number + 1, schedule.rounds + 1):
                if algorithm.finished(progress.state):
                    break
                row = run_round(algorithm, world, clients, progress, schedule, number)
                tell(row, progress.state.tree)
                if follow is not None and progress.record.clients:
                    follow(so_far)
                keeper.after_round(progress, world)
                over = number == schedule.rounds or algorithm.finished(progress.state)
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
    schedule: Schedule,
    number: int,
) -> Row:
    """Run one round, and book it; return its row of ``metrics.parquet``.

    Parameters
    ----------
    algorithm, world, clients, schedule
        As in :func:`run_rounds`.
    progress
        The run before the round, and afterwards after it.
    number
        The round, from 1.
    """
    meter, start = world.meter, perf_counter()
    before = meter.readings()
    evaluated = number % schedule.evaluate_every == 0 or number == schedule.rounds
    this_round = Round(number, schedule.local, schedule.seed, evaluated=evaluated, min_clients=schedule.min_clients)
    state, came_and_went = clients.begin(algorithm, progress.state, this_round)
    cohort = algorithm.cohort(state, schedule.client_fraction, this_round.generator("cohort"))
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


def config_of(
    schedule: Schedule, algorithm: Algorithm, settled: Mapping[str, Any], **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """Put together what to note as the config of a run that came without one.

    Parameters
    ----------
    schedule, algorithm
        What is run.
    settled
        Settings that the schedule does not have.
    **sections
        Sections by name.
    """
    top = {key: value for key, value in asdict(schedule).items() if key not in ("local", "tf32")}
    return {**top, **settled, "local": asdict(schedule.local), "algorithm": describe(algorithm), **sections}


def check_settings(
    rounds: int,
    seed: int,
    client_fraction: float,
    evaluate_every: int,
    target: float | None,
    engine: str,
    stream: Stream = "auto",
    min_clients: int = 1,
    checkpoint_every: int | str = "auto",
) -> None:
    """Check the settings of the round loop.

    Raises
    ------
    ConfigError
        If one is out of range; one line for each. If there is no engine of that name.
    """
    require(
        ("rounds", rounds, rounds >= 1, "at least 1"),
        ("seed", seed, seed >= 0, "at least 0"),
        ("client_fraction", client_fraction, 0 < client_fraction <= 1, "greater than 0 and at most 1"),
        ("evaluate_every", evaluate_every, evaluate_every >= 1, "at least 1"),
        ("target.accuracy", target, target is None or 0 < target <= 1, "greater than 0 and at most 1"),
        ("min_clients", min_clients, min_clients >= 1, "at least 1"),
        ("stream", stream, stream in (True, False, "auto"), "true, false or 'auto'"),
        (
            *("checkpoint_every", checkpoint_every),
            checkpoint_every == "auto" or (isinstance(checkpoint_every, int) and checkpoint_every >= 0),
            "a number of rounds, 0 for none, or 'auto'",
        ),
    )
    check_engine(engine)


def check_stream(stream: Stream, algorithm: Algorithm, signature: Signature) -> None:
    """Check that a run that is asked to stream can.

    Raises
    ------
    ConfigError
        If the algorithm needs the updates of single clients, or signatures are full; one line for each.
    """
    if stream is not True:
        return
    problems: list[str] = []
    if algorithm.needs_updates:
        name = type(algorithm).__name__
        problems.append(f"stream = true: {name} needs the updates of single clients; set stream = false")
    if signature.kind == "full":
        problems.append(
            "stream = true: signatures of kind 'full' take as much memory as the updates; set signature.kind = "
            "'projected'"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_privacy(privacy: DifferentialPrivacy | None, algorithm: type[Algorithm]) -> None:
    """Check that a run with private clients can do, and can state its ε in the end.

    Raises
    ------
    ConfigError
        If the algorithm asks clients for more than updates.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    if privacy is None:
        return
    if algorithm.asks_for:
        raise refusal(f"{algorithm.asks_for} that {algorithm.__name__} asks for")
    privacy.epsilon(1)


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's name and hyper-parameters, as a config has them. The oracle's truth stays out."""
    names = {entry.algorithm: name for name, entry in ALGORITHMS.items()}
    name = names.get(type(algorithm), type(algorithm).__name__)
    options = asdict(algorithm) if is_dataclass(algorithm) and not isinstance(algorithm, Oracle) else {}
    return {"name": name, **options}
