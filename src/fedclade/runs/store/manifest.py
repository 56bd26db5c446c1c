"""Manifest of a folder: the SHA-256 of every file, to detect damage; also the folder's lock."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedclade.core import FolderInUseError, RunError, sha256_of
from fedclade.runs.store.contents import CONFIG as CONFIG_SHAPE
from fedclade.runs.store.contents import check_shape
from fedclade.runs.store.toml_text import to_toml

# Lock of a run folder: one process at a time writes to it.

try:
    import fcntl
except ImportError:  # on Windows, where runs of other processes are not detected
    fcntl = None

LOCK = ".lock"
"""File in a run folder while a process writes to it, or after such a process was killed."""

_held: dict[Path, int] = {}
"""Folders that this process writes to, with its process id.

After a fork, the entries of the parent process have another id, and do not count.
"""


class Lock:
    """Lock that keeps other processes out of a folder.

    It is released when the process ends, for whatever reason.
    """

    def __init__(self) -> None:
        self._opened: int | None = None
        self._folder = Path()

    def take(self, folder: Path) -> None:
        """Take the lock of a folder.

        Raises
        ------
        FolderInUseError
            If another process has the lock, or another run of this process.
        """
        place = folder.resolve()
        if _held.get(place) == os.getpid():
            raise _busy(folder)
        while self._opened is None:
            opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            if not _locked(opened):
                os.close(opened)
                raise _busy(folder)
            with suppress(FileNotFoundError):
                if os.fstat(opened).st_ino == (folder / LOCK).stat().st_ino:
                    self._opened = opened
                    break
            os.close(opened)  # another process had it, and has removed it since
        self._folder = place
        _held[place] = os.getpid()

    def let_go(self) -> None:
        """Release the lock, if it is taken."""
        if self._opened is not None:
            with suppress(OSError):
                (self._folder / LOCK).unlink(missing_ok=True)
            os.close(self._opened)
            self._opened = None
            _held.pop(self._folder, None)


def _locked(opened: int) -> bool:
    """Lock an open file by a POSIX lock, which a forked worker process does not inherit."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _busy(folder: Path) -> FolderInUseError:
    return FolderInUseError(
        f"another process is writing to the run folder {folder}; wait until it is done, stop it, "
        "or name another folder"
    )


# The config of a run folder is written at the start of the run, with its SHA-256 in the last line.

CONFIG = "config.toml"
"""First file of a run folder, which exists from the start of the run."""

_SUM = "# SHA-256 of the lines above: "
"""Beginning of the last line of a config, which allows checking it from the start of the run."""


REMEDY = "restore it from a copy, or run its config again"
"""Advice for a damaged run folder."""


def read_run_config(folder: Path) -> Mapping[str, Any]:
    """Read the config of a run folder; raises RunError if it is damaged."""
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        content, mark, noted = text.rpartition(_SUM)
        if mark and noted.strip() != _sha256(content):
            raise ValueError(
                f"{CONFIG} is not what was written: its SHA-256 is not the one in its last line"
            )
        try:
            config = tomllib.loads(text)
        except ValueError as error:
            raise ValueError(f"{CONFIG} is no TOML ({error})") from error
        check_shape(config, CONFIG_SHAPE, CONFIG)
        return config
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"the run folder {folder} is damaged: {type(error).__name__}: {error}; {REMEDY}"
        ) from error


def is_private(config: Mapping[str, Any]) -> bool:
    """Whether only the user may read the files of a run's models.

    This holds for runs over a network, whose models have learned from the data of others.
    """
    return "network" in config


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config as TOML."""
    text = to_toml(config)
    path.write_text(f"{text}{_SUM}{_sha256(text)}\n", encoding="utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(path: Path, version: int, known: Mapping[str, str] | None = None) -> None:
    """Write a folder's format version and the SHA-256 of every file in it into a new file there.

    Parameters
    ----------
    path
        The file to write, in the folder.
    version
        Format version of the folder.
    known
        SHA-256 of files that are shared with another folder, by name. These are not computed again,
        as the files may have been damaged since they were written.
    """
    files = sorted(each for each in path.parent.rglob("*") if each.is_file())
    names = {each.relative_to(path.parent).as_posix(): each for each in files}
    sums = {name: (known or {}).get(name) or sha256_of(each) for name, each in names.items()}
    path.write_text(json.dumps({"format": version, "sha256": sums}) + "\n")


def read_manifest(path: Path, version: int) -> Mapping[str, str]:
    """Return the SHA-256 of every file of a folder, as recorded.

    Raises
    ------
    RunError
        If the manifest cannot be read or has another version.
    """
    try:
        manifest = json.loads(path.read_text())
        check_shape(manifest, {"format": object, "sha256": {...: str}}, path.name)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if manifest["format"] != version:
        raise RunError(
            f"{path.parent} has format {manifest['format']!r}, this version reads format {version}"
        )
    return manifest["sha256"]


def check_manifest(path: Path, version: int) -> tuple[str, ...]:
    """Check that the files of a folder have not changed, and return their names relative to it.

    Raises
    ------
    RunError
        If a file is missing, cannot be read or has changed; the message names it.
    """
    sums = read_manifest(path, version)
    for name, expected in sums.items():
        file = path.parent / name
        if not file.is_file():
            raise RunError(f"{file} is missing")
        try:
            found = sha256_of(file)
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        if found != expected:
            raise RunError(f"{file} is damaged: its SHA-256 is not the one in {path.name}")
    return tuple(sums)
