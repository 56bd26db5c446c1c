"""A batch: several configs, each run with several seeds, into one folder."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from fedclade.config.settings import Config
from fedclade.core import (
    ConfigError,
    FedcladeError,
    FolderInUseError,
    RunError,
    RunInterrupted,
    name_problem,
    shown,
)
from fedclade.data import Federation
from fedclade.runs import Callback, OnRound, Run, is_finished, read_run_config

_log = logging.getLogger(__name__)

MOST_FEDERATIONS = 3
"""That are kept for the next runs; the data of one may take as much memory as all else."""


def run_name(prefix: str, label: str, seed: int, seeds: int) -> str:
    """Return what a run is called, of so many seeds of one config."""
    return f"{prefix}{label}" + (f" seed {seed}" if seeds > 1 else "")


def check_labels(labels: Iterable[str]) -> None:
    """Check that configurations are called by what their folders can be called; a ConfigError if one is not."""
    for label in labels:
        if problem := name_problem(label):
            raise ConfigError(f"{shown(label)} should be a name that a folder can have: {problem}")


def _is_done(folder: Path, config: Config) -> bool:
    """Whether a folder holds a run of all rounds of a config."""
    if not is_finished(folder):
        return False
    try:
        return read_run_config(folder).get("rounds", 0) >= config.top.rounds
    except RunError:  # which is told when it is read
        return True


@dataclass
class Batch:
    """Runs configs one after the other, and goes on with the next when one fails.

    What an earlier call finished is read, and what it left unfinished is continued. ``start`` is
    called with the name and the rounds of each run, and returns what to call after each round;
    ``callbacks`` returns the callbacks of a run; ``finished`` is called with the run and its
    folder.
    """

    start: Callable[[str, int], OnRound]
    data_dir: Path | None = None
    device: str = "auto"
    memory: int | str | None = None
    finished: Callable[[Run, Path], object] = lambda run, folder: None
    stop: Callable[[], bool] = lambda: False
    callbacks: Callable[[], Sequence[Callback]] = tuple[Callback, ...]
    over: Callable[[], bool] = lambda: False
    """Whether it is too late to begin another run."""
    only: str = "*"
    """Which runs are made, by a pattern over their names, such as ``*rcfl*``; others are read if they are done."""
    failures: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By what went wrong: the names of the runs."""
    left: list[str] = field(default_factory=list[str])
    """The names of the runs that are not done: not wanted, too late, or in the hands of another process."""
    _federations: dict[int, tuple[Config, Federation]] = field(
        default_factory=dict[int, tuple[Config, Federation]]
    )
    """By seed, with the config that it is of: algorithms of one scenario have it in common."""

    def run(
        self, configs: Mapping[str, Config], seeds: int, target: Path, prefix: str = ""
    ) -> dict[str, list[Run]]:
        """Run every config with every seed into ``target/LABEL/seed-N``; return the runs that finished.

        Raises
        ------
        ConfigError
            If a label cannot be the name of a folder.
        """
        check_labels(configs)
        runs: dict[tuple[str, int], Run] = {}
        every = [(label, seed) for label in configs for seed in range(seeds)]
        waiting = deque(every)
        in_use = set[tuple[str, int]]()
        while waiting:
            label, seed = waiting.popleft()
            name = run_name(prefix, label, seed, seeds)
            folder = target / label / f"seed-{seed}"
            config = replace(configs[label], top=replace(configs[label].top, seed=seed))
            unwanted = (label, seed) in in_use or self.over() or not fnmatch(name, self.only)
            if unwanted and not _is_done(folder, config):
                self.left.append(name)
                continue
            try:
                runs[label, seed] = self._run(config, name, folder)
            except FolderInUseError:
                if (label, seed) in in_use:
                    self.left.append(name)
                else:  # it is looked at once more when the others are done
                    in_use.add((label, seed))
                    waiting.append((label, seed))
            except RunInterrupted:
                raise
            except Exception as error:
                # of a config, or of the user's own model or data: the others go on
                known = isinstance(error, FedcladeError)
                if not known:
                    _log.exception("%s failed", name)
                why = str(error) if known else f"{type(error).__name__}: {error}"
                self.failures.setdefault(why, []).append(name)
            else:
                self.finished(runs[label, seed], folder)
        of_label = {
            label: [runs[each] for each in every if each[0] == label and each in runs]
            for label in configs
        }
        return {label: found for label, found in of_label.items() if found}

    def _run(self, config: Config, name: str, folder: Path) -> Run:
        if self.stop():
            raise RunInterrupted(f"interrupted before {name}", "")
        on_round = self.start(name, config.top.rounds)
        try:
            return config.run(
                self._federation(config),
                device=self.device,
                memory=self.memory,
                callbacks=self.callbacks(),
                on_round=on_round,
                folder=folder,
                stop=self.stop,
                progress=False,  # which start() shows
            )
        except RunInterrupted as stopped:
            raise RunInterrupted(f"{stopped.happened} of {name}", "") from None

    def _federation(self, config: Config) -> Federation:
        """Return the federation of a run: that of the last with this seed, if their data are configured alike."""
        seed = config.top.seed
        known = self._federations.pop(seed, None)
        if known is None or known[0].data != config.data:
            known = config, config.federation(self.data_dir)
        self._federations[seed] = known
        while len(self._federations) > MOST_FEDERATIONS:
            self._federations.pop(next(iter(self._federations)))
        return known[1]
