"""Folder of a run in progress: made at the start, then with checkpoints, then with results."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedclade.core import CheckpointError, RunError, appear, flat, make_folder, remove
from fedclade.runs.store.checkpoint import Checkpoint
from fedclade.runs.store.contents import without_unset
from fedclade.runs.store.manifest import CONFIG, LOCK, Lock, read_run_config, write_config
from fedclade.runs.store.run import holds_leftovers, is_finished, is_unfinished, reopen

KEPT = 2
"""Number of checkpoints to store: if the last one is damaged, the one before it can be used."""

FREE_TO_CHANGE = ("rounds", "checkpoint_every", "versions", "network")
"""Settings, or sections with all their keys, that may differ when a run is continued.

The number of rounds cannot become smaller.
"""

CHOSEN = ("engine", "stream")
"""Settings whose value ``auto`` is replaced in the first round by the value that was chosen."""

_NAME = re.compile(r"round-(\d+)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Folder that stores a run from its start; it need not exist yet."""

    path: Path
    _lock: Lock = field(default_factory=Lock)

    def holds_all(self, config: Mapping[str, Any]) -> bool:
        """Whether the folder has a finished run with as many rounds as a config asks for."""
        return is_finished(self.path) and _rounds(read_run_config(self.path)) == config["rounds"]

    def check(self, config: Mapping[str, Any]) -> None:
        """Check that a run of this config can begin in the folder, or continue there.

        Raises
        ------
        RunError
            If the folder holds something else, or a run of another config.
        """
        if self._holds_run:
            if difference := first_difference(read_run_config(self.path), config):
                raise RunError(
                    f"{self.path} holds a run of another config: {difference}; name another folder"
                )
        elif self.path.exists() and not holds_leftovers(self.path):
            raise RunError(
                f"{self.path} exists already and holds no run; name another folder, or remove it"
            )

    def begin(self, config: Mapping[str, Any]) -> bool:
        """Make the folder, or prepare an existing run for more rounds; lock out other processes.

        Returns
        -------
        bool
            Whether the folder holds only this beginning of a run.

        Raises
        ------
        RunError
            If the folder cannot be written, another process is writing to it, or has begun
            something else there in the meantime.
        """
        try:
            is_new = not self.path.exists()
            make_folder(self.path)
            self._lock.take(self.path)
            # Checked with the lock: another process may have begun a run since the last check.
            self.check(config)
            if not self._holds_run:
                try:
                    appear(self.path / CONFIG, lambda beside: write_config(beside, config))
                except OSError:
                    if is_new:
                        remove(self.path)
                    raise
                return True
            if config["rounds"] > _rounds(kept := read_run_config(self.path)):
                # Before the config changes, since a finished run has had all rounds of its config.
                reopen(self.path)
                appear(
                    self.path / CONFIG,
                    lambda beside: write_config(beside, {**kept, "rounds": config["rounds"]}),
                )
            return False
        except OSError as error:
            raise RunError(f"cannot write the run folder {self.path}: {error}") from error

    def clear(self) -> None:
        """Remove the lock file of a process that was killed just after it finished the run."""
        if (self.path / LOCK).exists():
            with suppress(RunError, OSError):  # another process has it, or the folder is read-only
                self._lock.take(self.path)
                self._lock.let_go()

    def leave(self) -> None:
        """Let other processes write to the folder."""
        self._lock.let_go()

    def newest(self, config: Mapping[str, Any], fingerprint: str) -> Checkpoint | None:
        """Return the newest usable checkpoint of this run; None if there is no checkpoint.

        A warning is logged for each checkpoint that cannot be used. It is renamed as soon as an
        older one is found that can be used.

        Parameters
        ----------
        config
            Config of the run.
        fingerprint
            Fingerprint of its data.

        Raises
        ------
        CheckpointError
            If there are checkpoints, and none can be used. They are left as they are.
        """
        unusable: dict[Path, str] = {}
        for folder in self._checkpoints():
            try:
                checkpoint = Checkpoint.read(folder)
                _check_origin(folder, checkpoint, config, fingerprint)
            except CheckpointError as error:
                unusable[folder] = str(error)
                continue
            for each, why in unusable.items():
                _log.warning("%s; continuing from round %d", why, checkpoint.round)
                aside = each.with_name(f"unusable-{each.name}")
                remove(aside)
                each.rename(aside)
            return checkpoint
        if unusable:
            raise CheckpointError(
                f"no checkpoint of {self.path} can be used: {'; '.join(unusable.values())}"
            )
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and remove all but the last two.

        If that fails, the earlier checkpoints stay.
        """
        target = self._folder / f"round-{checkpoint.round:06d}"
        try:
            self._folder.mkdir(exist_ok=True)
            # Files are shared with the checkpoint that is removed next, and not with the one that
            # stays: a damaged file would otherwise damage both remaining checkpoints.
            earlier = next(iter(self._checkpoints()[KEPT - 1 :]), None)
            appear(target, lambda beside: checkpoint.write(beside, earlier))
            half_written = self._folder.glob(".round-*.writing")  # by a run that was killed
            for old in (*self._checkpoints()[KEPT:], *half_written):
                remove(old)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {target}: {error}; those before it are kept"
            ) from error

    @property
    def _holds_run(self) -> bool:
        return is_finished(self.path) or is_unfinished(self.path)

    @property
    def _folder(self) -> Path:
        return self.path / "checkpoints"

    def _checkpoints(self) -> list[Path]:
        """Return the folders of all checkpoints, the newest first."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        numbers = {path: int(match[1]) for path in found if (match := _NAME.fullmatch(path.name))}
        return sorted(numbers, key=lambda path: -numbers[path])


def first_difference(kept: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Describe the first setting that prevents a run from being continued with another config.

    ``kept`` is the config of the run, ``config`` the other one. None if the run can be continued.
    """
    before = _settings(kept)
    now = _settings(config)
    for key in dict.fromkeys([*before, *now]):
        if key.split(".")[0] in FREE_TO_CHANGE or before.get(key) == now.get(key):
            continue
        if key not in CHOSEN or now.get(key) != "auto":
            return f"its {key} is {before.get(key)!r}, not {now.get(key)!r}"
    if config["rounds"] < _rounds(kept):
        return f"its rounds is {_rounds(kept)}, and {config['rounds']} would be fewer"
    return None


def _rounds(kept: Mapping[str, Any]) -> int:
    """Return the rounds of a config that was read; 0 if a user has removed them."""
    return kept.get("rounds", 0)


def _check_origin(
    folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any], fingerprint: str
) -> None:
    if difference := first_difference(checkpoint.config, config):
        raise CheckpointError(f"{folder} is of another run: {difference}")
    if checkpoint.fingerprint != fingerprint:
        raise CheckpointError(
            f"{folder} was made with other data than was loaded now; give the run the data that it "
            "began with"
        )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config by dotted names, as JSON values, without unset ones."""
    return flat(json.loads(json.dumps(without_unset(config), default=str)))
