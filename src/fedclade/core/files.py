"""Files that appear whole: a crash leaves what was there before or what was to be, and nothing in between."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

OWNER_ONLY = 0o600
"""Mode of files with models, which reveal something of their training data, and of a client's own records."""


def appear(target: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Let a file or a folder appear whole, in place of what may be there; its folder must exist.

    ``write`` writes it under another name beside ``target``; it is brought to the disk and renamed. Only where a folder
    replaces a folder is there a moment with neither. From its first byte only the owner may read a ``private`` file.
    """
    beside = target.with_name(f".{target.name}.writing")
    remove(beside)
    try:
        if private:
            beside.touch(mode=OWNER_ONLY, exist_ok=False)
        write(beside)
        if private:
            beside.chmod(OWNER_ONLY)  # what wrote it may have put another file in its place
        bring_to_disk(beside)
        take_place(beside, target)
    finally:
        remove(beside)


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Keep others from it while a client's record is read and written: two processes may serve one client."""
    with FileLock(path.with_name(f".{path.name}.lock"), mode=OWNER_ONLY):
        yield


@contextmanager
def owner_only() -> Generator[None]:
    """Let only the owner read the files and enter the folders that are made meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def take_place(source: Path, target: Path) -> None:
    """Rename a file or a folder that lies beside, in place of what may be there."""
    if target.is_dir():  # which a rename would not replace
        remove(target)
    source.replace(target)
    _sync(target.parent)


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or a folder with all that it holds, is on the disk."""
    if path.is_dir():
        for each in path.iterdir():
            bring_to_disk(each)
    _sync(path)


def make_folder(path: Path) -> None:
    """Make a folder, and those that it lies in, if they are not there."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file; one that is there is replaced in one go."""
    appear(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None, *, private: bool = False
) -> None:
    """Write tensors that share no memory as a new safetensors file, which only its owner may read if ``private``.

    The same tensors and ``header`` give the same bytes.
    """
    path.touch(OWNER_ONLY if private else 0o666)
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, None if header is None else dict(header))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # which safetensors makes private
    if header is not None and len(header) > 1:
        _sort_header(path)


def _sort_header(path: Path) -> None:
    """Put the metadata in a safetensors file in order: safetensors writes it in the order of a randomized hash map.

    The offsets of tensors count from the end of the header, so the header must keep its length. It does: only the order
    of its entries changes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text = text.ljust(length)  # a header may end in spaces, and does
        if len(text) == length:
            file.seek(8)
            file.write(text)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # where folders cannot be opened
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
