"""The round loop: sample a cohort, let the algorithm step, evaluate, keep the record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from time import perf_counter
from typing import Any

from torch import nn

from fedclade import rng
from fedclade.algorithms import ALGORITHMS, Algorithm, Oracle, build_algorithm
from fedclade.clients import Clients, MeteredClients, Round
from fedclade.data.federation import Federation
from fedclade.engine.auto import check_engine
from fedclade.engine.clients import SimulatedClients, choose_device
from fedclade.engine.memory import memory_bytes
from fedclade.errors import require
from fedclade.local import LocalSpec
from fedclade.models import build_model
from fedclade.record import Record
from fedclade.signature import Permutation, PermutedClients
from fedclade.store import Run
from fedclade.store.run import Row
from fedclade.tree import ParameterTree

OnRound = Callable[[Row, ParameterTree], None]


def simulate(
    algorithm: Algorithm | str,
    model: nn.Module | str,
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
    memory: int | str | None = None,
    on_round: OnRound | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Run a federated algorithm over simulated clients.

    Parameters
    ----------
    algorithm
        An algorithm such as ``CFL(eps2=0.8)``, or its name for its defaults.
    model
        A module, whose parameters are the initial ones, or a name of ``fedclade ls models``, or ``module:factory``.
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
    memory
        What the data and the training of a round may take, in bytes or as ``"2GB"``; by default a quarter of the
        machine's or the GPU's memory. Where clients need more, they train in several blocks.
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
        If an argument is out of range or a name is unknown.
    ModelError
        If the model does not fit the data.
    UpdateError
        If a client's training diverges.
    """
    check_settings(rounds, seed, client_fraction, evaluate_every, target, engine)
    budget = None if memory is None else memory_bytes(memory)
    local = local or LocalSpec()
    device = choose_device(device)
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, true_clusters=federation.true_clusters)
    module = module_for(model, federation, seed) if isinstance(model, str) else copy.deepcopy(model)
    simulated = SimulatedClients(federation, module, device, engine, budget)
    params, layout = simulated.layout.flatten(module), simulated.layout
    secret = rng.torch_seed(seed, "the clients' secret")
    permutation = Permutation(secret, layout.size, layout.n_parameters) if permute else None
    clients: Clients = PermutedClients(simulated, permutation) if permutation else simulated
    meter, record = MeteredClients(clients), Record(federation, target)

    state = algorithm.init(permutation.apply(params) if permutation else params, meter)
    for number in range(1, rounds + 1):
        start, before = perf_counter(), meter.readings()
        this_round = Round(number, local, seed)
        cohort = algorithm.cohort(state, client_fraction, this_round.generator("cohort"))
        state, log = algorithm.step(state, cohort, meter, this_round)
        evaluation, served = None, dict[int, int]()
        if number % evaluate_every == 0 or number == rounds:
            served = dict(algorithm.serve(state, meter))
            models, rows = state.tree.models([served[client] for client in federation.ids])
            evaluation = meter.evaluate(federation.ids, models, rows, "test")
        cost = meter.since(before, perf_counter() - start)
        row = record.add(number, state, log, cost, evaluation, served)
        if on_round is not None:
            on_round(row, state.tree)

    # The clients open what only they can read: the folder then holds models that work.
    tree = state.tree.map_vectors(permutation.invert) if permutation else state.tree
    config = config or {
        **{"seed": seed, "rounds": rounds, "client_fraction": client_fraction, "evaluate_every": evaluate_every},
        "data": {"name": federation.pool.name, "description": str(federation)},
        "model": {"name": model if isinstance(model, str) else type(model).__name__},
        "local": asdict(local),
        "algorithm": describe(algorithm),
        "target": {"accuracy": target},
        "privacy": {"permute": permute},
    }
    # The engine that was taken, not auto: rounding depends on it, and the config should repeat the run.
    return record.finish({**config, "engine": simulated.engine}, tree, device)


def module_for(name: str, federation: Federation, seed: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model by name for a federation's data; see :func:`fedclade.models.build_model`."""
    pool = federation.pool
    return build_model(
        name,
        input_shape=pool.input_shape,
        outputs=pool.outputs,
        task=pool.task,
        vocabulary_size=len(pool.vocabulary),
        seed=seed,
        arguments=arguments,
    )


def check_settings(
    rounds: int, seed: int, client_fraction: float, evaluate_every: int, target: float | None, engine: str
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
    )
    check_engine(engine)


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """Return an algorithm's name and hyper-parameters, as a config has them. The oracle's truth stays out."""
    names = {entry.algorithm: name for name, entry in ALGORITHMS.items()}
    name = names.get(type(algorithm), type(algorithm).__name__)
    options = asdict(algorithm) if is_dataclass(algorithm) and not isinstance(algorithm, Oracle) else {}
    return {"name": name, **options}
