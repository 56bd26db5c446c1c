"""Writing of several files as a unit: all files or none, even if the process is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fedclade.core import bring_to_disk, make_folder, remove, take_place
from fedclade.runs.store.manifest import Lock

Writer = Callable[[Path], object]

_COMPLETE = "complete"
"""Marker file in the staging folder, which exists once all files have been written there.

If the process is killed while it moves the files to their places, the marker tells the next call
that files which are missing in the staging folder were already moved.
"""


def write_together(files: Mapping[Path, Writer], check: Callable[[], None]) -> None:
    """Write new files of one folder, either all of them or none.

    The files are written to a staging folder next to the last file, and moved to their places once
    all of them are on the disk. The last file is moved last, so that its existence shows that all
    files exist. If an earlier call for the same files was killed, its leftovers are removed
    first.

    Parameters
    ----------
    files
        Functions that write the files, by the files' final paths. The argument of a function is the
        path in the staging folder to which it must write.
    check
        Function that raises an error if one of the files must not be written, for example because
        it exists.

    Raises
    ------
    FolderInUseError
        If another process is writing the same files.
    OSError
        If a file cannot be written. All files that were written are removed.
    """
    *_, last = files
    staging = last.with_name(f".{last.name}.writing")
    if not staging.exists():
        check()  # before any folder is created, so that an error leaves nothing behind
    make_folder(last.parent)
    staging.mkdir(exist_ok=True)
    lock = Lock()
    lock.take(staging)
    try:
        _clean_up(files, staging)
        check()
        for path, write in files.items():
            write(staging / path.name)
        bring_to_disk(staging)
        (staging / _COMPLETE).touch()
        for path in files:
            take_place(staging / path.name, path)
    finally:
        _clean_up(files, staging)
        lock.let_go()
        remove(staging)


def _clean_up(files: Mapping[Path, Writer], staging: Path) -> None:
    """Remove the files and their staged copies, unless all files have reached their places."""
    *_, last = files
    if (staging / _COMPLETE).exists() and (staging / last.name).exists():
        for path in files:
            if not (staging / path.name).exists():  # it has been moved
                remove(path)
    (staging / _COMPLETE).unlink(missing_ok=True)
    for path in files:
        remove(staging / path.name)
