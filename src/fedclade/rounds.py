"""The round loop: sample a cohort, let the algorithm step, evaluate, keep the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from time import perf_counter
from typing import Any

from torch import nn

from fedclade.algorithms import ALGORITHMS, Algorithm, Oracle, build_algorithm
from fedclade.clients import Round
from fedclade.data.federation import Federation
from fedclade.engine.auto import check_engine
from fedclade.engine.precision import float32_products
from fedclade.errors import ConfigError, require
from fedclade.local import LocalSpec
from fedclade.record import Record
from fedclade.signature import Signature
from fedclade.store import Run
from fedclade.store.run import Row
from fedclade.tree import ParameterTree
from fedclade.world import Maker, Stream, World

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
    tf32: bool = False,
    on_round: OnRound | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Run a federated algorithm over simulated clients.

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
    tf32
        Let a GPU round the factors of float32 products to 10 bits, which is faster.
    on_round
        Called after every round with its metrics and the tree.
    config
        What to note as the run's config; by default it is put together from the arguments.

    Returns
    -------
    Run
        Metrics, clusters, models; ``run.save(folder)`` keeps it.

    Raises
    ------
    ConfigError
        If an argument is out of range, a name is unknown, a run that cannot stream is asked to, or the algorithm
        starts from several models, and the one given cannot be made anew.
    ModelError
        If the model does not fit the data.
    UpdateError
        If a client's training diverges.
    """
    check_settings(rounds, seed, client_fraction, evaluate_every, target, engine, stream)
    local, signature = local or LocalSpec(), signature or Signature()
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, true_clusters=federation.true_clusters)
    check_stream(stream, type(algorithm), signature)
    world = World.simulated_by(
        federation,
        model,
        algorithm,
        seed=seed,
        permute=permute,
        device=device,
        engine=engine,
        signature=signature,
        stream=stream,
        memory=memory,
    )
    clients, meter = world.clients, world.meter
    record = Record(federation, target)
    state = algorithm.init(world.initial, clients)
    with float32_products(tf32):
        for number in range(1, rounds + 1):
            start, before = perf_counter(), meter.readings()
            this_round = Round(number, local, seed, evaluated=number % evaluate_every == 0 or number == rounds)
            cohort = algorithm.cohort(state, client_fraction, this_round.generator("cohort"))
            state, log = algorithm.step(state, cohort, clients, this_round)
            evaluation, served = None, dict[int, int]()
            if this_round.evaluated:
                served = dict(algorithm.serve(state, clients))
                models, rows = state.tree.models([served[client] for client in federation.ids])
                evaluation = clients.evaluate(federation.ids, models, rows, "test")
            cost = meter.since(before, perf_counter() - start)
            row = record.add(number, state, log, cost, evaluation, served)
            if on_round is not None:
                on_round(row, state.tree)

    config = config or {
        **{"seed": seed, "rounds": rounds, "client_fraction": client_fraction, "evaluate_every": evaluate_every},
        "data": {"name": federation.pool.name, "description": str(federation)},
        "model": {"name": model if isinstance(model, str) else world.simulated.model_name},
        "local": asdict(local),
        "algorithm": describe(algorithm),
        "signature": asdict(signature),
        "target": {"accuracy": target},
        "privacy": {"permute": permute},
    }
    # What was done, not auto: rounding depends on it, and the config should repeat the run.
    done = {"engine": world.simulated.engine, "stream": world.streams, "tf32": tf32}
    return record.finish({**config, **done}, world.opened(state.tree), world.device, world.simulated.layout)


def check_settings(
    rounds: int,
    seed: int,
    client_fraction: float,
    evaluate_every: int,
    target: float | None,
    engine: str,
    stream: Stream = "auto",
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
        ("stream", stream, stream in (True, False, "auto"), "true, false or 'auto'"),
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
