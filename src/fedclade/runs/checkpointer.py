"""Keeping a run: when to save a checkpoint, what is in one, and going on from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NoReturn

import torch

from fedclade.algorithms import Algorithm, State
from fedclade.core import CheckpointError, ConfigError, RunInterrupted, remove
from fedclade.runs.backend import Backend
from fedclade.runs.history import History, versions
from fedclade.runs.settings import Every, RunSettings
from fedclade.runs.store import Checkpoint, Run, RunFolder
from fedclade.runs.store.run import plain

TIMES_A_SAVE = 60
"""``auto`` lets so many times pass what the last save took, so that saving stays below 2 % of a run: 1 / 61 = 1.6 %."""

FIRST_SAVE_SECONDS, FIRST_SAVE_BYTES = 0.05, 100e6
"""What the first save is taken to cost: some waiting for the disk, and a second for so many bytes."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingState:
    """How far a run has come.

    Parameters
    ----------
    number
        The last finished round; 0 before the first.
    state
        After it.
    record
        Of all rounds up to it.
    """

    number: int
    state: State
    record: History


class CheckpointPolicy:
    """When to save the next checkpoint.

    Parameters
    ----------
    every
        After every so many rounds, never (0), or ``auto``: whenever saving costs little of the time since.
    clock
        Tells the time in seconds.
    """

    def __init__(self, every: Every, clock: Callable[[], float] = perf_counter) -> None:
        self._every: Every = every
        self._clock = clock
        self._since = clock()
        self._slowest: float | None = None

    def due(self, progress: TrainingState) -> bool:
        """Whether to save after this round."""
        if self._every != "auto":
            return self._every > 0 and progress.number % self._every == 0
        seconds = self._slowest
        if seconds is None:
            size = sum(node.params.nbytes for node in progress.state.tree.nodes)
            seconds = FIRST_SAVE_SECONDS + size / FIRST_SAVE_BYTES
        return self._clock() - self._since >= TIMES_A_SAVE * seconds

    @contextmanager
    def saving(self) -> Generator[None]:
        """Note how long the block takes, which saves a checkpoint."""
        start = self._clock()
        yield
        self._since = self._clock()
        self._slowest = max(self._slowest or 0.0, self._since - start)


class Checkpointer:
    """Keeps a run in its folder; without a folder it does nothing.

    To be used as a context from when the run begins: at its end, other processes may write to the folder again.

    Parameters
    ----------
    folder
        The run's, or None.
    config
        What is run.
    every
        See :class:`CheckpointPolicy`.
    fingerprint
        Tells of what data the run is, see :attr:`Federation.fingerprint <fedclade.data.Federation.fingerprint>`.

    Raises
    ------
    ConfigError
        If the config is not that of a whole run.
    RunError
        If the folder holds something else, or a run of another config.
    CheckpointError
        If it holds checkpoints, and none can be used.
    """

    def __init__(
        self, folder: str | Path | None, config: Mapping[str, Any], every: Every, fingerprint: Callable[[], str]
    ) -> None:
        self._folder = None if folder is None else RunFolder(Path(folder))
        self.config = config = plain(config)
        _check_whole(config)
        self._fingerprint = fingerprint
        self._pace = CheckpointPolicy(every)
        self._saved = 0
        """The round of the newest checkpoint."""
        self._empty = False
        """Whether the folder holds nothing but the beginning of this run."""
        self._found: Checkpoint | None = None
        if self._folder is not None:
            self._folder.check(config)
            if not self._folder.holds_all(config):
                self._found = self._folder.newest(config, fingerprint())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.leave()

    def finished(self) -> Run | None:
        """Return the run that the folder holds, if that has had all its rounds."""
        if self._folder is None or not self._folder.holds_all(self.config):
            return None
        self._folder.clear()
        return Run.load(self._folder.path)

    def resumed(self, settings: RunSettings, device: str) -> tuple[RunSettings, str, str | None]:
        """Return settings and device as given, or as they were in the part of the run that is continued.

        Returns
        -------
        tuple
            Settings, device, and the engine that the run took before, if it is continued.

        Raises
        ------
        ConfigError
            If the run was on the CPU, and is to go on elsewhere.
        """
        if self._found is None:
            return settings, device, None
        before = self._found.made_with
        if before["device"] == "cpu" and device == "cuda":
            raise ConfigError("the run began on the CPU and can only go on there; leave out --device cuda")
        memory = before["memory"] if settings.memory is None else settings.memory
        settings = replace(settings, stream=self._found.config["stream"], memory=memory)
        return settings, before["device"] if device == "auto" else device, before["engine"]

    def progress(self, algorithm: Algorithm, world: Backend, record: History) -> TrainingState | None:
        """Return how far the run has come that is continued; None if there is none.

        Raises
        ------
        CheckpointError
            If its models do not fit the world's.
        """
        if self._found is None:
            return None
        found = self._found.moved(world.device)
        entries, expected = found.tree.nodes[0].params.shape[-1], world.initial.shape[-1]
        if entries != expected:
            raise CheckpointError(
                f"the checkpoint of round {found.round} holds models of {entries} entries, and the model given has "
                f"{expected}; give the run the model that it began with"
            )
        now = _made_with(world)
        if changed := [f"{key} {was!r} is now {now[key]!r}" for key, was in found.made_with.items() if was != now[key]]:
            _log.warning("the run may end in other bits than without the interruption: %s", ", ".join(changed))
        self._saved = found.round
        record = replace(record, **found.rows, similarities={s.node: s for s in found.similarities})
        return TrainingState(found.round, algorithm.state_type.from_tensors(found.tree, found.memory), record)

    def begin(self) -> None:
        """Make the folder, if it is not there yet, and keep other processes from writing to it.

        Raises
        ------
        RunError
            If it cannot be written, or another process is writing to it.
        """
        if self._folder is not None:
            self._empty = self._folder.begin(self.config)

    def after_round(self, progress: TrainingState, world: Backend) -> None:
        """Save a checkpoint if it is time for one.

        Raises
        ------
        CheckpointError
            If it cannot be written.
        """
        if self._folder is not None and self._pace.due(progress):
            self._save(progress, world)

    def stop(self, progress: TrainingState, world: Backend) -> NoReturn:
        """Save a checkpoint, and stop.

        Raises
        ------
        RunInterrupted
            Always, unless a CheckpointError says that it cannot be written.
        """
        self._save(progress, world)
        then = "nothing was kept" if self._folder is None else f"the same call continues from {self._folder.path}"
        raise RunInterrupted(f"interrupted after round {progress.number}", then)

    def rescue(self, progress: TrainingState, world: Backend) -> None:
        """Save what there is of a run that fails; of one that fails in its first round nothing is left."""
        if progress.number == 0:
            if self._folder is not None and self._empty:
                remove(self._folder.path)
            return
        try:
            self._save(progress, world)
        except CheckpointError as error:  # which should not hide why the run failed
            _log.warning("%s", error)

    def finish(self, run: Run) -> None:
        """Write the results, which makes the run a finished one.

        Raises
        ------
        RunError
            If they cannot be written.
        """
        if self._folder is not None:
            run.finish(self._folder.path)

    def _save(self, progress: TrainingState, world: Backend) -> None:
        if self._folder is None or self._saved == progress.number:
            return
        with self._pace.saving():
            self._folder.save(self._checkpoint(progress, world))
        self._saved = progress.number

    def _checkpoint(self, progress: TrainingState, world: Backend) -> Checkpoint:
        memory, record = progress.state.tensors(), progress.record
        return Checkpoint(
            round=progress.number,
            config={**self.config, **world.settled},
            made_with=_made_with(world),
            fingerprint=self._fingerprint(),
            tree=progress.state.tree,
            memory=memory,
            on_cpu=frozenset(name for name, tensor in memory.items() if tensor.device.type == "cpu"),
            rows={name: getattr(record, name) for name in ("metrics", "clusters", "clients", "events")},
            similarities=tuple(record.similarities.values()),
        )


def _check_whole(config: Mapping[str, Any]) -> None:
    """Check that a config that was given to be noted has what a run's summary tells of it."""
    named = {key: isinstance(config.get(key), Mapping) and "name" in config[key] for key in ("algorithm", "model")}
    told = {key: key in config for key in ("rounds", "seed", "engine")}
    if lacking := [key for key, holds in {**told, **named}.items() if not holds]:
        raise ConfigError(
            f"a config to note should be that of a whole run, but this one lacks {', '.join(lacking)} (the last as "
            "sections with a name); leave it out to have it put together"
        )


def _made_with(world: Backend) -> dict[str, Any]:
    """Return what rounding depends on besides the config."""
    return {
        "engine": world.workers.engine_taken,
        "device": world.device,
        "memory": world.memory,
        "threads": torch.get_num_threads(),
        **versions(),
    }
