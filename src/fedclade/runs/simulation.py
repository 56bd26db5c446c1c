"""Run a federated algorithm over clients that are simulated in this process."""

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

    With a ``folder`` the run survives: it leaves checkpoints there from which the same call goes
    on, and ends as if it had not been interrupted, bit for bit on the same machine but for the
    seconds it took.

    Parameters
    ----------
    algorithm
        An algorithm such as ``CFL(eps2=0.8)``, or its name for its defaults.
    model
        A module, whose parameters are the initial ones, or a name of ``fedclade ls models``, or
        ``module:factory``, or a function that makes a module from a seed. An algorithm that starts
        from several models takes no module.
    federation
        The clients' data.
    settings
        Rounds, seed, local training and whatever else does not depend on where clients are.
    device
        ``auto``, ``cpu`` or ``cuda``.
    engine
        How clients are trained: one of :data:`~fedclade.training.auto.ENGINES`. Updates do not
        depend on it beyond rounding; ``auto`` takes the fastest for the model and the machine, and
        the run reports which that was. Or ``ray``: actors of a Ray cluster, each with a shard of
        the clients.
    actors
        How many these are, or an :class:`~fedclade.Actors` that says where.
    tf32
        Let a GPU round the factors of float32 products to 10 bits, which is faster.
    faults
        How often clients drop out of a round, are too late, or send what cannot be used; never, if
        left out.
    adversary
        Which clients lie, and how; none, if left out. Summaries score honest clients apart.
    presence
        When the federation's newcomers join, when clients leave, and at which hours they are there;
        if left out, all are there all the time.
    callbacks
        What is told of every split, every round and the end; see :class:`~fedclade.Callback`.
    on_round, stop
        Functions in place of a callback: called after every round with its metrics and the tree;
        called after every round but the last without anything, and if it returns true, the run
        saves a checkpoint and stops. If either returns :data:`fedclade.FINISH`, the run is finished
        after the round.
    config
        What to note as the run's config; by default it is put together from the arguments.
    folder
        Where to keep the run from its start. A folder that holds an unfinished run of the same
        config is continued; of a finished one the run is returned, or continued if ``rounds`` is
        now larger.
    finish
        Run no further round, but finish the unfinished run in the folder where its newest
        checkpoint stands: evaluate it, unless that is done, and write its results.
    progress
        Whether to show a bar with rounds, score and clusters. If left out, in a notebook and at
        Python's prompt, and not in a script.
    **options
        Single fields of :class:`RunSettings`, such as ``rounds=40, seed=1``; they win over
        ``settings``.

    Returns
    -------
    Run
        Metrics, clusters, models; ``run.save(folder)`` keeps it if no ``folder`` did.

    Raises
    ------
    ConfigError
        If an argument is out of range, a name is unknown, a run that cannot stream should, the
        algorithm starts from several models, and the one given cannot be made anew, it asks private
        clients for more than updates, or there cannot be such adversaries.
    MissingExtraError
        If clients are private and ``dp-accounting`` is not installed, or the engine is ``ray`` and
        Ray is not.
    EngineError
        If there is no Ray cluster, or its actors die again and again.
    ModelError
        If the model does not fit the data.
    UpdateError
        If nobody answers in a round, be it that all training diverged.
    RunError
        If the folder holds something else or a run of another config, or cannot be written.
    CheckpointError
        If the folder holds checkpoints and none can be used, or one cannot be written.
    RunInterrupted
        If ``stop`` or a callback said so.
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
