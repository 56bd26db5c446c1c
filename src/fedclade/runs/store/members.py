"""The members of large clusters in files of their own, so that a checkpoint writes those of clusters that changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedclade.core import ParameterTree
from fedclade.runs.store.segments import share

LARGE = 10_000
"""Members from which on a cluster has a file for them."""

_NAME = re.compile(r"[0-9a-f]{32}\.npy")


def write_members(tree: ParameterTree, folder: Path, earlier: Sequence[Path] = ()) -> tuple[dict[int, str], list[Path]]:
    """Write the members of large clusters into a new folder, in files that are named by their content.

    Returns the name for each of these nodes, and which ``earlier`` files are shared since they say the same.
    """
    known = {path.name: path for path in earlier if _NAME.fullmatch(path.name)}
    names: dict[int, str] = {}
    shared: list[Path] = []
    for node in tree.nodes:
        if len(node.members) < LARGE:
            continue
        members = np.array(node.members, dtype=np.int64)
        names[node.id] = name = f"{hashlib.sha256(members.data).hexdigest()[:32]}.npy"
        folder.mkdir(exist_ok=True)
        if (folder / name).exists():  # of two clusters, such as a root and its only leaf
            continue
        if name in known:
            share(known[name], folder / name)
            shared.append(known[name])
        else:
            np.save(folder / name, members)
    return names, shared


def read_members(folder: Path, name: str) -> list[int]:
    """Read the members of a cluster from its file; raises OSError or ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"members should be a list, or the name of a file of them, got {name!r}")
    return np.load(folder / name, allow_pickle=False).tolist()
