"""One process at a time in a run folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedclade.core import FolderInUseError

try:
    import fcntl
except ImportError:  # on Windows, where runs of other processes are not noticed
    fcntl = None

LOCK = ".lock"
"""The file of a run folder that is there while a process writes to it, or after one was killed."""

_held: dict[Path, int] = {}
"""The folders that this process writes to, with its id: what it was forked from holds its own."""


class Lock:
    """Keeps others out of a folder; it is let go of when the process ends, in whatever way."""

    def __init__(self) -> None:
        self._opened: int | None = None
        self._folder = Path()

    def take(self, folder: Path) -> None:
        """Take the lock of a folder; a FolderInUseError if another process has it, or another run of this one."""
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
        """Let go of it, if it is held."""
        if self._opened is not None:
            with suppress(OSError):
                (self._folder / LOCK).unlink(missing_ok=True)
            os.close(self._opened)
            self._opened = None
            _held.pop(self._folder, None)


def _locked(opened: int) -> bool:
    """Lock an open file. POSIX locks, since a worker process that was forked does not inherit them."""
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
        f"another process is writing to the run folder {folder}; wait until it is done, stop it, or name another folder"
    )
