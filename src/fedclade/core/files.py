"""Atomic writing of files: after a crash, a file is either the old or the complete new one."""

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
"""Mode of files that only their owner may read.

These are files with models, which reveal something of their training data, and a client's records.
"""

LONGEST_NAME = 255
LONGEST_PATH = 4095
"""Largest lengths, in bytes, of a file's name and of a path on common file systems."""


def appear(target: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Write a file or folder atomically, replacing an existing one; its parent folder must exist.

    ``write`` is called with a temporary path next to ``target``. The result is flushed to the disk
    and then renamed. Only if a folder replaces a folder is there a moment without either.

    Parameters
    ----------
    target
        The final path.
    write
        Writes the file or folder to the path that it is given.
    private
        Whether only the owner may read the file, from its first byte on.
    """
    beside = target.with_name(f".{target.name}.writing")
    remove(beside)
    try:
        if private:
            beside.touch(mode=OWNER_ONLY, exist_ok=False)
        write(beside)
        if private:
            beside.chmod(OWNER_ONLY)  # write() may have replaced the file by another one
        bring_to_disk(beside)
        take_place(beside, target)
    finally:
        remove(beside)


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Lock a client's record while it is read and written, as two processes may run one client."""
    with FileLock(path.with_name(f".{path.name}.lock"), mode=OWNER_ONLY):
        yield


@contextmanager
def owner_only() -> Generator[None]:
    """Restrict files and folders that are created inside the block to their owner."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def take_place(source: Path, target: Path) -> None:
    """Rename a file or folder to a target in the same parent folder, replacing an existing one."""
    if target.is_dir():  # a rename does not replace a folder
        remove(target)
    source.replace(target)
    _sync(target.parent)  # the new name is an entry of the folder


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or a folder with all its contents, has been written to the disk."""
    if path.is_dir():
        for each in path.iterdir():
            bring_to_disk(each)
    _sync(path)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, if they do not exist."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        _sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, replacing an existing one."""
    appear(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str] | None = None,
    *,
    private: bool = False,
) -> None:
    """Write tensors as a new safetensors file.

    The same tensors and header result in the same bytes.

    Parameters
    ----------
    path
        The file.
    tensors
        Tensors by name; they must not share memory.
    header
        Metadata to store in the file.
    private
        Whether only the owner may read the file.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    path.touch(OWNER_ONLY if private else 0o666)
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, None if header is None else dict(header))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # safetensors makes every file private
    if header is not None and len(header) > 1:
        _sort_header(path)


def _sort_header(path: Path) -> None:
    """Sort the metadata in a safetensors file, so that equal contents give equal bytes.

    Safetensors writes the metadata in the order of a randomized hash map. The offsets of tensors
    count from the end of the header, so the header must keep its length; it does, since only the
    order of its entries changes.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text = text.ljust(length)  # safetensors pads headers with spaces, too
        if len(text) == length:
            file.seek(8)
            file.write(text)


def path_problem(path: object) -> str:
    """Return the reason why no file can have a path, in words; "" if one can.

    Values that are not paths also result in "".

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
    """Return the reason why a text cannot be the name of a folder, in words; "" if it can.

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
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
