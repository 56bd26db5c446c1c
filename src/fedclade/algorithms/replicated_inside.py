"""A second look at clusters just found, which may hold clients that should go apart, too.

The first rounds of replicated clustering find clusters once labels were learnt; where a model learns slowly, some lie
together still. Of many clients, later checks part them. Of few, shuffling whole updates has too few outcomes, and parts
at the initial model tell again what they told. So few clients that just went apart train in parts for one more round,
each from its cluster's model, and every cluster is tested by itself. It costs no more training.

The model of a cluster is, but for who its members are, a symmetric function of their parts. As a rule clusters are
right already, and were tested from inside in the round before. So a second look has a hundredth of the level: what
differs is told by far less, and right clusters stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedclade.algorithms.cluster_update import ClusterUpdate, by_cluster, move_clusters
from fedclade.algorithms.regrouping import divided
from fedclade.algorithms.replicated_checks import by_parts, cosines_of
from fedclade.algorithms.rounds_in_parts import Parting
from fedclade.core import Check, Clients, Event, Node, ParameterTree, Postponed, Regrouped, Round, Tested, Updates

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
    for leaf in several:
        mine = made.select([client for client in leaf.members if client in made.ids])
        if len(mine.ids) < (needed := max(2, this_round.min_clients)):
            events.append(Postponed(leaf.id, len(mine.ids), needed))
            continue
        events.append(event := _tested(leaf, mine, parting.parts, level, this_round))
        if isinstance(event, Regrouped):
            tree = divided(tree, leaf.id, event.clusters, this_round.number)
    return trained, tree, events


def _tested(leaf: Node, made: Updates, parts: int, level: float, this_round: Round) -> Check:
    draw, together = this_round.generator(f"shuffles {leaf.id}"), np.zeros(len(made.ids), dtype=np.int64)
    share = OF_THE_LEVEL * level
    verdict = by_parts(cosines_of(made), parts, together, share, draw, level_inside=share)
    return verdict.event(Regrouped if verdict.labels.any() else Tested, leaf.id, made.ids, share)
