"""The folder of a run in progress: made at the start, given checkpoints on the way, and the results at the end."""

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
"""Checkpoints: should the last one be damaged, there is the one before."""

FREE_TO_CHANGE = ("rounds", "checkpoint_every", "versions", "network")
"""What a run can be continued with another of (of sections, any key); but it cannot be made shorter."""

CHOSEN = ("engine", "stream")
"""What a run that leaves it to ``auto`` settles in its first round, and keeps."""

_NAME = re.compile(r"round-(\d+)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """A folder that a run is kept in from its start; it need not exist yet."""

    path: Path
    _lock: Lock = field(default_factory=Lock)

    def holds_all(self, config: Mapping[str, Any]) -> bool:
        """Whether it holds a finished run with as many rounds as a config asks for."""
        return is_finished(self.path) and _rounds(read_run_config(self.path)) == config["rounds"]

    def check(self, config: Mapping[str, Any]) -> None:
        """Check that a run of this config can begin in the folder, or go on there.

        Raises
        ------
        RunError
            If it holds something else, or a run of another config.
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
        """Make the folder, or make one that holds a run ready for more rounds; lock other processes out.

        Returns
        -------
        bool
            Whether it holds nothing but this beginning.

        Raises
        ------
        RunError
            If it cannot be written, another process is writing to it, or has begun something else
            there meanwhile.
        """
        try:
            is_new = not self.path.exists()
            make_folder(self.path)
            self._lock.take(self.path)
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
                # first, since a finished run has had all the rounds of its config
                reopen(self.path)
                appear(
                    self.path / CONFIG,
                    lambda beside: write_config(beside, {**kept, "rounds": config["rounds"]}),
                )
            return False
        except OSError as error:
            raise RunError(f"cannot write the run folder {self.path}: {error}") from error

    def clear(self) -> None:
        """Remove the lock of a process that was killed when it had just finished the run."""
        if (self.path / LOCK).exists():
            with suppress(RunError, OSError):  # another process has it, or the folder is read-only
                self._lock.take(self.path)
                self._lock.let_go()

    def leave(self) -> None:
        """Let other processes write to the folder."""
        self._lock.let_go()

    def newest(self, config: Mapping[str, Any], fingerprint: str) -> Checkpoint | None:
        """Return the newest checkpoint that this run can go on from; None if there is no checkpoint.

        Of each that cannot be used a warning is logged, and it is renamed once an older one is
        found that can.

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
        """Write a checkpoint, and remove all but the last two; if that fails, those before it stay."""
        target = self._folder / f"round-{checkpoint.round:06d}"
        try:
            self._folder.mkdir(exist_ok=True)
            # Shared with the one that is to be removed and not with the one that stays, should that
            # be needed.
            earlier = next(iter(self._checkpoints()[KEPT - 1 :]), None)
            appear(target, lambda beside: checkpoint.write(beside, earlier))
            half_written = self._folder.glob(".round-*.writing")  # when the run was killed
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
    """Say by which setting a run whose config was ``kept`` cannot be continued with another; None if it can."""
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
    """Return the rounds of a config that was read; 0 if somebody has taken them out."""
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
    """Return the settings of a config by dotted names, as JSON has them; what is not set is left out."""
    return flat(json.loads(json.dumps(without_unset(config), default=str)))
