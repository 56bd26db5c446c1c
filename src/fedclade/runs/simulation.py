"""Run a federated algorithm over clients that are simulated in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.channel import DifferentialPrivacy, Faults, Signature
from fedclade.core import LocalSpec, checked
from fedclade.data import Federation
from fedclade.runs.backend import Backend, Maker, Stream, model_name
from fedclade.runs.checkpointer import Checkpointer, Every
from fedclade.runs.churn import Churn
from fedclade.runs.history import History
from fedclade.runs.rounds import (
    Follow,
    OnRound,
    Schedule,
    check_privacy,
    check_settings,
    check_stream,
    config_of,
    run_rounds,
)
from fedclade.runs.store import Run


@checked()
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
    privacy: DifferentialPrivacy | None = None,
    presence: Churn | None = None,
    tf32: bool = False,
    on_round: OnRound | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    checkpoint_every: Every = "auto",
    stop: Callable[[], bool] | None = None,
    follow: Follow | None = None,
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
        How clients are trained: one of :data:`~fedclade.training.auto.ENGINES`. Updates do not depend on it beyond
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
    privacy
        How clients clip their updates, and how much noise they put on; not at all, if left out.
    presence
        When the federation's newcomers join, and when clients leave; never, if left out.
    tf32
        Let a GPU round the factors of float32 products to 10 bits, which is faster.
    on_round
        Called after every round with its metrics and the tree. If it fails, that is told in a warning, once, and the
        run goes on; an error of fedclade's own, such as ``RunInterrupted``, ends it.
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
    follow
        Called after every round, from the first that was evaluated on, with a function that returns the run so far.

    Returns
    -------
    Run
        Metrics, clusters, models; ``run.save(folder)`` keeps it if no ``folder`` did.

    Raises
    ------
    ConfigError
        If an argument is out of range, a name is unknown, a run that cannot stream is asked to, the algorithm starts
        from several models, and the one given cannot be made anew, or it asks private clients for more than updates.
    MissingExtraError
        If clients are private and ``dp-accounting`` is not installed.
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
    presence = presence or Churn()
    newcomers = 0 if federation.newcomers is None else len(federation.newcomers)
    presence.check(newcomers, len(federation), rounds)
    everybody = presence.everybody(federation)
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, true_clusters=everybody.true_clusters)
    algorithm.check_clients(len(federation))
    check_stream(stream, algorithm, signature)
    check_privacy(privacy, type(algorithm))
    schedule = Schedule(rounds, local, seed, client_fraction, evaluate_every, min_clients, tf32)
    config = config or config_of(
        schedule,
        algorithm,
        {"engine": engine, "stream": stream},
        data={"name": federation.pool.name, "description": str(federation)},
        model={"name": model_name(model, seed)},
        signature=asdict(signature),
        target={"accuracy": target},
        privacy={"permute": permute, **(asdict(privacy) if privacy else {})},
        faults=asdict(faults or Faults()),
        newcomers={"clients": newcomers, **asdict(presence)},
    )
    config = {**config, "tf32": tf32}
    keeper = Checkpointer(folder, config, checkpoint_every, lambda: everybody.fingerprint)
    if (finished := keeper.finished()) is not None:
        return finished
    settings = keeper.settings(stream=stream, device=device, memory=memory)
    world = Backend.simulated_by(
        everybody,
        model,
        algorithm,
        seed=seed,
        permute=permute,
        engine=engine,
        signature=signature,
        faults=faults,
        privacy=privacy,
        **settings,
    )
    present, record = presence.among(world.clients, federation, seed), History(everybody.roster, target)
    with keeper:
        return run_rounds(algorithm, world, present, keeper, record, schedule, on_round, stop, follow)
