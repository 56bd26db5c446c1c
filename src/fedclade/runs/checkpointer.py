"""Checkpoints of a run: their content, when to save them, and how to continue from them.

A checkpoint is the state of a run after a round, stored in the run's folder. An interrupted run
continues from its newest checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, Self

import torch

from fedclade.algorithms import Algorithm, State
from fedclade.core import (
    CheckpointError,
    ConfigError,
    RunInterrupted,
    ServerMoments,
    files_of_rows_in,
    moments_as_tensors,
    moments_from_tensors,
    remove,
)
from fedclade.runs.backend import Backend
from fedclade.runs.history import History, versions
from fedclade.runs.reference_log import RunLog
from fedclade.runs.settings import Every, RunSettings
from fedclade.runs.stopping import Stopped
from fedclade.runs.store import Checkpoint, KeptRound, Run, RunFolder
from fedclade.runs.store.contents import TO_NOTE, check_shape, plain
from fedclade.runs.store.run import is_finished

TIMES_A_SAVE = 60
"""Time between checkpoints with ``auto``, in multiples of the duration of the slowest save so far.

Saving then takes less than 2 % of a run's time: 1 / 61 = 1.6 %.
"""

FIRST_SAVE_SECONDS = 0.05
FIRST_SAVE_BYTES = 100e6
"""Estimated cost of the first save: a constant number of seconds, and bytes written per second."""

_log = RunLog(logging.getLogger(__name__))


@dataclass(eq=False)
class TrainingState:
    """Progress of a run after a round: the algorithm's state and the history of all rounds."""

    number: int  #: number of the last finished round; 0 before the first
    state: State  #: the algorithm's state after that round
    history: History  #: history of all rounds so far
    #: reason for finishing the run after that round; None if it continues
    stopped: Stopped | None = None
    best: KeptRound | None = None  #: the best round so far, in a run that stores the best round
    #: moments of each cluster's server optimizer, by node; empty without a server optimizer
    server: Mapping[int, ServerMoments] = field(default_factory=dict[int, ServerMoments])
    #: clients that were evaluated with their own models in the last evaluation; None before it
    clients_with_own: Collection[int] | None = None


class CheckpointPolicy:
    """Rule that decides after which rounds a checkpoint is saved.

    Parameters
    ----------
    every
        Number of rounds between checkpoints; 0: never; ``auto``: whenever saving costs little time.
    clock
        Function that returns the time in seconds.
    """

    def __init__(self, every: Every, clock: Callable[[], float] = perf_counter) -> None:
        self._every: Every = every
        self._clock = clock
        self._since = clock()
        self._slowest: float | None = None

    def due(self, training: TrainingState) -> bool:
        """Return whether to save a checkpoint of ``training``, the state after a round."""
        if self._every != "auto":
            return self._every > 0 and training.number % self._every == 0
        seconds = self._slowest
        if seconds is None:
            size = sum(node.params.nbytes for node in training.state.tree.nodes)
            seconds = FIRST_SAVE_SECONDS + size / FIRST_SAVE_BYTES
        return self._clock() - self._since >= TIMES_A_SAVE * seconds

    @contextmanager
    def saving(self) -> Generator[None]:
        """Measure the duration of the ``with`` block, which saves a checkpoint.

        If ``every`` is ``auto``, the time until the next checkpoint is proportional to the longest
        duration so far.
        """
        start = self._clock()
        yield
        self._since = self._clock()
        self._slowest = max(self._slowest or 0.0, self._since - start)


class Checkpointer:
    """Writer and reader of a run's folder, with its checkpoints; without a folder it does nothing.

    Use it as a context manager around the run. When the ``with`` block ends, other processes may
    write to the folder again.

    Parameters
    ----------
    folder
        Folder of the run, or None.
    config
        Config of the run.
    every
        See :class:`CheckpointPolicy`.
    fingerprint
        Function that returns a digest of the data, see :attr:`Federation.fingerprint
        <fedclade.data.Federation.fingerprint>`.
    finish
        Whether to finish the run in the folder at its newest checkpoint, without another round.

    Raises
    ------
    ConfigError
        If the config lacks settings of a complete run, or ``finish`` is set without a folder.
    RunError
        If the folder contains other files than a run, or a run with another config.
    CheckpointError
        If the folder contains checkpoints and none can be used, or ``finish`` is set and the folder
        contains no checkpoint.
    """

    def __init__(
        self,
        folder: str | Path | None,
        config: Mapping[str, Any],
        every: Every,
        fingerprint: Callable[[], str],
        *,
        finish: bool = False,
    ) -> None:
        self._folder = None if folder is None else RunFolder(Path(folder))
        self.config = config = plain(config)
        try:
            check_shape(config, TO_NOTE, "the config to record for a run")
        except ValueError as error:
            raise ConfigError(
                f"{error}; pass the config of a complete run, or leave out the argument config to "
                "have the config built from the other arguments"
            ) from error
        self._fingerprint = fingerprint
        self._policy = CheckpointPolicy(every)
        self._saved = 0  # the round of the newest checkpoint
        self._saved_evaluated = False  # whether the newest checkpoint has the round's evaluation
        self._is_new = False  # whether this run created the folder's content
        self._found: Checkpoint | None = None
        if self._folder is not None:
            self._folder.check(config)
            if not self._folder.holds_all(config):
                with files_of_rows_in(self._folder.path):
                    self._found = self._folder.newest(config, fingerprint())
                self._check_end_of_network_run(self._folder.path)
        self._finish = finish
        if finish and self._folder is None:
            raise ConfigError(
                "finish = True finishes the unfinished run in a folder, but no folder is given; "
                "pass the path of the run's folder as folder="
            )
        if finish and self._found is None and self.finished() is None:
            raise CheckpointError(
                f"the run in {folder} cannot be finished, since the folder contains no checkpoint; "
                "call again without finish to train the run from round 1"
            )

    def _check_end_of_network_run(self, folder: Path) -> None:
        """Check that a finished run of a network can be continued from its end.

        The clients of a simulation can repeat rounds without harm. The clients of a network would
        train the same rounds again, and their privacy would be charged for them again.

        Raises
        ------
        CheckpointError
            If the folder of a finished run of a network has no checkpoint.
        """
        if "network" not in self.config or not is_finished(folder):
            return
        done = Run.load(folder).summary["rounds"]
        if done == 0:
            return
        if self._found is None:
            raise CheckpointError(
                f"the run in {folder} is finished after {done} rounds, but its folder has no "
                "checkpoint, so its clients would have to repeat all rounds; restore the folder "
                f"{folder / 'checkpoints'} from a copy, or name another folder for a new run"
            )
        if self._found.round < done:
            _log.warning(
                "the newest checkpoint of %s is of round %d, so the clients repeat rounds %d to "
                "%d, and clients with differential privacy are charged for them again",
                *(folder, self._found.round, self._found.round + 1, done),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.leave()

    @property
    def path(self) -> Path | None:
        """Path of the run's folder; None for a run without a folder."""
        return None if self._folder is None else self._folder.path

    def finished(self) -> Run | None:
        """Return the finished run in the folder, if it has all rounds of the config.

        The result is None if there is no folder, the run in the folder is unfinished, or it was
        finished with fewer rounds than the config now requires.
        """
        if self._folder is None or not self._folder.holds_all(self.config):
            return None
        self._folder.clear()
        return Run.load(self._folder.path)

    def resumed(self, settings: RunSettings, device: str) -> tuple[RunSettings, str, str | None]:
        """Adapt the settings and the device to the checkpoint from which a run is continued.

        A continued run streams (sums updates as they arrive) if and only if it did so before the
        interruption. The memory limit is taken from the checkpoint if ``settings.memory`` is None,
        and the device if ``device`` is ``auto``.

        Returns
        -------
        tuple
            The settings; the device; and the engine that the run used before the interruption, or
            None for a new run.

        Raises
        ------
        ConfigError
            If the checkpoint was made on the CPU, and ``device`` is ``cuda``.
        """
        if self._found is None:
            return settings, device, None
        before = self._found.made_with
        if before["device"] == "cpu" and device.startswith("cuda"):
            raise ConfigError(
                f"device = {device!r}: this run began on the CPU and can only be continued on the "
                f"CPU; leave out --device {device}"
            )
        memory = before["memory"] if settings.memory is None else settings.memory
        settings = replace(settings, stream=self._found.config["stream"], memory=memory)
        return settings, before["device"] if device == "auto" else device, before["engine"]

    def restored(
        self, algorithm: Algorithm, backend: Backend, history: History
    ) -> TrainingState | None:
        """Return the state of the run at its newest checkpoint; None for a new run.

        A warning is logged if packages, device or threads have changed since the checkpoint in a
        way that affects rounding.

        Raises
        ------
        CheckpointError
            If the models of the checkpoint and of the backend differ in their number of entries.
        """
        if self._found is None:
            return None
        found = self._found.moved(backend.device)
        entries = found.tree.nodes[0].params.shape[-1]
        expected = backend.initial.shape[-1]
        if entries != expected:
            raise CheckpointError(
                f"the checkpoint of round {found.round} contains models of {entries} entries, but "
                f"the given model has {expected}; pass the model with which the run began"
            )
        _warn_of_changes(found.made_with, _made_with(backend))
        backend.load_tensors(found.stores)
        self._saved = found.round
        history = replace(
            history, **found.rows, similarities={s.node: s for s in found.similarities}
        )
        self._saved_evaluated = history.is_evaluated
        state = algorithm.state_type.from_tensors(found.tree, found.memory)
        # If the run now has more rounds than before, its callbacks decide again when to stop.
        is_longer = self.config["rounds"] > found.config["rounds"]
        if is_longer:
            self._warn_of_planned_rounds(found, algorithm)
        stopped = None if found.stopped is None or is_longer else Stopped(**found.stopped)
        if self._finish and stopped is None and found.round < self.config["rounds"]:
            stopped = Stopped(found.round, "user", "finished by hand after an interruption")
        server = moments_from_tensors(found.server)
        return TrainingState(found.round, state, history, stopped, found.best, server)

    def _warn_of_planned_rounds(self, found: Checkpoint, algorithm: Algorithm) -> None:
        """Log a warning if settings of a run that is continued depend on its number of rounds."""
        planned: list[str] = []
        if algorithm.requires.plans_rounds:
            planned.append(f"the decisions of the algorithm {self.config['algorithm']['name']}")
        if self.config.get("local", {}).get("lr_schedule") is not None:
            planned.append("the step sizes of local.lr_schedule")
        every = found.config.get("evaluate_every", 1)
        # A run that is evaluated only at its end has no other evaluations to compare with.
        if found.round == found.config["rounds"] > every and found.round % every:
            planned.append("the evaluation of a last round that evaluate_every leaves out")
        if planned:
            _log.warning(
                "this run continues with %d instead of %d rounds, but differs from a run of %d "
                "rounds from the start, since %s depended on the number of rounds until now",
                *(self.config["rounds"], found.config["rounds"], self.config["rounds"]),
                " and ".join(planned),
            )

    def begin(self) -> None:
        """Create the run's folder if it does not exist, and lock it against other processes."""
        if self._folder is not None:
            self._is_new = self._folder.begin(self.config)

    def after_round(self, training: TrainingState, backend: Backend) -> None:
        """Save a checkpoint of the round that has ended, if the checkpoint policy requires it."""
        if self._folder is not None and self._policy.due(training):
            self._save(training, backend)

    def after_last_round(self, training: TrainingState, backend: Backend) -> None:
        """Save a checkpoint of the end of the run, from which it can be continued for more rounds.

        Without this checkpoint, the continued run would repeat the rounds after the last
        checkpoint: clients of a network would train again, and would again be charged for privacy.
        If the checkpoint cannot be written, a warning is logged, since the run itself is complete.
        """
        has_evaluation = training.history.is_evaluated
        if self._saved == training.number and has_evaluation and not self._saved_evaluated:
            self._saved = 0  # a run that ends early is evaluated after its last checkpoint
        try:
            self._save(training, backend)
        except CheckpointError as error:
            _log.warning("%s", error)

    def stop(self, training: TrainingState, backend: Backend) -> NoReturn:
        """Save a checkpoint of an interrupted run, and raise :class:`~fedclade.RunInterrupted`."""
        self._save(training, backend)
        then = (
            "the run has no folder, so its state is lost"
            if self._folder is None
            else f"the same call continues from {self._folder.path}"
        )
        raise RunInterrupted(f"interrupted after round {training.number}", then)

    def rescue(self, training: TrainingState, backend: Backend) -> None:
        """Save a checkpoint of a run that fails, so that it can be continued.

        If the run fails in its first round, there is nothing to save: the folder is removed if this
        run has created it.
        """
        if training.number == 0:
            if self._folder is not None and self._is_new:
                remove(self._folder.path)
            return
        try:
            self._save(training, backend)
        except CheckpointError as error:  # not raised: the caller raises the run's own error
            _log.warning("%s", error)

    def finish(self, run: Run) -> None:
        """Write the results of a run into its folder, which marks the run as finished."""
        if self._folder is not None:
            run.finish(self._folder.path)

    def _save(self, training: TrainingState, backend: Backend) -> None:
        if self._folder is None or self._saved == training.number:
            return
        with self._policy.saving():
            self._folder.save(self._make_checkpoint(training, backend))
        self._saved = training.number
        self._saved_evaluated = training.history.is_evaluated

    def _make_checkpoint(self, training: TrainingState, backend: Backend) -> Checkpoint:
        memory = training.state.tensors()
        history = training.history
        return Checkpoint(
            round=training.number,
            config={**self.config, **backend.settled},
            made_with=_made_with(backend),
            fingerprint=self._fingerprint(),
            tree=training.state.tree,
            memory=memory,
            on_cpu=frozenset(
                name for name, tensor in memory.items() if tensor.device.type == "cpu"
            ),
            rows={
                name: getattr(history, name)
                for name in ("metrics", "clusters", "clients", "events")
            },
            similarities=tuple(history.similarities.values()),
            stores=backend.stored_tensors(),
            stopped=None if training.stopped is None else training.stopped.as_dict(),
            best=training.best,
            summary=self._summarize(training, backend),
            server=moments_as_tensors(training.server),
        )

    def _summarize(self, training: TrainingState, backend: Backend) -> Mapping[str, Any] | None:
        """Return the summary of a run in progress; None before the first evaluation."""
        if not training.history.clients:
            return None
        config = {**self.config, **backend.settled}
        run = training.history.finish(
            config, training.state.tree, backend.device, fallback=backend.workers.engine_fallback
        )
        progress = {"round": training.number, "of": self.config["rounds"]}
        return {**run.summary, "unfinished": progress}


def _warn_of_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log a warning if packages, device or threads differ from those of the checkpoint."""
    changed = [
        f"{key} {was!r} is now {now[key]!r}" for key, was in before.items() if was != now[key]
    ]
    if changed:
        _log.warning(
            "the result of the continued run may differ by rounding from an uninterrupted run, "
            "since the execution has changed: %s",
            ", ".join(changed),
        )


def _made_with(backend: Backend) -> dict[str, Any]:
    """Return the properties of the execution that affect rounding and are not in the config.

    These are the engine, the device, the memory limit (which decides how many clients train
    together), the number of threads, and the versions of packages.
    """
    return {
        "engine": backend.workers.engine_taken,
        "device": backend.device,
        "memory": backend.memory,
        "threads": torch.get_num_threads(),
        **versions(),
    }
