"""Protection of a run folder: a manifest that detects damaged files, and a lock.

The manifest lists the SHA-256 of every file. The lock prevents two processes from writing to the
folder at the same time.
"""

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
"""Name of the lock file, which a run folder contains while a process writes to the folder.

The file also remains if that process was killed.
"""

_held: dict[Path, int] = {}
"""Folders to which this process writes, each with the id of the process.

After a fork, entries with the process id of the parent process are ignored.
"""


class Lock:
    """Lock that prevents other processes from writing to a folder.

    The operating system releases the lock when the process ends, for whatever reason.
    """

    def __init__(self) -> None:
        self._opened: int | None = None
        self._folder = Path()

    def take(self, folder: Path) -> None:
        """Acquire the lock of a folder.

        Raises
        ------
        FolderInUseError
            If another process, or another run of this process, is writing to the folder.
        """
        place = folder.resolve()
        if _held.get(place) == os.getpid():
            raise _busy_error(folder)
        while self._opened is None:
            opened = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            if not _try_lock(opened):
                os.close(opened)
                raise _busy_error(folder)
            with suppress(FileNotFoundError):
                if os.fstat(opened).st_ino == (folder / LOCK).stat().st_ino:
                    self._opened = opened
                    break
            os.close(opened)  # another process has removed this lock file meanwhile: try again
        self._folder = place
        _held[place] = os.getpid()

    def let_go(self) -> None:
        """Release the lock, and remove the lock file. Nothing happens without a lock."""
        if self._opened is not None:
            with suppress(OSError):
                (self._folder / LOCK).unlink(missing_ok=True)
            os.close(self._opened)
            self._opened = None
            _held.pop(self._folder, None)


def _try_lock(opened: int) -> bool:
    """Try to lock an open file by a POSIX lock, and return whether this succeeded.

    A forked worker process does not inherit a POSIX lock. Where locks do not exist (on Windows, and
    on some file systems), the result is True.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_locked(folder: Path) -> bool:
    """Return whether a process writes to a folder: this process, or another one.

    On Windows, a process that was killed counts as well. On file systems without locks, other
    processes are not detected.
    """
    if _held.get(folder.resolve()) == os.getpid():
        return True  # checked first, as closing a file releases all locks of this process on it
    if fcntl is None:
        return (folder / LOCK).exists()
    try:
        opened = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # no process has the lock, or the folder belongs to another user
        return (folder / LOCK).exists()
    try:
        return not _try_lock(opened)
    finally:
        os.close(opened)


def _busy_error(folder: Path) -> FolderInUseError:
    """Return the error for a folder to which another process, or another run, is writing."""
    return FolderInUseError(
        f"another process is writing to the run folder {folder}; wait until the process ends, stop "
        "it, or name another folder"
    )


# The config of a run folder is written at the start of the run, with its SHA-256 in the last line.

CONFIG = "config.toml"
"""Name of the file with a run's config, the first file that is written to a run folder."""

_SUM = "# SHA-256 of the lines above: "
"""Beginning of the last line of a config file, which ends with the SHA-256 of the lines above.

The manifest exists only for a finished run; this line detects a damaged config from the start.
"""


REMEDY = "restore it from a copy, or run its config again"
"""Advice for a damaged run folder."""


def read_run_config(folder: Path) -> Mapping[str, Any]:
    """Read the config of a run folder.

    Raises
    ------
    RunError
        If the file cannot be read or is damaged.
    """
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        content, mark, noted = text.rpartition(_SUM)
        if mark and noted.strip() != _sha256(content):
            raise ValueError(
                f"{CONFIG} was changed: its SHA-256 differs from the SHA-256 in its last line"
            )
        try:
            config = tomllib.loads(text)
        except ValueError as error:
            raise ValueError(f"{CONFIG} is not valid TOML ({error})") from error
        check_shape(config, CONFIG_SHAPE, CONFIG)
        return config
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"the run folder {folder} is damaged: {type(error).__name__}: {error}; {REMEDY}"
        ) from error


def is_private(config: Mapping[str, Any]) -> bool:
    """Return whether only the owner of a run folder may read the files with the models.

    This holds for runs over a network, whose models were trained on the data of other parties.
    """
    return "network" in config


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config as TOML, with the SHA-256 of the text in the last line."""
    text = to_toml(config)
    path.write_text(f"{text}{_SUM}{_sha256(text)}\n", encoding="utf-8")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(path: Path, version: int, known: Mapping[str, str] | None = None) -> None:
    """Write a manifest: a folder's format version, and the SHA-256 of every file in the folder.

    Parameters
    ----------
    path
        Path of the manifest, in the folder that it describes.
    version
        Format version of the folder.
    known
        SHA-256 of files that are shared with another folder, by name. These sums are not computed
        again: if a file was damaged meanwhile, a new sum would match the damaged file and hide the
        damage.
    """
    files = sorted(each for each in path.parent.rglob("*") if each.is_file())
    names = {each.relative_to(path.parent).as_posix(): each for each in files}
    sums = {name: (known or {}).get(name) or sha256_of(each) for name, each in names.items()}
    path.write_text(json.dumps({"format": version, "sha256": sums}) + "\n")


def read_manifest(path: Path, version: int) -> Mapping[str, str]:
    """Return the recorded SHA-256 of every file of a folder, by the file's relative path.

    Raises
    ------
    RunError
        If the manifest cannot be read, or records another format version than ``version``.
    """
    try:
        manifest = json.loads(path.read_text())
        check_shape(manifest, {"format": object, "sha256": {...: str}}, path.name)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if manifest["format"] != version:
        raise RunError(
            f"{path.parent} has format {manifest['format']!r}, but this version of fedclade reads "
            f"format {version}; use the version that wrote the folder"
        )
    return manifest["sha256"]


def check_manifest(path: Path, version: int) -> tuple[str, ...]:
    """Check that the files of a folder have not changed since the manifest was written.

    The result has the names of the files, relative to the folder.

    Raises
    ------
    RunError
        If a file is missing, cannot be read or has changed; the message names it.
    """
    sums = read_manifest(path, version)
    for name, expected in sums.items():
        file = path.parent / name
        if not file.is_file():
            raise RunError(f"{file} is missing, although {path.name} lists it")
        try:
            found = sha256_of(file)
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        if found != expected:
            raise RunError(f"{file} is damaged: its SHA-256 differs from the one in {path.name}")
    return tuple(sums)
