"""Simulation of a federated algorithm with clients in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.channel import Adversary, Faults, refusal
from fedclade.core import checked
from fedclade.data import Federation
from fedclade.runs.adversaries import Adversaries
from fedclade.runs.backend import Backend, fitted_task
from fedclade.runs.callbacks import Callback, Callbacks, OnRound, Stop, progress_shown
from fedclade.runs.checkpointer import Checkpointer
from fedclade.runs.churn import Churn, fingerprint
from fedclade.runs.example_inputs import check_inputs_apart
from fedclade.runs.history import History, check_validation, metric_named
from fedclade.runs.models import Maker, model_name, target_of
from fedclade.runs.rounds import run_rounds
from fedclade.runs.settings import RunOptions, RunSettings, settings_from
from fedclade.runs.store import Run
from fedclade.training import Actors, actors_from, check_engine, float32_products


@checked()
def simulate(
    algorithm: Algorithm | str,
    model: nn.Module | str | Maker,
    federation: Federation,
    settings: RunSettings | None = None,
    *,
    device: str = "auto",
    engine: str = "auto",
    actors: Actors | int | None = None,
    tf32: bool = False,
    faults: Faults | None = None,
    adversary: Adversary | None = None,
    presence: Churn | None = None,
    callbacks: Sequence[Callback] = (),
    on_round: OnRound | None = None,
    stop: Stop | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    finish: bool = False,
    progress: bool | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Run a federated algorithm over simulated clients.

    With a ``folder``, an interrupted run can be continued: it saves checkpoints there, and the same
    call continues from the last one. The result is the same as without the interruption, bit for
    bit on the same machine, except for the measured seconds.

    Parameters
    ----------
    algorithm
        An algorithm such as ``CFL(eps2=0.8)``, or its name for its default settings.
    model
        A module, whose parameters are the initial ones, or a name of ``fedclade ls models``, or
        ``module:factory``, or a function that makes a module from a seed. An algorithm that starts
        from several models takes no module.
    federation
        The clients' data.
    settings
        Rounds, seed, local training and all other settings that do not depend on where clients run.
    device
        ``auto``, ``cpu`` or ``cuda``.
    engine
        Method by which clients are trained: one of :data:`~fedclade.training.auto.ENGINES`. Updates
        do not depend on it beyond rounding. ``auto`` takes the fastest for the model and the
        machine, and the run reports its choice. ``ray`` uses actors of a Ray cluster, each with a
        shard of the clients.
    actors
        Number of Ray actors, or an :class:`~fedclade.Actors` with their cores and Ray cluster.
    tf32
        Let a GPU round the factors of float32 products to 10 bits, which is faster.
    faults
        Probabilities that clients drop out of a round, reply too late, or send unusable updates; no
        faults, if left out.
    adversary
        Selection of adversaries, and their attack; none, if left out. Summaries score honest
        clients separately.
    presence
        Rounds in which the federation's newcomers join and clients leave, and the hours at which
        clients are available; if left out, all clients are always available.
    callbacks
        Objects that are called for every split, every round and the end of the run; see
        :class:`~fedclade.Callback`.
    on_round, stop
        Functions in place of a callback. ``on_round`` is called after every round with its metrics
        and the tree. ``stop`` is called after every round but the last, without arguments; if it
        returns true, the run saves a checkpoint and stops. If either returns
        :data:`fedclade.FINISH`, the run is finished after the round.
    config
        Config to record for the run; by default it is built from the arguments.
    folder
        Folder for the run and its checkpoints, from its start. A folder that holds an unfinished
        run of the same config is continued. If the run is finished, it is returned, or continued if
        ``rounds`` is now larger.
    finish
        Run no further round, but finish the unfinished run in the folder at its newest checkpoint:
        evaluate it, unless that is done, and write its results.
    progress
        Whether to show a bar with rounds, score and clusters. If left out, it is shown in a
        notebook and at Python's prompt, and not in a script.
    **options
        Single fields of :class:`RunSettings`, such as ``rounds=40, seed=1``; they take precedence
        over ``settings``.

    Returns
    -------
    Run
        Metrics, clusters, models; ``run.save(folder)`` writes it to a folder if no ``folder`` was
        given.

    Raises
    ------
    ConfigError
        If an argument is out of range, a name is unknown, a run that cannot stream should, the
        algorithm starts from several models and the given one cannot be made again, the algorithm
        requests more than updates from private clients, or such adversaries are not possible.
    MissingExtraError
        If clients are private and ``dp-accounting`` is not installed, or the engine is ``ray`` and
        Ray is not installed.
    EngineError
        If there is no Ray cluster, or its actors die repeatedly.
    ModelError
        If the model does not fit the data.
    UpdateError
        If no client replies in a round, for example because training diverged on all clients.
    RunError
        If the folder holds something else or a run of another config, or cannot be written.
    CheckpointError
        If the folder holds checkpoints and none can be used, or one cannot be written.
    RunInterrupted
        If ``stop`` or a callback interrupted the run.
    """
    settings = settings_from(settings, options, callbacks)
    following = Callbacks(settings.followed_by(callbacks), on_round, stop)
    check_engine(engine)
    actors = actors_from(actors, engine)
    presence = presence or Churn()
    newcomers = 0 if federation.newcomers is None else len(federation.newcomers)
    presence.check(newcomers, len(federation), settings.rounds)
    everybody = presence.everybody(federation)
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, None, *everybody.truth)
    algorithm.check_clients(len(federation))
    algorithm.check_data(federation.pool.schema)
    settings = settings.completed(algorithm)
    settings.check_algorithm(algorithm, len(federation))
    settings.check_enough(len(federation))
    if (
        settings.privacy
        and federation.pool.columns is not None
        and federation.pool.columns.are_scaled_together
    ):
        raise refusal("sums of their data (standardize = 'federated')")
    check_inputs_apart(settings.privacy, federation)
    if settings.needs_validation:
        check_validation(everybody, settings.needs_validation)
    task = fitted_task(settings, federation)
    metric_named(task.metrics, settings.chosen_by, "stop.metric")
    (adversary or Adversary()).check_stream(settings.stream, central=settings.is_central)
    adversaries = Adversaries.drawn(adversary, everybody, task, settings.seed)
    # Adversaries are drawn for a task, and can change balanced class weights by what they report.
    if adversaries is not None:
        task = fitted_task(settings, federation, adversaries)
        adversaries = replace(adversaries, task=task)
    target = target_of(settings, task)
    config = config or settings.as_config(
        algorithm,
        task,
        engine,
        data={"name": federation.pool.name, "description": str(federation)},
        model=model_name(model, settings.seed),
        faults=asdict(faults or Faults()),
        newcomers={
            "clients": newcomers,
            "join_round": presence.join_round,
            "leave_round": presence.leave_round,
        },
        **({} if presence.trace is None else {"presence": presence.of_trace}),
        **({"adversary": adversary.described} if adversary else {}),
    )
    config = {**config, "tf32": tf32, **settings.stopping_noted}
    every = settings.checkpoint_every
    timetable = presence.timetable(everybody, settings.seed)
    checkpointer = Checkpointer(
        folder, config, every, lambda: fingerprint(everybody, timetable), finish=finish
    )
    if (finished := checkpointer.finished()) is not None:
        return finished
    settings, device, taken = checkpointer.resumed(settings, device)
    backend = Backend.simulated_by(
        everybody,
        model,
        algorithm,
        settings,
        device=device,
        engine=engine,
        taken=taken,
        faults=faults,
        actors=actors,
        adversaries=adversaries,
    )
    lying = None if adversaries is None else adversaries.lying
    present = presence.among(
        backend.clients, federation, settings.seed, timetable, backend.absence, lying
    )
    history = History(
        everybody.roster,
        task,
        target,
        adversaries=adversaries,
        least=settings.min_cluster_size,
        chosen_by=settings.chosen_by,
    )
    bar = progress_shown(progress, config["algorithm"]["name"], settings.rounds, following)
    with checkpointer, float32_products(tf32), closing(backend), bar as following:
        return run_rounds(algorithm, backend, present, checkpointer, history, settings, following)
