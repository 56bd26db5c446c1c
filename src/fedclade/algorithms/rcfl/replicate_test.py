"""The replicate test: a test for more than one distribution in the updates of splits of data.

:func:`cluster_by_splits` clusters clients by updates from equal splits of their data, and
:func:`cluster_by_halves` by updates from two halves. Both return a :class:`Verdict`. The statistics
behind them are in :mod:`fedclade.clustering.part_test` and :mod:`fedclade.clustering.split_half`.

:class:`ReplicateTest` is the test as a criterion of CFL, in place of the paper's thresholds
(``criterion = "replicated"``):

- A cluster trains in splits (:mod:`fedclade.algorithms.rcfl.data_splits`) in its first three
  rounds, and in the third the splits are tested. If not all clients take part in a round, all
  members are queried in the first round of the cluster, and are tested then. The same holds for a
  child of a cluster that was split by such a test. A child whose parent trained on whole data is
  tested by halves only, since its model has memorized examples.
- In every seventh round of a cluster all members are queried for updates from two halves of their
  data in addition. If only some members train in a round, this is done as much less often.
- The test by splits has half of the level, and the j-th test by halves 1/(j(j + 1)) of the other
  half. So the chance that a cluster of one distribution is ever split is at most the level.
- A test often finds more than two clusters, and CFL splits in two. So the most similar of them stay
  together (average linkage of their mean similarities), and are separated further down the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.algorithms.cluster_update import ClusterUpdate, train_clusters
from fedclade.algorithms.rcfl.data_splits import HALVES, DataSplits
from fedclade.algorithms.split_criterion import (
    CFLState,
    ExaminedCluster,
    ProposedSplit,
    SplitCriterion,
)
from fedclade.clustering import (
    Labels,
    Replicates,
    Similarity,
    agglomerate,
    average_client_similarity,
    compute_gain,
    compute_gain_by_parts,
    compute_part_similarity,
    cosine_similarity,
    cut,
    estimate_gammas,
    estimate_noise,
    find_by_parts,
    find_clusters,
    is_same_partition,
)
from fedclade.core import Check, Clients, Node, ParameterTree, Postponed, Round, Tested, Updates

CHANGED = 0.01
"""Cosines of splits that differ by more than this are those of other data.

Rounding changes them by less.
"""

CHANCE = 0.05
"""Share of shuffles inside the present clusters that may gain more than clusters beyond these."""

LEVEL_TO_REPORT = 0.01
"""Level at which p-values are resolved on which no decision depends."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """Clusters after a check, and the numbers that decided.

    Parameters
    ----------
    labels
        The clusters ``[n]``.
    p_value
        Of there being one distribution only; 1 where there was nothing to test.
    gain
        Gain of the clusters that were found, per client.
    gain_before
        Gain of the present clusters, per client.
    gamma
        Median of γ_i (CFL eq. 39); None if it is infinite.
    tested
        False where splits have not changed since the last test, and were not tested.
    """

    labels: Labels
    p_value: float
    gain: float
    gain_before: float
    gamma: float | None
    tested: bool = True

    @property
    def criteria(self) -> dict[str, float]:
        """The numbers by name, as the tree and events have them."""
        return {"p_value": self.p_value, "gain": self.gain, "gain_before": self.gain_before}

    def make_event(self, kind: type[Check], node: int, ids: Sequence[int], level: float) -> Check:
        """Return an event about the clients ``[n]`` of a node."""
        clusters = list_clusters(ids, self.labels)
        return kind(node, **self.criteria, level=level, gamma=self.gamma, clusters=clusters)


def cluster_by_splits(
    cosines: Tensor,
    splits: int,
    present: Labels,
    level: float,
    generator: np.random.Generator,
    *,
    level_inside: float,
    known: Tensor | None = None,
) -> Verdict:
    """Cluster clients by updates from equal splits of their data.

    Parameters
    ----------
    cosines
        Cosines of all pairs of splits, ``[n·r, n·r]``, the splits of a client next to each other.
    splits
        r, the number of splits of each client.
    present
        The present clusters ``[n]``. They stay unless others gain more; if they gain nothing, they
        become one cluster.
    level
        Chance of separating clients of one distribution.
    generator
        Draws the shuffles.
    level_inside
        Level of the tests inside the clusters that were found.
    known
        Cosines of an earlier test. If they are the same, what they show was decided then, and
        nothing is tested.
    """
    matrix = cosines.double().numpy()
    similarity = average_client_similarity(matrix, splits)
    gamma = _find_median(estimate_gammas(similarity, splits))
    if known is not None and _is_same(known, cosines):
        gain_now = compute_gain_by_parts(similarity, present, estimate_noise(similarity, splits))
        return Verdict(present, 1.0, gain_now, gain_before=gain_now, gamma=gamma, tested=False)

    found = find_by_parts(matrix, splits, level, generator, level_inside)
    present_gains = found.compute_gains(present)  # in each view of the similarities
    found_gain = found.compute_gains(found.labels)[found.view]
    if found_gain > present_gains[found.view]:
        labels = found.labels
    elif max(present_gains) > 0:
        labels = present
    else:
        labels = np.zeros_like(present)
    return Verdict(
        labels, found.p_value, found_gain, gain_before=present_gains[found.view], gamma=gamma
    )


def cluster_by_halves(
    updates: Updates, present: Labels, level: float, generator: np.random.Generator
) -> Verdict:
    """Cluster clients by updates from two halves of their data.

    Parameters
    ----------
    updates
        Of n clients, with the signatures of both halves.
    present
        The present clusters ``[n]``. They stay unless others gain more and the test rejects one
        distribution; if they gain nothing, they become one cluster.
    level
        Chance of separating clients of one distribution.
    generator
        Draws the shuffles.
    """
    replicates = Replicates(*get_split_signatures(updates).unbind(1))
    found = find_clusters(replicates)
    present_gain = compute_gain(found.similarity, present, found.noise, found.own)
    finds_more = present.any() and found.labels.max() > present.max() and found.gain > present_gain
    # More clusters than the present ones could gain by chance; see split_half.
    if finds_more and found.compute_share_exceeding(present, generator) > CHANCE:
        found = found.limit_clusters(int(present.max()) + 1)

    changes = found.gain > max(present_gain, 0.0) and not is_same_partition(found.labels, present)
    # If no decision depends on the p-value, fewer shuffles resolve it well enough for the report.
    p_value = found.compute_p_value(level if changes else max(level, LEVEL_TO_REPORT), generator)
    if changes and p_value <= level:
        labels = found.labels
    elif present_gain > 0:
        labels = present
    else:
        labels = np.zeros_like(present)
    return Verdict(
        labels, p_value, found.gain, gain_before=present_gain, gamma=_find_median(replicates.gammas)
    )


def examine_node(
    node: int,
    updates: Updates,
    splits: int,
    level: float,
    this_round: Round,
    *,
    level_inside: float,
) -> Verdict:
    """Test whether the members of one cluster have one distribution.

    ``updates`` were made in equal splits, at the cluster's model.
    """
    generator = this_round.generator(f"shuffles {node}")
    one_cluster = np.zeros(len(updates.ids), dtype=np.int64)
    return cluster_by_splits(
        compute_cosines(updates),
        splits,
        one_cluster,
        level=level,
        generator=generator,
        level_inside=level_inside,
    )


def get_split_signatures(updates: Updates) -> Tensor:
    """Return the signatures of all splits, ``[n, r, R]``."""
    assert updates.parts is not None  # the query requested them
    return updates.parts


def compute_cosines(updates: Updates) -> Tensor:
    """Return the cosines of all pairs of splits, ``[n·r, n·r]``, in float32 as checkpoints do."""
    return torch.from_numpy(compute_part_similarity(get_split_signatures(updates))).float()


def list_clusters(ids: Sequence[int], labels: Labels) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each cluster, by labels ``[n]``."""
    clusters: list[tuple[int, ...]] = []
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label).tolist()
        clusters.append(tuple(ids[place] for place in places))
    return tuple(clusters)


def postpone_if_too_few(node: int, replies: int, this_round: Round) -> Postponed | None:
    """Return the event of a postponed test if too few clients of a node replied, or None."""
    needed = max(2, this_round.min_clients)
    return Postponed(node, replies, needed) if replies < needed else None


def _is_same(known: Tensor, cosines: Tensor) -> bool:
    return known.shape == cosines.shape and bool((known - cosines).abs().max() <= CHANGED)


def _find_median(gammas: NDArray[np.float64]) -> float | None:
    median = float(np.median(gammas))
    return median if np.isfinite(median) else None


# The test as a criterion of CFL.

ROUNDS_IN_SPLITS = 3
"""Number of rounds, the first of a cluster, in which its members train in splits."""

ROUNDS_BETWEEN_HALVES = 7
"""Number of rounds of a cluster from one test by halves to the next."""


@dataclass(frozen=True, eq=False)
class _Replicates:
    """Updates that the members of a cluster made for a test, each from one split of its data.

    Parameters
    ----------
    updates
        The updates; None if too few members have enough examples to be queried.
    clients
        Number of members that replied, or of those with enough examples.
    splits
        Number of equal splits of each member; 0 for two halves of all its data.
    level
        Level of the test.
    """

    updates: Updates | None
    clients: int
    splits: int
    level: float


@dataclass(frozen=True, eq=False)
class _TestedCluster(ClusterUpdate):
    """A trained cluster with the updates for the test that is due."""

    replicates: _Replicates | None = None

    @classmethod
    def add(cls, cluster: ClusterUpdate, replicates: _Replicates) -> _TestedCluster:
        values = {each.name: getattr(cluster, each.name) for each in fields(cluster)}
        return cls(**values, replicates=replicates)


@dataclass(frozen=True, kw_only=True)
class ReplicateTest(SplitCriterion):
    """Split a cluster when the replicate test shows more than one distribution among its members.

    Parameters
    ----------
    level
        Chance of ever splitting a cluster whose members all have one distribution, in (0, 1).
    """

    level: float = 0.01

    @property
    def needs_updates(self) -> bool:
        """False: signatures and means of the updates suffice."""
        return False

    def init(self, state: CFLState, clients: Clients) -> CFLState:
        """Choose the splits of the clients' data, if they have enough examples."""
        splits = DataSplits.choose_for_test("cfl", clients, self.level)
        if splits is None:
            return state
        return replace(state, parts=splits.count, part_size=splits.size)

    def train(
        self,
        state: CFLState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: Round,
        *,
        weighted: bool,
    ) -> Sequence[ClusterUpdate]:
        """Train all clusters, in splits or on whole data, and request halves if a test is due."""
        tree = state.tree
        splits = DataSplits(state.parts, state.part_size) if state.parts else None
        all_take_part = len(cohort) == len(tree.leaf_of)
        last_in_splits = ROUNDS_IN_SPLITS if all_take_part else 1
        on_whole_data = set(cohort)
        trained: list[ClusterUpdate] = []
        halves: dict[int, _Replicates] = {}
        for leaf in tree.leaves:
            if not leaf.members:
                continue
            age = this_round.number - leaf.born
            training = sorted(on_whole_data.intersection(leaf.members))
            if (
                splits
                and age <= last_in_splits
                and _can_train_in_splits(leaf, splits, tree, clients)
            ):
                tested = age == last_in_splits and len(leaf.members) > 1
                updates, in_splits = splits.train(
                    tree,
                    leaf.members,
                    training,
                    clients=clients,
                    this_round=this_round,
                    compares=tested,
                )
                cluster = ClusterUpdate.of(
                    leaf.id, updates, this_round, weighted=weighted
                ).compared()
                if tested:
                    replies = len(in_splits.ids)
                    replicates = _Replicates(in_splits, replies, splits.count, self.level / 2)
                    cluster = _TestedCluster.add(cluster, replicates)
                trained.append(cluster)
                on_whole_data.difference_update(leaf.members)
                continue
            number = _count_tests_by_halves(age, len(leaf.members), len(training))
            if number:
                level = self.level / 2 / (number * (number + 1))
                # The cluster's model need not be sent twice to members that all train.
                model_is_sent = len(training) == len(leaf.members)
                halves[leaf.id] = _request_halves(
                    leaf, clients, this_round, level, model_is_sent=model_is_sent
                )

        if on_whole_data:
            for cluster in train_clusters(
                state, sorted(on_whole_data), clients, this_round, weighted=weighted
            ):
                due = halves.get(cluster.node)
                trained.append(cluster if due is None else _TestedCluster.add(cluster, due))
        return sorted(trained, key=lambda cluster: cluster.node)

    def examine(
        self, cluster: ClusterUpdate, state: CFLState, clients: Clients, this_round: Round
    ) -> ExaminedCluster:
        """Test a cluster if a test is due, and split it in two if the test finds clusters."""
        if not isinstance(cluster, _TestedCluster) or cluster.replicates is None:
            return ExaminedCluster(cluster)
        replicates = cluster.replicates
        postponed = postpone_if_too_few(cluster.node, replicates.clients, this_round)
        if postponed or replicates.updates is None:
            return ExaminedCluster(cluster, events=(postponed,) if postponed else ())

        updates = replicates.updates
        if replicates.splits:
            verdict = examine_node(
                cluster.node,
                updates,
                replicates.splits,
                level=replicates.level,
                this_round=this_round,
                level_inside=self.level,
            )
        else:
            one_cluster = np.zeros(len(updates.ids), dtype=np.int64)
            generator = this_round.generator(f"shuffles {cluster.node}")
            verdict = cluster_by_halves(updates, one_cluster, replicates.level, generator)
        event = verdict.make_event(Tested, cluster.node, updates.ids, replicates.level)
        if len(event.clusters) == 1:
            return ExaminedCluster(cluster, events=(event,))

        labels = join_to_two(verdict.labels, cosine_similarity(updates.signatures))
        split = ProposedSplit(
            node=state.tree.nodes[cluster.node],
            updates=updates,
            clusters=list_clusters(updates.ids, labels),
            criteria={"p_value": verdict.p_value, "gain": verdict.gain},
        )
        return ExaminedCluster(cluster, split=split, events=(event,))


def join_to_two(labels: Labels, similarity: Similarity) -> Labels:
    """Join the most similar of k clusters until two are left.

    Parameters
    ----------
    labels
        The clusters ``[n]``, with values 0 to k − 1.
    similarity
        Similarities of the clients, ``[n, n]``.

    Returns
    -------
    Labels
        The two clusters ``[n]``.
    """
    memberships = np.eye(labels.max() + 1)[labels]  # [n, k]
    sizes = memberships.sum(0)
    mean_similarity = memberships.T @ similarity @ memberships / np.outer(sizes, sizes)
    np.fill_diagonal(mean_similarity, 1.0)
    distances = scipy.spatial.distance.squareform(1 - mean_similarity, checks=False)
    return cut(agglomerate(distances, "average"), 2)[labels]


def _can_train_in_splits(
    leaf: Node, splits: DataSplits, tree: ParameterTree, clients: Clients
) -> bool:
    """Return whether some member has enough examples, and the model depends on all splits alike.

    It does if all rounds that led to it were rounds in splits, in this cluster and those above.
    """
    if not splits.select_able(clients.sizes, leaf.members):
        return False
    path = tree.above(leaf.id)
    return all(child.born - node.born <= ROUNDS_IN_SPLITS for node, child in pairwise(path))


def _count_tests_by_halves(age: int, members: int, training: int) -> int:
    """Return the number of the test by halves that is due, from 1; 0 if none is due.

    If only some of the members train in a round, tests are made as much less often.
    """
    number, rest = divmod(age, ROUNDS_BETWEEN_HALVES)
    if members < 2 or rest or not training:
        return 0
    members_per_trained = math.ceil(members / training)
    return number if number % members_per_trained == 0 else 0


def _request_halves(
    leaf: Node, clients: Clients, this_round: Round, level: float, *, model_is_sent: bool
) -> _Replicates:
    """Query all members of a cluster for updates from two halves of their data, at its model."""
    able = HALVES.select_able(clients.sizes, leaf.members)
    if postpone_if_too_few(leaf.id, len(able), this_round):
        return _Replicates(None, len(able), splits=0, level=level)
    communicates = "updates" if model_is_sent else "all"
    query = replace(this_round, purpose="replicate", communicates=communicates)
    updates = HALVES.request_updates(clients, able, leaf.params[None], query)
    return _Replicates(updates, len(updates.ids), splits=0, level=level)
