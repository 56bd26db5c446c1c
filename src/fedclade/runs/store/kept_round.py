"""Best round so far by scores on validation data, in memory and in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedclade.core import ParameterTree, write_tensors
from fedclade.runs.store.tree_files import SimilarityMatrix, read_tree, write_tree

_FACTS = "best.json"
_TENSORS = "best.safetensors"
_TREE = "tree"


@dataclass(frozen=True, eq=False)
class KeptRound:
    """Results with which a run would end if this round had been its last.

    Parameters
    ----------
    round
        Number of the round, from 1.
    tree
        The clusters and their models after the round, as the server sees them.
    kept
        Tensors that each client of a simulation stores, by client and name; see
        :class:`~fedclade.Run`.
    own_models
        Number of clients that are evaluated with models of their own.
    similarities
        The latest similarity matrix of every cluster.
    """

    round: int
    tree: ParameterTree
    kept: Mapping[int, Mapping[str, Tensor]] = field(
        default_factory=dict[int, Mapping[str, Tensor]]
    )
    own_models: int = 0
    similarities: Sequence[SimilarityMatrix] = ()

    def write(self, folder: Path, *, private: bool) -> None:
        """Write the round into a new folder.

        ``private`` is whether its models are private, see :func:`write_tensors
        <fedclade.core.files.write_tensors>`.
        """
        folder.mkdir()
        write_tree(self.tree, folder / _TREE, None, private)
        tensors = {
            f"kept/{client}/{name}": tensor.detach().cpu().clone()
            for client, mine in self.kept.items()
            for name, tensor in mine.items()
        }
        tensors |= {f"similarity/{s.node}": torch.tensor(s.alpha) for s in self.similarities}
        write_tensors(folder / _TENSORS, tensors, private=private)
        facts = {
            "round": self.round,
            "own_models": self.own_models,
            "similarities": [
                {"node": s.node, "round": s.round, "clients": s.clients} for s in self.similarities
            ],
        }
        (folder / _FACTS).write_text(json.dumps(facts) + "\n")

    @classmethod
    def read(cls, folder: Path) -> KeptRound:
        """Read a round onto the CPU; raises one of the errors of damaged files, or a RunError."""
        facts = json.loads((folder / _FACTS).read_text())
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / _TENSORS).items()}
        kept: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, place = key.partition("/")
            if kind == "kept":
                client, _, name = place.partition("/")
                kept.setdefault(int(client), {})[name] = tensor
        similarities = tuple(
            SimilarityMatrix(
                s["node"],
                s["round"],
                tuple(s["clients"]),
                tensors[f"similarity/{s['node']}"].numpy(),
            )
            for s in facts["similarities"]
        )
        tree = read_tree(folder / _TREE).map_vectors(torch.clone, torch.clone)
        return cls(facts["round"], tree, kept, facts["own_models"], similarities)

    def moved(self, device: str) -> KeptRound:
        """Return the round with the models of its tree on a device."""
        return replace(self, tree=self.tree.map_vectors(*[lambda tensor: tensor.to(device)] * 2))
