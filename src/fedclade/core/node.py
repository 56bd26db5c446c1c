"""A node of the parameter tree: one cluster, its model, and how it was split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

VECTORS = ("params", "trained_from", "continued")
"""What of a node is a model, ``[S]``."""


@dataclass(frozen=True, eq=False)
class Node:
    """One cluster.

    Parameters
    ----------
    id, parent
        Its place in the tree's list of nodes, and that of the node it was split from; the root is 0, its parent None.
    members
        Its clients c_v, in ascending order.
    params
        Its model ``[S]``: the current one of a leaf; of an inner node the θ*_v at which the updates before the split
        were made, so that eq. 47 holds for the cached updates to the letter.
    born
        Round after which it came into being; 0 is the start of the run.
    split_in
        Round in which it was split; None for a leaf.
    criteria
        The numbers by which its split was decided.
    cached
        The signatures of the members' updates at the parent's model before the split, Δ_e of eq. 47, ``[n, R]`` in the
        order of members. None for the root, and where no split made the node.
    trained_from
        The model ``[S]`` from which its last own training began, so that ``params - trained_from`` is its latest update
        (Δw_t^(g) of FedGroup's eq. 10); in FlexCFL the model that the group began with. None where no algorithm needs
        it.
    continued
        The model ``[S]`` that went on training beside the clusters that the node was split into, and that clients are
        served with in place of ``params``. None where there is none.
    """

    id: int
    parent: int | None
    members: tuple[int, ...]
    params: Tensor
    born: int = 0
    split_in: int | None = None
    criteria: Mapping[str, float] = field(default_factory=dict[str, float])
    cached: Tensor | None = None
    trained_from: Tensor | None = None
    continued: Tensor | None = None

    def __repr__(self) -> str:
        lifetime = f"born={self.born}" + ("" if self.split_in is None else f", split_in={self.split_in}")
        return f"Node({self.id}, parent={self.parent}, clients={len(self.members)}, {lifetime})"

    @property
    def model(self) -> Tensor:
        """The model ``[S]`` that clients are served with here."""
        return self.params if self.continued is None else self.continued
