"""Functions that write files atomically, and checks of file names and paths.

Atomic means that after a crash, a file has either its old or its complete new contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor

OWNER_ONLY = 0o600
"""File mode for files that only their owner may read and write.

It is used for files with models, since a model reveals something about its training data, and for a
client's records, such as its privacy budget.
"""

LONGEST_NAME = 255
LONGEST_PATH = 4095
"""Largest lengths, in bytes, of a file's name and of a path on common file systems."""


def appear(target: Path, write: Callable[[Path], object], *, private: bool = False) -> None:
    """Write a file or folder atomically, replacing an existing file or folder of the same name.

    ``write`` is called with a temporary path next to ``target``. The new file is flushed to the
    disk and then renamed to ``target``. Only if a folder replaces a folder, there is a moment in
    which ``target`` does not exist. The parent folder must exist.

    Parameters
    ----------
    target
        The final path.
    write
        Function that writes the file or folder to a given path.
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
    """Lock a client's record file, so that only one process at a time reads and changes it.

    Two processes may run the same client. The lock applies to the ``with`` block.
    """
    from filelock import FileLock

    with FileLock(path.with_name(f".{path.name}.lock"), mode=OWNER_ONLY):
        yield


@contextmanager
def owner_only() -> Generator[None]:
    """Make new files and folders accessible to their owner only, inside a ``with`` block.

    The block changes the umask of the whole process.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def take_place(source: Path, target: Path) -> None:
    """Rename a file or folder to ``target``, replacing an existing file or folder.

    Both paths must be in the same parent folder. The rename is flushed to the disk.
    """
    if target.is_dir():  # a rename does not replace a folder
        remove(target)
    source.replace(target)
    _flush_to_disk(target.parent)  # the new name is an entry of the folder


def bring_to_disk(path: Path) -> None:
    """Flush a file, or a folder with all its contents, to the disk (fsync)."""
    if path.is_dir():
        for each in path.iterdir():
            bring_to_disk(each)
    _flush_to_disk(path)


def make_folder(path: Path) -> None:
    """Create a folder and its parent folders if they do not exist yet."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        _flush_to_disk(path.parent)


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
    """Write tensors to a new safetensors file.

    Equal tensors and headers result in equal bytes.

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
        from safetensors.torch import save_file  # imports torch, unlike the module safetensors

        save_file(dict(tensors), path, None if header is None else dict(header))
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # safetensors makes every file readable by its owner only
    if header is not None and len(header) > 1:
        _sort_header(path)


def _sort_header(path: Path) -> None:
    """Sort the metadata in a safetensors file, so that equal contents result in equal bytes.

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
    """Return the reason why a path is not a valid file path, in words; "" if it is valid.

    The result is also "" for values that are not paths.

    >>> path_problem("runs/" + 300 * "x")
    'a name in the path has 300 bytes, but file systems allow at most 255'
    """
    if not isinstance(path, str | Path):
        return ""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "the path contains characters that no file name can have"
    if b"\0" in encoded:
        return "the path contains a null character"
    longest = max(len(name) for name in encoded.split(os.fsencode(os.sep)))
    if longest > LONGEST_NAME:
        return (
            f"a name in the path has {longest} bytes, but file systems allow at most {LONGEST_NAME}"
        )
    if len(encoded) > LONGEST_PATH:
        return (
            f"the path has {len(encoded):,} bytes, but file systems allow at most {LONGEST_PATH:,}"
        )
    return ""


def name_problem(name: str) -> str:
    """Return the reason why a text is not a valid name of a folder, in words; "" if it is valid.

    >>> name_problem("../x")
    "the name contains a '/', which would make it a path"
    """
    if not name.strip():
        return "the name is empty"
    if name in (".", ".."):
        return "the name refers to another folder"
    if separators := [each for each in ("/", "\\") if each in name]:
        return f"the name contains a {separators[0]!r}, which would make it a path"
    if not name.isprintable():
        return "the name contains characters that cannot be displayed"
    return path_problem(name)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hash of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_to_disk(path: Path) -> None:
    """Flush a file, or the list of entries of a folder, to the disk (fsync)."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
