"""Storage of a parameter tree: ``tree.json`` for the nodes, ``tree.safetensors`` for the vectors.

``tree.json`` also contains the layout of the model, which maps a model vector to the module's
tensors. Similarity matrices and the tensors that clients store are in separate files.
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
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedclade.clustering import Similarity
from fedclade.core import (
    MANY_IDS,
    VECTORS,
    ClientIds,
    Layout,
    Node,
    ParameterTree,
    RunError,
    Slot,
    ascending_ids,
    id_array,
    is_in_file,
    release_pages,
    shown,
    write_tensors,
)
from fedclade.runs.store.contents import check_ids, check_shape

# Similarity matrices of a run, and the NPZ file that stores them.

LARGEST_KEPT = 1000
"""Largest number of clients of a cluster whose similarity matrix is stored.

A plot of a larger matrix is unreadable, and its file is large.
"""


@dataclass(frozen=True, eq=False)
class SimilarityMatrix:
    """Cosine similarities ``[n, n]`` between the model updates of a cluster's n clients."""

    node: int  #: id of the cluster's node
    round: int  #: round of the updates: for a cluster that was split, the last round before
    clients: tuple[int, ...]  #: ids of the clients
    alpha: Similarity  #: cosine similarities


def write_similarities(path: Path, similarities: Sequence[SimilarityMatrix]) -> None:
    """Write similarity matrices into a new NPZ file."""
    arrays: dict[str, Any] = {}
    for s in similarities:
        key = f"{s.node}/{s.round}"
        arrays[f"{key}/clients"] = np.asarray(s.clients, dtype=np.int64)
        arrays[f"{key}/alpha"] = s.alpha.astype(np.float32)
    np.savez_compressed(path, **arrays)


def read_similarities(path: Path, nodes: int) -> tuple[SimilarityMatrix, ...]:
    """Read the similarity matrices of a run.

    Parameters
    ----------
    path
        The NPZ file.
    nodes
        Number of nodes of the run's parameter tree.

    Raises
    ------
    Exception
        One of the errors in :data:`DAMAGES`, if the file is damaged.
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
                        f"the matrix of similarities {name} should have a row and a column for each "
                        f"of {len(clients)} clients, got the shape {list(alpha.shape)}"
                    )
                if not 0 <= node < nodes or node in found:
                    raise ValueError(
                        f"the matrix of similarities {name} should be the only matrix of its node, "
                        f"and the node should be from 0 to {nodes - 1}, got node {node}"
                    )
                found[node] = SimilarityMatrix(node, number, tuple(clients.tolist()), alpha)
    return tuple(found.values())


def _read_array(arrays: zipfile.ZipFile, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Read one array of an NPZ file, after rejecting arrays that are too large.

    A small compressed file could otherwise unpack to gigabytes.
    """
    info = arrays.getinfo(name)
    largest = LARGEST_KEPT**2 * 8 + 4096
    if info.file_size > largest:
        raise ValueError(
            f"the array of similarities {name} should have at most {largest:,} bytes, for "
            f"{LARGEST_KEPT:,} clients, got {info.file_size:,} bytes"
        )
    content = io.BytesIO(arrays.read(info))
    version = np.lib.format.read_magic(content)
    header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, by_columns, dtype = header(content)
    if dtype.kind not in "if" or (by_columns and len(shape) > 1):
        raise ValueError(
            f"the array of similarities {name} should contain integers or floats in row-major "
            f"order, got the type {dtype} (column-major: {by_columns})"
        )
    return np.frombuffer(content.read(), dtype).reshape(shape)


# Tensors that the clients of a simulated run store, such as personal parameters, in the file
# ``personal.safetensors``, by client id and name.

KEPT = "personal.safetensors"
"""Name of the file with clients' tensors, which does not exist if clients store no tensors."""


def write_kept(path: Path, kept: Mapping[int, Mapping[str, Tensor]], private: bool = False) -> None:
    """Write the tensors that clients store into a new file, if there are any.

    ``private`` is whether only the owner of the file may read it.
    """
    if kept:
        tensors = {
            f"{client}/{name}": t.cpu().clone()
            for client, mine in kept.items()
            for name, t in mine.items()
        }
        write_tensors(path, tensors, private=private)


def read_kept(path: Path, layout: Layout | None) -> dict[int, dict[str, Tensor]]:
    """Read the tensors that clients store, by client id and name.

    Parameters
    ----------
    path
        The file, which need not exist.
    layout
        Layout of the model, which defines the size of each tensor; None if it is not known. Only
        the number of mixture weights, one for each model of the mixture, is not checked.

    Raises
    ------
    Exception
        One of the errors in :data:`DAMAGES`, if the file is damaged.
    """
    kept: dict[int, dict[str, Tensor]] = {}
    if not path.exists():
        return kept
    lengths: dict[str, int] = {}
    if layout is not None:
        lengths = {"personal": layout.personal_size, "model": layout.full.size}
    for key, tensor in load_file(path).items():
        client, _, name = key.partition("/")
        if name == "mixture":
            lengths["mixture"] = len(tensor) if tensor.dim() else 0
        if tensor.shape != (lengths.get(name),) or not tensor.is_floating_point():
            raise ValueError(
                f"{key} in {path.name} should be floating-point numbers of the shape "
                f"[{lengths.get(name)}], got the shape {list(tensor.shape)}"
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
"""Types of the errors that reading a damaged file can raise."""

_NODE = {
    **{"id": int, "parent": (int, None), "members": [int], "born": int, "split_in": (int, None)},
    "criteria": {...: (float, None)},
}
"""Shape of a node in ``tree.json``; the node's tensors are in ``tree.safetensors``."""
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
    """Write a parameter tree into a new folder.

    Parameters
    ----------
    tree
        The tree.
    folder
        Folder to create.
    layout
        Layout that maps a model vector to the module's tensors, to be written, too; None if it is
        not known.
    private
        Whether only the owner of the files may read the models, see
        :func:`fedclade.core.files.write_tensors`.
    members
        For each node whose members are stored in a separate file, the name of this file, which is
        written in place of the members.

    Notes
    -----
    For many members with consecutive ids, ``tree.json`` has the first and the last id, such as
    ``{"first": 0, "last": 9999999}``, in place of a list of all ids.
    """
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for node in tree.nodes:
        tensors |= {
            f"{node.id}/{name}": tensor
            for name in _TENSORS
            if (tensor := getattr(node, name)) is not None
        }
    if layout is not None:
        tensors |= {f"{FROZEN}{name}": value for name, value in layout.frozen.items()}
    copies = {name: _copy_to_write(name, tensor) for name, tensor in tensors.items()}
    write_tensors(folder / "tree.safetensors", copies, private=private)
    release_pages()
    nodes = [_describe_node(node) for node in tree.nodes]
    for number, name in (members or {}).items():
        nodes[number]["members"] = name
    content: dict[str, Any] = {"nodes": nodes}
    if layout is not None:
        content["layout"] = _describe_layout(layout)
    (folder / "tree.json").write_text(json.dumps(content, indent=2, default=dict) + "\n")


def _copy_to_write(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a tree in memory of its own, as a file of tensors requires it.

    Models are copied, since a node and its parent may have the same model. Large matrices of
    signatures are not: each of them lies in a temporary file of its own.
    """
    if name.endswith("/cached") and is_in_file(tensor):
        return tensor
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def read_tree(
    folder: Path, members: Callable[[str], NDArray[np.int64]] | None = None
) -> ParameterTree:
    """Read a parameter tree from its folder, and check that its nodes and vectors are consistent.

    Parameters
    ----------
    folder
        Folder of the tree.
    members
        Function that reads the members of a node from a separate file, given the file's name; None
        if no node has a separate file.

    Raises
    ------
    RunError
        If files are missing, damaged, or inconsistent with each other.
    """
    try:
        described = json.loads((folder / "tree.json").read_text())
        check_shape(described, {"nodes": [{"id": int, "members": object}]}, "tree.json")
        ids = [_read_members(node, members) for node in described["nodes"]]
        check_shape(described, {"nodes": [_NODE]}, "tree.json")
        tensors = load_file(folder / "tree.safetensors")
        nodes = [
            _build_node(node, members_of_node, tensors)
            for node, members_of_node in zip(described["nodes"], ids, strict=True)
        ]
        tree = ParameterTree(tuple(nodes))
        _check_tree(tree)
        return tree
    except DAMAGES as error:
        raise RunError(
            f"the parameter tree in {folder} is damaged: {type(error).__name__}: {error}; restore "
            "the folder from a copy"
        ) from error


def read_layout(folder: Path) -> Layout | None:
    """Read the layout of a tree's model vectors; None if the folder contains no layout.

    The layout maps the entries of a vector to the module's tensors.

    Raises
    ------
    RunError
        If the layout is damaged.
    """
    try:
        described = json.loads((folder / "tree.json").read_text())
        check_shape(described, {"layout?": _LAYOUT}, "tree.json")
        if "layout" not in described:
            return None
        return _build_layout(described["layout"], folder)
    except DAMAGES as error:
        raise RunError(
            f"the layout in {folder / 'tree.json'} is damaged: {type(error).__name__}: {error}; "
            "restore the file from a copy"
        ) from error


def consecutive_range(members: Sequence[int]) -> range | None:
    """Return many members with consecutive ids as a range; None for other members.

    ``members`` are in ascending order. Fewer members than :data:`~fedclade.core.MANY_IDS` are
    listed one by one, as people and other programs expect.
    """
    if len(members) < MANY_IDS or members[-1] - members[0] >= len(members):
        return None
    return range(members[0], members[-1] + 1)


def _describe_node(node: Node) -> dict[str, Any]:
    """Return the attributes of a node that ``tree.json`` stores."""
    described = {name: getattr(node, name) for name in _NODE}
    ids = consecutive_range(node.members)
    described["members"] = list(node.members) if ids is None else {"first": ids[0], "last": ids[-1]}
    return described


def _read_members(
    described: dict[str, Any], read: Callable[[str], NDArray[np.int64]] | None
) -> Sequence[int] | None:
    """Take the members out of the description of a node, if they are no list of ids.

    These are members with consecutive ids, and members in a separate file, which ``read`` reads.
    The description then has an empty list. None if the members are a list.
    """
    stated = described["members"]
    if isinstance(stated, Mapping):
        check_shape(stated, {"first": int, "last": int}, "members")
        ids = np.arange(stated["first"], stated["last"] + 1)
    elif isinstance(stated, str) and read is not None:
        ids = read(stated)
    else:
        return None
    described["members"] = []
    if len(ids) == 0 or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(
            f"the members of node {described['id']} should be distinct and in ascending order, got "
            f"{shown(stated)}"
        )
    return ascending_ids(ClientIds(ids))


def _build_node(
    described: Mapping[str, Any], members: Sequence[int] | None, tensors: Mapping[str, Tensor]
) -> Node:
    """Build a node from its description in ``tree.json``, its members and the tree's tensors.

    If ``members`` is None, the members are those in the description.
    """
    node: dict[str, Any] = {name: described[name] for name in _NODE}
    node |= {name: tensors.get(f"{node['id']}/{name}") for name in _TENSORS}
    if members is None:
        listed: list[int] = described["members"]
        members = ClientIds(np.array(listed)) if len(listed) >= MANY_IDS else tuple(listed)
    node |= {"members": members, "params": tensors[f"{node['id']}/params"]}
    return Node(**node)


def _check_tree(tree: ParameterTree) -> None:
    """Check that the nodes of a tree are in the order of their ids and have matching tensors.

    Raises
    ------
    ValueError
        If nodes, parents, members or tensors are inconsistent.
    """
    if not tree.nodes:
        raise ValueError("the parameter tree should have at least one node, the root, got no node")
    size = tree.nodes[0].params.shape
    for place, node in enumerate(tree.nodes):
        if node.id != place:
            raise ValueError(
                f"the node at index {place} should have the id {place}, got {node.id}, so the nodes "
                "of the parameter tree are not in the order of their ids"
            )
        if (node.parent is None) != (place == 0) or (
            node.parent is not None and node.parent >= place
        ):
            raise ValueError(
                f"the parent of node {place} should be a node with a smaller id, got {node.parent}"
            )
        ids = id_array(node.members)
        if not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError(
                f"the members of node {place} should be distinct and in ascending order, got "
                f"{shown(list(node.members))}"
            )
        for name in VECTORS:
            tensor: Tensor | None = getattr(node, name)
            if tensor is not None and (
                tensor.dim() != 1 or tensor.shape != size or not tensor.is_floating_point()
            ):
                raise ValueError(
                    f"tensor {name!r} of node {place} of the parameter tree should be floating-point "
                    f"numbers of the shape {list(size)}, got the shape {list(tensor.shape)}"
                )
        if node.cached is not None and (
            node.cached.dim() != 2 or len(node.cached) != len(node.members)
        ):
            raise ValueError(
                f"tensor 'cached' of node {place} of the parameter tree should be a matrix with a "
                f"row for each member, got the shape {list(node.cached.shape)}"
            )


def _describe_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout as values for JSON, of the shape ``_LAYOUT``."""
    described: dict[str, Any] = {
        "dtype": str(layout.dtype).removeprefix("torch."),
        **_describe_slots(layout),
        "tied": dict(layout.tied),
        "frozen": [*layout.frozen],
    }
    if layout.personal:
        described["full"] = _describe_slots(layout.full)
    return described


def _describe_slots(layout: Layout) -> dict[str, Any]:
    """Return names, shapes and types of a layout's parameters and buffers, as values for JSON."""
    return {
        "parameters": [_describe_slot(slot) for slot in layout.parameters],
        "buffers": [_describe_slot(slot) for slot in layout.buffers],
    }


def _describe_slot(slot: Slot) -> dict[str, Any]:
    return {
        "name": slot.name,
        "shape": list(slot.shape),
        "dtype": str(slot.dtype).removeprefix("torch."),
    }


def _build_layout(described: Mapping[str, Any], folder: Path) -> Layout:
    """Build a layout from its description in ``tree.json``.

    ``folder`` has the file with frozen tensors.

    Raises
    ------
    ValueError
        If the description is inconsistent.
    """
    tied = tuple(described["tied"].items())
    frozen = dict[str, Tensor]()
    if described.get("frozen"):
        with safe_open(folder / "tree.safetensors", "pt") as tensors:
            frozen = {name: tensors.get_tensor(f"{FROZEN}{name}") for name in described["frozen"]}
    rest = _read_dtype(described["dtype"]), tied, frozen
    full = Layout(*_build_slots(described.get("full", described)), *rest)
    names = [*(slot.name for slot in (*full.parameters, *full.buffers)), *frozen]
    if len(set(names)) < len(names) or not {place for _, place in tied} <= set(names):
        raise ValueError(
            "the tensors of a layout should have distinct names, and each tied tensor should refer "
            "to one of them"
        )
    shared = _build_slots(described)
    shared_names = [slot.name for slot in (*shared[0], *shared[1])]
    layout = full.without(set(names) - set(shared_names) - set(frozen))
    if (layout.parameters, layout.buffers) != shared:
        raise ValueError(
            "the tensors that clients share should be tensors of the model, with the same order, "
            f"shapes and types, got {shown(shared_names)}"
        )
    return layout


def _build_slots(described: Mapping[str, Any]) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Return the slots of parameters and of buffers, from their description in ``tree.json``.

    A slot is the position of a tensor in the model vector. Slots follow each other without gaps.
    """
    start = 0
    kinds = dict[str, list[Slot]]()
    for kind in ("parameters", "buffers"):
        kinds[kind] = []
        for each in described[kind]:
            kinds[kind].append(
                Slot(each["name"], tuple(each["shape"]), _read_dtype(each["dtype"]), start)
            )
            start = kinds[kind][-1].stop
    return tuple(kinds["parameters"]), tuple(kinds["buffers"])


def _read_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(
            f"unknown tensor type {name!r} in the layout of a model; expected one such as 'float32'"
        )
    return getattr(torch, name)
