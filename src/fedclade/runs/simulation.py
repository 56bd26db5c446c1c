"""The function :func:`simulate`, which runs a federated algorithm with simulated clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from fedclade.algorithms import Algorithm, FedAvg, Local
from fedclade.channel import Adversary, Faults, Middleware
from fedclade.core import ParameterTree, RunInterrupted, checked
from fedclade.data import Federation
from fedclade.runs.assembly import assemble_run
from fedclade.runs.callbacks import Callback, Callbacks, OnRound, Stop
from fedclade.runs.churn import Churn
from fedclade.runs.gains import check_data, measure_gains, store_gains
from fedclade.runs.models import Maker, make_module
from fedclade.runs.references import (
    has_references,
    is_small,
    settings_of_reference,
    train_references,
)
from fedclade.runs.settings import RunOptions, RunSettings, settings_from
from fedclade.runs.simulated import Simulation
from fedclade.runs.stopping import FINISH, Finish
from fedclade.runs.store import Run
from fedclade.runs.store.contents import Row
from fedclade.runs.store.gains import ALONE
from fedclade.training import Actors, actors_from, check_engine, choose_device

_log = logging.getLogger(__name__)


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
    middleware: Sequence[Middleware] = (),
    references: bool | None = False,
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

    With a ``folder``, an interrupted run can be continued: the run saves checkpoints in the folder,
    and the same call continues from the last checkpoint. The result is the same as without the
    interruption, bit for bit on the same machine, except for the measured seconds.

    Parameters
    ----------
    algorithm
        An algorithm such as ``CFL(eps2=0.8)``, or its name for its default settings.
    model
        A module, whose parameters are the initial model; or a name that ``fedclade ls models``
        lists; or ``module:factory``; or a function that makes a module from a seed. An algorithm
        that starts from several models does not accept a module.
    federation
        The clients' data.
    settings
        Rounds, seed, local training and all other settings that do not depend on where clients run.
    device
        ``auto``, ``cpu``, ``cuda``, or one GPU of several such as ``cuda:1``.
    engine
        Method by which clients are trained: one of :data:`~fedclade.training.ENGINES`. It
        changes updates by rounding only. ``auto`` selects the fastest engine for the model and the
        machine, and the run reports its choice. ``ray`` uses actors of a Ray cluster, each with a
        shard of the clients.
    actors
        Number of Ray actors, or an :class:`~fedclade.Actors` with their cores and Ray cluster.
    tf32
        Whether a GPU may round the factors of float32 products to 10 bits, which is faster.
    faults
        Probabilities that clients drop out of a round, reply too late, or send unusable updates; if
        left out, no faults are simulated.
    adversary
        Selection of adversaries (malicious clients), and their attack; if left out, all clients are
        honest. Summaries score honest clients separately.
    presence
        Rounds in which the federation's newcomers join and clients leave, and the hours at which
        clients are available; if left out, all clients are always available.
    middleware
        Objects of your own that may change each query on its way to the clients, and each reply on
        its way back; see :class:`~fedclade.Middleware`. Replies pass through them last, in the
        given order, after the limits, the repetition of queries and the noise on sums. The config
        of a run records the middleware that has settings; a continued run must be given the same
        middleware again.
    references
        Whether to train two references as well, with the same seed, rounds and local training: each
        client alone, and one model for all by FedAvg. The report then compares the run with them on
        the same test rows of each client (:attr:`Run.gains <fedclade.Run.gains>`). With a
        ``folder``, references are stored in it, and continued if they were interrupted; they are
        also trained for a run that is already finished. References are not trained with ``finish``,
        or if the run diverged. False: the run is compared only with a trivial predictor, which
        needs no training, and only for up to 200 clients and 100,000 test rows. None: the run is
        not compared with any reference.
    callbacks
        Objects that are called for every split, every round and the end of the run; see
        :class:`~fedclade.Callback`.
    on_round, stop
        Functions in place of a callback. ``on_round`` is called after every round, with the round's
        metrics and the parameter tree. ``stop`` is called after every round but the last, without
        arguments; if it returns true, the run saves a checkpoint and raises
        :class:`~fedclade.RunInterrupted`. If either function returns :data:`fedclade.FINISH`, the
        run is finished after the round.
    config
        Config to record for the run; by default it is built from the arguments.
    folder
        Folder to which the run and its checkpoints are written. An unfinished run of the same
        config in the folder is continued. A finished run in the folder is returned, or continued if
        ``rounds`` is now larger.
    finish
        Whether to finish the unfinished run in the folder at its newest checkpoint, without another
        round: clients are evaluated, if they were not, and the results are written.
    progress
        Whether to show a progress bar with rounds, score and clusters. If left out, the bar is
        shown in a notebook and at Python's prompt, but not in a script.
    **options
        Single fields of :class:`RunSettings`, such as ``rounds=40, seed=1``; they take precedence
        over ``settings``.

    Returns
    -------
    Run
        Metrics, clusters and models of the run. If no ``folder`` was given, ``run.save(folder)``
        writes them to a folder.

    Raises
    ------
    ConfigError
        If an argument is out of range; a name is unknown; ``stream`` is true but the algorithm
        cannot stream; the algorithm starts from several models but a module is given; the algorithm
        requests other numbers than updates from private clients; or the adversaries cannot be
        drawn.
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
        If the folder contains other files than a run, or a run of another config, or cannot be
        written.
    CheckpointError
        If the folder contains checkpoints and none can be used, or a checkpoint cannot be written.
    RunInterrupted
        If ``stop`` or a callback interrupted the run.
    """
    settings = settings_from(settings, options, callbacks)
    following = Callbacks(settings.followed_by(callbacks), on_round, stop)
    check_engine(engine)
    actors = actors_from(actors, engine)
    deployment = Simulation.of(
        federation,
        settings,
        presence,
        engine=engine,
        actors=actors,
        tf32=tf32,
        faults=faults,
        adversary=adversary,
    )
    federation = deployment.federation
    everybody = deployment.everybody
    assembled = assemble_run(
        deployment,
        algorithm,
        model,
        settings,
        callbacks=following,
        middleware=middleware,
        config=config,
        folder=folder,
        finish=finish,
    )
    checkpointer = assembled.checkpointer
    task = assembled.task
    # The settings before they are adapted to a checkpoint of the run: references have own folders.
    given = assembled.settings

    def train_reference(name: str, rounds: int, place: Path | None) -> Run:
        """Train a reference with those settings of the run that apply to it.

        The reference is finished after the given number of rounds. This number is smaller than the
        number in the run's config if the run was finished early. The reference's config has the
        number in the run's config, so that the reference can be continued together with the run.
        """
        is_alone = name == ALONE

        def finish_with_run(row: Row, _: ParameterTree) -> Finish | None:
            """Finish the reference after as many rounds as the run had."""
            return FINISH if row["round"] >= rounds else None

        return simulate(
            Local() if is_alone else FedAvg(),
            model,
            federation,
            settings_of_reference(given, is_alone=is_alone),
            device=device,
            engine=engine,
            actors=actors if engine == "ray" else None,
            tf32=tf32,
            faults=None if is_alone else faults,
            adversary=None if is_alone else adversary,
            presence=presence,
            middleware=() if is_alone else middleware,
            references=None,
            on_round=finish_with_run,
            folder=place,
            stop=stop,
            progress=progress,
        )

    def measure(run: Run) -> Run:
        """Return the run with the gains of its clients, which are also written to its folder."""
        train = train_reference if references and not finish else None
        trained = train_references(run, train, checkpointer.path)
        module = make_module(model, federation.pool.schema, given.seed, given.parts)
        where = "cpu" if engine == "ray" else choose_device(device)
        gains = measure_gains(run, everybody, module, task, trained, where)
        return store_gains(run, gains, checkpointer.path)

    def with_gains(run: Run) -> Run:
        """Return a finished run with the gains of its clients; without gains if measuring fails."""
        if references is None or not (references or is_small(everybody)):
            return run
        try:
            return measure(run)
        # The results of the run are complete. Without a folder, raising an error would lose them.
        except RunInterrupted as error:
            if checkpointer.path is not None:
                raise
            _log.warning("the run has no gains, since a reference was %s", error.happened)
            return run
        # Any error is caught: a user's metric or model may fail.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.warning("the gains of clients could not be measured: %s", reason)
            return run

    if (finished := checkpointer.finished()) is not None:
        if references and not finish and not has_references(finished):
            check_data(finished, everybody)
            return with_gains(finished)
        if finished.gains is not None:
            return finished
        # The gains are missing if the process was killed just before it wrote them.
        return with_gains(finished)
    return with_gains(assembled.run(device, tf32=tf32, progress=progress))
