"""Replicated clustering where a round sees a small part of many clients: tests on cohorts, and first assignments.

To ask everybody is out of the question then. Three things take its place:

- *Tests are made on the cohort*, on a sample of those of its clients that have never trained before. Nothing that a
  model has learnt is theirs, so their parts are exchangeable at any model under the null hypothesis, whatever others
  have trained; and clients that are drawn without regard to their data are as exchangeable as all. Those that are
  tested train in parts in that round, all others on all their data. The root is tested in rounds 1, 2 and 3, until it
  is split, and every cluster whenever its age is a multiple of ``check_every``; the j-th test of one has 1/(j(j + 1))
  of the level, which add up to it.
- *Clients are assigned when they train.* In the round in which their cluster is split, to the part whose mean signature
  theirs is most like; later on to the cluster whose model has the lowest loss on their training data, as in IFCA. So
  clients that change are moved.
- *Clients that have not trained* are the root's alone, and are served with the mean of the clusters' models.

A split goes on with the means of its parts' updates, since copies of one model would all have the same loss. Of many
clients no two need have the same distribution, and a test finds differences that are of no use; so clusters whose new
clients lose no more with the mean of two models become one again. Members of a cluster that was split wait at its node
until they are drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedclade.algorithms.cluster_update import ClusterUpdate, by_cluster, membership_events, move_clusters
from fedclade.algorithms.replicated_checks import Parting, clusters_of, of_cluster, too_few
from fedclade.clustering import training_losses
from fedclade.core import Clients, ClusterSplit, Event, Node, ParameterTree, Postponed, Round, Tested, Updates, mean

EARLY_TESTS = 3
"""Rounds, from the first, in which the root is tested."""

LARGEST_GAIN = 3.0
"""Times the median gain of a pair's clients, up or down, that one of them counts with at most."""

SMALLEST_FOUND = 2
"""Clients of a sample that make a cluster; fewer go to the clusters of the others."""


@dataclass(frozen=True)
class CohortTests:
    """How clusters are tested on a cohort: how clients part their data, at what level, and how often."""

    parting: Parting
    sample: int  # clients that are tested, at most
    level: float
    check_every: int

    def due(self, leaf: Node, number: int) -> int:
        """Return the how many-th test of a cluster is due in a round; 0 for none."""
        age, early = number - leaf.born, EARLY_TESTS if leaf.parent is None else 0
        if age <= early:
            return age
        later, rest = divmod(age, self.check_every)
        return 0 if rest else early + later - early // self.check_every


@dataclass(frozen=True, eq=False)
class _Found:
    """A cluster that was tested, its updates of the round, and the two or more parts that it is to be split into."""

    node: Node  # as it was before the round
    event: Event
    updates: Updates
    clusters: Sequence[tuple[int, ...]] = ()
    criteria: Mapping[str, float] | None = None


def cohort_round(
    tree: ParameterTree,
    early: Sequence[int],
    cohort: Sequence[int],
    tests: CohortTests,
    clients: Clients,
    this_round: Round,
) -> tuple[ParameterTree, list[ClusterUpdate], list[Event]]:
    """Assign the cohort, train it, and test the clusters that are due on those of it that never trained before.

    ``early`` are the clients that trained before there were clusters.
    """
    before, untrained = tree, {client for client in cohort if tree.leaf_of[client] == 0}.difference(early)
    if len(tree.nodes) > 1:
        tree = _assigned(tree, cohort, untrained, clients)
        this_round = replace(this_round, communicates="updates")  # the models were sent for their losses
    home: dict[int, list[int]] = {}
    for client in sorted(cohort):
        home.setdefault(tree.leaf_of[client], []).append(client)
    needed = max(2, this_round.min_clients)
    parts, found, events, whole = list[ClusterUpdate](), list[_Found](), list[Event](), list[int]()
    for leaf in tree.leaves:  # who told no losses, and is in none, does not train
        mine, test = home.get(leaf.id, []), tests.due(leaf, this_round.number)
        new = tests.parting.able(clients.sizes, [c for c in mine if c in untrained]) if test else []
        if len(new) < needed:
            whole += mine
            events += [Postponed(leaf.id, len(new), needed)] if test else []
            continue
        some = _drawn(new, tests.sample, this_round, leaf.id)
        updates, made = tests.parting.train(tree, some, mine, clients, this_round, compares=True)
        parts.append(ClusterUpdate.of(leaf.id, updates, this_round))
        found.append(_tested(leaf, updates, made, tests, tests.level / (test * (test + 1)), this_round))
    if whole:
        models, rows = tree.models([tree.leaf_of[client] for client in whole])
        parts += by_cluster(tree, clients.train(whole, models, rows, this_round), this_round)
    parts.sort(key=lambda part: part.node)
    tree = move_clusters(tree, parts)
    events += membership_events(before, tree)
    for each in found:
        tree, more = _split(tree, each, clients, this_round)
        events += more
    if len(tree.nodes) > 1:
        tree = tree.continued(_mean_model([leaf for leaf in tree.leaves if leaf.members]))
    return tree, parts, events


def _assigned(
    tree: ParameterTree, cohort: Sequence[int], untrained: Collection[int], clients: Clients
) -> ParameterTree:
    """Put each client of a cohort into the cluster of lowest training loss; merge clusters that fare as well as one.

    Each cluster is compared with that which is next best for those of its clients that never trained before, for whom
    training losses are as good as test losses.
    """
    leaves = [leaf.id for leaf in tree.leaves if leaf.members]
    losses = training_losses(*tree.models(leaves), cohort, clients)
    if not losses:
        return tree
    home = {client: int(mine.argmin()) for client, mine in losses.items()}
    tree = tree.reassigned({client: leaves[place] for client, place in home.items()})
    if len(leaves) == 1:
        return tree
    new: dict[int, list[int]] = {}
    for client, place in home.items():
        if client in untrained:
            new.setdefault(place, []).append(client)
    pairs = set[tuple[int, int]]()
    for place, mine in new.items():
        mean_losses = torch.stack([losses[client] for client in mine]).mean(0)
        mean_losses[place] = torch.inf
        other = int(mean_losses.argmin())
        pairs.add((min(place, other), max(place, other)))
    lowest = {client: float(losses[client].min()) for mine in new.values() for client in mine}
    of_leaf = {leaves[place]: mine for place, mine in new.items()}
    return _merged(tree, [(leaves[one], leaves[other]) for one, other in sorted(pairs)], of_leaf, lowest, clients)


def _merged(
    tree: ParameterTree,
    pairs: Sequence[tuple[int, int]],
    new: Mapping[int, Sequence[int]],
    lowest: Mapping[int, float],
    clients: Clients,
) -> ParameterTree:
    """Merge pairs of leaves whose new clients lose no more with the mean of both models, each leaf at most once."""
    both = [[*new.get(one, ()), *new.get(other, ())] for one, other in pairs]
    asked = [(client, k) for k, mine in enumerate(both) for client in mine]
    if not asked:
        return tree
    means = [_mean_model([tree.nodes[leaf] for leaf in pair]) for pair in pairs]
    told = clients.evaluate([client for client, _ in asked], torch.stack(means), [k for _, k in asked], "train")
    answered = set(told.ids)  # each for all of its models, or for none
    each_gains: list[list[float]] = [[] for _ in pairs]
    for (client, k), loss in zip([each for each in asked if each[0] in answered], told.losses.tolist(), strict=True):
        each_gains[k].append(lowest[client] - (loss if math.isfinite(loss) else math.inf))
    gains = np.array([_bounded_sum(of_pair) for of_pair in each_gains])
    done = set[int]()
    for k in np.argsort(-gains, kind="stable").tolist():
        one, other = pairs[k]
        if gains[k] >= 0 and answered.intersection(both[k]) and not done.intersection(pairs[k]):
            done.update(pairs[k])
            members: tuple[int, ...] = tree.nodes[other].members
            tree = tree.reassigned(dict(zip(members, [one] * len(members), strict=True))).with_model(one, means[k])
    return tree


def _bounded_sum(gains: Sequence[float]) -> float:
    """Return the sum of what clients gain, none of whom counts more than so many times the median one.

    Losses are only told: one client is not to decide for all.
    """
    if not gains:
        return 0.0
    most = LARGEST_GAIN * float(np.median(np.abs(gains)))
    return float(np.sum(np.clip(gains, -most, most)))


def _tested(leaf: Node, updates: Updates, made: Updates, tests: CohortTests, level: float, this_round: Round) -> _Found:
    """Test a cluster by the parts of some of its members; put all others that trained to those most like them."""
    if waits := too_few(leaf.id, len(made.ids), this_round):
        return _Found(leaf, waits, updates)
    verdict = of_cluster(leaf.id, made, tests.parting.parts, level, this_round, level_inside=tests.level)
    event = verdict.event(Tested, leaf.id, made.ids, level)
    large = [cluster for cluster in event.clusters if len(cluster) >= SMALLEST_FOUND]
    criteria = {"p_value": verdict.p_value, "gain": verdict.gain}
    return _Found(leaf, event, updates, _nearest(updates, large) if len(large) > 1 else (), criteria)


def _nearest(updates: Updates, clusters: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Put clients that are in no cluster into that whose mean signature theirs is most like."""
    unit = functional.normalize(updates.signatures.double(), dim=1)
    rows = {client: row for row, client in enumerate(updates.ids)}
    known = [[rows[client] for client in cluster] for cluster in clusters]
    means = functional.normalize(torch.stack([unit[mine].mean(0) for mine in known]), dim=1)
    labels = (unit @ means.T).argmax(1).cpu().numpy()
    for k, mine in enumerate(known):
        labels[mine] = k
    return clusters_of(updates.ids, labels)


def _split(
    tree: ParameterTree, found: _Found, clients: Clients, this_round: Round
) -> tuple[ParameterTree, list[Event]]:
    """Split a cluster into what was found; each part goes on from the old model and the mean of its own updates."""
    if not found.clusters or found.criteria is None:
        return tree, [found.event]
    cached = [found.updates.signatures_of(cluster) for cluster in found.clusters]
    number, start = this_round.number, found.node.params
    tree = tree.split(
        found.node.id, found.clusters, params=start, cached=cached, round_number=number, criteria=found.criteria
    )
    children = tree.children(found.node.id)
    for child in children:
        if found.updates.deltas is not None:
            updates = found.updates.select(child.members)
        else:  # the server keeps sums over all clients of a model alone
            again = replace(this_round, purpose="train the parts")
            updates = clients.train(child.members, start[None], [0] * len(child.members), again)
        tree = tree.with_model(child.id, start + mean(updates))
    ids = tuple(child.id for child in children)
    split = ClusterSplit(found.node.id, **found.criteria, clusters=tuple(found.clusters), children=ids)
    return tree, [found.event, split]


def _drawn(clients: list[int], count: int, this_round: Round, node: int) -> list[int]:
    if len(clients) <= count:
        return clients
    return sorted(this_round.generator(f"sample {node}").choice(clients, count, replace=False).tolist())


def _mean_model(leaves: Sequence[Node]) -> Tensor:
    """Return the mean of clusters' models, by their members."""
    members = torch.tensor([float(len(leaf.members)) for leaf in leaves])
    models = torch.stack([leaf.params for leaf in leaves])
    return (members / members.sum()).to(models) @ models
