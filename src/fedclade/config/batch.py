"""Batches of runs: several configs, each with several seeds, written to one folder."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from fedclade.config.labels import check_labels, run_name
from fedclade.config.settings import Config
from fedclade.core import FedcladeError, FolderInUseError, RunError, RunInterrupted
from fedclade.data import Federation
from fedclade.runs import Callback, OnRound, Run, is_finished, read_run_config

_log = logging.getLogger(__name__)

MOST_FEDERATIONS = 3
"""Largest number of federations that stay in memory for later runs.

The data of a single federation may take as much memory as everything else in a run.
"""


def _is_done(folder: Path, config: Config) -> bool:
    """Return whether a folder has a finished run that need not be repeated or continued.

    The run must have at least as many rounds as the config requires.
    """
    if not is_finished(folder):
        return False
    try:
        return read_run_config(folder).get("rounds", 0) >= config.top.rounds
    except RunError:  # reported when the run is read
        return True


@dataclass
class Batch:
    """Batch of runs, which are executed one after the other, even if some of them fail.

    Runs that an earlier call finished are read from their folders, and unfinished runs are
    continued.

    Parameters
    ----------
    start
        Called before each run with the name and the number of rounds of the run; returns a function
        that is called after each round.
    data_dir, device, memory
        As in :meth:`fedclade.config.Config.run` and :meth:`fedclade.config.Config.federation`.
    finished
        Called with each finished run and its folder.
    stop
        Function that returns whether to interrupt the batch.
    callbacks
        Function that returns the callbacks for the next run.
    """

    start: Callable[[str, int], OnRound]
    data_dir: Path | None = None
    device: str = "auto"
    memory: int | str | None = None
    finished: Callable[[Run, Path], object] = lambda run, folder: None
    stop: Callable[[], bool] = lambda: False
    callbacks: Callable[[], Sequence[Callback]] = tuple[Callback, ...]
    over: Callable[[], bool] = lambda: False
    """Function that returns whether it is too late to begin another run."""
    only: str = "*"
    """Pattern for the names of the runs to execute, such as ``*rcfl*``.

    Runs with other names are read if they are finished, and otherwise skipped.
    """
    failures: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Names of the runs that failed, by error message."""
    left: list[str] = field(default_factory=list[str])
    """Names of the runs that were skipped.

    A run is skipped if its name does not match ``only``, if ``over`` returned True, or if another
    process is writing to its folder.
    """
    _federations: dict[int, tuple[Config, Federation]] = field(
        default_factory=dict[int, tuple[Config, Federation]]
    )
    """The last federation of each seed with its config, by seed, for reuse.

    The algorithms of a scenario have the same data, and so can use the same federation.
    """

    def run(
        self, configs: Mapping[str, Config], seeds: int, target: Path, prefix: str = ""
    ) -> dict[str, list[Run]]:
        """Run every config with every seed in ``target/LABEL/seed-N``.

        Parameters
        ----------
        configs
            Configs by label.
        seeds
            Number of runs of each config; the runs have the seeds 0, 1, ...
        target
            Folder of the batch.
        prefix
            Beginning of the names of all runs.

        Returns
        -------
        dict
            The finished runs by label; labels without a finished run are left out.

        Raises
        ------
        ConfigError
            If a label cannot be the name of a folder.
        RunInterrupted
            If the batch is interrupted.
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
                runs[label, seed] = self._run_one(config, name, folder)
            except FolderInUseError:
                if (label, seed) in in_use:
                    self.left.append(name)
                else:  # try once more when all other runs are done
                    in_use.add((label, seed))
                    waiting.append((label, seed))
            except RunInterrupted:
                raise
            except Exception as error:
                # an error in a config, or in the user's model or data: other runs may succeed
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

    def _run_one(self, config: Config, name: str, folder: Path) -> Run:
        if self.stop():
            raise RunInterrupted(
                f"the batch was interrupted before run {name}", "run the batch again to continue"
            )
        on_round = self.start(name, config.top.rounds)
        try:
            return config.run(
                self._load_federation(config),
                device=self.device,
                memory=self.memory,
                callbacks=self.callbacks(),
                on_round=on_round,
                folder=folder,
                stop=self.stop,
                progress=False,  # start() shows it
                # "auto" would cost too much in a batch.
                references=config.report.references is True,
            )
        except RunInterrupted as stopped:
            raise RunInterrupted(
                f"{stopped.happened} of {name}", "run the batch again to continue"
            ) from None

    def _load_federation(self, config: Config) -> Federation:
        """Return the federation of a run, loaded or reused.

        The last federation of the run's seed is reused if its config has equal data settings.
        """
        seed = config.top.seed
        known = self._federations.pop(seed, None)
        if known is None or known[0].data != config.data:
            known = config, config.federation(self.data_dir)
        self._federations[seed] = known
        while len(self._federations) > MOST_FEDERATIONS:
            self._federations.pop(next(iter(self._federations)))
        return known[1]
