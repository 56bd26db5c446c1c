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

from fedclade.algorithms.cluster_update import ClusterUpdate, by_cluster, move_clusters
from fedclade.algorithms.regrouping import divided
from fedclade.algorithms.replicated_checks import of_cluster, too_few
from fedclade.algorithms.rounds_in_parts import Parting
from fedclade.core import Clients, Event, ParameterTree, Regrouped, Round, Tested

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
