"""The parameter tree on disk: ``tree.json`` says what there is, ``tree.safetensors`` holds the vectors.

With the layout of its model, which ``tree.json`` has too, a vector becomes the module's parameters again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedclade.errors import RunError
from fedclade.files import write_tensors
from fedclade.params import Layout, Slot
from fedclade.tree import Node, ParameterTree


def write_tree(tree: ParameterTree, folder: Path, layout: Layout | None = None) -> None:
    """Write a tree, and where its vectors' entries belong if that is known, into a new folder."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for node in tree.nodes:
        tensors[f"{node.id}/params"] = node.params.cpu().clone()
        if node.cached is not None:
            tensors[f"{node.id}/cached"] = node.cached.cpu().clone(memory_format=torch.contiguous_format)
        if node.trained_from is not None:
            tensors[f"{node.id}/trained_from"] = node.trained_from.cpu().clone()
    write_tensors(folder / "tree.safetensors", tensors)
    described = [
        {
            "id": node.id,
            "parent": node.parent,
            "members": list(node.members),
            "born": node.born,
            "split_in": node.split_in,
            "criteria": dict(node.criteria),
        }
        for node in tree.nodes
    ]
    content = {"nodes": described, **({} if layout is None else {"layout": _described(layout)})}
    (folder / "tree.json").write_text(json.dumps(content, indent=2) + "\n")


def read_tree(folder: Path) -> ParameterTree:
    """Read a tree.

    Raises
    ------
    RunError
        If its files are missing or do not belong together.
    """
    try:
        described = json.loads((folder / "tree.json").read_text())["nodes"]
        tensors = load_file(folder / "tree.safetensors")
        return ParameterTree(
            tuple(
                Node(
                    id=node["id"],
                    parent=node["parent"],
                    members=tuple(node["members"]),
                    params=tensors[f"{node['id']}/params"],
                    born=node["born"],
                    split_in=node["split_in"],
                    criteria=node["criteria"],
                    cached=tensors.get(f"{node['id']}/cached"),
                    trained_from=tensors.get(f"{node['id']}/trained_from"),
                )
                for node in described
            )
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"the parameter tree in {folder} is damaged: {type(error).__name__}: {error}") from error


def read_layout(folder: Path) -> Layout | None:
    """Read where the entries of a tree's vectors belong; None if that was not written.

    Raises
    ------
    RunError
        If it is damaged.
    """
    try:
        described = json.loads((folder / "tree.json").read_text()).get("layout")
        return None if described is None else _layout(described)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"the layout in {folder / 'tree.json'} is damaged: {type(error).__name__}: {error}") from error


def _described(layout: Layout) -> dict[str, Any]:
    def places(slots: tuple[Slot, ...]) -> list[dict[str, Any]]:
        return [{"name": s.name, "shape": list(s.shape), "dtype": str(s.dtype).removeprefix("torch.")} for s in slots]

    return {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "parameters": places(layout.parameters),
        "buffers": places(layout.buffers),
        "tied": dict(layout.tied),
    }


def _layout(described: Mapping[str, Any]) -> Layout:
    start = 0

    def places(kind: str) -> tuple[Slot, ...]:
        nonlocal start
        slots: list[Slot] = []
        for each in described[kind]:
            slots.append(Slot(each["name"], tuple(each["shape"]), _dtype(each["dtype"]), start))
            start = slots[-1].stop
        return tuple(slots)

    return Layout(places("parameters"), places("buffers"), _dtype(described["dtype"]), tuple(described["tied"].items()))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no type of tensors")
    return dtype
