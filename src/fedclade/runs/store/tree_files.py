"""Parameter tree on disk: ``tree.json`` describes the nodes, ``tree.safetensors`` has the vectors.

``tree.json`` also has the layout of the model, by which a vector becomes the module's parameters
again. Similarity matrices and the tensors that clients store have files of their own.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedclade.clustering import Similarity
from fedclade.core import VECTORS, Layout, Node, ParameterTree, RunError, Slot, write_tensors
from fedclade.runs.store.contents import check_ids, check_shape

# Similarity matrices of a run, and the NPZ file that stores them.

LARGEST_KEPT = 1000
"""Largest number of clients whose similarity matrix is stored.

A picture of a larger matrix shows nothing, and its file fills the disk.
"""


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """Cosine similarities ``[n, n]`` of the updates of a cluster's clients ``[n]``."""

    node: int  #: node of the cluster
    round: int  #: round of the updates: for a cluster that was split, the last round before
    clients: tuple[int, ...]  #: ids of the clients
    alpha: Similarity  #: cosine similarities


def write_similarities(path: Path, similarities: Sequence[SimilarityMatrix]) -> None:
    """Write similarity matrices into a new file."""
    arrays: dict[str, Any] = {}
    for s in similarities:
        key = f"{s.node}/{s.round}"
        arrays[f"{key}/clients"] = np.asarray(s.clients, dtype=np.int64)
        arrays[f"{key}/alpha"] = s.alpha.astype(np.float32)
    np.savez_compressed(path, **arrays)


def read_similarities(path: Path, nodes: int) -> tuple[SimilarityMatrix, ...]:
    """Read the similarity matrices of a run, whose tree has this number of nodes.

    Raises one of the errors in :data:`DAMAGES` if the file is damaged.
    """
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
                    raise ValueError(
                        f"{name} should have a row and a column for each client, got {alpha.shape}"
                    )
                if not 0 <= node < nodes or node in found:
                    raise ValueError(
                        f"{name} should be the one matrix of a node from 0 to {nodes - 1}"
                    )
                found[node] = SimilarityMatrix(node, number, tuple(clients.tolist()), alpha)
    return tuple(found.values())


def _read_array(arrays: zipfile.ZipFile, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Read one array of an NPZ file, after refusing files that unpack to gigabytes."""
    info = arrays.getinfo(name)
    if info.file_size > LARGEST_KEPT**2 * 8 + 4096:
        raise ValueError(
            f"{name} should be of at most {LARGEST_KEPT} clients, got {info.file_size:,} bytes"
        )
    content = io.BytesIO(arrays.read(info))
    version = np.lib.format.read_magic(content)
    header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, by_columns, dtype = header(content)
    if dtype.kind not in "if" or (by_columns and len(shape) > 1):
        raise ValueError(f"{name} should hold numbers row by row, got {dtype}")
    return np.frombuffer(content.read(), dtype).reshape(shape)


# Tensors that the clients of a simulated run store, in the file ``personal.safetensors``, by client
# and name.

KEPT = "personal.safetensors"
"""Name of the file; it does not exist if clients store nothing."""


def write_kept(path: Path, kept: Mapping[int, Mapping[str, Tensor]], private: bool = False) -> None:
    """Write the tensors that clients store into a new file, if there are any."""
    if kept:
        tensors = {
            f"{client}/{name}": t.cpu().clone()
            for client, mine in kept.items()
            for name, t in mine.items()
        }
        write_tensors(path, tensors, private=private)


def read_kept(path: Path, layout: Layout | None) -> dict[int, dict[str, Tensor]]:
    """Read the tensors that clients store.

    Raises one of the errors in :data:`DAMAGES` if the file is damaged, for example if a tensor has
    another size than the layout. The weights of a mixture, float64, are one for each model; their
    number is not checked here.
    """
    kept: dict[int, dict[str, Tensor]] = {}
    lengths = (
        {} if layout is None else {"personal": layout.personal_size, "model": layout.full.size}
    )
    for key, tensor in (load_file(path) if path.exists() else {}).items():
        client, _, name = key.partition("/")
        if name == "mixture":
            lengths["mixture"] = len(tensor) if tensor.dim() else 0
        if tensor.shape != (lengths.get(name),) or not tensor.is_floating_point():
            raise ValueError(
                f"{key} in {path.name} should be of shape [{lengths.get(name)}], got "
                f"{list(tensor.shape)}"
            )
        kept.setdefault(int(client), {})[name] = tensor
    return kept


DAMAGES = (
    *(
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        EOFError,
        RecursionError,
        MemoryError,
    ),
    *(zipfile.BadZipFile, zlib.error, SafetensorError),
)
"""Errors that readers of files raise if the content is not what was written."""

_NODE = {
    **{"id": int, "parent": (int, None), "members": [int], "born": int, "split_in": (int, None)},
    "criteria": {...: (float, None)},
}
"""Shape of a node in ``tree.json``; ``tree.safetensors`` has its tensors, as far as set."""
_TENSORS = (*VECTORS, "cached")
_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("uint8", "int8", "int16", "int32", "int64"),
)
FROZEN = "frozen/"
"""Prefix of the names of frozen parameters in ``tree.safetensors``."""
_SLOT = {"name": str, "shape": [int], "dtype": str}
_FULL = {"parameters": [_SLOT], "buffers": [_SLOT]}
_LAYOUT = {"dtype": str, **_FULL, "tied": {...: str}, "frozen?": [str], "full?": _FULL}


def write_tree(
    tree: ParameterTree,
    folder: Path,
    layout: Layout | None = None,
    private: bool = False,
    members: Mapping[int, str] | None = None,
) -> None:
    """Write a tree into a new folder.

    Parameters
    ----------
    tree
        The tree.
    folder
        Folder to make.
    layout
        Layout of the entries of its vectors, to be written too; None if it is not known.
    private
        Whether only the owner may read the models, see :func:`fedclade.core.files.write_tensors`.
    members
        For nodes whose members are in a separate file, the name of that file; only the name is
        written here.
    """
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for node in tree.nodes:
        tensors |= {
            f"{node.id}/{name}": tensor
            for name in _TENSORS
            if (tensor := getattr(node, name)) is not None
        }
    for name, value in ({} if layout is None else layout.frozen).items():
        tensors[f"{FROZEN}{name}"] = value
    copies = {
        name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()
    }
    write_tensors(folder / "tree.safetensors", copies, private=private)
    nodes = [{name: getattr(node, name) for name in _NODE} for node in tree.nodes]
    for node, name in (members or {}).items():
        nodes[node]["members"] = name
    content = {"nodes": nodes, **({} if layout is None else {"layout": _described(layout)})}
    (folder / "tree.json").write_text(json.dumps(content, indent=2, default=dict) + "\n")


def read_tree(folder: Path, members: Callable[[str], list[int]] | None = None) -> ParameterTree:
    """Read a tree.

    Parameters
    ----------
    folder
        Folder of the tree.
    members
        Reads the members of a node from the separate file of this name; None if no node has one.

    Raises
    ------
    RunError
        If files are missing, damaged, or do not belong together.
    """
    try:
        described = json.loads((folder / "tree.json").read_text())
        if members is not None:
            for node in described["nodes"]:
                node["members"] = (
                    members(given) if isinstance(given := node["members"], str) else given
                )
        check_shape(described, {"nodes": [_NODE]}, "tree.json")
        tensors = load_file(folder / "tree.safetensors")
        tree = ParameterTree(tuple(_node(node, tensors) for node in described["nodes"]))
        _check_tree(tree)
        return tree
    except DAMAGES as error:
        raise RunError(
            f"the parameter tree in {folder} is damaged: {type(error).__name__}: {error}"
        ) from error


def read_layout(folder: Path) -> Layout | None:
    """Read the layout of the entries of a tree's vectors; None if it was not written.

    Raises
    ------
    RunError
        If it is damaged.
    """
    try:
        described = json.loads((folder / "tree.json").read_text())
        check_shape(described, {"layout?": _LAYOUT}, "tree.json")
        return _layout(described["layout"], folder) if "layout" in described else None
    except DAMAGES as error:
        raise RunError(
            f"the layout in {folder / 'tree.json'} is damaged: {type(error).__name__}: {error}"
        ) from error


def _node(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Node:
    node: dict[str, Any] = {name: described[name] for name in _NODE}
    node |= {name: tensors.get(f"{node['id']}/{name}") for name in _TENSORS}
    node |= {"members": tuple(node["members"]), "params": tensors[f"{node['id']}/params"]}
    return Node(**node)


def _check_tree(tree: ParameterTree) -> None:
    """Check that nodes are in the order of their ids, parents first, and their tensors fit."""
    if not tree.nodes:
        raise ValueError("there is no root")
    size = tree.nodes[0].params.shape
    for place, node in enumerate(tree.nodes):
        if node.id != place:
            raise ValueError(f"node {place} should be in place {place}, where {node.id} is")
        if (node.parent is None) != (place == 0) or (
            node.parent is not None and node.parent >= place
        ):
            raise ValueError(
                f"the parent of node {place} should be a node before it, got {node.parent}"
            )
        if list(node.members) != sorted(set(node.members)):
            raise ValueError(f"the members of node {place} should be different and in order")
        for name in VECTORS:
            tensor: Tensor | None = getattr(node, name)
            if tensor is not None and (
                tensor.dim() != 1 or tensor.shape != size or not tensor.is_floating_point()
            ):
                raise ValueError(
                    f"{name} of node {place} should be of shape {list(size)}, got "
                    f"{list(tensor.shape)}"
                )
        if node.cached is not None and (
            node.cached.dim() != 2 or len(node.cached) != len(node.members)
        ):
            raise ValueError(
                f"cached of node {place} should be a row for each member, got "
                f"{list(node.cached.shape)}"
            )


def _described(layout: Layout) -> dict[str, Any]:
    return {
        "dtype": str(layout.dtype).removeprefix("torch."),
        **_places(layout),
        "tied": dict(layout.tied),
        "frozen": [*layout.frozen],
        **({"full": _places(layout.full)} if layout.personal else {}),
    }


def _places(layout: Layout) -> dict[str, Any]:
    return {
        kind: [
            {"name": s.name, "shape": list(s.shape), "dtype": str(s.dtype).removeprefix("torch.")}
            for s in slots
        ]
        for kind, slots in (("parameters", layout.parameters), ("buffers", layout.buffers))
    }


def _layout(described: Mapping[str, Any], folder: Path) -> Layout:
    tied = tuple(described["tied"].items())
    frozen = dict[str, Tensor]()
    if described.get("frozen"):
        with safe_open(folder / "tree.safetensors", "pt") as tensors:
            frozen = {name: tensors.get_tensor(f"{FROZEN}{name}") for name in described["frozen"]}
    rest = _dtype(described["dtype"]), tied, frozen
    full = Layout(*_slots(described.get("full", described)), *rest)
    names = [*(slot.name for slot in (*full.parameters, *full.buffers)), *frozen]
    if len(set(names)) < len(names) or not {place for _, place in tied} <= set(names):
        raise ValueError("each tensor should have one place, and tied ones that of another")
    shared = _slots(described)
    layout = full.without(
        set(names) - {slot.name for slots in shared for slot in slots} - set(frozen)
    )
    if (layout.parameters, layout.buffers) != shared:
        raise ValueError("what is shared should be a part of the full layout")
    return layout


def _slots(described: Mapping[str, Any]) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    start = 0
    kinds = dict[str, list[Slot]]()
    for kind in ("parameters", "buffers"):
        kinds[kind] = []
        for each in described[kind]:
            kinds[kind].append(
                Slot(each["name"], tuple(each["shape"]), _dtype(each["dtype"]), start)
            )
            start = kinds[kind][-1].stop
    return tuple(kinds["parameters"]), tuple(kinds["buffers"])


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is no type of a model's tensors")
    return getattr(torch, name)
