"""Replicated clustering of very many clients, of which a round samples a small part.

With so many clients a check cannot query all of them. It is replaced as follows:

**Tests on the cohort.** A test uses a sample of those clients of the cohort that have never trained
before. A model has memorized none of their data, so their splits are exchangeable at any model
under the null hypothesis, whatever other clients have trained; and clients that are drawn without
regard to their data are as exchangeable as all. Clients that are tested train in splits in that
round, all others on all their data. The root is tested in rounds 1, 2 and 3, until it is split, and
every cluster whenever its age is a multiple of ``check_every``. The j-th test of a cluster has
1/(j(j + 1)) of the level; these shares add up to the level.

**Assignment in training.** In the round in which its cluster is split, a client joins the group
with the mean signature that is most similar to its own; later the cluster whose model has the
lowest loss on its training data, as in IFCA. So clients are reassigned if their data changes.

**Clients that have not trained** belong to the root only, and are evaluated with the mean of the
clusters' models.

The clusters of a split start from the means of their own members' updates, since copies of one
model would all have the same loss. Of very many clients no two need have the same distribution, and
a test also finds differences that are too small to matter. So two clusters are merged if their new
clients lose nothing with the mean of both models. Members of a cluster that was split wait at its
node until they are sampled again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    membership_events,
    move_clusters,
)
from fedclade.algorithms.rcfl.data_splits import DataSplits
from fedclade.algorithms.rcfl.replicate_test import examine_node, list_clusters, postpone_if_too_few
from fedclade.clustering import compute_training_losses
from fedclade.core import (
    Clients,
    ClusterSplit,
    Evaluation,
    Event,
    Node,
    ParameterTree,
    Postponed,
    Round,
    Tested,
    Updates,
    mean,
)

EARLY_TESTS = 3
"""Number of rounds, from the first, in which the root is tested."""

LARGEST_GAIN = 3.0
"""Largest gain or loss of one client, in median gains of the clients of its pair of clusters.

Losses are only claimed: one client must not decide for all.
"""

SMALLEST_CLUSTER = 2
"""Smallest number of sampled clients that make a cluster; fewer go to the other clusters."""


@dataclass(frozen=True)
class CohortTests:
    """Schedule and level of the tests on cohorts.

    Parameters
    ----------
    splits
        How clients split their data.
    sample
        Largest number of clients of a cluster that are tested.
    level
        Chance of ever splitting a cluster of clients of one distribution.
    check_every
        Number of rounds between two tests of a cluster.
    """

    splits: DataSplits
    sample: int
    level: float
    check_every: int

    def get_due_test(self, leaf: Node, number: int) -> int:
        """Return the number of the test of a cluster that is due in a round, from 1; 0 for none."""
        age = number - leaf.born
        early = EARLY_TESTS if leaf.parent is None else 0
        if age <= early:
            return age
        later, rest = divmod(age, self.check_every)
        if rest:
            return 0
        return early + later - early // self.check_every


@dataclass(frozen=True, eq=False)
class _TestedLeaf:
    """A cluster after its test.

    Parameters
    ----------
    node
        The cluster as it was before the round.
    event
        What the test found.
    updates
        The updates of its members in the round.
    groups
        The two or more groups that it is to be split into; none if it stays as it is.
    criteria
        The numbers by which it is split.
    """

    node: Node
    event: Event
    updates: Updates
    groups: Sequence[tuple[int, ...]] = ()
    criteria: Mapping[str, float] | None = None


def run_cohort_round(
    tree: ParameterTree,
    early: Sequence[int],
    cohort: Sequence[int],
    tests: CohortTests,
    clients: Clients,
    this_round: Round,
) -> tuple[ParameterTree, list[ClusterUpdate], list[Event]]:
    """Assign the cohort to clusters, train it, and test the clusters that are due.

    Parameters
    ----------
    tree
        The tree before the round.
    early
        Clients that trained before there were clusters.
    cohort
        Clients of the round; no others are queried.
    tests
        Schedule and level of the tests.
    clients, this_round
        As in :meth:`~fedclade.Algorithm.step`.
    """
    before = tree
    unassigned = {client for client in cohort if tree.leaf_of[client] == 0}
    untrained = unassigned.difference(early)
    if len(tree.nodes) > 1:
        tree = _assign_by_loss(tree, cohort, untrained, clients)
        # The models were already sent, for their losses.
        this_round = replace(this_round, communicates="updates")

    members = _group_by_leaf(tree, sorted(cohort))
    trained: list[ClusterUpdate] = []
    tested: list[_TestedLeaf] = []
    events: list[Event] = []
    on_whole_data: list[int] = []
    needed = max(2, this_round.min_clients)
    # Clients that reported no losses belong to no leaf, and do not train.
    for leaf in tree.leaves:
        training = members.get(leaf.id, [])
        number = tests.get_due_test(leaf, this_round.number)
        if not number:
            on_whole_data += training
            continue
        new = [client for client in training if client in untrained]
        able = tests.splits.select_able(clients.sizes, new)
        if len(able) < needed:
            on_whole_data += training
            events.append(Postponed(leaf.id, len(able), needed))
            continue
        sampled = _draw_sample(able, tests.sample, this_round, leaf.id)
        updates, in_splits = tests.splits.train(
            tree, sampled, training, clients=clients, this_round=this_round, compares=True
        )
        trained.append(ClusterUpdate.of(leaf.id, updates, this_round))
        level = tests.level / (number * (number + 1))
        tested.append(
            _test_leaf(leaf, updates, in_splits, tests=tests, level=level, this_round=this_round)
        )

    if on_whole_data:
        models, rows = tree.models([tree.leaf_of[client] for client in on_whole_data])
        updates = clients.train(on_whole_data, models, rows, this_round)
        trained += by_cluster(tree, updates, this_round)
    trained.sort(key=lambda cluster: cluster.node)

    tree = move_clusters(tree, trained)
    events += membership_events(before, tree)
    for leaf in tested:
        tree, split_events = _split_leaf(tree, leaf, clients, this_round)
        events += split_events
    if len(tree.nodes) > 1:
        populated = [leaf for leaf in tree.leaves if leaf.members]
        tree = tree.continued(_average_models(populated))
    return tree, trained, events


def _group_by_leaf(tree: ParameterTree, clients: Iterable[int]) -> dict[int, list[int]]:
    """Return the clients of each leaf, in their order."""
    members: dict[int, list[int]] = {}
    for client in clients:
        members.setdefault(tree.leaf_of[client], []).append(client)
    return members


def _assign_by_loss(
    tree: ParameterTree, cohort: Sequence[int], untrained: Collection[int], clients: Clients
) -> ParameterTree:
    """Assign each client of a cohort to the cluster of lowest training loss, and merge clusters.

    Each cluster is compared with the one that is second best for those of its clients that never
    trained before, for which training losses are as good as test losses.
    """
    leaves = [leaf.id for leaf in tree.leaves if leaf.members]
    losses = compute_training_losses(*tree.models(leaves), cohort, clients)
    if not losses:
        return tree
    best = {client: int(client_losses.argmin()) for client, client_losses in losses.items()}
    tree = tree.reassigned({client: leaves[place] for client, place in best.items()})
    if len(leaves) == 1:
        return tree

    new: dict[int, list[int]] = {}  # by the place of their cluster among the leaves
    for client, place in best.items():
        if client in untrained:
            new.setdefault(place, []).append(client)
    pairs = set[tuple[int, int]]()
    lowest: dict[int, float] = {}
    for place, members in new.items():
        mean_losses = torch.stack([losses[client] for client in members]).mean(0)
        mean_losses[place] = torch.inf
        second = int(mean_losses.argmin())
        pairs.add((min(place, second), max(place, second)))
        lowest |= {client: float(losses[client].min()) for client in members}
    pairs_of_leaves = [(leaves[first], leaves[second]) for first, second in sorted(pairs)]
    new_of_leaf = {leaves[place]: members for place, members in new.items()}
    return _merge_leaves(tree, pairs_of_leaves, new_of_leaf, lowest=lowest, clients=clients)


def _merge_leaves(
    tree: ParameterTree,
    pairs: Sequence[tuple[int, int]],
    new: Mapping[int, Sequence[int]],
    lowest: Mapping[int, float],
    clients: Clients,
) -> ParameterTree:
    """Merge pairs of leaves whose new clients lose nothing with the mean of both models.

    Each leaf is merged at most once, the pair with the largest gain first.

    Parameters
    ----------
    tree
        The tree with all clients assigned.
    pairs
        Pairs of leaves that may be merged.
    new
        The clients of each leaf that never trained before.
    lowest
        Training loss of each of these clients with the model of its leaf.
    clients
        All clients.
    """
    new_of_pair = [[*new.get(first, ()), *new.get(second, ())] for first, second in pairs]
    queried: list[tuple[int, int]] = []  # clients, each with the place of a pair
    for place, members in enumerate(new_of_pair):
        queried += [(client, place) for client in members]
    if not queried:
        return tree
    models = [_average_models([tree.nodes[first], tree.nodes[second]]) for first, second in pairs]
    evaluation = clients.evaluate(
        [client for client, _ in queried],
        torch.stack(models),
        [place for _, place in queried],
        "train",
    )
    gains = _sum_gains(queried, evaluation, lowest, len(pairs))
    replied = set(evaluation.ids)
    merged = set[int]()
    for place in np.argsort(-gains, kind="stable").tolist():
        first, second = pairs[place]
        gains_enough = gains[place] >= 0 and bool(replied.intersection(new_of_pair[place]))
        if not gains_enough or merged.intersection(pairs[place]):
            continue
        merged.update(pairs[place])
        moved = tree.nodes[second].members
        new_leaves = [first] * len(moved)
        tree = tree.reassigned(dict(zip(moved, new_leaves, strict=True)))
        tree = tree.with_model(first, models[place])
    return tree


def _sum_gains(
    queried: Sequence[tuple[int, int]],
    evaluation: Evaluation,
    lowest: Mapping[int, float],
    pairs: int,
) -> NDArray[np.float64]:
    """Return the gain of each pair's new clients with the mean of both models, ``[pairs]``."""
    replied = set(evaluation.ids)  # a client replied for all of its models, or for none
    of_replies = [(client, place) for client, place in queried if client in replied]
    gains: list[list[float]] = [[] for _ in range(pairs)]
    for (client, place), loss in zip(of_replies, evaluation.losses.tolist(), strict=True):
        gains[place].append(lowest[client] - (loss if math.isfinite(loss) else math.inf))
    return np.array([_sum_bounded(of_pair) for of_pair in gains])


def _sum_bounded(gains: Sequence[float]) -> float:
    """Return the sum of clients' gains, each limited to :data:`LARGEST_GAIN` median gains."""
    if not gains:
        return 0.0
    largest = LARGEST_GAIN * float(np.median(np.abs(gains)))
    return float(np.sum(np.clip(gains, -largest, largest)))


def _test_leaf(
    leaf: Node,
    updates: Updates,
    in_splits: Updates,
    tests: CohortTests,
    level: float,
    this_round: Round,
) -> _TestedLeaf:
    """Test a cluster by the splits of a sample of its members.

    If the test finds clusters, all other members that trained go to the most similar of them.
    """
    postponed = postpone_if_too_few(leaf.id, len(in_splits.ids), this_round)
    if postponed:
        return _TestedLeaf(leaf, postponed, updates)
    verdict = examine_node(
        leaf.id,
        in_splits,
        tests.splits.count,
        level=level,
        this_round=this_round,
        level_inside=tests.level,
    )
    event = verdict.make_event(Tested, leaf.id, in_splits.ids, level)
    found = [cluster for cluster in event.clusters if len(cluster) >= SMALLEST_CLUSTER]
    criteria = {"p_value": verdict.p_value, "gain": verdict.gain}
    groups = _assign_by_signature(updates, found) if len(found) > 1 else ()
    return _TestedLeaf(leaf, event, updates, groups=groups, criteria=criteria)


def _assign_by_signature(
    updates: Updates, clusters: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Assign clients in no cluster to the one whose mean signature is most similar to theirs."""
    unit = functional.normalize(updates.signatures.double(), dim=1)
    row_of = {client: row for row, client in enumerate(updates.ids)}
    rows_of_clusters = [list(map(row_of.__getitem__, cluster)) for cluster in clusters]
    means = torch.stack([unit[rows].mean(0) for rows in rows_of_clusters])
    labels = (unit @ functional.normalize(means, dim=1).T).argmax(1).cpu().numpy()
    for label, rows in enumerate(rows_of_clusters):
        labels[rows] = label
    return list_clusters(updates.ids, labels)


def _split_leaf(
    tree: ParameterTree, tested: _TestedLeaf, clients: Clients, this_round: Round
) -> tuple[ParameterTree, list[Event]]:
    """Split a cluster into the groups that its test found.

    Each group starts from the old model and moves by the mean of its own updates.
    """
    if not tested.groups or tested.criteria is None:
        return tree, [tested.event]
    node = tested.node
    tree = tree.split(
        node.id,
        tested.groups,
        params=node.params,
        cached=[tested.updates.signatures_of(group) for group in tested.groups],
        round_number=this_round.number,
        criteria=tested.criteria,
    )
    children = tree.children(node.id)
    for child in children:
        if tested.updates.deltas is not None:
            updates = tested.updates.select(child.members)
        else:  # a run that streams keeps only sums over all clients of a model
            again = replace(this_round, purpose="train the parts")
            updates = clients.train(
                child.members, node.params[None], [0] * len(child.members), again
            )
        tree = tree.with_model(child.id, node.params + mean(updates))
    split = ClusterSplit(
        node.id,
        **tested.criteria,
        clusters=tuple(tested.groups),
        children=tuple(child.id for child in children),
    )
    return tree, [tested.event, split]


def _draw_sample(clients: list[int], count: int, this_round: Round, node: int) -> list[int]:
    """Draw at most ``count`` of the clients of a node, in ascending order."""
    if len(clients) <= count:
        return clients
    generator = this_round.generator(f"sample {node}")
    return sorted(generator.choice(clients, count, replace=False).tolist())


def _average_models(nodes: Sequence[Node]) -> Tensor:
    """Return the mean of clusters' models ``[S]``, weighted by their numbers of members."""
    members = torch.tensor([float(len(node.members)) for node in nodes])
    models = torch.stack([node.params for node in nodes])
    return (members / members.sum()).to(models) @ models
