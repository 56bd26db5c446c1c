"""Writing of several files all or none, even if the writing process is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fedclade.core import bring_to_disk, make_folder, remove, take_place
from fedclade.runs.store.manifest import Lock

Writer = Callable[[Path], object]

_COMPLETE = "complete"
"""Marker file in the staging folder.

It exists once all files have been written there, while they are moved to their places.
"""


def write_together(files: Mapping[Path, Writer], check: Callable[[], None]) -> None:
    """Write new files of one folder all or none.

    The files are written to a staging folder beside the last one, and moved to their places once
    all are on the disk. The existence of the last file shows that all files are there. Leftovers of
    an earlier call for the same files whose process was killed are removed first.

    Parameters
    ----------
    files
        Function that writes each file, by the file's path.
    check
        Raises an error if one of the files may not be written, for example because it exists.

    Raises
    ------
    FolderInUseError
        If another process is writing the same files.
    OSError
        If a file cannot be written. None of the files is left.
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
    """Remove the written files, unless all of them have reached their places."""
    *_, last = files
    if (staging / _COMPLETE).exists() and (staging / last.name).exists():
        for path in files:
            if not (staging / path.name).exists():  # it has been moved
                remove(path)
    (staging / _COMPLETE).unlink(missing_ok=True)
    for path in files:
        remove(staging / path.name)
