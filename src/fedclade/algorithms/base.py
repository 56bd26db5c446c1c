"""What an algorithm is: a pure step from one state to the next, with the world passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedclade.aggregate import weighted_mean
from fedclade.clients import Clients, Round
from fedclade.clustering import Merges
from fedclade.geometry import Geometry
from fedclade.tree import ParameterTree
from fedclade.updates import Updates


@dataclass(frozen=True, eq=False)
class State:
    """All that an algorithm carries from round to round. Immutable.

    Parameters
    ----------
    tree
        The clusters and their models; its leaves are what clients train on.
    memory
        Named tensors that an algorithm keeps besides.
    """

    tree: ParameterTree
    memory: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Event:
    """Something worth telling that happened in a round.

    Parameters
    ----------
    kind
        ``split``, ``rejected``, ...
    node
        The cluster it happened to.
    details
        Numbers and members, ready for JSON.
    """

    kind: str
    node: int
    details: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class RoundLog:
    """What an algorithm reports of a round.

    Parameters
    ----------
    geometry
        By node, for every cluster that had answers.
    losses
        Mean training loss of each client that answered.
    norms
        Norm of the update of each client that answered, in parameter units.
    events
        In the order in which they happened.
    phase
        ``train``, or what else the round was for.
    """

    geometry: Mapping[int, Geometry]
    losses: Mapping[int, float]
    norms: Mapping[int, float] = field(default_factory=dict[int, float])
    events: tuple[Event, ...] = ()
    phase: str = "train"


class Algorithm(ABC):
    """A federated algorithm: its hyper-parameters, and a step.

    Subclasses are frozen dataclasses whose fields are the hyper-parameters, named as in the paper.

    Attributes
    ----------
    needs_updates
        Whether a step works on the updates of single clients. One that does with their signatures, and with sums over
        all clients of a model, says False, and can stream.
    """

    needs_updates: ClassVar[bool] = True

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return 1

    @abstractmethod
    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state before the first round, from the initial model ``[S]``, or ``[initial_models, S]``."""

    @abstractmethod
    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round with the sampled clients; return the next state and what there is to tell."""

    def cohort(self, state: State, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Sample the clients of a round: this fraction of every cluster, and at least one of each.

        Every cluster is a federation of its own (CFL Algorithm 3; FL+HC after its clustering step).
        """
        clusters = [leaf.members for leaf in state.tree.leaves if leaf.members]
        return tuple(client for members in clusters for client in sample(members, fraction, draw))

    def serve(self, state: State, clients: Clients) -> Mapping[int, int]:
        """Return the node whose model each client is served with: its cluster's."""
        return state.tree.leaf_of


class OneCohort(Algorithm):
    """An algorithm that samples from all clients at once: who is in which cluster may change in every round."""

    def cohort(self, state: State, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Sample the clients of a round: this fraction of all, and at least one."""
        return sample(state.tree.nodes[0].members, fraction, draw)


def sample(members: Sequence[int], fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
    """Return a random fraction of the members, at least one, in ascending order (C of FedAvg)."""
    count = max(1, round(fraction * len(members)))
    return tuple(sorted(draw.choice(np.sort(members), count, replace=False).tolist()))


@dataclass(frozen=True, eq=False)
class ClusterRound:
    """One cluster's part of a round: who answered, with what, and what it shows."""

    node: int
    updates: Updates
    geometry: Geometry


def train_clusters(state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> list[ClusterRound]:
    """Let the cohort train, each client from its cluster's model; return the clusters that had answers."""
    leaf_of = state.tree.leaf_of
    models, assignment = state.tree.models([leaf_of[client] for client in cohort])
    return by_cluster(state.tree, clients.train(cohort, models, assignment, this_round))


def train_root(state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> ClusterRound:
    """Let the cohort train, each client from the root's model."""
    updates = clients.train(cohort, state.tree.nodes[0].params[None], [0] * len(cohort), this_round)
    updates = updates.of(sorted(updates.ids))
    return ClusterRound(0, updates, Geometry.of(updates))


def by_cluster(tree: ParameterTree, updates: Updates) -> list[ClusterRound]:
    """Part the updates of clients that each started from its cluster's model; return the clusters that had answers."""
    members: dict[int, list[int]] = {}
    for client in sorted(updates.ids):
        members.setdefault(tree.leaf_of[client], []).append(client)
    parts = [(node, updates.of(members[node])) for node in sorted(members)]
    return [ClusterRound(node, mine, Geometry.of(mine)) for node, mine in parts]


def move_clusters(tree: ParameterTree, parts: Sequence[ClusterRound]) -> ParameterTree:
    """Move every cluster's model by the weighted mean of its updates (CFL eq. 2; Algorithm 2, line 7).

    A cluster without an answer keeps its model.
    """
    for part in parts:
        tree = tree.moved(part.node, weighted_mean(part.updates))
    return tree


def log_of(parts: Sequence[ClusterRound], events: Sequence[Event] = (), phase: str = "train") -> RoundLog:
    """Gather what a round reports."""
    return RoundLog(
        geometry={part.node: part.geometry for part in parts},
        losses={c: loss for p in parts for c, loss in zip(p.updates.ids, p.updates.losses.tolist(), strict=True)},
        norms={c: norm for p in parts for c, norm in zip(p.updates.ids, p.updates.norms.tolist(), strict=True)},
        events=tuple(events),
        phase=phase,
    )


def clustering_event(
    metric: str,
    linkage: str,
    threshold: float | None,
    clusters: Sequence[Sequence[int]],
    clients: Sequence[int],
    merges: Merges,
) -> Event:
    """Tell of a step of hierarchical clustering of all clients, with all that a dendrogram needs.

    Parameters
    ----------
    metric, linkage, threshold
        How clients are compared, and clusters; where the merges were cut, if they were.
    clusters
        The members of each cluster found.
    clients, merges
        The clients in the order in which they were compared, ``[m]``; how they merged, ``[m-1, 4]``.
    """
    details = {
        "metric": metric,
        "linkage": linkage,
        "threshold": threshold,
        "sizes": [len(cluster) for cluster in clusters],
        "clients": list(clients),
        "merges": [[int(a), int(b), height] for a, b, height, _ in merges.tolist()],
    }
    return Event("clustered", 0, details)


def membership_events(before: ParameterTree, after: ParameterTree) -> list[Event]:
    """Tell which clients joined which cluster, and which clusters were left empty; both trees have the same leaves."""
    started = any(leaf.members for leaf in before.leaves)
    events: list[Event] = []
    for old, new in zip(before.leaves, after.leaves, strict=True):
        if joined := sorted(set(new.members) - set(old.members)):
            events.append(Event("joined", new.id, {"clients": joined}))
        if not new.members and (old.members or not started):
            events.append(Event("empty", new.id, {}))
    return events


def best_on_validation(tree: ParameterTree, clients: Clients) -> dict[int, int]:
    """Return for each client the node on its path with the best validation accuracy; of equals the deepest.

    So nobody fares worse than with an ancestor's model, as far as validation data can tell (CFL, end of section II-A).
    """
    paths = {client: tree.path(client) for client in clients.ids}
    best: dict[int, tuple[float, int]] = dict.fromkeys(paths, (-1.0, 0))
    for depth in range(max(map(len, paths.values()))):
        at = {client: path[depth].id for client, path in paths.items() if depth < len(path)}
        models, rows = tree.models(list(at.values()))
        accuracies = clients.evaluate(list(at), models, rows, "validation").accuracies.tolist()
        for (client, node), accuracy in zip(at.items(), accuracies, strict=True):
            if accuracy >= best[client][0]:
                best[client] = (accuracy, node)
    return {client: node for client, (_, node) in best.items()}
