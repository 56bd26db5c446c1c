"""Similarity matrices of a run, and the NPZ file that they are kept in."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedclade.clustering import Similarity
from fedclade.runs.store.contents import check_ids

LARGEST_KEPT = 1000
"""Similarity matrices of more clients are not kept: a picture of them shows nothing, and they fill the disk."""


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """Cosine similarities ``[n, n]`` of the updates of a cluster's clients ``[n]``."""

    node: int
    round: int  #: of the updates: for a cluster that was split, the last before
    clients: tuple[int, ...]
    alpha: Similarity


def write_similarities(path: Path, similarities: Sequence[SimilarityMatrix]) -> None:
    """Write matrices into a new file."""
    arrays: dict[str, Any] = {}
    for s in similarities:
        key = f"{s.node}/{s.round}"
        arrays[f"{key}/clients"] = np.asarray(s.clients, dtype=np.int64)
        arrays[f"{key}/alpha"] = s.alpha.astype(np.float32)
    np.savez_compressed(path, **arrays)


def read_similarities(path: Path, nodes: int) -> tuple[SimilarityMatrix, ...]:
    """Read the similarity matrices of a run whose tree has so many nodes; raises one of the errors of damaged files."""
    found: dict[int, SimilarityMatrix] = {}
    with zipfile.ZipFile(path) as arrays:
        for name in arrays.namelist():
            key, what = name.rsplit("/", 1)
            node, number = map(int, key.split("/"))
            if what == "alpha.npy":
                clients = _read_array(arrays, f"{key}/clients.npy")
                check_ids(clients.tolist(), f"the clients of {name}")
                alpha = _read_array(arrays, name).astype(np.float64)
                if clients.ndim != 1 or alpha.shape != (len(clients),) * 2 or not len(clients):
                    raise ValueError(f"{name} should have a row and a column for each client, got {alpha.shape}")
                if not 0 <= node < nodes or node in found:
                    raise ValueError(f"{name} should be the one matrix of a node from 0 to {nodes - 1}")
                found[node] = SimilarityMatrix(node, number, tuple(clients.tolist()), alpha)
    return tuple(found.values())


def _read_array(arrays: zipfile.ZipFile, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Read one array of an NPZ file; a few kilobytes that would unpack to gigabytes are refused before."""
    info = arrays.getinfo(name)
    if info.file_size > LARGEST_KEPT**2 * 8 + 4096:
        raise ValueError(f"{name} should be of at most {LARGEST_KEPT} clients, got {info.file_size:,} bytes")
    content = io.BytesIO(arrays.read(info))
    version = np.lib.format.read_magic(content)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, by_columns, dtype = header(content)
    if dtype.kind not in "if" or (by_columns and len(shape) > 1):
        raise ValueError(f"{name} should hold numbers row by row, got {dtype}")
    return np.frombuffer(content.read(), dtype).reshape(shape)
