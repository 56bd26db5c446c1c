"""The SHA-256 of every file of a folder, so that what is not what was written is found when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedclade.core import RunError, sha256_of
from fedclade.runs.store.shape import check_shape


def write_manifest(path: Path, version: int, known: Mapping[str, str] | None = None) -> None:
    """Write a folder's format version, and the SHA-256 of every file in it, into a new file beside them.

    The sums of files that were taken from elsewhere are ``known`` by name: those files may be damaged since.
    """
    files = sorted(each for each in path.parent.rglob("*") if each.is_file())
    names = {each.relative_to(path.parent).as_posix(): each for each in files}
    sums = {name: (known or {}).get(name) or sha256_of(each) for name, each in names.items()}
    path.write_text(json.dumps({"format": version, "sha256": sums}) + "\n")


def read_manifest(path: Path, version: int) -> Mapping[str, str]:
    """Return the SHA-256 of every file of a folder as noted; a RunError if there is no manifest of this version."""
    try:
        manifest = json.loads(path.read_text())
        check_shape(manifest, {"format": object, "sha256": {...: str}}, path.name)
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if manifest["format"] != version:
        raise RunError(f"{path.parent} has format {manifest['format']!r}, this version reads format {version}")
    return manifest["sha256"]


def check_manifest(path: Path, version: int) -> tuple[str, ...]:
    """Check that the files of a folder are those that were written, and return their names relative to it.

    Raises
    ------
    RunError
        If they are not; names the file.
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
