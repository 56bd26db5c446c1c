"""FedDrift and FedDrift-Eager: Jothimurugesan et al. 2023, Algorithms 1 and 2.

The authors are Jothimurugesan, Hsieh, Wang, Joshi and Gibbons.

Time is divided into steps, each of several rounds, and every client gets new data at the start of
each time step. A step runs as follows:

1. *Choose.* Every client takes the model that is most accurate on its new data. If even this model
   is less accurate, by more than δ, than the client's model was on the data of the step before, the
   client's concept has drifted.
2. *Create.* A client that has drifted gets a new model, a copy of the most accurate model.
3. *Merge.* Models that are about as accurate on each other's data as on their own are merged, by
   complete linkage up to δ′. Their distance is d(i, j) = max(A_ii − A_ij, A_jj − A_ji, 0), with
   A_ij the accuracy of model i on all data that is assigned to model j.
4. *Train.* In the rounds of the step a model is trained on all data that was ever assigned to it: a
   client trains every model to which its data of some step belongs.

Where paper and official code leave a choice, this file makes it:

**Time steps.** A step begins where clients' data changes (:class:`~fedclade.data.Stage`), and after
``step_rounds``. If the data does not change, all steps have the same data, and a client that trains
a model on the data of several steps uses each example once.

**Initial models.** Every client begins with a model of its own, and all of these models are equal.
The official code calls this variant FedDrift; the defaults of δ and W are those of the official
code. The paper sets δ for each data set: 0.04 for SEA, 0.2 for SINE, 0.1 for CIRCLE and MNIST. With
``start = "together"`` all clients begin with one model, as in the algorithms.

**Accumulated data.** If clients keep their earlier data (``accumulate``), this data belongs to each
later step, too. A model that is trained on the data of several steps still uses each example once.

**Accuracies.** Clients compute A on all of their data, and report accuracies and numbers of
examples. (In the official code the server has all data, and computes A on twenty batches.)

**Models in use.** A model is in use as long as some data is assigned to it. A model that no client
has in the present step is stored, but not trained (official code). A merged model is the mean of
the models, weighted by the number of pairs (client, step) that are assigned to each (official
code).

**Isolation.** A new model is not merged in the step of its creation, and is isolated for W steps:
no other client may take it.

**Number of models.** If ``models`` limits the number, a new model replaces the model that was used
least recently; if there are several such models, one is drawn at random. If all models are used in
the step, the client stays with the most accurate model (official code). In the official code the
first new models replace the models that clients began with.

**Participation.** All clients, not a cohort, report at the start of a step; a client that does not
reply stays with its model. A newcomer during a run takes the most accurate model at once; a
newcomer to a finished run takes the model with the lowest loss.

**Metric.** If the task has another metric than accuracy, this is used, and δ is in its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade.algorithms.base import OneCohort, RoundLog, State
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of
from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
from fedclade.clustering import agglomerate, cut
from fedclade.core import (
    BESIDE,
    AllData,
    Clients,
    ClientWork,
    Empty,
    EvaluationQuery,
    Event,
    Indices,
    Joined,
    Lasting,
    Merged,
    Node,
    Nothing,
    OfRounds,
    ParameterTree,
    Round,
    RoundPlan,
    Store,
    Updates,
    checked,
    mean_of_all,
    require,
)

WORST = -1e18
"""Score of a model that has diverged, in place of minus infinity or NaN."""

MODELS_PER_QUERY = 64
"""Largest number of models in one query, since clients may refuse more (``max-models``)."""


@dataclass(frozen=True, eq=False)
class FedDriftState(State):
    """State of FedDrift between rounds: which data belongs to which model, and last accuracies.

    A time step is a number of rounds in which clients' data and models are fixed.

    Parameters
    ----------
    ids
        Ids of all n clients so far, in the order of the columns of the following tensors.
    assigned
        Leaf of the model to which each client's data of each step belongs, int64 ``[steps, n]``; 0
        for no model.
    accuracy
        Accuracy of each client's most accurate model on its data of the last step, float64 ``[n]``;
        NaN if it is not known.
    until
        Step in which each client's isolation ends, int64 ``[n]``; 0 for clients that are not
        isolated. An isolated client's new model is not available to other clients.
    begun
        First round of each step.
    stages
        Stage of the clients' data in each step: a number that grows whenever the data changes.
    """

    ids: tuple[int, ...]
    assigned: torch.Tensor
    accuracy: torch.Tensor
    until: torch.Tensor
    begun: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()

    @classmethod
    def first(cls, tree: ParameterTree, ids: Sequence[int]) -> FedDriftState:
        """Return the state before the first time step, in which no data belongs to a model yet."""
        n = len(ids)
        return cls(
            tree,
            tuple(ids),
            assigned=torch.zeros(0, n, dtype=torch.int64),
            accuracy=torch.full((n,), torch.nan, dtype=torch.float64),
            until=torch.zeros(n, dtype=torch.int64),
        )

    @property
    def free(self) -> list[int]:
        """Leaves of the models that any client may take.

        These are the models to which some data belongs and whose clients are not isolated. Before
        the first time step, when no data belongs to any model, they are the leaves with members.
        """
        if not len(self.assigned):
            return [leaf.id for leaf in self.tree.leaves if leaf.members]
        isolated = set(self.assigned[-1][self.until > 0].tolist())
        return [node for node in self.assigned.unique().tolist() if node and node not in isolated]

    def with_clients(self, ids: Sequence[int]) -> FedDriftState:
        """Return the state with columns for newcomers, which have no models and accuracies yet."""
        new = FedDriftState.first(self.tree, ids)
        unassigned = new.assigned.new_zeros(len(self.assigned), len(ids))
        return replace(
            self,
            tree=self.tree.with_newcomers(ids),
            ids=(*self.ids, *ids),
            assigned=torch.cat([self.assigned, unassigned], dim=1),
            accuracy=torch.cat([self.accuracy, new.accuracy]),
            until=torch.cat([self.until, new.until]),
        )


def query_accuracies(
    tree: ParameterTree,
    nodes: Sequence[int],
    ids: Sequence[int],
    clients: Clients,
    data_round: int = 0,
) -> tuple[dict[int, NDArray[np.float64]], dict[int, int]]:
    """Query clients for the accuracies of models on their training data.

    Parameters
    ----------
    tree
        The tree with the models.
    nodes
        Nodes of the m models in the tree.
    ids
        Ids of the clients to query.
    clients
        All clients of the run; queries go through this object.
    data_round
        Round whose training data is used; 0: the present data.

    Returns
    -------
    tuple of dict
        Two dictionaries by client: the accuracies of the models, ``[m]``, and the number of
        examples. Clients that did not reply, or for which no accuracy is defined, are missing.
    """
    if not nodes or not ids:
        return {}, {}
    accuracies = dict.fromkeys(ids, np.zeros(0))
    examples: dict[int, int] = {}
    for first in range(0, len(nodes), MODELS_PER_QUERY):
        models, rows = tree.models(nodes[first : first + MODELS_PER_QUERY])
        n_models = len(rows)
        queried: list[int] = []  # each client once for each model
        for client in accuracies:
            queried += [client] * n_models
        assignment = list(rows) * len(accuracies)
        reply = clients.ask(
            EvaluationQuery(queried, models, assignment, "train", data_round=data_round)
        )
        scores = (
            reply.merit.double().nan_to_num(nan=torch.nan, neginf=WORST).view(-1, n_models).numpy()
        )
        replied = reply.ids[::n_models]
        # Clients that did not reply to a query are not queried on further models.
        accuracies = {
            client: np.append(accuracies[client], row)
            for client, row in zip(replied, scores, strict=True)
        }
        examples = dict(zip(replied, reply.examples.view(-1, n_models)[:, 0].tolist(), strict=True))
        if not accuracies:
            break
    # A client for which the metric is undefined for all models has no score.
    known = {client: row for client, row in accuracies.items() if not np.isnan(row).all()}
    scored = {client: np.nan_to_num(row, nan=WORST) for client, row in known.items()}
    return scored, {client: examples[client] for client in scored}


@dataclass(eq=False)
class TimeStep:
    """Working state of the start of a time step, in which models are chosen, created and merged.

    The methods change its fields in place; :meth:`finish` returns the resulting state.

    Parameters
    ----------
    clients, this_round
        As in :meth:`FedDrift.step`.
    before
        The tree before the step.
    tree
        The tree with the created and merged models.
    ids, accuracy, until, begun, stages
        As in :class:`FedDriftState`, including the new step.
    assigned
        As in :class:`FedDriftState`, with a last row for the new step, ``[steps, n]``.
    free
        Leaves of the models that any client may take.
    accuracies
        Accuracy of each model in ``free`` on the client's new data, by client.
    events
        Events so far, such as merges.
    """

    clients: Clients
    this_round: Round
    before: ParameterTree
    tree: ParameterTree
    ids: tuple[int, ...]
    assigned: Indices
    accuracy: NDArray[np.float64]
    until: Indices
    begun: tuple[int, ...]
    stages: tuple[int, ...]
    free: list[int]
    accuracies: Mapping[int, NDArray[np.float64]] = field(
        default_factory=dict[int, NDArray[np.float64]]
    )
    events: list[Event] = field(default_factory=list[Event])

    @classmethod
    def begin(cls, state: FedDriftState, clients: Clients, this_round: Round) -> TimeStep:
        """Create the working state of a new time step.

        The isolation of a client ends if it was to last until this step. No client's data of the
        new step belongs to a model yet.
        """
        step = len(state.begun)
        until = np.where(state.until.numpy() == step, 0, state.until.numpy())
        free = replace(state, until=torch.from_numpy(until)).free if step else []
        unassigned = np.zeros((1, len(state.ids)), dtype=np.int64)
        return cls(
            clients=clients,
            this_round=this_round,
            before=state.tree,
            tree=state.tree,
            ids=state.ids,
            assigned=np.vstack([state.assigned.numpy(), unassigned]),
            accuracy=state.accuracy.numpy().copy(),
            until=until,
            begun=(*state.begun, this_round.number),
            stages=(*state.stages, clients.stage),
            free=free,
        )

    @property
    def available(self) -> list[int]:
        """Ids of the clients that are available now, in the order of ``ids``."""
        available = set(self.clients.ids)
        return [client for client in self.ids if client in available]

    def keep_models(self) -> None:
        """Assign the first step's data of each client to the client's initial model.

        Clients are queried for the accuracy of the initial model, with which the next step's
        accuracy is compared.
        """
        leaf_of = self.tree.leaf_of
        initial = self.tree.leaves[0].id  # all initial models are equal
        accuracies, _ = query_accuracies(self.tree, [initial], self.available, self.clients)
        for column, client in enumerate(self.ids):
            self.assigned[-1, column] = leaf_of.get(client, 0)
            self.accuracy[column] = accuracies[client][0] if client in accuracies else np.nan

    def choose_models(self, delta: float) -> list[int]:
        """Assign each client's new data to the model that is most accurate on it.

        Isolated clients, and clients that do not reply, stay with their models.

        Parameters
        ----------
        delta
            Threshold δ on the drop of a client's accuracy since the last step.

        Returns
        -------
        list of int
            Ids of the clients whose concept has drifted: their accuracy has dropped by more than δ.
        """
        drifted: list[int] = []
        leaf_of = self.tree.leaf_of
        self.accuracies, _ = query_accuracies(self.tree, self.free, self.available, self.clients)
        for column, client in enumerate(self.ids):
            if self.until[column] or client not in self.accuracies:
                self.assigned[-1, column] = leaf_of.get(client, 0)
                continue
            best = int(self.accuracies[client].argmax())
            best_accuracy = self.accuracies[client][best]
            self.assigned[-1, column] = self.free[best]
            if self.accuracy[column] - best_accuracy > delta:
                drifted.append(client)
            self.accuracy[column] = best_accuracy
        return drifted

    def open_model(
        self, ids: Sequence[int], largest_number: int | None, isolation: int = 0
    ) -> None:
        """Create a new model for clients whose concept has drifted.

        The new model is a copy of the model that is most accurate on the first client's data. If
        there are already ``largest_number`` models, it replaces the model that was used least
        recently. If all models are used in this step, no model is created, and the clients stay
        with their models.

        Parameters
        ----------
        ids
            Ids of the clients, which share the new model.
        largest_number
            Largest number of models; None: no limit.
        isolation
            Number W of time steps in which no other client may take the new model.
        """
        if not ids:
            return
        used = set(np.unique(self.assigned).tolist()) - {0}
        if largest_number is not None and len(used) >= largest_number:
            replaced = self._find_least_recently_used(used)
            if replaced is None:
                return
            self.assigned[self.assigned == replaced] = 0
        columns = [self.ids.index(client) for client in ids]
        copied = self.tree.nodes[int(self.assigned[-1, columns[0]])]
        new = Node(len(self.tree.nodes), 0, (), copied.params, born=self.this_round.number - 1)
        self.tree = ParameterTree((*self.tree.nodes, new))
        self.assigned[-1, columns] = new.id
        if isolation:
            self.until[columns] = len(self.assigned) - 1 + isolation

    def _find_least_recently_used(self, used: set[int]) -> int | None:
        """Return the model that was used least recently; None if all are used in this step."""
        last_use: dict[int, int] = {}
        for node in sorted(used):
            steps = np.flatnonzero((self.assigned == node).any(axis=1))
            last_use[node] = int(steps[-1])
        earliest = min(last_use.values())
        if earliest == len(self.assigned) - 1:
            return None
        oldest = [node for node, step in last_use.items() if step == earliest]
        generator = self.this_round.generator(f"model {len(self.tree.nodes)}")
        return int(generator.choice(oldest))

    def merge_models(self, largest_distance: float) -> None:
        """Merge models that are about as accurate on each other's data as on their own.

        Parameters
        ----------
        largest_distance
            Threshold δ′ on the distance of two models: the larger of the drops of accuracy when
            each of the two models is used on the other model's data. Complete linkage merges models
            up to this distance.
        """
        nodes = [node for node in self.free if (self.assigned == node).any()]
        if len(nodes) < 2:
            return
        accuracies = self._compare_models(nodes)
        known = np.flatnonzero(np.isfinite(accuracies.diagonal()))
        if len(known) < 2:
            return
        nodes = [nodes[place] for place in known.tolist()]
        accuracies = accuracies[np.ix_(known, known)]  # A_ij
        drops = accuracies.diagonal()[:, None] - accuracies  # A_ii − A_ij
        distances = np.maximum(np.maximum(drops, drops.T), 0)
        merges = agglomerate(scipy.spatial.distance.squareform(distances, checks=False), "complete")
        n_clusters = 1 + int(np.count_nonzero(merges[:, 2] > largest_distance))
        labels = cut(merges, n_clusters)
        for label in dict.fromkeys(labels.tolist()):
            self._merge_group(np.array(nodes)[labels == label].tolist())

    def _merge_group(self, nodes: Sequence[int]) -> None:
        """Replace several models by their weighted mean, which becomes the model of the first node.

        A model's weight is the number of pairs (client, step) whose data belongs to it.
        """
        first, *others = nodes
        if not others:
            return
        weights = torch.tensor(
            [int((self.assigned == node).sum()) for node in nodes], dtype=torch.float64
        )
        models = torch.stack([self.tree.nodes[node].params for node in nodes])
        self.tree = self.tree.with_model(first, (weights / weights.sum()).to(models) @ models)
        self.assigned[np.isin(self.assigned, others)] = first
        self.events.append(Merged(first, tuple(others)))

    def _compare_models(self, nodes: Sequence[int]) -> NDArray[np.float64]:
        """Query clients for the accuracy A_ij of each model i on all data of each model j.

        Returns
        -------
        numpy.ndarray
            ``[m, m]`` for m models; column j is NaN if no client with data of model j replied.
        """
        correct = np.zeros((len(nodes), len(nodes)))  # number that model i predicts correctly
        total = np.zeros(len(nodes))
        available = set(self.available)
        # All steps of one stage have the same data, so that clients are queried once for each.
        for stage in sorted(set(self.stages)):
            steps = [
                step for step, stage_of_step in enumerate(self.stages) if stage_of_step == stage
            ]
            of_stage = self.assigned[steps]
            columns = np.flatnonzero(np.isin(of_stage, nodes).sum(axis=0))
            owners = [self.ids[column] for column in columns.tolist()]
            ids = [client for client in owners if client in available]
            data_round = 0 if stage == self.stages[-1] else self.begun[steps[0]]
            accuracies, examples = query_accuracies(
                self.tree, nodes, ids, clients=self.clients, data_round=data_round
            )
            for client, row in accuracies.items():
                assigned = of_stage[:, self.ids.index(client)]
                for column, node in enumerate(nodes):
                    count = examples[client] * int((assigned == node).sum())
                    correct[:, column] += row * count
                    total[column] += count
        with np.errstate(invalid="ignore"):
            return correct / np.where(total > 0, total, np.nan)

    def finish(self) -> tuple[FedDriftState, list[Event]]:
        """Return the algorithm's state after the start of the time step, and the events."""
        column_of = {client: column for column, client in enumerate(self.ids)}
        taken = {client: int(self.assigned[-1, column_of[client]]) for client in self.available}
        tree = self.tree.reassigned(taken)
        events = list(self.events)
        for leaf in tree.leaves:
            is_new = leaf.id >= len(self.before.nodes)
            members_before = () if is_new else self.before.nodes[leaf.id].members
            joined = tuple(sorted(set(leaf.members) - set(members_before)))
            if joined:
                events.append(Joined(leaf.id, joined))
            if members_before and not leaf.members:
                events.append(Empty(leaf.id))
        state = FedDriftState(
            tree,
            self.ids,
            assigned=torch.from_numpy(self.assigned),
            accuracy=torch.from_numpy(self.accuracy),
            until=torch.from_numpy(self.until),
            begun=self.begun,
            stages=self.stages,
        )
        return state, events


@checked()
@dataclass(frozen=True, kw_only=True)
class FedDrift(OneCohort[FedDriftState]):
    """FedDrift: new models for clients whose accuracy drops, and merges of models that agree.

    Source: Jothimurugesan et al. 2023, Algorithms 1 and 2.

    Parameters
    ----------
    step_rounds
        R ≥ 1, the number of rounds of a time step. A step ends earlier if clients' data changes. If
        the data does not change, a run should have several steps, so that most runs need a smaller
        value than the paper's 200.
    delta
        δ ≥ 0: if a client's accuracy drops by more than δ from one step to the next, the client
        gets a new model.
    delta_merge
        δ′ ≥ 0, the distance up to which models are merged; None: δ.
    isolation
        W ≥ 1, the number of steps in which a client that has drifted stays with its new model, and
        no other client may take this model.
    start
        Initial models: ``alone``, each client with a model of its own; ``together``, all clients
        with the same model.
    eager
        Whether to run the variant FedDrift-Eager: all clients that drift in a step get one new
        model together, no client is isolated, and no models are merged.
    models
        Largest number of models, at least 1; None: no limit.

    Raises
    ------
    ConfigError
        If options are out of range; one line for each of them.
    """

    state_type = FedDriftState
    requires = Requires(updates=False, signatures=False, reports="training accuracies")

    step_rounds: int = 200
    delta: float = 0.06
    delta_merge: float | None = None
    isolation: int = 1
    start: Literal["alone", "together"] = "alone"
    eager: bool = False
    models: int | None = None

    def __post_init__(self) -> None:
        delta_merge = self.delta_merge
        models = self.models
        require(
            ("algorithm.step_rounds", self.step_rounds, self.step_rounds >= 1, "at least 1"),
            ("algorithm.delta", self.delta, self.delta >= 0, "at least 0"),
            (
                "algorithm.delta_merge",
                delta_merge,
                delta_merge is None or delta_merge >= 0,
                "at least 0, or left out",
            ),
            ("algorithm.isolation", self.isolation, self.isolation >= 1, "at least 1"),
            (
                "algorithm.start",
                self.start,
                self.start in ("alone", "together"),
                "'alone' or 'together'",
            ),
            ("algorithm.models", models, models is None or models >= 1, "at least 1, or left out"),
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that ``models`` allows one model for each client, if each begins with its own.

        The result contains a warning if the run consists of a single time step, in which no model
        is created or merged.

        Raises
        ------
        ConfigError
            If each client begins with its own model, and ``models`` is less than the number of
            clients.
        """
        warnings = super().check(run)
        if run.clients is not None:
            valid = self.models is None or self.start == "together" or self.models >= run.clients
            rule = f"at least the number of clients, {run.clients}, if start is 'alone'"
            require(("algorithm.models", self.models, valid, rule))
        if run.rounds is None or run.rounds > self.step_rounds:
            return warnings
        alone = (
            "every client trains alone" if self.start == "alone" else "it is federated averaging"
        )
        return (
            *warnings,
            "FedDrift creates and merges models only at the start of a time step of "
            f"{self.step_rounds} rounds, but this run has {run.rounds} rounds, so that, unless "
            f"clients' data changes, {alone}; set a smaller algorithm.step_rounds",
        )

    def init(self, params: torch.Tensor, clients: Clients) -> FedDriftState:
        """Return the state before round 1, with equal initial models.

        Each client has a model of its own, or all clients share one model (``start``). No data
        belongs to a model yet.
        """
        ids = tuple(clients.ids)
        clusters = [[client] for client in ids] if self.start == "alone" else [ids]
        return FedDriftState.first(ParameterTree.star(clusters, params), ids)

    def step(
        self, state: FedDriftState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FedDriftState, RoundLog]:
        """Run one round of FedDrift: start a time step if this is due, then train the models.

        Every model that some client has in the present time step is trained. For the parameters see
        :meth:`Algorithm.step <fedclade.Algorithm.step>`.
        """
        events: list[Event] = []
        data_has_changed = not state.stages or clients.stage != state.stages[-1]
        if data_has_changed or this_round.number - state.begun[-1] >= self.step_rounds:
            state, events = self._start_step(state, clients, this_round)

        members = _group_by_model(state.tree, sorted(cohort), clients)
        # Clients train the models that they have in this step in one query.
        updates = self._train_models(state, members, clients, this_round, store=Lasting())
        tree = state.tree
        trained: list[ClusterUpdate] = []
        for node, ids in members.items():
            own_updates = updates.select(ids) if updates is not None and ids else None
            tree, cluster = self._move_model(
                tree, node, state, cohort, own_updates, clients, this_round
            )
            if cluster is not None:
                trained.append(cluster)
        return replace(state, tree=tree), log_of(trained, events)

    def _move_model(
        self,
        tree: ParameterTree,
        node: int,
        state: FedDriftState,
        cohort: Sequence[int],
        own_updates: Updates | None,
        clients: Clients,
        this_round: RoundPlan,
    ) -> tuple[ParameterTree, ClusterUpdate | None]:
        """Train and move one model, with all clients of the cohort whose data belongs to it.

        Clients that have the model in this time step have already trained it (``own_updates``).
        Clients whose data of an earlier step belongs to the model are queried for updates here.

        Parameters
        ----------
        tree
            The tree, in which other models may have moved already.
        node
            The model's node.
        state
            The state at the start of the round's training.
        cohort
            Ids of the clients sampled for this round.
        own_updates
            Updates of the clients that have the model in this time step; None if no such client is
            in the cohort.
        clients, this_round
            As in :meth:`step`.

        Returns
        -------
        tuple
            The tree with the moved model, and the round's result for the cluster of clients that
            have the model in this time step, for the log; None if no such client trained.
        """
        owners = self._list_owners(state, node)
        former = [
            client
            for client in sorted(cohort)
            if client in owners and state.tree.leaf_of[client] != node
        ]
        # Tensors that clients store after training, such as personal parameters, belong to the
        # model that they have in this step. Training for models of earlier steps stores nothing.
        aside = replace(this_round, purpose=BESIDE)
        former_updates = self._train_models(state, {node: former}, clients, aside, store=Nothing())
        replies = [each for each in (former_updates, own_updates) if each is not None and each.ids]
        enough = sum(len(each.ids) for each in replies) >= this_round.min_clients
        step = mean_of_all(replies) if replies else None
        if step is not None and enough:
            tree = tree.moved(node, step)
        if own_updates is None:
            return tree, None
        cluster = ClusterUpdate.of(node, own_updates, this_round)
        return tree, replace(cluster, mean=step if own_updates.ids else None, enough=enough)

    def _start_step(
        self, state: FedDriftState, clients: Clients, this_round: RoundPlan
    ) -> tuple[FedDriftState, list[Event]]:
        """Start a time step: assign clients to models, create new models, and merge models."""
        time_step = TimeStep.begin(state, clients, this_round)
        is_first = len(time_step.begun) == 1
        if is_first:
            time_step.keep_models()
            return time_step.finish()
        drifted = time_step.choose_models(self.delta)
        if self.eager:
            time_step.open_model(drifted, self.models)
            return time_step.finish()
        for client in drifted:
            time_step.open_model([client], self.models, self.isolation)
        time_step.merge_models(self.delta if self.delta_merge is None else self.delta_merge)
        return time_step.finish()

    def _list_owners(self, state: FedDriftState, node: int) -> set[int]:
        """Return the ids of the clients whose data of any step belongs to a model."""
        owns = (state.assigned == node).any(dim=0).tolist()
        return {client for client, is_owner in zip(state.ids, owns, strict=True) if is_owner}

    def _train_models(
        self,
        state: FedDriftState,
        members: Mapping[int, Sequence[int]],
        clients: Clients,
        this_round: Round,
        *,
        store: Store,
    ) -> Updates | None:
        """Train models, each client on all of its data that belongs to its model.

        Parameters
        ----------
        state
            The state at the start of the round's training.
        members
            The clients that train each model, by the model's node. A client trains one model only.
        clients, this_round
            As in :meth:`step`.
        store
            Rule for the tensors that clients store after training.

        Returns
        -------
        Updates or None
            The clients' updates; None if ``members`` contains no clients.
        """
        node_of = {client: node for node, ids in members.items() for client in ids}
        if not node_of:
            return None
        column_of = {client: column for column, client in enumerate(state.ids)}
        assigned = state.assigned.numpy()
        data_rounds: dict[int, tuple[int, ...]] = {}
        for client, node in node_of.items():
            steps = np.flatnonzero(assigned[:, column_of[client]] == node).tolist()
            data_rounds[client] = tuple(state.begun[step] for step in steps)
        models, rows = state.tree.models(list(node_of.values()))
        # If clients' data has never changed, all steps have the same data, which is all data.
        has_changed = len(set(state.stages)) > 1
        data = OfRounds(data_rounds) if has_changed else AllData()
        work = ClientWork(data=data, store=store)
        return clients.train(list(node_of), models, rows, this_round, work)

    def models_for(self, state: FedDriftState, clients: Clients) -> EvaluatedModels:
        """Return the models with which clients are evaluated: the models that they have.

        A client without a model is queried, and evaluated with the model that is most accurate on
        its training data.
        """
        leaf_of = state.tree.leaf_of
        unassigned = [client for client, node in leaf_of.items() if node == 0]
        free = state.free
        accuracies, _ = query_accuracies(state.tree, free, unassigned, clients)
        taken = {client: free[int(row.argmax())] for client, row in accuracies.items()}
        return EvaluatedModels(nodes={**leaf_of, **taken})

    def join(
        self, state: FedDriftState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedDriftState, list[Event]]:
        """Add clients that join during a run, before a round.

        Newcomers take the model that is most accurate on their data, and the data of the present
        step then belongs to this model.

        Returns
        -------
        tuple
            The state with the newcomers, and the events that report where they joined.
        """
        state = state.with_clients(ids)
        events: list[Event] = [Joined(0, tuple(ids))]
        if not len(state.assigned):  # before the first step, which assigns all clients
            return state, events
        free = state.free
        accuracies, _ = query_accuracies(state.tree, free, ids, clients)
        assigned = state.assigned.clone()
        accuracy = state.accuracy.clone()
        taken: dict[int, int] = {}
        for client, row in accuracies.items():
            taken[client] = free[int(row.argmax())]
            column = state.ids.index(client)
            assigned[-1, column] = taken[client]
            accuracy[column] = row.max()
        joined: dict[int, list[int]] = {}
        for client, node in taken.items():
            joined.setdefault(node, []).append(client)
        events += [Joined(node, tuple(members)) for node, members in sorted(joined.items())]
        tree = state.tree.reassigned(taken)
        return replace(state, tree=tree, assigned=assigned, accuracy=accuracy), events


def _group_by_model(
    tree: ParameterTree, cohort: Sequence[int], clients: Clients
) -> dict[int, list[int]]:
    """Group the clients of the cohort by their models; return the groups by the models' nodes.

    The result contains every model that some available client has, even if no such client is in the
    cohort.
    """
    available = set(clients.ids)
    leaf_of = tree.leaf_of
    members: dict[int, list[int]] = {}
    for leaf in tree.leaves:
        if available.intersection(leaf.members):
            members[leaf.id] = [client for client in cohort if leaf_of[client] == leaf.id]
    return members
