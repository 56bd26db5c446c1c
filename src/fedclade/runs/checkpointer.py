"""Checkpoints of a run: their content, when to save them, and how to continue from one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, Self

import torch

from fedclade.algorithms import Algorithm, State
from fedclade.core import CheckpointError, ConfigError, RunInterrupted, remove
from fedclade.runs.backend import Backend
from fedclade.runs.history import History, versions
from fedclade.runs.settings import Every, RunSettings
from fedclade.runs.stopping import Stopped
from fedclade.runs.store import Checkpoint, KeptRound, Run, RunFolder
from fedclade.runs.store.contents import TO_NOTE, check_shape, plain

TIMES_A_SAVE = 60
"""Time between checkpoints with ``auto``, in multiples of the time that the slowest save took.

Saving then takes less than 2 % of a run: 1 / 61 = 1.6 %.
"""

FIRST_SAVE_SECONDS = 0.05
FIRST_SAVE_BYTES = 100e6
"""Estimated cost of the first save: seconds that each save takes, and bytes written per second."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingState:
    """Progress of a run: the algorithm's state and the history after a round."""

    number: int  #: number of the last finished round; 0 before the first
    state: State  #: the algorithm's state after that round
    history: History  #: history of all rounds so far
    stopped: Stopped | None = None  #: why the run is finished after that round; None if it is not
    best: KeptRound | None = None  #: the best round so far, in a run that stores the best round


class CheckpointPolicy:
    """Rule that decides when to save the next checkpoint.

    Parameters
    ----------
    every
        Number of rounds between checkpoints; 0: never; ``auto``: whenever saving costs little time.
    clock
        Returns the time in seconds.
    """

    def __init__(self, every: Every, clock: Callable[[], float] = perf_counter) -> None:
        self._every: Every = every
        self._clock = clock
        self._since = clock()
        self._slowest: float | None = None

    def due(self, training: TrainingState) -> bool:
        """Whether to save a checkpoint after this round."""
        if self._every != "auto":
            return self._every > 0 and training.number % self._every == 0
        seconds = self._slowest
        if seconds is None:
            size = sum(node.params.nbytes for node in training.state.tree.nodes)
            seconds = FIRST_SAVE_SECONDS + size / FIRST_SAVE_BYTES
        return self._clock() - self._since >= TIMES_A_SAVE * seconds

    @contextmanager
    def saving(self) -> Generator[None]:
        """Measure the duration of the block, which saves a checkpoint."""
        start = self._clock()
        yield
        self._since = self._clock()
        self._slowest = max(self._slowest or 0.0, self._since - start)


class Checkpointer:
    """Writer and reader of a run's folder; without a folder it does nothing.

    Use it as a context that begins with the run: at its end, other processes may write to the
    folder again.

    Parameters
    ----------
    folder
        Folder of the run, or None.
    config
        Config of the run.
    every
        See :class:`CheckpointPolicy`.
    fingerprint
        Returns the fingerprint of the data, see :attr:`Federation.fingerprint
        <fedclade.data.Federation.fingerprint>`.
    finish
        Whether to finish the run in the folder at its newest checkpoint, without another round.

    Raises
    ------
    ConfigError
        If the config is not that of a whole run, or ``finish`` is set without a folder.
    RunError
        If the folder holds something else, or a run of another config.
    CheckpointError
        If the folder holds checkpoints and none can be used, or ``finish`` is set and there is no
        checkpoint.
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
            check_shape(config, TO_NOTE, "a config to note")
        except ValueError as error:
            raise ConfigError(
                f"{error}; give that of a whole run, or leave it out to have it put together"
            ) from error
        self._fingerprint = fingerprint
        self._policy = CheckpointPolicy(every)
        self._saved = 0  # the round of the newest checkpoint
        self._is_new = False  # whether the folder holds only the beginning of this run
        self._found: Checkpoint | None = None
        if self._folder is not None:
            self._folder.check(config)
            if not self._folder.holds_all(config):
                self._found = self._folder.newest(config, fingerprint())
        self._finish = finish
        if finish and self._folder is None:
            raise ConfigError(
                "finish = True finishes the run that is in a folder, and none is given; name it: "
                "folder="
            )
        if finish and self._found is None and self.finished() is None:
            raise CheckpointError(
                f"{folder} has no checkpoint, so no round of a run can be finished there"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.leave()

    @property
    def path(self) -> Path | None:
        """Folder of the run."""
        return None if self._folder is None else self._folder.path

    def finished(self) -> Run | None:
        """Return the run in the folder if it has had all its rounds, or else None."""
        if self._folder is None or not self._folder.holds_all(self.config):
            return None
        self._folder.clear()
        return Run.load(self._folder.path)

    def resumed(self, settings: RunSettings, device: str) -> tuple[RunSettings, str, str | None]:
        """Return the settings and the device, adapted to the run that is continued.

        If a run is continued, it streams or not as before; memory and device are as before if they
        are not set.

        Returns
        -------
        tuple
            Settings, device, and the engine that the run used before, None if no run is continued.

        Raises
        ------
        ConfigError
            If the run used the CPU, and ``device`` is ``cuda``.
        """
        if self._found is None:
            return settings, device, None
        before = self._found.made_with
        if before["device"] == "cpu" and device == "cuda":
            raise ConfigError(
                "the run began on the CPU and can only go on there; leave out --device cuda"
            )
        memory = before["memory"] if settings.memory is None else settings.memory
        settings = replace(settings, stream=self._found.config["stream"], memory=memory)
        return settings, before["device"] if device == "auto" else device, before["engine"]

    def restored(
        self, algorithm: Algorithm, backend: Backend, history: History
    ) -> TrainingState | None:
        """Return the progress of the run that is continued; None if no run is continued.

        Raises
        ------
        CheckpointError
            If the models of the checkpoint have another size than those of the backend.
        """
        if self._found is None:
            return None
        found = self._found.moved(backend.device)
        entries = found.tree.nodes[0].params.shape[-1]
        expected = backend.initial.shape[-1]
        if entries != expected:
            raise CheckpointError(
                f"the checkpoint of round {found.round} holds models of {entries} entries, and the "
                f"model given has {expected}; give the run the model that it began with"
            )
        now = _made_with(backend)
        if changed := [
            f"{key} {was!r} is now {now[key]!r}"
            for key, was in found.made_with.items()
            if was != now[key]
        ]:
            _log.warning(
                "the run may end in other bits than without the interruption: %s",
                ", ".join(changed),
            )
        if backend.store is not None:
            backend.store.load(found.stores)
        self._saved = found.round
        history = replace(
            history, **found.rows, similarities={s.node: s for s in found.similarities}
        )
        state = algorithm.state_type.from_tensors(found.tree, found.memory)
        # If the run now has more rounds than before, its callbacks decide again when to stop.
        is_longer = self.config["rounds"] > found.config["rounds"]
        stopped = None if found.stopped is None or is_longer else Stopped(**found.stopped)
        if self._finish and stopped is None and found.round < self.config["rounds"]:
            stopped = Stopped(found.round, "user", "finished by hand after an interruption")
        return TrainingState(found.round, state, history, stopped, found.best)

    def begin(self) -> None:
        """Make the folder if it does not exist, and prevent other processes from writing to it."""
        if self._folder is not None:
            self._is_new = self._folder.begin(self.config)

    def after_round(self, training: TrainingState, backend: Backend) -> None:
        """Save a checkpoint if the policy asks for one."""
        if self._folder is not None and self._policy.due(training):
            self._save(training, backend)

    def stop(self, training: TrainingState, backend: Backend) -> NoReturn:
        """Save a checkpoint, and raise a RunInterrupted."""
        self._save(training, backend)
        then = (
            "nothing was kept"
            if self._folder is None
            else f"the same call continues from {self._folder.path}"
        )
        raise RunInterrupted(f"interrupted after round {training.number}", then)

    def rescue(self, training: TrainingState, backend: Backend) -> None:
        """Save a checkpoint of a run that fails.

        The folder of a run that fails in its first round is removed, if this run has made it.
        """
        if training.number == 0:
            if self._folder is not None and self._is_new:
                remove(self._folder.path)
            return
        try:
            self._save(training, backend)
        except CheckpointError as error:  # should not hide why the run failed
            _log.warning("%s", error)

    def finish(self, run: Run) -> None:
        """Write the results, which makes the run a finished one."""
        if self._folder is not None:
            run.finish(self._folder.path)

    def _save(self, training: TrainingState, backend: Backend) -> None:
        if self._folder is None or self._saved == training.number:
            return
        with self._policy.saving():
            self._folder.save(self._checkpoint(training, backend))
        self._saved = training.number

    def _checkpoint(self, training: TrainingState, backend: Backend) -> Checkpoint:
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
            stores={} if backend.store is None else backend.store.tensors(),
            stopped=None if training.stopped is None else training.stopped.as_dict(),
            best=training.best,
        )


def _made_with(backend: Backend) -> dict[str, Any]:
    """Return the properties of the execution, other than the config, that affect rounding."""
    return {
        "engine": backend.workers.engine_taken,
        "device": backend.device,
        "memory": backend.memory,
        "threads": torch.get_num_threads(),
        **versions(),
    }
