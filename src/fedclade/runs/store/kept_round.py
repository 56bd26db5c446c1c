"""Best round of a run so far, by scores on validation data, in memory and in a checkpoint.

A run with ``keep_best`` stores this round's models instead of the last round's models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedclade.core import ParameterTree, copy_rows, write_tensors
from fedclade.runs.store.tree_files import SimilarityMatrix, read_tree, write_tree

_FACTS = "best.json"
_TENSORS = "best.safetensors"
_TREE = "tree"


@dataclass(frozen=True, eq=False)
class KeptRound:
    """Results of one round, as the run would store them if the round had been its last.

    Parameters
    ----------
    round
        Number of the round, from 1.
    tree
        The clusters and their models after the round; if clients permute the entries of models,
        the models are in permuted order.
    kept
        Tensors that each client of a simulation stores, by client id and name; see
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
        """Write the round's results into a new folder.

        ``private`` is whether only the owner of the files may read the models, see
        :func:`write_tensors <fedclade.core.files.write_tensors>`.
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
        """Read a round's results from a folder, with all tensors on the CPU.

        Damaged files raise one of the errors in :data:`DAMAGES
        <fedclade.runs.store.tree_files.DAMAGES>`, or a RunError.
        """
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
        tree = read_tree(folder / _TREE).map_vectors(torch.clone, copy_rows)
        return cls(
            facts["round"], tree, kept, own_models=facts["own_models"], similarities=similarities
        )

    def moved(self, device: str) -> KeptRound:
        """Return the round's results with the models of the tree on a device, such as ``cuda``."""
        return replace(self, tree=self.tree.map_vectors(*[lambda tensor: tensor.to(device)] * 2))
