"""The round loop: sample a cohort, let the algorithm step, evaluate, keep the record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from fedclade.algorithms import ALGORITHMS, Algorithm, Oracle, build_algorithm
from fedclade.clients import Round
from fedclade.data.federation import Federation
from fedclade.engine.auto import check_engine
from fedclade.engine.precision import float32_products
from fedclade.errors import CheckpointError, ConfigError, RunInterrupted, require
from fedclade.faults import Faults
from fedclade.keeper import Every, Keeper, Progress
from fedclade.local import LocalSpec
from fedclade.presence import Presence, PresentClients
from fedclade.record import Record
from fedclade.signature import Signature
from fedclade.store import Run
from fedclade.store.run import Row
from fedclade.tree import ParameterTree
from fedclade.world import Maker, Stream, World, model_name

_log = logging.getLogger(__name__)

OnRound = Callable[[Row, ParameterTree], None]


def simulate(
    algorithm: Algorithm | str,
    model: nn.Module | str | Maker,
    federation: Federation,
    *,
    local: LocalSpec | None = None,
    rounds: int = 20,
    seed: int = 0,
    client_fraction: float = 1.0,
    evaluate_every: int = 1,
    target: float | None = None,
    permute: bool = False,
    device: str = "auto",
    engine: str = "auto",
    signature: Signature | None = None,
    stream: Stream = "auto",
    memory: int | str | None = None,
    min_clients: int = 1,
    faults: Faults | None = None,
    presence: Presence | None = None,
    tf32: bool = False,
    on_round: OnRound | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    checkpoint_every: Every = "auto",
    stop: Callable[[], bool] | None = None,
) -> Run:
    """Run a federated algorithm over simulated clients.

    With a ``folder`` the run survives: it leaves checkpoints there from which the same call goes on, and ends as if it
    had not been interrupted, bit for bit on the same machine but for the seconds it took.

    Parameters
    ----------
    algorithm
        An algorithm such as ``CFL(eps2=0.8)``, or its name for its defaults.
    model
        A module, whose parameters are the initial ones, or a name of ``fedclade ls models``, or ``module:factory``, or
        a function that makes a module from a seed. An algorithm that starts from several models takes no module.
    federation
        The clients' data.
    local
        Local training; ``LocalSpec()`` if left out.
    rounds
        Communication rounds, at least 1.
    seed
        Keys every random draw: the same seed gives the same run, bit for bit on the same machine.
    client_fraction
        Share of every cluster that trains in a round, in (0, 1]; C of FedAvg.
    evaluate_every
        Evaluate on the clients' test data after every so many rounds, and after the last.
    target
        Accuracy in (0, 1] whose reach is reported.
    permute
        Let clients shuffle what they send by a permutation that the server does not know (CFL eqs. 45, 46).
    device
        ``auto``, ``cpu`` or ``cuda``.
    engine
        How clients are trained: one of :data:`~fedclade.engine.auto.ENGINES`. Updates do not depend on it beyond
        rounding; ``auto`` takes the fastest for the model and the machine, and the run tells which that was.
    signature
        What clients are compared by; ``Signature()``, the whole update, if left out.
    stream
        Whether the server keeps no updates, only their sums and signatures, which must then be projected. Results do
        not depend on it beyond rounding. ``auto``: if the updates of all clients would take more than a quarter of
        ``memory``, signatures are projected, and the algorithm can do with that.
    memory
        What the data and the training of a round may take, in bytes or as ``"2GB"``; by default a quarter of the
        machine's or the GPU's memory. Where clients need more, they train in several blocks.
    min_clients
        A cluster of which fewer clients answer in a round keeps its model, and is not split.
    faults
        How often clients drop out of a round, are too late, or send what cannot be used; never, if left out.
    presence
        When the federation's newcomers join, and when clients leave; never, if left out.
    tf32
        Let a GPU round the factors of float32 products to 10 bits, which is faster.
    on_round
        Called after every round with its metrics and the tree.
    config
        What to note as the run's config; by default it is put together from the arguments.
    folder
        Where to keep the run from its start. A folder that holds an unfinished run of the same config is continued; of
        a finished one the run is returned, or continued if ``rounds`` is now larger.
    checkpoint_every
        Rounds between checkpoints in ``folder``. ``auto``: as often as costs less than 2 % of the run; 0: only when the
        run stops early.
    stop
        Asked after every round but the last; if it says yes, the run saves a checkpoint and stops.

    Returns
    -------
    Run
        Metrics, clusters, models; ``run.save(folder)`` keeps it if no ``folder`` did.

    Raises
    ------
    ConfigError
        If an argument is out of range, a name is unknown, a run that cannot stream is asked to, or the algorithm
        starts from several models, and the one given cannot be made anew.
    ModelError
        If the model does not fit the data.
    UpdateError
        If nobody answers in a round, be it that all training diverged.
    RunError
        If the folder holds something else or a run of another config, or cannot be written.
    CheckpointError
        If the folder holds checkpoints and none can be used, or one cannot be written.
    RunInterrupted
        If ``stop`` said so.
    """
    check_settings(rounds, seed, client_fraction, evaluate_every, target, engine, stream, min_clients, checkpoint_every)
    local, signature = local or LocalSpec(), signature or Signature()
    presence = presence or Presence()
    newcomers = 0 if federation.newcomers is None else len(federation.newcomers)
    presence.check(newcomers, len(federation), rounds)
    everybody = presence.everybody(federation)
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, true_clusters=everybody.true_clusters)
    check_stream(stream, type(algorithm), signature)
    config = config or {
        **{"seed": seed, "rounds": rounds, "client_fraction": client_fraction, "evaluate_every": evaluate_every},
        **{"engine": engine, "stream": stream},
        "min_clients": min_clients,
        "data": {"name": federation.pool.name, "description": str(federation)},
        "model": {"name": model_name(model, seed)},
        "local": asdict(local),
        "algorithm": describe(algorithm),
        "signature": asdict(signature),
        "target": {"accuracy": target},
        "privacy": {"permute": permute},
        "faults": asdict(faults or Faults()),
        "newcomers": {"clients": newcomers, **asdict(presence)},
    }
    config = {**config, "tf32": tf32}
    keeper = Keeper(folder, config, everybody, checkpoint_every)
    if (finished := keeper.finished()) is not None:
        return finished
    settings = keeper.settings(stream=stream, device=device, memory=memory)
    world = World.simulated_by(
        everybody,
        model,
        algorithm,
        seed=seed,
        permute=permute,
        engine=engine,
        signature=signature,
        faults=faults,
        **settings,
    )
    clients = presence.among(world.clients, federation, seed)
    if rounds < algorithm.rounds_needed:
        _log.warning(
            "%s needs %d rounds until it has clustered the clients, and this run has %d: it will be federated "
            "averaging; set more rounds, or a smaller algorithm.rounds_before",
            type(algorithm).__name__,
            algorithm.rounds_needed,
            rounds,
        )
    progress = keeper.progress(world, target)
    if progress is None:
        progress = Progress(0, algorithm.init(world.initial, clients), Record(everybody, target))
    keeper.begin()
    try:
        with float32_products(tf32):
            for number in range(progress.number + 1, rounds + 1):
                evaluated = number % evaluate_every == 0 or number == rounds
                this_round = Round(number, local, seed, evaluated=evaluated, min_clients=min_clients)
                row = run_round(algorithm, world, clients, progress, this_round, client_fraction)
                if on_round is not None:
                    on_round(row, progress.state.tree)
                keeper.after_round(progress, world)
                if stop is not None and number < rounds and stop():
                    keeper.stop(progress, world)
    except (CheckpointError, RunInterrupted):  # which saved what it could
        raise
    except Exception:
        keeper.rescue(progress, world)
        raise
    tree, layout = world.opened(progress.state.tree), world.simulated.layout
    run = progress.record.finish({**config, **world.settled}, tree, world.device, layout)
    keeper.finish(run)
    return run


def run_round(
    algorithm: Algorithm,
    world: World,
    clients: PresentClients,
    progress: Progress,
    this_round: Round,
    client_fraction: float,
) -> Row:
    """Run one round, and book it; return its row of ``metrics.parquet``.

    Parameters
    ----------
    clients
        Those of the world who are there.
    progress
        The run before the round, and afterwards after it.
    """
    meter, start = world.meter, perf_counter()
    before = meter.readings()
    state, came_and_went = clients.begin(algorithm, progress.state, this_round)
    cohort = algorithm.cohort(state, client_fraction, this_round.generator("cohort"))
    state, log = algorithm.step(state, cohort, clients, this_round)
    log = replace(log, events=(*came_and_went, *world.attendance.closed(this_round.number), *log.events))
    evaluation, served = None, dict[int, int]()
    if this_round.evaluated:
        served = dict(algorithm.serve(state, clients))
        models, rows = state.tree.models([served[client] for client in clients.ids])
        evaluation = clients.evaluate(clients.ids, models, rows, "test")
    cost = meter.since(before, perf_counter() - start)
    row = progress.record.add(this_round.number, state, log, cost, evaluation, served)
    progress.number, progress.state = this_round.number, state
    return row


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


def check_stream(stream: Stream, algorithm: type[Algorithm], signature: Signature) -> None:
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
        problems.append(f"stream = true: {algorithm.__name__} needs the updates of single clients; set stream = false")
    if signature.kind == "full":
        problems.append(
            "stream = true: signatures of kind 'full' take as much memory as the updates; set signature.kind = "
            "'projected'"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's name and hyper-parameters, as a config has them. The oracle's truth stays out."""
    names = {entry.algorithm: name for name, entry in ALGORITHMS.items()}
    name = names.get(type(algorithm), type(algorithm).__name__)
    options = asdict(algorithm) if is_dataclass(algorithm) and not isinstance(algorithm, Oracle) else {}
    return {"name": name, **options}
