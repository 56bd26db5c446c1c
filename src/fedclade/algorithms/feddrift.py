"""FedDrift and FedDrift-Eager: Jothimurugesan, Hsieh, Wang, Joshi, Gibbons 2023, Algorithms 1 and 2.

Time goes in steps of some rounds, and every client gets new data at the start of each. It then takes the most accurate
of the models on its new data; if even that is less accurate by more than δ than its model was on the data of the step
before, its concept has drifted, and it opens a model of its own, a copy of the most accurate. Then models are merged,
by complete linkage up to δ′, that are about as accurate on each other's data as on their own: d(i, j) =
max(A_ii − A_ij, A_jj − A_ji, 0), with A_ij the accuracy of model i on all data of model j. A model is trained on all
data that was ever assigned to it: a client trains every model to which data of some step of its own belongs.

Where paper and official code leave a choice, this file makes it:

- A step begins where clients' data changes (:class:`~fedclade.data.Stage`), and after ``step_rounds``. Where data stays
  the same, so do the data of all steps, and a client that trains a model on those of several has each example once.
- Every client begins with a model of its own, all of them equal, as in the run that the official code names FedDrift;
  its δ and W are the defaults here. The paper sets δ for each data set: 0.04 for SEA, 0.2 for SINE, 0.1 for CIRCLE and
  MNIST. With ``start = "together"`` all begin with one model, as in the algorithms.
- Where clients keep earlier data (``accumulate``), so does the data of each step, and each example trains a model once.
- Clients compute A on all of their data, and report accuracies and numbers of examples. (The official code does so on
  the server, which has all data there, and on twenty batches.)
- A model is in use as long as some data is assigned to it; one that no client has in the step is kept, but not trained
  (official code). A merged model is the mean, weighted by how many (client, step) are assigned to each (official code).
- A model that is opened takes no part in merging in its step, and is isolated for W steps: nobody else may take it.
- Where ``models`` limits their number, a new one takes the place of the one that was used least recently, of equals one
  drawn at random, and if all are used in the step, the client stays with the most accurate (official code).
  There the first new models take the places of those that clients began with; here that is of those least used.
- All clients, not a cohort, report at the start of a step; one that does not answer stays with its model.
- A newcomer during a run takes the most accurate model at once. After a run, that with the lowest loss.
- Another metric than accuracy takes its place where the task has another; δ is in its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of
from fedclade.clustering import agglomerate, cut
from fedclade.core import (
    BESIDE,
    Clients,
    Empty,
    EvaluationQuery,
    Event,
    Indices,
    Joined,
    Merged,
    Node,
    ParameterTree,
    Round,
    UpdateQuery,
    Updates,
    checked,
    mean_of_all,
    require,
)

# What FedDrift keeps from time step to time step, and how clients and models move at the start of
# one.

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


@checked()
@dataclass(frozen=True, kw_only=True)
class FedDrift(OneCohort[FedDriftState]):
    """FedDrift (Jothimurugesan et al. 2023): models are opened where accuracy drops, and merged where they agree.

    Parameters
    ----------
    step_rounds
        R, the rounds of a time step; it ends earlier where clients' data changes. The paper's 200 are more than most
        runs over data that stays the same have: such a run needs several steps.
    delta
        δ: by how much a client's accuracy may fall from one step to the next before it opens a model, at least 0.
    delta_merge
        δ′: up to which distance models are merged, at least 0; δ if left out.
    isolation
        W: for how many steps a client that has drifted keeps to the model that it opened, and others do not get it.
    start
        Whether clients begin ``alone``, each with a model of its own, or ``together`` with one.
    eager
        FedDrift-Eager: those who drift in a step open one model together, nobody is isolated, and nothing is merged.
    models
        How many models there may be at most; any number, if left out.
    """

    state_type = FedDriftState
    asks_for = "training accuracies"

    step_rounds: int = 200
    delta: float = 0.06
    delta_merge: float | None = None
    isolation: int = 1
    start: Literal["alone", "together"] = "alone"
    eager: bool = False
    models: int | None = None

    def __post_init__(self) -> None:
        most, apart = self.models, self.delta_merge
        require(
            ("algorithm.step_rounds", self.step_rounds, self.step_rounds >= 1, "at least 1"),
            ("algorithm.delta", self.delta, self.delta >= 0, "at least 0"),
            ("algorithm.delta_merge", apart, apart is None or apart >= 0, "at least 0, or left out"),
            ("algorithm.isolation", self.isolation, self.isolation >= 1, "at least 1"),
            ("algorithm.start", self.start, self.start in ("alone", "together"), "'alone' or 'together'"),
            ("algorithm.models", most, most is None or most >= 1, "at least 1, or left out"),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    def check_clients(self, clients: int) -> None:
        """Check that there are as many models as clients, where each begins with one; a ConfigError otherwise."""
        enough = self.models is None or self.start == "together" or self.models >= clients
        rule = f"at least the number of clients, {clients}, where start is 'alone'"
        require(("algorithm.models", self.models, enough, rule))

    def too_short(self, rounds: int) -> str:
        """Return that in a single time step there is nothing to merge and no drift."""
        if rounds > self.step_rounds:
            return ""
        alone = "every client trains alone" if self.start == "alone" else "it is federated averaging"
        return (
            f"FedDrift merges and opens models at the start of a time step, of {self.step_rounds} rounds, and this run "
            f"has {rounds}: unless clients' data changes, {alone}; set a smaller algorithm.step_rounds"
        )

    def init(self, params: Tensor, clients: Clients) -> FedDriftState:
        """Give every client a model, equal to all others; no data belongs to any yet."""
        ids = tuple(clients.ids)
        clusters = [[client] for client in ids] if self.start == "alone" else [ids]
        return FedDriftState.first(ParameterTree.star(clusters, params), ids)

    def step(
        self, state: FedDriftState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedDriftState, RoundLog]:
        """Run one round: if a time step begins, see where clients go; then train every model that is in use."""
        events, number, cohort = list[Event](), this_round.number, sorted(cohort)
        changed = not state.stages or clients.stage != state.stages[-1]
        if changed or number - state.begun[-1] >= self.step_rounds:
            state, events = self._new_step(state, clients, this_round)
        there, leaf_of, tree = set(clients.ids), state.tree.leaf_of, state.tree
        used = sorted({leaf.id for leaf in tree.leaves if there.intersection(leaf.members)})
        holds = {node: [client for client in cohort if leaf_of[client] == node] for node in used}
        present = self._trained(state, holds, clients, this_round)
        parts = list[ClusterUpdate]()
        for node, ids in holds.items():
            owners = self._owners(state, node)
            others = [client for client in cohort if client in owners and client not in ids]
            # Clients keep what they train of the model that they have in the step, and nothing of others.
            former = self._trained(state, {node: others}, clients, replace(this_round, purpose=BESIDE))
            its = present.select(ids) if present is not None and ids else None
            came = [updates for updates in (former, its) if updates is not None and updates.ids]
            enough = sum(len(updates.ids) for updates in came) >= this_round.min_clients
            step = mean_of_all(came) if came else None
            tree = tree.moved(node, step) if step is not None and enough else tree
            if its is not None:
                part = ClusterUpdate.of(node, its, this_round)
                parts.append(replace(part, mean=step if its.ids else None, enough=enough))
        return replace(state, tree=tree), log_of(parts, events)

    def _new_step(self, state: FedDriftState, clients: Clients, this_round: Round) -> tuple[FedDriftState, list[Event]]:
        """Begin a time step: see which model each client takes, and merge models."""
        move = Move.begin(state, clients, this_round)
        if len(move.begun) == 1:
            move.stay()
        else:
            drifted = move.choose(self.delta)
            if self.eager:
                move.open(drifted, self.models)
            else:
                for client in drifted:
                    move.open([client], self.models, self.isolation)
                move.merge(self.delta if self.delta_merge is None else self.delta_merge)
        return move.ended()

    def _owners(self, state: FedDriftState, node: int) -> set[int]:
        """Return the clients of which data of some step belongs to a model."""
        owned = (state.assigned == node).any(dim=0).tolist()
        return {client for client, its in zip(state.ids, owned, strict=True) if its}

    def _trained(
        self, state: FedDriftState, holds: Mapping[int, Sequence[int]], clients: Clients, this_round: Round
    ) -> Updates | None:
        """Let clients train models, each on all of its data that belongs to the model; None if there are no clients."""
        of = {client: node for node, ids in holds.items() for client in ids}
        if not of:
            return None
        places = {client: place for place, client in enumerate(state.ids)}
        assigned = state.assigned.numpy()
        steps_of = {c: np.flatnonzero(assigned[:, places[c]] == node).tolist() for c, node in of.items()}
        rounds = [tuple(state.begun[step] for step in steps) for steps in steps_of.values()]
        held = rounds if len(set(state.stages)) > 1 else None
        models, rows = state.tree.models([*of.values()])
        return clients.ask(UpdateQuery([*of], "train", models, rows, this_round, data_rounds=held))

    def serve(self, state: FedDriftState, clients: Clients) -> Mapping[int, int]:
        """Return the node that each client is served with: its model, or the one that it would take now."""
        unseen = [client for client, node in state.tree.leaf_of.items() if node == 0]
        found, _ = accuracies(state.tree, state.free, unseen, clients)
        return {**state.tree.leaf_of, **{c: state.free[int(mine.argmax())] for c, mine in found.items()}}

    def join(
        self, state: FedDriftState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedDriftState, list[Event]]:
        """Let newcomers take the most accurate model on their data, which belongs to it in this step."""
        state = state.with_clients(ids)
        if not len(state.assigned):  # nobody was there so far: the first step takes them as it takes all
            return state, [Joined(0, tuple(ids))]
        found, _ = accuracies(state.tree, state.free, ids, clients)
        taken = {client: state.free[int(mine.argmax())] for client, mine in found.items()}
        assigned, accuracy = state.assigned.clone(), state.accuracy.clone()
        for client, node in taken.items():
            place = state.ids.index(client)
            assigned[-1, place], accuracy[place] = node, found[client].max()
        tree = state.tree.reassigned(taken)
        joined = [Joined(n, tuple(c for c in taken if taken[c] == n)) for n in sorted(set(taken.values()))]
        return replace(state, tree=tree, assigned=assigned, accuracy=accuracy), [Joined(0, tuple(ids)), *joined]
