"""Several files that appear together: all of them or none, also where the process that writes them is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fedclade.core import bring_to_disk, make_folder, remove, take_place
from fedclade.runs.store.manifest import Lock

Writer = Callable[[Path], object]

_COMPLETE = "complete"
"""Marker in the staging folder: all files have been written there, and are being moved to their places."""


def write_together(files: Mapping[Path, Writer], check: Callable[[], None]) -> None:
    """Write new files that lie in one folder, the last of them as a sign that all are there.

    The files are written to a staging folder beside the last one, and moved to their places once
    all are on the disk. What an earlier call for the same files left when its process was killed is
    removed first.

    Parameters
    ----------
    files
        How to write each file, by its path.
    check
        Raises an error if one of the files may not be written, such as since it exists already.

    Raises
    ------
    FolderInUseError
        If another process is writing the same files.
    OSError
        If a file cannot be written. None of them is left.
    """
    *_, last = files
    staging = last.with_name(f".{last.name}.writing")
    if not staging.exists():
        check()  # before any folder is made
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
    """Remove what was written, unless all files have reached their places."""
    *_, last = files
    if (staging / _COMPLETE).exists() and (staging / last.name).exists():
        for path in files:
            if not (staging / path.name).exists():  # it has been moved
                remove(path)
    (staging / _COMPLETE).unlink(missing_ok=True)
    for path in files:
        remove(staging / path.name)
