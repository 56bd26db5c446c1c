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

LONGEST_NAME = 255
LONGEST_PATH = 4095
"""Bytes of a file's name, and of a path, that common file systems take."""


def appear(target: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Let a file or a folder appear whole, in place of what may be there; its folder must exist.

    ``write`` writes it under another name beside ``target``; it is brought to the disk and renamed.
    Only where a folder replaces a folder is there a moment with neither. From its first byte only
    the owner may read a ``private`` file.
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
    path: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str] | None = None,
    *,
    private: bool = False,
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

    The offsets of tensors count from the end of the header, so the header must keep its length. It
    does: only the order of its entries changes.
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


def path_problem(path: object) -> str:
    """Return why no file can have a path, in words; nothing if one can, or if the value is not a path.

    >>> path_problem("runs/" + 300 * "x")
    'a name in it has 300 bytes, and file systems take at most 255'
    """
    if not isinstance(path, str | Path):
        return ""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "it has characters that no file name can have"
    if b"\0" in encoded:
        return "it has a null character"
    longest = max(len(name) for name in encoded.split(os.fsencode(os.sep)))
    if longest > LONGEST_NAME:
        return f"a name in it has {longest} bytes, and file systems take at most {LONGEST_NAME}"
    if len(encoded) > LONGEST_PATH:
        return f"it has {len(encoded):,} bytes, and file systems take at most {LONGEST_PATH:,}"
    return ""


def name_problem(name: str) -> str:
    """Return why a text cannot be the name of one folder, in words; nothing if it can.

    >>> name_problem("../x")
    "it has a '/', which would make it a path"
    """
    if not name.strip():
        return "it is empty"
    if name in (".", ".."):
        return "it names another folder"
    if separators := [each for each in ("/", "\\") if each in name]:
        return f"it has a {separators[0]!r}, which would make it a path"
    if not name.isprintable():
        return "it has characters that cannot be shown"
    return path_problem(name)


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
