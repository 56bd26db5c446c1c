"""The parameter tree on disk: ``tree.json`` says what there is, ``tree.safetensors`` holds the vectors."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedclade.errors import RunError
from fedclade.store.files import write_tensors
from fedclade.tree import Node, ParameterTree


def write_tree(tree: ParameterTree, folder: Path) -> None:
    """Write a tree into a new folder."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for node in tree.nodes:
        tensors[f"{node.id}/params"] = node.params.cpu().clone()
        if node.cached is not None:
            tensors[f"{node.id}/cached"] = node.cached.cpu().contiguous()
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
    (folder / "tree.json").write_text(json.dumps({"nodes": described}, indent=2) + "\n")


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
                )
                for node in described
            )
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"the parameter tree in {folder} is damaged: {type(error).__name__}: {error}") from error
