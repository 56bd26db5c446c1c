"""Replicate test: a statistical test of whether the clients have more than one data distribution.

Each client divides its data into splits and makes one update from each split. If all clients have
the same distribution, the updates from splits of different clients are as similar as the updates
from splits of one client.
:func:`cluster_by_splits` clusters clients by updates from equal splits of their data, and
:func:`cluster_by_halves` by updates from splits at a trained model. Both return a :class:`Verdict`.
The statistics are in :mod:`fedclade.clustering.part_test` and
:mod:`fedclade.clustering.split_half`.

:class:`ReplicateTest` is the test as a split criterion of CFL, in place of the paper's thresholds
(``criterion = "replicated"``):

- *Test by splits*, once for each cluster. In the cluster's first three rounds its members train on
  splits of their data (:mod:`fedclade.algorithms.rcfl.data_splits`), and the updates of the third
  round are tested. If a round samples only some clients, all members are queried in the cluster's
  first round instead, and the updates of this round are tested. A child of a split cluster is
  tested in this way, too, unless its ancestors have trained on whole data: its model has then
  memorized examples, and the child has only tests by halves.
- *Tests by halves*, repeated. In every seventh round of a cluster all members are queried for
  additional updates from two halves of their data, or from up to four splits when the test uses an
  e-value. If only a fraction of the members trains in a round, these tests are less frequent, in
  proportion.
- *Levels.* The test by splits has half of the level. The tests by halves share the other half. The
  first of them (at most three) use p-values, and the j-th test has 1/(j(j + 1)) of this half. All
  later tests compare a running sum of e-values with the rest
  (:mod:`fedclade.clustering.repeated_test`). So the probability that a cluster of one distribution
  is ever split is at most the level.
- *More than two clusters.* A test often finds more than two clusters, but CFL splits a cluster in
  two. So the most similar of the clusters stay together (average linkage of their mean
  similarities), and are separated further down the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade import core
from fedclade.algorithms.cluster_update import ClusterUpdate, train_clusters
from fedclade.algorithms.rcfl.data_splits import HALVES, DataSplits, all_take_part, divisible_sizes
from fedclade.algorithms.split_criterion import (
    CFLState,
    ExaminedCluster,
    ProposedSplit,
    SplitCriterion,
    TestedSoFar,
)
from fedclade.clustering import (
    CUT,
    LARGEST_TESTED_BY_HALVES,
    LARGEST_TESTED_BY_PARTS,
    MOST_SHUFFLES,
    VIEWS,
    Labels,
    PartFinding,
    RepeatedTest,
    Replicates,
    Similarity,
    Stability,
    agglomerate,
    average_client_similarity,
    compute_e_value_by_parts,
    compute_gain,
    compute_gain_by_parts,
    compute_largest_e_value,
    compute_least_share,
    compute_part_similarity,
    compute_rank_e_value,
    cosine_similarity,
    count_shuffles,
    cut,
    estimate_gammas,
    estimate_noise,
    find_by_parts,
    find_clusters,
    find_clusters_by_parts,
    find_smallest_group,
    is_same_partition,
    measure_stability,
)
from fedclade.core import Clients, Node, ParameterTree, Round, RoundPlan, Updates

if TYPE_CHECKING:
    from torch import Tensor

    from fedclade.core import Check, Postponed

CHANCE = 0.05
"""Largest share of shuffles with a larger gain at which additional clusters are accepted."""

STILL_SHOWS = 0.01
"""Largest p-value at which present clusters stay although they have no gain."""

LEVEL_TO_REPORT = 0.01
"""Level down to which a p-value is computed if it is only reported and decides nothing."""

MERGE_SHUFFLES = 400
"""Largest number of shuffles in the decision whether present clusters stay without a gain."""

ROUNDING = 1e-12
"""Difference of gains that may be rounding."""

CHECK_PARTS = 4
"""Number of splits of each client's data in a check at a trained model that uses an e-value.

It is smaller if clients have too few examples. With two splits, no single e-value of rcfl would be
large enough at the default level.
"""


@dataclass(frozen=True, eq=False)
class Verdict:
    """Result of a check: the clusters after it, and the numbers that decided on them.

    The gain of a partition into clusters measures how much more similar clients are within clusters
    than noise would make them.

    Parameters
    ----------
    labels
        Number of the cluster of each of n clients after the check, ``[n]``.
    p_value
        P-value of the hypothesis that all clients have one distribution; 1 if nothing was tested.
        For a check with e-values it is the inverse of their running sum, at most 1.
    gain
        Gain per client of the clusters that the check found.
    gain_before
        Gain per client of the clusters before the check.
    gamma
        Median over clients of the noise γ_i (CFL eq. 39); None if it is infinite.
    level
        Level with which the p-value was compared.
    smallest_group
        Size of the smallest perfectly separate group that the check could have found among all
        clients; 0 if it could have found no group. None if nothing was tested.
    e_value
        E-value of the check; None if the check used a p-value, or if no decision depended on it.
    repeated
        Number and evidence of the repeated tests after this one; None if the test is not repeated.
    stability
        Stability of the clusters after the check, and the stable groups among them; None if there
        is one cluster, or if nothing was tested. No decision depends on it.
    """

    labels: Labels
    p_value: float
    gain: float
    gain_before: float
    gamma: float | None
    level: float
    smallest_group: int | None = None
    e_value: float | None = None
    repeated: RepeatedTest | None = None
    stability: Stability | None = None

    @property
    def criteria(self) -> dict[str, float]:
        """P-value and gains of the check by name, as the tree and events store them."""
        return {"p_value": self.p_value, "gain": self.gain, "gain_before": self.gain_before}

    def make_event(self, kind: type[Check], node: int, ids: Sequence[int]) -> Check:
        """Create the event that reports this result.

        Parameters
        ----------
        kind
            Class of the event.
        node
            Node whose clients were checked.
        ids
            Ids of the clients, in the order of ``labels``.
        """
        repeated = self.repeated
        stability = self.stability
        groups: tuple[tuple[int, ...], ...] | None = None
        if stability is not None:
            groups = () if stability.groups is None else list_clusters(ids, stability.groups)
        return kind(
            node,
            **self.criteria,
            level=self.level,
            gamma=self.gamma,
            clusters=list_clusters(ids, self.labels),
            e_value=self.e_value,
            tests=None if repeated is None else repeated.tests,
            level_left=None if repeated is None else repeated.level_left,
            smallest_group=self.smallest_group,
            stability=None if stability is None else stability.value,
            stable_groups=groups,
        )


# Tests by equal splits, whose clients may be shuffled together.


def cluster_by_splits(
    cosines: Tensor,
    splits: int,
    level: float,
    generator: np.random.Generator,
    *,
    level_inside: float,
) -> Verdict:
    """Cluster clients by updates from equal splits of their data, in a test that is made once.

    Parameters
    ----------
    cosines
        Cosines of the updates of all pairs of splits, ``[n·r, n·r]`` for r splits of each of n
        clients, with the splits of a client in consecutive rows.
    splits
        Number r of splits of each client.
    level
        Level of the test: largest probability of separating clients that all have the same
        distribution.
    generator
        Generator of the random shuffles.
    level_inside
        Level of the further tests inside the clusters that were found.
    """
    matrix = cosines.double().numpy()
    n = len(matrix) // splits
    found = find_by_parts(matrix, splits, level, draw=generator, level_inside=level_inside)
    one_cluster = np.zeros(n, dtype=np.int64)
    labels, gain, gain_before = _choose_by_splits(found, one_cluster, generator)
    shuffles = count_shuffles(level / VIEWS)

    def can_find(group: int) -> bool:
        return _compute_least_p_value(n, splits, group, shuffles) <= level

    return Verdict(
        labels,
        found.p_value,
        gain,
        gain_before=gain_before,
        gamma=_estimate_median_gamma(matrix, splits),
        level=level,
        smallest_group=find_smallest_group(n, can_find) or 0,
        stability=_measure_stability(matrix, splits, labels, view=found.view),
    )


def cluster_again_by_splits(
    cosines: Tensor,
    splits: int,
    present: Labels,
    repeated: RepeatedTest,
    generator: np.random.Generator,
    *,
    level_inside: float,
    fresh: bool = False,
) -> Verdict:
    """Cluster clients by updates from equal splits of their data, in a test that is repeated.

    The model must not have been trained on these data, or must have been trained on all splits
    alike.

    Parameters
    ----------
    cosines, splits, generator, level_inside
        As in :func:`cluster_by_splits`.
    present
        Number of the present cluster of each of n clients, ``[n]``. The present clusters stay
        unless other clusters have a larger gain and the test rejects that there is one
        distribution. But if the present clusters have no gain, and clusters of randomly shuffled
        clients have as large a gain, all clients become one cluster.
    repeated
        Number and evidence of the tests of this kind so far, which determine the level.
    fresh
        Whether the data of these clients was not used in any earlier test of this kind.
    """
    matrix = cosines.double().numpy()
    n = len(matrix) // splits

    def is_better(found: PartFinding) -> bool:
        """Return whether found clusters have a larger gain than the present clusters."""
        gain_now = found.compute_gains(present)[found.view]
        return found.compute_gains(found.labels)[found.view] > gain_now

    # Many shuffles are drawn only if a decision may depend on the p-value or e-value.
    is_needed = is_better if present.any() else None
    level = repeated.next_level
    e_value = None
    if repeated.is_by_p_value:
        shuffles = min(repeated.shuffles, count_shuffles(level / VIEWS))
        found = find_by_parts(
            matrix, splits, level, generator, level_inside, shuffles=shuffles, is_better=is_needed
        )
        after = repeated.count()
        p_value = found.p_value
    else:
        found = find_by_parts(
            matrix,
            splits,
            VIEWS * CUT,
            draw=generator,
            level_inside=level_inside,
            shuffles=MOST_SHUFFLES // 2 // VIEWS,
            is_better=is_needed,
        )
        if present.any() and not is_better(found):
            after = repeated.count()
        else:
            in_turn = compute_e_value_by_parts(
                matrix, splits, generator, is_trained=False, shuffles=MOST_SHUFFLES // 2
            )
            e_value = (in_turn + found.e_value) / 2
            after = repeated.add(e_value, fresh=fresh)
        if not _is_significant(e_value, after, level):
            found = replace(found, labels=np.zeros(n, dtype=np.int64), view=0)
        p_value = after.anytime_p_value

    labels, gain, gain_before = _choose_by_splits(found, present, generator)
    return Verdict(
        labels,
        p_value,
        gain,
        gain_before=gain_before,
        gamma=_estimate_median_gamma(matrix, splits),
        level=level,
        smallest_group=_find_smallest_by_splits(repeated, n, splits, fresh=fresh),
        e_value=e_value,
        repeated=after if is_same_partition(labels, present) else after.restart(),
        stability=_measure_stability(matrix, splits, labels, view=found.view),
    )


def describe_unchanged(
    cosines: Tensor, splits: int, present: Labels, repeated: RepeatedTest
) -> Verdict:
    """Return the result of a check whose splits have not changed, and are therefore not tested.

    The present clusters stay. The p-value is 1, and the level is that of the next test.

    Parameters
    ----------
    cosines
        Cosines of the updates of all pairs of splits, as in :func:`cluster_by_splits`.
    splits
        Number of splits of each client.
    present
        Number of the present cluster of each client, ``[n]``.
    repeated
        Number and evidence of the tests of this kind so far.
    """
    matrix = cosines.double().numpy()
    similarity = average_client_similarity(matrix, splits)
    gain = compute_gain_by_parts(similarity, present, estimate_noise(similarity, splits))
    return Verdict(
        present,
        1.0,
        gain,
        gain_before=gain,
        gamma=_estimate_median_gamma(matrix, splits),
        level=repeated.next_level,
    )


def _choose_by_splits(
    found: PartFinding, present: Labels, generator: np.random.Generator
) -> tuple[Labels, float, float]:
    """Choose between the clusters that a test found, the present clusters, and one cluster.

    The found clusters are chosen if their gain is larger than the gain of the present clusters.
    Otherwise the present clusters stay if their gain is positive in any view (kind of similarity),
    or larger than the gain after nearly all random shuffles of their clients. If neither is true,
    all clients form one cluster.

    Returns
    -------
    tuple of numpy.ndarray, float and float
        Number of the chosen cluster of each client, ``[n]``; the gain of the found clusters; and
        the gain of the present clusters.
    """
    present_gains = found.compute_gains(present)  # in each view of the similarities
    found_gain = found.compute_gains(found.labels)[found.view]
    if found.labels.any() and found_gain > present_gains[found.view]:
        labels = found.labels
    elif max(present_gains) > 0:
        labels = present
    else:
        labels = np.zeros_like(present)
    if not labels.any() and _still_shows(
        present, lambda labels: found.compute_gains(labels)[found.view], generator
    ):
        labels = present
    return labels, found_gain, present_gains[found.view]


def _compute_least_p_value(clients: int, splits: int, group: int, shuffles: int) -> float:
    """Return the smallest p-value that a test by splits can have for a perfectly separate group.

    Parameters
    ----------
    clients
        Number of clients.
    splits
        Number of splits of each client.
    group
        Number of clients in the group.
    shuffles
        Number of shuffles that the test draws.
    """
    share = _compute_least_share(clients, group, splits)
    return VIEWS * max(share, 1 / (shuffles + 1))


def _compute_least_share(
    clients: int, group: int, splits: int = 1, largest: int = LARGEST_TESTED_BY_PARTS
) -> float:
    """Return the share of shuffles that leave a perfectly separate group of clients intact.

    This share is a lower bound of the p-value. The test shuffles splits, or whole clients if
    ``splits`` is 1. If there are more than ``largest`` clients, a sample of this size is shuffled,
    in which the group is smaller.
    """
    sampled = min(clients, largest)
    group_sampled = group * sampled // clients
    return compute_least_share(sampled * splits, group_sampled * splits)


def _find_smallest_by_splits(
    repeated: RepeatedTest, clients: int, splits: int, *, fresh: bool
) -> int:
    """Return the size of the smallest group that the next test by splits can find; 0 if none."""
    half = MOST_SHUFFLES // 2

    def can_find(group: int) -> bool:
        p_value = _compute_least_p_value(clients, splits, group, repeated.shuffles)
        share = _compute_least_share(clients, group, splits)
        draws = half // VIEWS
        by_statistic = compute_rank_e_value(1 + math.floor(draws * share), draws)
        in_turn = compute_largest_e_value(_compute_least_share(clients, group), splits, half)
        e_value = (by_statistic + in_turn) / 2
        return repeated.can_find(p_value=p_value, e_value=e_value, fresh=fresh)

    return find_smallest_group(clients, can_find) or 0


# Tests at a trained model, which has memorized properties that the splits of one client share.


def cluster_by_halves(
    updates: Updates, present: Labels, repeated: RepeatedTest, generator: np.random.Generator
) -> Verdict:
    """Cluster clients by updates from two halves or more splits of their data, at a trained model.

    Parameters
    ----------
    updates
        Updates of n clients with the signatures of their splits: of two halves if the next test of
        ``repeated`` uses a p-value; otherwise of any number of splits
        (:func:`choose_check_splits`).
    present
        Number of the present cluster of each client, ``[n]``. The present clusters stay unless
        other clusters have a larger gain and the test rejects that there is one distribution. But
        if the present clusters have no gain, and clusters of randomly shuffled clients have as
        large a gain, all clients become one cluster.
    repeated
        Number and evidence of the tests of this kind so far.
    generator
        Generator of the random shuffles.
    """
    by_p_value = repeated.is_by_p_value
    signatures = get_split_signatures(updates)
    splits = signatures.shape[1]
    cosines = compute_part_similarity(signatures)
    if by_p_value:
        found = find_clusters(Replicates(*signatures.unbind(1)))
    else:
        found = find_clusters_by_parts(cosines, splits)
    present_gain = compute_gain(found.similarity, present, found.noise, found.own)
    finds_more = present.any() and found.labels.max() > present.max() and found.gain > present_gain
    # A larger number of clusters than the present one may have more gain by chance; see split_half.
    if finds_more and found.compute_share_exceeding(present, generator) > CHANCE:
        found = found.limit_clusters(int(present.max()) + 1)

    changes = found.gain > max(present_gain, 0.0) and not is_same_partition(found.labels, present)
    level = repeated.next_level
    e_value = None
    after = repeated.count()
    if by_p_value:
        # If no decision depends on the p-value, fewer shuffles resolve it for the report.
        resolved = level if changes else max(level, LEVEL_TO_REPORT)
        p_value = found.compute_p_value(resolved, generator)
        is_significant = p_value <= level
    else:
        if changes or not present.any():
            e_value = compute_e_value_by_parts(cosines, splits, generator, is_trained=True)
            after = repeated.add(e_value)
        p_value = after.anytime_p_value
        is_significant = _is_significant(e_value, after, level)

    if changes and is_significant:
        labels = found.labels
    elif present_gain > 0 or _still_shows(
        present,
        lambda labels: compute_gain(found.similarity, labels, found.noise, found.own),
        generator,
    ):
        labels = present
    else:
        labels = np.zeros_like(present)
    return Verdict(
        labels,
        p_value,
        found.gain,
        gain_before=present_gain,
        gamma=_estimate_median_gamma(cosines, splits),
        level=level,
        smallest_group=_find_smallest_by_halves(repeated, len(present), splits),
        e_value=e_value,
        repeated=after if is_same_partition(labels, present) else after.restart(),
        stability=_measure_stability(cosines, splits, labels, compares_own=False),
    )


def choose_check_splits(
    sizes: Mapping[int, int], members: Collection[int], repeated: RepeatedTest
) -> tuple[DataSplits, list[int]]:
    """Choose the splits for the next test at a trained model, and the clients with enough data.

    Tests with a p-value use two halves. Tests with an e-value use up to :data:`CHECK_PARTS` splits.

    Parameters
    ----------
    sizes
        Number of training examples of each client.
    members
        Ids of the clients to test.
    repeated
        Number and evidence of the tests of this kind so far, which determine the next test.

    Returns
    -------
    tuple
        The splits, and the ids of the members with enough examples for them.
    """
    if repeated.is_by_p_value or len(members) < 2:
        return HALVES, HALVES.select_able(sizes, members)
    return DataSplits.choose_for_checks({client: sizes[client] for client in members}, CHECK_PARTS)


def can_split_later(repeated: RepeatedTest, clients: int, splits: int) -> bool:
    """Return whether any later test at a trained model could find clusters among the clients.

    If not even the largest possible e-values in all later tests are enough, the clients need not be
    queried.

    Parameters
    ----------
    repeated
        Number and evidence of the tests so far.
    clients
        Number of clients.
    splits
        Number of splits of each client.
    """
    if repeated.is_by_p_value:
        return True
    # In the best case all orders but one are worse.
    share = 1 / math.factorial(min(clients, LARGEST_TESTED_BY_PARTS))
    return repeated.can_ever_find(compute_largest_e_value(share, splits))


def _find_smallest_by_halves(repeated: RepeatedTest, clients: int, splits: int) -> int:
    """Return the size of the smallest group that the next test by halves can find; 0 if none.

    These tests shuffle whole clients.
    """

    def can_find(group: int) -> bool:
        by_halves = _compute_least_share(clients, group, largest=LARGEST_TESTED_BY_HALVES)
        by_parts = _compute_least_share(clients, group)
        return repeated.can_find(
            p_value=max(by_halves, 1 / (MOST_SHUFFLES + 1)),
            e_value=compute_largest_e_value(by_parts, splits),
        )

    return find_smallest_group(clients, can_find) or 0


def _is_significant(e_value: float | None, after: RepeatedTest, level: float) -> bool:
    """Return whether the e-values so far reject the hypothesis that there is one distribution.

    In addition the e-value of this check must be at least 1: the running sum may be large because
    of clusters that existed before the data changed, which this check no longer finds.

    Parameters
    ----------
    e_value
        E-value of this check; None if it was not computed, and the result is then False.
    after
        Number and evidence of the tests, including this check.
    level
        Level of the test.
    """
    return e_value is not None and e_value >= 1 and after.anytime_p_value <= level


def _still_shows(
    present: Labels, compute_gain_of: Callable[[Labels], float], generator: np.random.Generator
) -> bool:
    """Return whether the present clusters have more gain than nearly all shuffles of their clients.

    A shuffle assigns the clients to the clusters at random, and keeps the clusters' sizes. If the
    result is False, the present clusters may become one cluster.

    Parameters
    ----------
    present
        Number of the present cluster of each of n clients, ``[n]``.
    compute_gain_of
        Function that returns the gain of clusters ``[n]``.
    generator
        Generator of the random shuffles.
    """
    if not present.any():
        return False
    least = compute_gain_of(present) - ROUNDING
    allowed = int(STILL_SHOWS * (MERGE_SHUFFLES + 1)) - 1  # the true order counts as a shuffle
    for _ in range(MERGE_SHUFFLES):
        allowed -= compute_gain_of(generator.permutation(present)) >= least
        if allowed < 0:
            return False
    return True


def _estimate_median_gamma(cosines: NDArray[np.float64], splits: int) -> float | None:
    """Estimate the noise γ_i of each client (CFL eq. 39); return the median, None if infinite."""
    return _find_median(estimate_gammas(average_client_similarity(cosines, splits), splits))


# Functions for both kinds of tests.


def examine_node(
    node: int,
    updates: Updates,
    splits: int,
    test: float | RepeatedTest,
    this_round: Round,
    *,
    level_inside: float,
) -> Verdict:
    """Test whether the members of one cluster have one distribution.

    Parameters
    ----------
    node
        The cluster's node.
    updates
        The members' updates from equal splits of their data, at the cluster's model.
    splits
        Number of splits of each member.
    test
        Level of the test, if it is made once; or number and evidence of the cluster's tests so far,
        if it is repeated with different clients each time.
    this_round
        The round, which determines the random shuffles.
    level_inside
        Level of the further tests inside the clusters that were found.
    """
    generator = this_round.generator(f"shuffles {node}")
    cosines = compute_cosines(updates)
    if isinstance(test, RepeatedTest):
        one_cluster = np.zeros(len(updates.ids), dtype=np.int64)
        return cluster_again_by_splits(
            cosines, splits, one_cluster, test, generator, level_inside=level_inside, fresh=True
        )
    return cluster_by_splits(cosines, splits, test, generator, level_inside=level_inside)


def get_split_signatures(updates: Updates) -> Tensor:
    """Return the signatures ``[n, r, R]`` of r splits of each of n clients, with R entries each."""
    assert updates.parts is not None  # the query requested them
    return updates.parts


def compute_cosines(updates: Updates) -> Tensor:
    """Return the cosines of the updates of all pairs of splits, ``[n·r, n·r]``, rounded to float32.

    Here r is the number of splits of each of n clients. The precision is that of checkpoints.
    """
    return torch.from_numpy(compute_part_similarity(get_split_signatures(updates))).float()


def list_clusters(ids: Sequence[int], labels: Labels) -> tuple[tuple[int, ...], ...]:
    """Return the members of each cluster, given the cluster number of each client, ``[n]``."""
    clusters: list[tuple[int, ...]] = []
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label).tolist()
        clusters.append(tuple(ids[place] for place in places))
    return tuple(clusters)


def postpone_if_too_few(node: int, replies: int, this_round: RoundPlan) -> Postponed | None:
    """Return the event that a test is postponed if too few clients of a node replied, else None."""
    needed = max(2, this_round.min_clients)
    return core.Postponed(node, replies, needed) if replies < needed else None


def _measure_stability(
    cosines: Similarity, splits: int, labels: Labels, *, view: int = 0, compares_own: bool = True
) -> Stability | None:
    """Measure the stability of clusters; None if there is one cluster.

    For the parameters see :func:`~fedclade.clustering.measure_stability`.
    """
    if not labels.any():
        return None
    return measure_stability(cosines, splits, labels, view=view, compares_own=compares_own)


def _find_median(gammas: NDArray[np.float64]) -> float | None:
    """Return the median of the clients' noise γ_i; None if it is infinite."""
    median = float(np.median(gammas))
    return median if np.isfinite(median) else None


# The test as a criterion of CFL.

ROUNDS_IN_SPLITS = 3
"""Number of a cluster's first rounds, in which its members train on splits of their data."""

ROUNDS_BETWEEN_HALVES = 7
"""Number of rounds of a cluster from one test by halves to the next."""


@dataclass(frozen=True, eq=False)
class _Replicates:
    """Data for the test of one cluster: several updates of each member, from parts of its data.

    The updates of one member replicate each other, as its parts have the same distribution. The
    test compares how similar updates of one member and of different members are.

    Parameters
    ----------
    updates
        The updates; None if no member was queried, since too few have enough examples.
    clients
        Number of members that replied; if ``updates`` is None, of members with enough examples.
    splits
        Number of parts of each member's data in the test of the cluster's first rounds; 0 for a
        later test, at a trained model, which determines the number itself.
    repeated
        The cluster's tests at trained models so far, with their sum of e-values; None for the test
        of the first rounds.
    """

    updates: Updates | None
    clients: int
    splits: int
    repeated: RepeatedTest | None


@dataclass(frozen=True, eq=False)
class _TestedCluster(ClusterUpdate):
    """Result of a round for one cluster, with ``replicates`` for its test if one is due."""

    replicates: _Replicates | None = None

    @classmethod
    def add(cls, cluster: ClusterUpdate, replicates: _Replicates) -> _TestedCluster:
        """Return a cluster's result of a round with the updates for its test added."""
        values = {each.name: getattr(cluster, each.name) for each in fields(cluster)}
        return cls(**values, replicates=replicates)


@dataclass(frozen=True, kw_only=True)
class ReplicateTest(SplitCriterion):
    """Split criterion of CFL: split a cluster if the replicate test finds several distributions.

    The test compares updates that the members make from splits of their data.

    Parameters
    ----------
    level
        Upper bound on the probability that a cluster whose members all have the same distribution
        is ever split, in (0, 1).
    """

    level: float = 0.01

    @property
    def needs_updates(self) -> bool:
        """Whether the criterion needs whole updates of single clients: False.

        The replicate test needs only means and signatures (short vectors for comparison) of
        updates.
        """
        return False

    def init(self, state: CFLState, clients: Clients) -> CFLState:
        """Add the chosen splits of the clients' data to CFL's state before the first round.

        The state is unchanged if clients have too few examples.
        """
        splits = DataSplits.choose_for_test("cfl", clients, self.level)
        if splits is None:
            return state
        return replace(state, parts=splits.count, part_size=splits.size)

    def train(
        self,
        state: CFLState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: RoundPlan,
        *,
        weighted: bool,
    ) -> Sequence[ClusterUpdate]:
        """Train all clusters for one round, and query clients for the updates that tests need.

        In the first rounds of a cluster its members train on splits of their data, and later on all
        of their data. If a test at the trained model is due, members are queried for additional
        updates from splits.
        For the parameters see :meth:`SplitCriterion.train`.
        """
        tree = state.tree
        splits = DataSplits(state.parts, state.part_size) if state.parts else None
        last_in_splits = ROUNDS_IN_SPLITS if all_take_part(tree, cohort, clients) else 1
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
                    replicates = _Replicates(in_splits, replies, splits.count, None)
                    cluster = _TestedCluster.add(cluster, replicates)
                trained.append(cluster)
                on_whole_data.difference_update(leaf.members)
                continue
            repeated = self._get_repeated_test(state, leaf.id)
            if _is_test_due(age, len(leaf.members), len(training)):
                # The cluster's model need not be sent twice to members that all train.
                model_is_sent = len(training) == len(leaf.members)
                replicates = _request_halves(
                    leaf, clients, this_round, repeated, model_is_sent=model_is_sent
                )
                if replicates is not None:
                    halves[leaf.id] = replicates

        if on_whole_data:
            for cluster in train_clusters(
                state, sorted(on_whole_data), clients, this_round, weighted=weighted
            ):
                due = halves.get(cluster.node)
                trained.append(cluster if due is None else _TestedCluster.add(cluster, due))
        return sorted(trained, key=lambda cluster: cluster.node)

    def examine(
        self, cluster: ClusterUpdate, state: CFLState, clients: Clients, this_round: RoundPlan
    ) -> ExaminedCluster:
        """Test a cluster if a test is due, and propose to split it in two if the test finds groups.

        For the parameters see :meth:`SplitCriterion.examine`.
        """
        if not isinstance(cluster, _TestedCluster) or cluster.replicates is None:
            return ExaminedCluster(cluster)
        replicates = cluster.replicates
        postponed = postpone_if_too_few(cluster.node, replicates.clients, this_round)
        if postponed or replicates.updates is None:
            return ExaminedCluster(cluster, events=(postponed,) if postponed else ())

        updates = replicates.updates
        if replicates.repeated is None:
            verdict = examine_node(
                cluster.node,
                updates,
                replicates.splits,
                self.level / 2,
                this_round=this_round,
                level_inside=self.level,
            )
        else:
            one_cluster = np.zeros(len(updates.ids), dtype=np.int64)
            generator = this_round.generator(f"shuffles {cluster.node}")
            verdict = cluster_by_halves(updates, one_cluster, replicates.repeated, generator)
        event = verdict.make_event(core.Tested, cluster.node, updates.ids)
        tested = None
        if verdict.repeated is not None:
            tested = TestedSoFar(verdict.repeated.tests, verdict.repeated.total)
        if len(event.clusters) == 1:
            return ExaminedCluster(cluster, events=(event,), tested=tested)

        labels = join_to_two(verdict.labels, cosine_similarity(updates.signatures))
        split = ProposedSplit(
            node=state.tree.nodes[cluster.node],
            updates=updates,
            clusters=list_clusters(updates.ids, labels),
            criteria={"p_value": verdict.p_value, "gain": verdict.gain},
        )
        return ExaminedCluster(cluster, split=split, events=(event,), tested=tested)

    def _get_repeated_test(self, state: CFLState, node: int) -> RepeatedTest:
        """Return number and evidence of a cluster's tests at trained models so far.

        The evidence is the running sum of the tests' e-values.
        """
        repeated = RepeatedTest(self.level / 2)
        if state.tests is None or state.evidence is None:
            return repeated
        tests, total = int(state.tests[node]), float(state.evidence[node])
        return replace(repeated, tests=tests, total=total)


def join_to_two(labels: Labels, similarity: Similarity) -> Labels:
    """Join the most similar of several clusters until two clusters are left.

    CFL splits a cluster in two, while a test may find more clusters.

    Parameters
    ----------
    labels
        Number of the cluster of each of n clients, ``[n]``, from 0.
    similarity
        Similarities of the clients, ``[n, n]``.

    Returns
    -------
    Labels
        Number of the joined cluster of each client, ``[n]``: 0 or 1.
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
    """Return whether a cluster's members can train on splits, and a test of the splits is exact.

    Some member must have enough examples, and the cluster's model must depend on all splits alike:
    clients must have trained on splits in all rounds that led to it, in this cluster and in the
    clusters above it.
    """
    if not splits.select_able(divisible_sizes(clients), leaf.members):
        return False
    path = tree.above(leaf.id)
    return all(child.born - node.born <= ROUNDS_IN_SPLITS for node, child in pairwise(path))


def _is_test_due(age: int, members: int, training: int) -> bool:
    """Return whether a cluster is tested at its trained model in this round.

    If only a fraction of the members trains in a round, tests are less frequent, in proportion.

    Parameters
    ----------
    age
        Number of rounds since the cluster was created.
    members
        Number of members of the cluster.
    training
        Number of members that train in this round.
    """
    number, rest = divmod(age, ROUNDS_BETWEEN_HALVES)
    if members < 2 or rest or not training:
        return False
    members_per_trained = math.ceil(members / training)
    return number > 0 and number % members_per_trained == 0


def _request_halves(
    leaf: Node,
    clients: Clients,
    this_round: RoundPlan,
    repeated: RepeatedTest,
    *,
    model_is_sent: bool,
) -> _Replicates | None:
    """Query all members of a cluster for updates from splits of their data, at its trained model.

    Parameters
    ----------
    leaf
        The cluster's node.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.
    repeated
        Number and evidence of the cluster's tests so far.
    model_is_sent
        Whether the members receive the cluster's model in this round anyway.

    Returns
    -------
    _Replicates or None
        The updates for the test. None if no later test could split the cluster: no client is then
        queried.
    """
    splits, able = choose_check_splits(divisible_sizes(clients), leaf.members, repeated)
    if postpone_if_too_few(leaf.id, len(able), this_round):
        return _Replicates(None, len(able), splits=0, repeated=repeated)
    if not can_split_later(repeated, len(able), splits.count):
        return None
    query = replace(this_round, purpose="replicate")
    updates = splits.request_updates(
        clients, able, leaf.params[None], query, sent_before=model_is_sent
    )
    return _Replicates(updates, len(updates.ids), splits=0, repeated=repeated)
