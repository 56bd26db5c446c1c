"""Folder of a run in progress: first with a config, then checkpoints, finally results."""

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
from fedclade.runs.store.run import Run, holds_leftovers, is_finished, is_unfinished, reopen

KEPT = 2
"""Number of checkpoints to store: if the last one is damaged, the one before it can be used."""

FREE_TO_CHANGE = ("rounds", "checkpoint_every", "versions", "network", "report")
"""Settings, and sections with all their keys, that may change when a run is continued.

The number of rounds may only become larger.
"""

CHOSEN = ("engine", "stream")
"""Settings whose value ``auto`` is replaced in the first round by the value that was chosen."""

_NAME = re.compile(r"round-(\d+)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """Folder in which a run is stored from its start; the folder need not exist yet."""

    path: Path
    _lock: Lock = field(default_factory=Lock)

    def holds_all(self, config: Mapping[str, Any]) -> bool:
        """Return whether the folder contains a finished run with the config's number of rounds."""
        return (
            is_finished(self.path) and _read_rounds(read_run_config(self.path)) == config["rounds"]
        )

    def check(self, config: Mapping[str, Any]) -> None:
        """Check that a run with this config can begin in the folder, or be continued there.

        Raises
        ------
        RunError
            If the folder contains other files than a run, or a run with another config.
        """
        if self._holds_run:
            if difference := first_difference(read_run_config(self.path), config):
                raise RunError(
                    f"{self.path} contains a run with another config: {difference}; name another "
                    "folder"
                )
        elif self.path.exists() and not holds_leftovers(self.path):
            raise RunError(
                f"{self.path} exists already, but does not contain a run; name another folder, or "
                "remove it"
            )

    def begin(self, config: Mapping[str, Any]) -> bool:
        """Create the folder of a new run, or prepare the folder of an existing run for more rounds.

        Until :meth:`leave` is called, other processes cannot write to the folder.

        Returns
        -------
        bool
            True for a new run; False if the folder already contained a run.

        Raises
        ------
        RunError
            If the folder cannot be written, another process is writing to the folder, or another
            process has meanwhile begun a run with another config there.
        """
        try:
            is_new = not self.path.exists()
            make_folder(self.path)
            self._lock.take(self.path)
            # Checked again under the lock: another process may have begun a run meanwhile.
            self.check(config)
            if not self._holds_run:
                try:
                    appear(self.path / CONFIG, lambda beside: write_config(beside, config))
                except OSError:
                    if is_new:
                        remove(self.path)
                    raise
                return True
            if config["rounds"] > _read_rounds(kept := read_run_config(self.path)):
                # Before the config changes: a folder marked as finished must have all rounds.
                reopen(self.path)
                appear(
                    self.path / CONFIG,
                    lambda beside: write_config(beside, {**kept, "rounds": config["rounds"]}),
                )
            return False
        except OSError as error:
            raise RunError(f"cannot write the run folder {self.path}: {error}") from error

    def clear(self) -> None:
        """Remove the lock file of a process that was killed just after it had finished the run."""
        if (self.path / LOCK).exists():
            with suppress(RunError, OSError):  # another process has it, or the folder is read-only
                self._lock.take(self.path)
                self._lock.let_go()

    def leave(self) -> None:
        """Release the lock of the folder, so that other processes can write to the folder."""
        self._lock.let_go()

    def newest(self, config: Mapping[str, Any], fingerprint: str) -> Checkpoint | None:
        """Return the newest usable checkpoint of the run; None if the folder has no checkpoint.

        If a newer checkpoint is unusable and an older one is usable, a warning is logged and the
        unusable checkpoint is renamed.

        Parameters
        ----------
        config
            Config of the run, which the config of a usable checkpoint must match.
        fingerprint
            Digest of the clients' data, which a usable checkpoint must have recorded.

        Raises
        ------
        CheckpointError
            If the folder has checkpoints, but none is usable. The checkpoints are not changed.
        """
        unusable: dict[Path, str] = {}
        for folder in self.list_checkpoints():
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
                f"no checkpoint of {self.path} can be used: {'; '.join(unusable.values())}; to "
                "start the run from round 1, name another folder"
            )
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and remove all but the last two checkpoints.

        Raises
        ------
        CheckpointError
            If the checkpoint cannot be written. The earlier checkpoints then remain.
        """
        target = self._folder / f"round-{checkpoint.round:06d}"
        try:
            self._folder.mkdir(exist_ok=True)
            # Files are shared with the checkpoint that is removed next, and not with the one that
            # stays: a damaged file would otherwise damage both remaining checkpoints.
            earlier = next(iter(self.list_checkpoints()[KEPT - 1 :]), None)
            appear(target, lambda beside: checkpoint.write(beside, earlier))
            # Folders of this name are left by a process that was killed.
            half_written = self._folder.glob(".round-*.writing")
            for old in (*self.list_checkpoints()[KEPT:], *half_written):
                remove(old)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {target}: {error}; the earlier checkpoints remain"
            ) from error

    @property
    def _holds_run(self) -> bool:
        """Whether the folder contains a run, finished or unfinished."""
        return is_finished(self.path) or is_unfinished(self.path)

    @property
    def _folder(self) -> Path:
        """Path of the subfolder with the checkpoints."""
        return self.path / "checkpoints"

    def list_checkpoints(self) -> list[Path]:
        """Return the folders of all checkpoints, the newest first."""
        if not self._folder.is_dir():
            return []
        paths = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=self.round_of, reverse=True)

    @staticmethod
    def round_of(checkpoint: Path) -> int:
        """Return the round of a checkpoint, which is part of the name of its folder."""
        return int(checkpoint.name.removeprefix("round-"))


def load_unfinished(folder: Path) -> Run:
    """Read the state of an unfinished run at its newest checkpoint, without models of clients.

    Raises
    ------
    RunError
        If the folder has no usable checkpoint, or its clients were not evaluated yet.
    """
    reasons: list[str] = []
    for path in RunFolder(folder).list_checkpoints():
        try:
            found = Checkpoint.read(path)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        if found.summary is None:
            reasons.append(f"no client was evaluated until round {found.round}")
            continue
        return Run(
            found.summary,
            found.config,
            found.tree,
            found.rows["metrics"],
            found.rows["clusters"],
            found.rows["clients"],
            found.rows["events"],
            similarities=found.similarities,
            is_trusted=False,
        )
    why = "; ".join(reasons) or "it has no checkpoint"
    raise RunError(
        f"the unfinished run in {folder} cannot be shown: {why}; continue it with: fedclade resume "
        f"{folder}"
    )


def first_difference(kept: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Describe the first setting that prevents a run from being continued with a new config.

    Parameters
    ----------
    kept
        Config that is stored in the run's folder.
    config
        Config of the call that continues the run.

    Returns
    -------
    str or None
        Text such as ``its seed is 1, not 2``; None if the run can be continued.
    """
    before = _flatten_settings(kept)
    now = _flatten_settings(config)
    for key in dict.fromkeys([*before, *now]):
        if key.split(".")[0] in FREE_TO_CHANGE or before.get(key) == now.get(key):
            continue
        if key not in CHOSEN or now.get(key) != "auto":
            return f"its {key} is {before.get(key)!r}, not {now.get(key)!r}"
    if config["rounds"] < _read_rounds(kept):
        return f"its rounds is {_read_rounds(kept)}, which cannot be lowered to {config['rounds']}"
    return None


def _read_rounds(kept: Mapping[str, Any]) -> int:
    """Return the number of rounds of a stored config; 0 if a user has removed the setting."""
    return kept.get("rounds", 0)


def _check_origin(
    folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any], fingerprint: str
) -> None:
    """Check that a checkpoint belongs to the run with this config and these data.

    Raises
    ------
    CheckpointError
        If the config or the data's fingerprint differ.
    """
    if difference := first_difference(checkpoint.config, config):
        raise CheckpointError(f"the checkpoint {folder} is from another run: {difference}")
    if checkpoint.fingerprint != fingerprint:
        raise CheckpointError(
            f"the checkpoint {folder} was made with other data than the data that is loaded now; "
            "pass the data with which the run began"
        )


def _flatten_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config as JSON values, by dotted names such as ``local.lr``.

    Unset settings are left out.
    """
    return flat(json.loads(json.dumps(without_unset(config), default=str)))
