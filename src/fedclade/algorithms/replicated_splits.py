"""When to split a cluster in two without thresholds: the tests of replicated clustering in a tree that CFL grows.

- A cluster trains in equal parts (:mod:`fedclade.algorithms.replicated_checks`) in its first three rounds, and in the
  third the parts are tested. If not all clients take part in a round, all members are asked in its first round, and are
  tested then. So is a child of a cluster that was split by such a test. One whose model has learnt examples by heart,
  since its parent trained on whole data, is left to the next.
- Every seventh round of a cluster all members are asked for updates from two halves of their data besides; if only some
  train in a round, as much less often.
- The test by parts has half of the level, and the j-th one of halves 1/(j(j + 1)) of the other half. So the chance that
  a cluster of one distribution is ever split is at most the level.
- What is found are often more than two clusters. CFL splits in two; so those that are most alike stay together (average
  linkage of their mean similarities), and are told apart further down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import scipy

from fedclade.algorithms.base import State
from fedclade.algorithms.cluster_update import ClusterUpdate, by_cluster, move_clusters, train_clusters
from fedclade.algorithms.replicated_checks import (
    HALVES,
    Parting,
    Verdict,
    by_halves,
    clusters_of,
    divided,
    of_cluster,
    too_few,
)
from fedclade.clustering import Labels, Similarity, agglomerate, cosine_similarity, cut
from fedclade.core import Clients, Event, Node, ParameterTree, Regrouped, Round, Tested, Updates

# A second look at clusters just found, which may hold clients that should go apart, too.
#
# The first rounds of replicated clustering find clusters once labels were learnt; where a model
# learns slowly, some lie together still. Of many clients, later checks part them. Of few, shuffling
# whole updates has too few outcomes, and parts at the initial model tell again what they told. So
# few clients that just went apart train in parts for one more round, each from its cluster's model,
# and every cluster is tested by itself. It costs no more training.
#
# The model of a cluster is, but for who its members are, a symmetric function of their parts. As a
# rule clusters are right already, and were tested from inside in the round before. So a second look
# has a hundredth of the level: what differs is told by far less, and right clusters stay whole.

OF_THE_LEVEL = 0.01
"""The share that a test inside a cluster has at a second look."""


def just_apart(tree: ParameterTree, number: int) -> bool:
    """Whether clusters, some of more than one client, were all found in the round before this one."""
    fresh = all(leaf.born == number - 2 for leaf in tree.leaves)  # so that they trained in it
    return fresh and any(len(leaf.members) > 1 for leaf in tree.leaves)


def look_inside(
    tree: ParameterTree, parting: Parting, cohort: Sequence[int], clients: Clients, this_round: Round, level: float
) -> tuple[list[ClusterUpdate], ParameterTree, list[Event]]:
    """Train clusters of two or more in parts, others as ever; part those further whose parts say so.

    Return the clusters as they trained, the tree after it, and what was found in each cluster.
    """
    several = [leaf for leaf in tree.leaves if len(leaf.members) > 1]
    members = [client for leaf in several for client in leaf.members]
    updates, made = parting.train(tree, members, cohort, clients, this_round, compares=True)
    trained, events = by_cluster(tree, updates, this_round), list[Event]()
    tree = move_clusters(tree, trained)
    share = OF_THE_LEVEL * level
    for leaf in several:
        mine = made.select([client for client in leaf.members if client in made.ids])
        if waits := too_few(leaf.id, len(mine.ids), this_round):
            events.append(waits)
            continue
        verdict = of_cluster(leaf.id, mine, parting.parts, share, this_round, level_inside=share)
        parted = bool(verdict.labels.any())
        events.append(event := verdict.event(Regrouped if parted else Tested, leaf.id, mine.ids, share))
        if parted:
            tree = divided(tree, leaf.id, event.clusters, this_round.number)
    return trained, tree, events


IN_PARTS = 3
"""Rounds of a cluster."""

HALVES_EVERY = 7
"""Rounds of a cluster."""


@dataclass(frozen=True, eq=False)
class SplitTest:
    """What was found about one cluster, by updates that its members made at its model."""

    event: Event
    updates: Updates | None = None
    clusters: tuple[tuple[int, ...], ...] = ()  # two, if it is to be split
    criteria: Mapping[str, float] = field(default_factory=dict[str, float])  # by which it is

    @classmethod
    def of(cls, node: Node, verdict: Verdict, updates: Updates, level: float) -> SplitTest:
        """Take down a verdict about a cluster."""
        event = verdict.event(Tested, node.id, updates.ids, level)
        if len(event.clusters) == 1:
            return cls(event)
        labels = in_two(verdict.labels, cosine_similarity(updates.signatures))
        criteria = {"p_value": verdict.p_value, "gain": verdict.gain}
        return cls(event, updates, clusters_of(updates.ids, labels), criteria)


def train_and_test(
    state: State,
    parting: Parting | None,
    cohort: Sequence[int],
    clients: Clients,
    this_round: Round,
    level: float,
    *,
    weighted: bool = True,
) -> tuple[list[ClusterUpdate], dict[int, SplitTest]]:
    """Train all clusters, in parts or not; return them, and what was found about those that were tested, by node."""
    tree, everybody = state.tree, len(cohort) == len(state.tree.leaf_of)
    last = IN_PARTS if everybody else 1
    parts, tests, whole = list[ClusterUpdate](), dict[int, SplitTest](), set(cohort)
    for leaf in tree.leaves:
        age, mine = this_round.number - leaf.born, sorted(whole.intersection(leaf.members))
        if not leaf.members:
            continue
        if parting and age <= last and parting.able(clients.sizes, leaf.members) and _only_in_parts(tree, leaf):
            tested = age == last and len(leaf.members) > 1
            updates, made = parting.train(tree, leaf.members, mine, clients, this_round, compares=tested)
            parts.append(ClusterUpdate.of(leaf.id, updates, this_round, weighted=weighted).compared())
            whole.difference_update(leaf.members)
            if tested:
                tests[leaf.id] = _by_parts(leaf, parting, made, this_round, level)
        elif len(leaf.members) > 1 and (test := _halves_due(age, len(leaf.members), len(mine))):
            share = level / 2 / (test * (test + 1))
            sent = len(mine) == len(leaf.members)  # its model, for training
            tests[leaf.id] = _by_halves(leaf, clients, this_round, share, sent=sent)
    if whole:
        parts += train_clusters(state, sorted(whole), clients, this_round, weighted=weighted)
    return sorted(parts, key=lambda part: part.node), tests


def in_two(labels: Labels, similarity: Similarity) -> Labels:
    """Return a partition ``[n]`` into two, in which clusters of ``labels [n]`` that are most alike are together."""
    members = np.eye(labels.max() + 1)[labels]  # [n, k]
    between = members.T @ similarity @ members / np.outer(members.sum(0), members.sum(0))
    np.fill_diagonal(between, 1.0)
    apart = scipy.spatial.distance.squareform(1 - between, checks=False)
    return cut(agglomerate(apart, "average"), 2)[labels]


def _only_in_parts(tree: ParameterTree, leaf: Node) -> bool:
    """Whether a cluster's model comes from rounds in parts alone, and so owes no part more than another."""
    path = tree.above(leaf.id)
    return all(child.born - node.born <= IN_PARTS for node, child in pairwise(path))


def _halves_due(age: int, members: int, training: int) -> int:
    """Return the how many-th test of halves of a cluster is due at an age; 0 for none."""
    test, rest = divmod(age, HALVES_EVERY)
    return test if rest == 0 and training and test % -(-members // training) == 0 else 0


def _by_parts(leaf: Node, parting: Parting, made: Updates, this_round: Round, level: float) -> SplitTest:
    if waits := too_few(leaf.id, len(made.ids), this_round):
        return SplitTest(waits)
    verdict = of_cluster(leaf.id, made, parting.parts, level / 2, this_round, level_inside=level)
    return SplitTest.of(leaf, verdict, made, level / 2)


def _by_halves(leaf: Node, clients: Clients, this_round: Round, level: float, *, sent: bool) -> SplitTest:
    ids = HALVES.able(clients.sizes, leaf.members)
    if waits := too_few(leaf.id, len(ids), this_round):
        return SplitTest(waits)
    asked = replace(this_round, purpose="replicate", communicates="updates" if sent else "all")
    made = HALVES.ask(clients, ids, leaf.params[None], asked)
    if waits := too_few(leaf.id, len(made.ids), this_round):
        return SplitTest(waits)
    together = np.zeros(len(made.ids), dtype=np.int64)
    verdict = by_halves(made, together, level, this_round.generator(f"shuffles {leaf.id}"))
    return SplitTest.of(leaf, verdict, made, level)
