"""What FedBuff carries from round to round: clocks, who trains, and the models that are still trained from."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedclade.algorithms.state import State
from fedclade.core import ParameterTree

Flight = tuple[float, int, int]
"""A client in training: when it finishes, in virtual seconds; the client; the version that it began from."""


@dataclass(frozen=True, eq=False)
class FedBuffState(State):
    """The clock and version of each cluster, who trains, and the models that are still trained from.

    Clusters are the leaves of the tree, in their order, and clocks are in virtual seconds. Of those in training
    ``finishes`` says when each is done, and ``begun`` which version of its cluster's model it has. Models that their
    clusters have moved on from are the rows of ``old [V, S]``; ``old_node`` and ``old_version`` say what they are.
    ``velocity [clusters, S]`` is that of each cluster's model, where the server has momentum.
    """

    clocks: tuple[float, ...]
    versions: tuple[int, ...]
    training: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    finishes: tuple[float, ...] = ()
    old: Tensor | None = None
    old_node: tuple[int, ...] = ()
    old_version: tuple[int, ...] = ()
    velocity: Tensor | None = None

    @classmethod
    def of(cls, tree: ParameterTree) -> FedBuffState:
        """Return the state in which nobody has begun."""
        return cls(tree, (0.0,) * len(tree.leaves), (0,) * len(tree.leaves))


def flights_of(state: FedBuffState) -> list[list[Flight]]:
    """Return those in training of each cluster, as heaps; who has left is not among them."""
    place_of = {leaf.id: place for place, leaf in enumerate(state.tree.leaves)}
    heaps: list[list[Flight]] = [[] for _ in place_of]
    for client, begun, finish in zip(state.training, state.begun, state.finishes, strict=True):
        if client in state.tree.leaf_of:
            heaps[place_of[state.tree.leaf_of[client]]].append((finish, client, begun))
    for heap in heaps:
        heapq.heapify(heap)
    return heaps


def models_of(state: FedBuffState, buffers: Sequence[Sequence[Flight]]) -> tuple[Tensor, dict[int, int]]:
    """Return the models ``[V, S]`` that the clients in the buffers began from, and the row of each client."""
    now = dict(zip((leaf.id for leaf in state.tree.leaves), state.versions, strict=True))
    rows, models, row_of = dict[tuple[int, int], int](), list[Tensor](), dict[int, int]()
    for leaf, buffer in zip(state.tree.leaves, buffers, strict=True):
        for _, client, begun in sorted(buffer, key=lambda flight: flight[1]):
            if (key := (leaf.id, begun)) not in rows:
                rows[key] = len(rows)
                models.append(leaf.params if begun == now[leaf.id] else _old(state, *key))
            row_of[client] = rows[key]
    return torch.stack(models) if models else state.tree.nodes[0].params[:0], row_of


def _old(state: FedBuffState, node: int, version: int) -> Tensor:
    """Return the model that a cluster had as of a version ``[S]``."""
    place = list(zip(state.old_node, state.old_version, strict=True)).index((node, version))
    assert state.old is not None  # as somebody trains from it
    return state.old[place]


def next_state(
    state: FedBuffState,
    tree: ParameterTree,
    clocks: Sequence[float],
    versions: Sequence[int],
    flights: Sequence[Sequence[Flight]],
) -> FedBuffState:
    """Return the state after a round, with those models that are still needed."""
    flying = [(leaf.id, *flight) for leaf, heap in zip(tree.leaves, flights, strict=True) for flight in sorted(heap)]
    before = dict(zip((leaf.id for leaf in tree.leaves), state.versions, strict=True))
    now = dict(zip(before, versions, strict=True))
    needed = sorted({(node, begun) for node, _, _, begun in flying if begun != now[node]})
    old = [
        state.tree.nodes[node].params if begun == before[node] else _old(state, node, begun) for node, begun in needed
    ]
    return FedBuffState(
        tree,
        clocks=tuple(clocks),
        versions=tuple(versions),
        training=tuple(client for _, _, client, _ in flying),
        begun=tuple(begun for _, _, _, begun in flying),
        finishes=tuple(finish for _, finish, _, _ in flying),
        old=torch.stack(old) if old else None,
        old_node=tuple(node for node, _ in needed),
        old_version=tuple(begun for _, begun in needed),
    )
