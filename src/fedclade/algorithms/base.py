"""What an algorithm is: a pure step from one state to the next, with the world passed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedclade.clustering import (
    Assignment,
    SplitCriteria,
    route,
    to_root,
    walk_down,
)
from fedclade.core import (
    Clients,
    Event,
    ParameterTree,
    Round,
    Updates,
    mean,
    row_norms,
)


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


@dataclass(frozen=True, eq=False)
class RoundLog:
    """What an algorithm reports of a round.

    Parameters
    ----------
    geometry
        By node, for every cluster that had answers.
    losses
        Mean training loss of each client that answered.
    discrepancy
        Σ ‖w_i − w‖ over the clients that answered, where w is the model of the client's cluster after the round, in
        parameter units (FedGroup eq. 4). None if nobody answered, or the run streams and keeps no single updates.
    events
        In the order in which they happened.
    phase
        ``train``, or what else the round was for.
    """

    geometry: Mapping[int, SplitCriteria]
    losses: Mapping[int, float]
    discrepancy: float | None = None
    events: tuple[Event, ...] = ()
    phase: str = "train"


class Algorithm(ABC):
    """A federated algorithm: its hyper-parameters, and a step.

    Subclasses are frozen dataclasses whose fields are the hyper-parameters, named as in the paper.

    Attributes
    ----------
    asks_for
        What else of their data clients must tell besides updates and scores, in words; differential privacy does not
        cover it.
    waits_by
        The hyper-parameter by which :attr:`rounds_needed` can be lowered, if there is one.
    """

    asks_for: ClassVar[str] = ""
    waits_by: ClassVar[str] = ""

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients.

        One that does with their signatures, and with sums over all clients of a model, says False, and can stream.
        """
        return True

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return 1

    @property
    def rounds_needed(self) -> int:
        """How many rounds it takes until it has done what sets it apart; a run of fewer is told so."""
        return 1

    def check_clients(self, clients: int) -> None:
        """Check that so many clients are enough for what the hyper-parameters ask for; any number is by default.

        Raises
        ------
        ConfigError
            If they are not.
        """
        return

    @abstractmethod
    def init(self, params: Tensor, clients: Clients) -> State:
        """Return the state before the first round, from the initial model ``[S]``, or ``[initial_models, S]``."""

    @abstractmethod
    def step(self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, RoundLog]:
        """Run one round with the sampled clients; return the next state and what there is to tell."""

    def finished(self, state: State) -> bool:
        """Tell whether the run is at its end, however many rounds it was given."""
        return False

    def cohort(self, state: State, fraction: float, draw: np.random.Generator) -> tuple[int, ...]:
        """Sample the clients of a round: this fraction of every cluster, and at least one of each.

        Every cluster is a federation of its own (CFL Algorithm 3; FL+HC after its clustering step). So are those who
        wait at a node, as they did not answer when it was split.
        """
        clusters = [leaf.members for leaf in state.tree.leaves if leaf.members]
        clusters += [members for _, members in sorted(state.tree.stragglers.items())]
        return tuple(client for members in clusters for client in sample(members, fraction, draw))

    def serve(self, state: State, clients: Clients) -> Mapping[int, int]:
        """Return the node whose model each client is served with: its cluster's."""
        return state.tree.leaf_of

    def join(self, state: State, ids: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, list[Event]]:
        """Take newcomers in before a round; return the next state and what there is to tell.

        In a tree of cached updates they go down to a leaf (CFL Algorithm 4). Otherwise they begin at the root, and so
        does who does not answer: methods that assign clients in every round, or at their first, do so with them.

        Parameters
        ----------
        state
            Before the round.
        ids
            The newcomers, who are among the clients now.
        clients, this_round
            As in :meth:`step`.
        """
        tree, joined = walk_down(state.tree.with_newcomers(ids), ids, clients, this_round)
        events = [Event("joined", node, {"clients": come}) for node, come in [(0, list(ids)), *joined.items()]]
        return replace(state, tree=tree), events

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Find a place in the tree for newcomers; it changes nothing.

        By what the tree has: where updates from before the splits are cached, down the tree by the newcomers' own (CFL
        Algorithm 4); otherwise to the leaf whose model has the lowest loss on their training data.

        Parameters
        ----------
        tree
            Of a run, as the server sees it.
        ids
            The newcomers, all of them among the clients.
        clients
            Who can be asked.
        this_round
            What newcomers are asked to do.
        """
        return route(tree, ids, clients, this_round)


class OwnModels(Algorithm):
    """An algorithm that gives every client a model of its own, in a leaf of the root."""

    def join(self, state: State, ids: Sequence[int], clients: Clients, this_round: Round) -> tuple[State, list[Event]]:
        """Give each newcomer a leaf, with the root's model."""
        tree = state.tree.with_leaves([[client] for client in ids], this_round.number - 1)
        return replace(state, tree=tree), [Event("joined", 0, {"clients": list(ids)})]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Give newcomers the root's model; the other models are other clients' own."""
        return to_root(ids)


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
class ClusterUpdate:
    """One cluster's part of a round: who answered, with what, and what it shows.

    Parameters
    ----------
    node, updates, geometry
        The cluster, the updates of its members that answered, and their geometry.
    mean
        The mean of the updates, ``[S]``; None if nobody answered.
    enough
        Whether so many answered that the cluster may move, and decide anything.
    waits
        Whether these are no cluster, but clients that wait where one was split, since they did not answer then.
    """

    node: int
    updates: Updates
    geometry: SplitCriteria
    mean: Tensor | None
    enough: bool
    waits: bool = False

    @classmethod
    def of(
        cls, node: int, updates: Updates, this_round: Round, *, waits: bool = False, weighted: bool = True
    ) -> ClusterUpdate:
        """Measure what came from a cluster; see :func:`fedclade.core.aggregate.mean` for ``weighted``."""
        moved = mean(updates, weighted=weighted) if updates.ids else None
        enough = len(updates.ids) >= this_round.min_clients
        return cls(node, updates, SplitCriteria.of(updates, moved), moved, enough, waits)

    @property
    def step(self) -> Tensor | None:
        """What the cluster's model moves by, ``[S]``: the mean of its updates; None if it keeps its model."""
        return self.mean if self.enough and not self.waits else None

    @property
    def discrepancy(self) -> float | None:
        """How far the clients' models are from the cluster's after its step, in all (FedGroup eq. 4)."""
        if not self.updates.ids or self.updates.deltas is None:
            return None
        D = self.updates.n_parameters
        if self.step is None:
            return float(self.updates.norms.sum())
        return float(row_norms(self.updates.deltas[:, :D], self.step[:D]).sum())


def train_clusters(
    state: State, cohort: Sequence[int], clients: Clients, this_round: Round, *, weighted: bool = True
) -> list[ClusterUpdate]:
    """Let the cohort train, each client from its cluster's model; return the clusters that were asked."""
    leaf_of = state.tree.leaf_of
    models, assignment = state.tree.models([leaf_of[client] for client in cohort])
    return by_cluster(state.tree, clients.train(cohort, models, assignment, this_round), this_round, weighted=weighted)


def train_root(state: State, cohort: Sequence[int], clients: Clients, this_round: Round) -> ClusterUpdate:
    """Let the cohort train, each client from the root's model."""
    updates = clients.train(cohort, state.tree.nodes[0].params[None], [0] * len(cohort), this_round)
    return ClusterUpdate.of(0, updates.select(sorted(cohort)), this_round)


def by_cluster(
    tree: ParameterTree, updates: Updates, this_round: Round, *, weighted: bool = True
) -> list[ClusterUpdate]:
    """Part the updates of clients that each started from its cluster's model; return the clusters that were asked."""
    members: dict[int, list[int]] = {}
    for client in sorted({*updates.ids, *updates.left_out}):
        members.setdefault(tree.leaf_of[client], []).append(client)
    # Where a split took place, that is: the root of a star, split in round 0, is no cluster that was parted.
    waits = {node: bool(tree.nodes[node].split_in) for node in members}
    how = {node: {"waits": waits[node], "weighted": weighted} for node in members}
    return [ClusterUpdate.of(node, updates.select(members[node]), this_round, **how[node]) for node in sorted(members)]


def move_clusters(tree: ParameterTree, parts: Sequence[ClusterUpdate]) -> ParameterTree:
    """Move every cluster's model by the mean of its updates (CFL eq. 2; Algorithm 2, line 7).

    A cluster with too few answers keeps its model, and so does a node at which clients wait.
    """
    for part in parts:
        if part.step is not None:
            tree = tree.moved(part.node, part.step)
    return tree


def log_of(parts: Sequence[ClusterUpdate], events: Sequence[Event] = (), phase: str = "train") -> RoundLog:
    """Gather what a round reports, and tell of clusters with too few answers."""
    clusters = [part for part in parts if not part.waits]
    too_few = [too_few_event(part.node, len(part.updates.ids)) for part in clusters if not part.enough]
    apart = [part.discrepancy for part in parts if part.updates.ids]
    return RoundLog(
        geometry={part.node: part.geometry for part in clusters if part.updates.ids},
        losses={c: loss for p in parts for c, loss in zip(p.updates.ids, p.updates.losses.tolist(), strict=True)},
        discrepancy=sum(each for each in apart if each is not None) if apart and None not in apart else None,
        events=(*too_few, *events),
        phase=phase,
    )


def too_few_event(node: int, answered: int) -> Event:
    """Tell that fewer clients of a cluster answered than the round's ``min_clients``, so that it keeps its model."""
    return Event("too_few", node, {"clients": answered})


def postponed(part: ClusterUpdate, needed: int) -> Event:
    """Tell that too few clients answered to be clustered, so that it is left to the next round."""
    return Event("postponed", part.node, {"clients": len(part.updates.ids), "needed": needed})


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
    best = {client: (-1.0, path[-1].id) for client, path in paths.items()}
    for depth in range(max(map(len, paths.values()))):
        at = {client: path[depth].id for client, path in paths.items() if depth < len(path)}
        models, rows = tree.models(list(at.values()))
        evaluation = clients.evaluate(list(at), models, rows, "validation")
        for client, accuracy in zip(evaluation.ids, evaluation.accuracies.tolist(), strict=True):
            if accuracy >= best[client][0]:
                best[client] = (accuracy, at[client])
    return {client: node for client, (_, node) in best.items()}
