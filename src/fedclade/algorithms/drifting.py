"""What FedDrift keeps from time step to time step, and how clients and models move at the start of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.algorithms.state import State
from fedclade.clustering import agglomerate, cut
from fedclade.core import Clients, Empty, EvaluationQuery, Event, Indices, Joined, Merged, Node, ParameterTree, Round

WORST = -1e18
"""In place of the score of a model that has diverged."""

AT_ONCE = 64
"""Models that a client is asked about in one question: more it may refuse (``max-models``)."""


@dataclass(frozen=True, eq=False)
class FedDriftState(State):
    """What data belongs to which model, and what clients reported in the last step.

    Parameters
    ----------
    ids
        The clients that there have been, ``[n]``, in the order of what follows.
    assigned
        The leaf of the model that the data of each client belongs to in each step, int64 ``[steps, n]``; 0: to none.
    accuracy
        Of each client's most accurate model on its data of the last step, float64 ``[n]``; NaN where it is not known.
    until
        The step in which each client's isolation ends, int64 ``[n]``; 0 where it is not isolated.
    begun, stages
        The first round of each step, and which stage clients' data was in.
    """

    ids: tuple[int, ...]
    assigned: Tensor
    accuracy: Tensor
    until: Tensor
    begun: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()

    @classmethod
    def first(cls, tree: ParameterTree, ids: Sequence[int]) -> FedDriftState:
        """Return the state before the first step, in which no data belongs to any model."""
        n = len(ids)
        unknown, none = torch.full((n,), torch.nan, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
        return cls(tree, tuple(ids), torch.zeros(0, n, dtype=torch.int64), unknown, none)

    @property
    def free(self) -> list[int]:
        """The leaves of the models that clients may take: some data belongs to them, and nobody is isolated there.

        Before the first step no data belongs to any, and clients may take those that somebody begins with.
        """
        if not len(self.assigned):
            return [leaf.id for leaf in self.tree.leaves if leaf.members]
        apart = set(self.assigned[-1][self.until > 0].tolist())
        return [node for node in self.assigned.unique().tolist() if node and node not in apart]

    def with_clients(self, ids: Sequence[int]) -> FedDriftState:
        """Return the state after clients came of which nothing is known."""
        new = FedDriftState.first(self.tree, ids)
        none = new.assigned.new_zeros(len(self.assigned), len(ids))
        pairs = {"accuracy": (self.accuracy, new.accuracy), "until": (self.until, new.until)}
        longer = {name: torch.cat(each) for name, each in pairs.items()}
        assigned = torch.cat([self.assigned, none], dim=1)
        return replace(self, tree=self.tree.with_newcomers(ids), ids=(*self.ids, *ids), assigned=assigned, **longer)


def accuracies(
    tree: ParameterTree, nodes: Sequence[int], ids: Sequence[int], clients: Clients, data_round: int = 0
) -> tuple[dict[int, NDArray[np.float64]], dict[int, int]]:
    """Return how accurate m models are on the training data that some clients held in a round, or hold now.

    Of each client that answers, and has a score, the accuracies ``[m]`` and the number of its examples.
    """
    if not nodes or not ids:
        return {}, {}
    found, counts = dict.fromkeys(ids, np.zeros(0)), dict[int, int]()
    for first in range(0, len(nodes), AT_ONCE):
        models, rows = tree.models(nodes[first : first + AT_ONCE])
        each, m = [client for client in found for _ in rows], len(rows)
        reply = clients.ask(EvaluationQuery(each, models, [*rows] * len(found), "train", data_round=data_round))
        merits = reply.merit.double().nan_to_num(nan=torch.nan, neginf=WORST).view(-1, m).numpy()
        found = {c: np.append(found[c], mine) for c, mine in zip(reply.ids[::m], merits, strict=True)}
        counts = dict(zip(found, reply.examples.view(-1, m)[:, 0].tolist(), strict=True))
        if not found:
            break
    # A metric that is undefined for all models says nothing of a client.
    found = {client: np.nan_to_num(mine, nan=WORST) for client, mine in found.items() if not np.isnan(mine).all()}
    return found, {client: counts[client] for client in found}


@dataclass(eq=False)
class Move:
    """The start of a time step, in which clients and models move."""

    clients: Clients
    this_round: Round
    before: ParameterTree
    tree: ParameterTree
    ids: tuple[int, ...]
    assigned: Indices  # [steps, n], of which the last is this step's
    accuracy: NDArray[np.float64]
    until: Indices
    begun: tuple[int, ...]
    stages: tuple[int, ...]
    free: list[int]
    found: Mapping[int, NDArray[np.float64]] = field(default_factory=dict[int, NDArray[np.float64]])
    events: list[Event] = field(default_factory=list[Event])

    @classmethod
    def begin(cls, state: FedDriftState, clients: Clients, this_round: Round) -> Move:
        """Begin a step, in which isolation ends for some, and no data belongs to any model yet."""
        step = len(state.begun)
        until = np.where(state.until.numpy() == step, 0, state.until.numpy())
        free = replace(state, until=torch.from_numpy(until)).free if step else []
        return cls(
            clients,
            this_round,
            state.tree,
            state.tree,
            state.ids,
            np.vstack([state.assigned.numpy(), np.zeros((1, len(state.ids)), dtype=np.int64)]),
            state.accuracy.numpy().copy(),
            until,
            (*state.begun, this_round.number),
            (*state.stages, clients.stage),
            free,
        )

    @property
    def there(self) -> list[int]:
        """The clients that are there, in the order of the state."""
        there = set(self.clients.ids)
        return [client for client in self.ids if client in there]

    def stay(self) -> None:
        """Let all clients stay where they are in the first step; their accuracy is that of the initial model."""
        leaf_of = self.tree.leaf_of
        found, _ = accuracies(self.tree, [self.tree.leaves[0].id], self.there, self.clients)
        for place, client in enumerate(self.ids):
            self.assigned[-1, place] = leaf_of.get(client, 0)
            self.accuracy[place] = found[client][0] if client in found else np.nan

    def choose(self, delta: float) -> list[int]:
        """Let clients that are not isolated take the most accurate model; return those whose concept has drifted."""
        drifted: list[int] = []
        leaf_of = self.tree.leaf_of
        self.found, _ = accuracies(self.tree, self.free, self.there, self.clients)
        for place, client in enumerate(self.ids):
            if self.until[place] or client not in self.found:
                self.assigned[-1, place] = leaf_of.get(client, 0)
                continue
            best = int(self.found[client].argmax())
            self.assigned[-1, place] = self.free[best]
            if self.accuracy[place] - self.found[client][best] > delta:
                drifted.append(client)
            self.accuracy[place] = self.found[client][best]
        return drifted

    def open(self, ids: Sequence[int], most: int | None, isolation: int = 0) -> None:
        """Open a model for clients that have drifted, a copy of the first one's; or let them be if there is no room."""
        if not ids:
            return
        places = [self.ids.index(client) for client in ids]
        used = set(np.unique(self.assigned).tolist()) - {0}
        if most is not None and len(used) >= most:
            last = {node: int(np.flatnonzero((self.assigned == node).any(axis=1))[-1]) for node in sorted(used)}
            oldest = [node for node, step in last.items() if step == min(last.values())]
            if last[oldest[0]] == len(self.assigned) - 1:
                return
            gone = int(self.this_round.generator(f"model {len(self.tree.nodes)}").choice(oldest))
            self.assigned[self.assigned == gone] = 0
        copied = self.tree.nodes[int(self.assigned[-1, places[0]])]
        new = Node(len(self.tree.nodes), 0, (), copied.params, born=self.this_round.number - 1)
        self.tree = ParameterTree((*self.tree.nodes, new))
        self.assigned[-1, places] = new.id
        if isolation:
            self.until[places] = len(self.assigned) - 1 + isolation

    def merge(self, most_apart: float) -> None:
        """Merge models that are about as accurate on each other's data as on their own, by complete linkage."""
        nodes = [node for node in self.free if (self.assigned == node).any()]
        if len(nodes) < 2:
            return
        found = self._cluster_accuracies(nodes)
        known = np.flatnonzero(np.isfinite(found.diagonal()))
        if len(known) < 2:
            return
        nodes, A = [nodes[k] for k in known.tolist()], found[np.ix_(known, known)]
        worse = A.diagonal()[:, None] - A  # how much worse model i is on the data of j than on its own
        apart = np.maximum(np.maximum(worse, worse.T), 0)
        merges = agglomerate(scipy.spatial.distance.squareform(apart, checks=False), "complete")
        labels = cut(merges, 1 + int(np.count_nonzero(merges[:, 2] > most_apart)))
        for label in dict.fromkeys(labels.tolist()):
            first, *others = [node for node, its in zip(nodes, labels, strict=True) if its == label]
            if not others:
                continue
            each = (first, *others)
            weights = torch.tensor([int((self.assigned == node).sum()) for node in each], dtype=torch.float64)
            params = torch.stack([self.tree.nodes[node].params for node in each])
            merged = (weights / weights.sum()).to(params) @ params
            self.tree = self.tree.with_model(first, merged)
            self.assigned[np.isin(self.assigned, others)] = first
            self.events.append(Merged(first, tuple(others)))

    def _cluster_accuracies(self, nodes: Sequence[int]) -> NDArray[np.float64]:
        """Return how accurate each model is on all data of each, ``[m, m]``: row i is model i, NaN without data."""
        right, total = np.zeros((len(nodes), len(nodes))), np.zeros(len(nodes))
        there = set(self.there)
        for stage in sorted(set(self.stages)):
            steps = [step for step, of in enumerate(self.stages) if of == stage]
            owned = self.assigned[steps]
            ids = [c for c, its in zip(self.ids, owned.T, strict=True) if c in there and np.isin(its, nodes).any()]
            held = 0 if stage == self.stages[-1] else self.begun[steps[0]]
            found, counts = accuracies(self.tree, nodes, ids, self.clients, held)
            for client, mine in found.items():
                of_client = owned[:, self.ids.index(client)]
                for j, node in enumerate(nodes):
                    examples = counts[client] * int((of_client == node).sum())
                    right[:, j] += mine * examples
                    total[j] += examples
        with np.errstate(invalid="ignore"):
            return right / np.where(total > 0, total, np.nan)

    def ended(self) -> tuple[FedDriftState, list[Event]]:
        """Return the state in the step, and what happened."""
        there = set(self.clients.ids)
        places = {client: place for place, client in enumerate(self.ids)}
        taken = {client: int(self.assigned[-1, places[client]]) for client in self.ids if client in there}
        tree = self.tree.reassigned(taken)
        events = list(self.events)
        for leaf in tree.leaves:
            held = self.before.nodes[leaf.id].members if leaf.id < len(self.before.nodes) else ()
            if came := tuple(sorted(set(leaf.members) - set(held))):
                events.append(Joined(leaf.id, came))
            if held and not leaf.members:
                events.append(Empty(leaf.id))
        assigned, accuracy, until = map(torch.from_numpy, (self.assigned, self.accuracy, self.until))
        return FedDriftState(tree, self.ids, assigned, accuracy, until, self.begun, self.stages), events
