"""Replicated clustering: clustered federated learning without thresholds.

Now and then every client makes two updates at one model, each from half of its data. Clusters are what is found in one
half and holds in the other (:mod:`fedclade.clustering.split_half`): each partition is judged on updates that had no
part in finding it, for whether it is real (a permutation test) and whether it is worth it (its gain). The tree is a
star, since a check looks at all clients at once: it splits clusters, merges them, and moves single clients.

- A check asks everybody at one model: the mean of the clusters' models, by their training examples.
- The j-th check tests at level/(j(j + 1)); these add up to the level. So the chance that clients of one distribution
  are ever parted is at most the level, however long the run.
- Clusters that there are already stay unless others gain more; if they gain nothing any more, they become one again.
- A new cluster goes on from the models of the clusters most of whose members it has, by the number of these; if there
  is none, from that of the cluster that most of its members come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog, never_clusters
from fedclade.algorithms.cluster_update import log_of, move_clusters, place_stragglers, train_clusters
from fedclade.algorithms.state import State
from fedclade.clustering import Finding, Labels, Replicates, find_clusters, gain, same_partition
from fedclade.core import Checked, Clients, Event, Group, ParameterTree, Postponed, Regrouped, Round, checked, require

FOR_PEOPLE = 0.01
"""Level at which p-values are resolved that decide nothing."""


@dataclass(frozen=True, eq=False)
class ReplicatedState(State):
    """How many checks there were."""

    checks: int = 0


@checked()
@dataclass(frozen=True, kw_only=True)
class ReplicatedCFL(Algorithm[ReplicatedState]):
    """Clustered federated learning whose clusters are found on one half of the data and hold on the other.

    Parameters
    ----------
    level
        The chance of parting clients that all have one distribution, over the whole run.
    check_every
        Rounds between checks, each of which costs every client the training of a round: by default they add a seventh.
        Nothing else hangs on it but how soon clusters are found, and a change of them.
    """

    state_type = ReplicatedState

    level: float = 0.01
    check_every: int = 7

    def __post_init__(self) -> None:
        require(
            ("algorithm.level", self.level, 0 < self.level < 1, "greater than 0 and less than 1"),
            ("algorithm.check_every", self.check_every, self.check_every >= 1, "at least 1"),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    def too_short(self, rounds: int) -> str:
        """Return what a run of so few rounds misses: the first check."""
        return never_clusters(self, self.check_every, rounds, "check_every")

    def init(self, params: Tensor, clients: Clients) -> ReplicatedState:
        """Put all clients in one cluster."""
        return ReplicatedState(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run a round of federated learning in every cluster, after a check if it is time for one."""
        events: list[Event] = []
        if this_round.number % self.check_every == 0:
            state, events = self._check(state, clients, this_round)
        parts = train_clusters(state, cohort, clients, this_round)
        if events:  # criteria are for people: nothing is decided by them
            parts = [part.compared() for part in parts]
        tree, joined = place_stragglers(move_clusters(state.tree, parts), parts)
        phase = "check" if events else "train"
        return replace(state, tree=tree), log_of(parts, [*events, *joined], phase)

    def _check(
        self, state: ReplicatedState, clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, list[Event]]:
        """Let everybody make two updates, and cluster by them."""
        tree, checks = state.tree, state.checks + 1
        model = _joint_model(tree, clients.sizes)
        answered, halves = _halves(model, tree, clients, this_round)
        if len(answered) < (needed := max(2, this_round.min_clients)):
            return state, [Postponed(0, len(answered), needed)]
        replicates = Replicates(*halves.chunk(2, dim=1))
        before = np.array([tree.leaf_of[client] for client in answered])
        level, draw = self.level / (checks * (checks + 1)), this_round.generator("shuffles")
        labels, numbers = _decided(find_clusters(replicates), np.unique(before, return_inverse=True)[1], level, draw)
        members = (np.flatnonzero(labels == k).tolist() for k in range(labels.max() + 1))
        clusters = tuple(tuple(answered[i] for i in mine) for mine in members)
        gamma = float(np.median(replicates.gammas))
        state, happened = replace(state, checks=checks), Checked if same_partition(before, labels) else Regrouped
        event = happened(0, **numbers, level=level, gamma=gamma if np.isfinite(gamma) else None, clusters=clusters)
        if happened is Checked:
            return state, [event]
        signatures = dict(zip(answered, replicates.first + replicates.second, strict=True))
        groups = [Group(c, *_origin(tree, c), torch.stack([signatures[i] for i in c])) for c in clusters]
        tree = tree.regrouped(groups, params=model, round_number=this_round.number, criteria=numbers)
        return replace(state, tree=tree), [event]


def _halves(model: Tensor, tree: ParameterTree, clients: Clients, this_round: Round) -> tuple[Sequence[int], Tensor]:
    """Return the clients that make an update from each half of their data, and both signatures, ``[n, 2R]``."""
    ids = [client for client in sorted(tree.leaf_of) if clients.sizes[client] > 1]  # one example has no halves
    if not ids:
        return (), model[None, :0]
    travels = "updates" if len(tree.leaves) == 1 else "all"  # the model of a single cluster is sent anyway
    training = replace(this_round, replicates=2, purpose="replicate", require_all=True, communicates=travels)
    updates = clients.train(ids, model[None], [0] * len(ids), training).select(ids)
    return updates.ids, updates.required_deltas


def _decided(found: Finding, now: Labels, level: float, draw: np.random.Generator) -> tuple[Labels, dict[str, float]]:
    """Return the clusters to go on with, ``[n]``, and the numbers that they were decided by."""
    kept = gain(found.similarity, now, found.noise)
    changes = found.gain > max(kept, 0.0) and not same_partition(found.labels, now)
    # Where nothing depends on it, the p-value is for people, and may be less exact.
    p_value = found.p_value(level if changes else max(level, FOR_PEOPLE), draw)
    numbers = {"p_value": p_value, "gain": found.gain, "gain_before": kept}
    if changes and p_value <= level:
        return found.labels, numbers
    return (now if kept > 0 else np.zeros_like(now)), numbers


def _joint_model(tree: ParameterTree, sizes: Mapping[int, int]) -> Tensor:
    """Return the mean of the clusters' models, by the training examples of their members."""
    leaves = [leaf for leaf in tree.leaves if leaf.members]
    weights = torch.tensor([float(sum(sizes[client] for client in leaf.members)) for leaf in leaves])
    models = torch.stack([leaf.params for leaf in leaves])
    return (weights / weights.sum()).to(models) @ models


def _origin(tree: ParameterTree, cluster: Sequence[int]) -> tuple[int, Tensor]:
    """Return the leaf that a new cluster goes on with, 0 for none, and the model that it goes on from."""
    come_from = Counter(tree.leaf_of[client] for client in cluster)
    taken_over = {leaf: n for leaf, n in come_from.items() if leaf and 2 * n > len(tree.nodes[leaf].members)}
    if not taken_over:
        return 0, tree.nodes[come_from.most_common(1)[0][0]].params
    weights = torch.tensor([float(n) for n in taken_over.values()])
    models = torch.stack([tree.nodes[leaf].params for leaf in taken_over])
    return max(taken_over, key=lambda leaf: taken_over[leaf]), (weights / weights.sum()).to(models) @ models
