"""Decoded arrays on disk, so that only the first start decodes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

CACHE_FORMAT = 1
"""Part of every key: raise it whenever the same files and options decode to something else than before."""

_log = logging.getLogger(__name__)


def cached(name: str, key: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that belong to a key: from the cache if they are there, else built and put there.

    The key has all that the arrays depend on, as JSON can hold it: files with their :func:`stamps`, options of the
    decoder. A file of the cache is an uncompressed ``.npz``, whose checksums show whether it is damaged and must be
    built again. Without a folder that can be written, every start decodes.
    """
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, name, key], sort_keys=True).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:20]}.npz"
    arrays = _read(path)
    if arrays is None:
        arrays = build()
        _write(path, arrays)
    return arrays


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and time of the last change in ns of each file, which show that it was replaced."""
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def cache_folder() -> Path:
    """Return ``FEDCLADE_CACHE_DIR``, by default ``~/.cache/fedclade``; it need not exist yet."""
    return Path(os.environ.get("FEDCLADE_CACHE_DIR") or "~/.cache/fedclade").expanduser()


def _read(path: Path) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning("cannot use the cached data in %s (%s); decoding again", path, error)
        return None


def _write(path: Path, arrays: Arrays) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as beside:
            whole = Path(beside) / path.name
            np.savez(whole, allow_pickle=False, **arrays)
            whole.replace(path)  # in one step: a crash leaves the old file or the new one, never a half
    except OSError as error:
        _log.warning("cannot keep decoded data in %s (%s); the next start decodes again", path.parent, error)
