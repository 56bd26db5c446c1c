"""Replicated clustering of very many clients, of which only a few are sampled for a round.

With so many clients the checks of :mod:`fedclade.algorithms.rcfl.method`, which query all clients,
are not possible. They are replaced as follows:

**Tests on the cohort.** A test uses a sample of the cohort's clients that have never trained
before. Since no model has memorized their data, their splits are exchangeable at any model under
the null hypothesis of one distribution, whichever other clients have trained the model. The sample
is drawn without regard to the clients' data, so drawing it does not change this. Clients that are
tested train in splits in that round, all other clients on all their data. The root is tested in
rounds 1, 2 and 3, until it is split. Every cluster is tested whenever its age in rounds is a
multiple of ``check_every``. The first tests of a cluster use p-values, and the j-th of them has
1/(j(j + 1)) of the level. All later tests use e-values and share the rest of the level. Since each
test uses different clients, the running sum of a cluster's e-values is multiplied by each new
e-value (:mod:`fedclade.clustering.repeated_test`).

**Assignment in training.** In the round in which its cluster is split, a client joins the group
with the mean signature that is most similar to its own. Later it joins the cluster whose model has
the lowest loss on its training data, as in IFCA, so that clients are reassigned if their data
changes.

**Clients that have not trained** are members of the root only, and are evaluated with the mean of
the clusters' models.

**Models.** The clusters of a split start from the old model plus the means of their own members'
updates, since copies of one model would all have the same loss. Among very many clients perhaps no
two have the same distribution, and a test also finds differences that are too small to matter. So
two clusters are merged if their clients that have never trained before have no higher loss with the
mean of both models. Members of a split cluster that did not train in the round of the split stay
at its node until they are sampled again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade import core
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    membership_events,
    move_clusters,
)
from fedclade.algorithms.rcfl.data_splits import DataSplits, divisible_sizes
from fedclade.algorithms.rcfl.replicate_test import examine_node, list_clusters, postpone_if_too_few
from fedclade.clustering import VIEWS, RepeatedTest, compute_training_losses
from fedclade.core import (
    Clients,
    ClientWork,
    Evaluation,
    Node,
    Nothing,
    ParameterTree,
    Round,
    RoundPlan,
    Updates,
    mean,
)

if TYPE_CHECKING:
    from fedclade.core import Event

EARLY_TESTS = 3
"""Number of rounds at the start of a run in which the root is tested."""

LARGEST_GAIN = 3.0
"""Largest gain, positive or negative, of one client that counts in a merge of two clusters.

It is a multiple of the median gain, in absolute value, of the clients of both clusters. Clients
report losses that the server cannot check, so a single client must not be able to decide.
"""

SMALLEST_CLUSTER = 2
"""Smallest number of tested clients in a new cluster; smaller groups join the other clusters."""


@dataclass(frozen=True)
class CohortTests:
    """Settings of the tests for clusters in a run that queries only the clients of each cohort.

    Parameters
    ----------
    splits
        Number and size of the splits of a client's data.
    sample
        Largest number of clients of a cluster that are tested.
    level
        Upper bound on the probability that a cluster whose clients all have the same distribution
        is ever split.
    check_every
        Number of rounds between two tests of a cluster.
    """

    splits: DataSplits
    sample: int
    level: float
    check_every: int

    def get_due_test(self, leaf: Node, number: int) -> int:
        """Return which test of a cluster is due in a round: 1 for the first, and so on; 0 for none.

        Parameters
        ----------
        leaf
            The cluster's node.
        number
            Number of the round.
        """
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
    """Result of a round's test whether the members of one cluster have one distribution.

    Parameters
    ----------
    node
        The cluster's node before the round.
    event
        Event that reports the result of the test, or that it was postponed.
    updates
        Updates of the cluster's members in the round.
    groups
        The two or more groups into which the cluster is to be split; empty if it is not split.
    criteria
        Numbers that decided on the split, by name; None if the test was postponed.
    evidence
        Running sum R of the e-values of the cluster's tests
        (:class:`~fedclade.clustering.RepeatedTest`).
    """

    node: Node
    event: Event
    updates: Updates
    groups: Sequence[tuple[int, ...]] = ()
    criteria: Mapping[str, float] | None = None
    evidence: float = 0.0


@dataclass(frozen=True, eq=False)
class CohortRound:
    """Result of a round in which only the clients of the cohort are queried.

    Parameters
    ----------
    tree
        The tree after the round.
    trained
        The round's result for each cluster that trained.
    events
        Events of the round.
    evidence
        For each node, the running sum R of the e-values of its tests, ``[nodes]``.
    """

    tree: ParameterTree
    trained: list[ClusterUpdate]
    events: list[Event]
    evidence: torch.Tensor


def run_cohort_round(
    tree: ParameterTree,
    early: Sequence[int],
    cohort: Sequence[int],
    tests: CohortTests,
    evidence: torch.Tensor | None,
    clients: Clients,
    this_round: RoundPlan,
) -> CohortRound:
    """Run a round of replicated clustering in which only the clients of the cohort are queried.

    The clients are assigned to clusters and train them. Clusters for which a test is due are tested
    and, if the test finds groups, split.

    Parameters
    ----------
    tree
        The tree before the round.
    early
        Ids of the clients that trained before there were clusters.
    cohort
        Ids of the clients sampled for this round.
    tests
        Settings of the tests.
    evidence
        For each node, the running sum R of the e-values of its tests, ``[nodes]``; None before the
        first test.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.
    """
    before = tree
    unassigned = {client for client in cohort if tree.leaf_of[client] == 0}
    untrained = unassigned.difference(early)
    has_clusters = len(tree.nodes) > 1
    if has_clusters:
        tree = _assign_by_loss(tree, cohort, untrained, clients)
    models_are_sent = has_clusters  # clients received all models to compute losses

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
        able = tests.splits.select_able(divisible_sizes(clients), new)
        if len(able) < needed:
            on_whole_data += training
            events.append(core.Postponed(leaf.id, len(able), needed))
            continue
        sampled = _draw_sample(able, tests.sample, this_round, leaf.id)
        updates, in_splits = tests.splits.train(
            tree,
            sampled,
            training,
            clients=clients,
            this_round=this_round,
            compares=True,
            sent_before=models_are_sent,
        )
        trained.append(ClusterUpdate.of(leaf.id, updates, this_round))
        total = 0.0 if evidence is None or leaf.id >= len(evidence) else float(evidence[leaf.id])
        repeated = RepeatedTest(tests.level, tests=number - 1, total=total, views=VIEWS)
        tested.append(
            _test_leaf(
                leaf, updates, in_splits, tests=tests, repeated=repeated, this_round=this_round
            )
        )

    if on_whole_data:
        models, rows = tree.models([tree.leaf_of[client] for client in on_whole_data])
        updates = clients.train(
            on_whole_data, models, rows, this_round, sent_before=models_are_sent
        )
        trained += by_cluster(tree, updates, this_round)
    trained.sort(key=lambda cluster: cluster.node)

    tree = move_clusters(tree, trained)
    events += membership_events(before, tree)
    for leaf in tested:
        tree, split_events = _split_leaf(
            tree, leaf, clients, this_round, models_are_sent=models_are_sent
        )
        events += split_events
    if len(tree.nodes) > 1:
        populated = [leaf for leaf in tree.leaves if leaf.members]
        tree = tree.continued(_average_models(populated))
    return CohortRound(tree, trained, events, _remember_evidence(evidence, tested, len(tree.nodes)))


def _remember_evidence(
    before: torch.Tensor | None, tested: Sequence[_TestedLeaf], nodes: int
) -> torch.Tensor:
    """Return the running sum of e-values of each node after a round, ``[nodes]``.

    Parameters
    ----------
    before
        The sums before the round; None if there was no test yet.
    tested
        Results of the round's tests.
    nodes
        Number of nodes; the sums of new nodes are 0.
    """
    evidence = torch.zeros(nodes, dtype=torch.float64)
    if before is not None:
        evidence[: len(before)] = before
    for leaf in tested:
        evidence[leaf.node.id] = leaf.evidence
    return evidence


def _group_by_leaf(tree: ParameterTree, clients: Iterable[int]) -> dict[int, list[int]]:
    """Group clients by their leaves, in the given order; return the groups by leaf."""
    members: dict[int, list[int]] = {}
    for client in clients:
        members.setdefault(tree.leaf_of[client], []).append(client)
    return members


def _assign_by_loss(
    tree: ParameterTree, cohort: Sequence[int], untrained: Collection[int], clients: Clients
) -> ParameterTree:
    """Assign each client of a cohort to the cluster with the lowest loss, and merge clusters.

    The losses are on the clients' training data. Each cluster may be merged with the cluster that
    is second best for its clients that never trained before. Only these clients decide, since no
    model has memorized their training data.
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
    """Merge pairs of clusters if a mean model is at least as good for their new clients.

    New clients are clients that never trained before. The mean model is the mean of the models of
    both clusters. Each cluster is merged at most once, the pair with the largest gain first.

    Parameters
    ----------
    tree
        The tree with all clients of the cohort assigned.
    pairs
        Pairs of leaves that may be merged.
    new
        New clients of each leaf.
    lowest
        Training loss of each new client with the model of its leaf.
    clients
        All clients of the run, through which the new clients are queried.
    """
    new_of_pair = [[*new.get(first, ()), *new.get(second, ())] for first, second in pairs]
    queried: list[tuple[int, int]] = []  # clients, each with the index of its pair
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
    """Return for each pair of clusters the total gain of its new clients by a merge.

    A client's gain is the decrease of its loss when the mean of both clusters' models replaces the
    model of its present cluster.

    Parameters
    ----------
    queried
        Client and index of its pair, for each evaluation that was requested.
    evaluation
        The clients' replies.
    lowest
        Loss of each client with the model of its present cluster.
    pairs
        Number of pairs.
    """
    replied = set(evaluation.ids)  # a client replied for all of its models, or for none
    of_replies = [(client, place) for client, place in queried if client in replied]
    gains: list[list[float]] = [[] for _ in range(pairs)]
    for (client, place), loss in zip(of_replies, evaluation.losses.tolist(), strict=True):
        gains[place].append(lowest[client] - (loss if math.isfinite(loss) else math.inf))
    return np.array([_sum_bounded(of_pair) for of_pair in gains])


def _sum_bounded(gains: Sequence[float]) -> float:
    """Sum the gains of clients, each limited to :data:`LARGEST_GAIN` times the median gain."""
    if not gains:
        return 0.0
    largest = LARGEST_GAIN * float(np.median(np.abs(gains)))
    return float(np.sum(np.clip(gains, -largest, largest)))


def _test_leaf(
    leaf: Node,
    updates: Updates,
    in_splits: Updates,
    tests: CohortTests,
    repeated: RepeatedTest,
    this_round: RoundPlan,
) -> _TestedLeaf:
    """Test whether the members of a cluster have one distribution.

    The test compares updates that a sample of the members made from splits of their data. If it
    finds groups, the other members that trained in this round are assigned to the most similar
    groups.

    Parameters
    ----------
    leaf
        The cluster's node.
    updates
        Updates of all members that trained in this round.
    in_splits
        Updates of the tested members, from splits of their data.
    tests
        Settings of the tests.
    repeated
        Number and evidence of the cluster's tests so far.
    this_round
        The round.
    """
    postponed = postpone_if_too_few(leaf.id, len(in_splits.ids), this_round)
    if postponed:
        return _TestedLeaf(leaf, postponed, updates, evidence=repeated.total)
    verdict = examine_node(
        leaf.id,
        in_splits,
        tests.splits.count,
        repeated,
        this_round=this_round,
        level_inside=tests.level,
    )
    event = verdict.make_event(core.Tested, leaf.id, in_splits.ids)
    found = [cluster for cluster in event.clusters if len(cluster) >= SMALLEST_CLUSTER]
    criteria = {"p_value": verdict.p_value, "gain": verdict.gain}
    groups = _assign_by_signature(updates, found) if len(found) > 1 else ()
    evidence = repeated.total if verdict.repeated is None else verdict.repeated.total
    return _TestedLeaf(leaf, event, updates, groups=groups, criteria=criteria, evidence=evidence)


def _assign_by_signature(
    updates: Updates, clusters: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Extend groups of clients to all clients with an update.

    Clients in no group join the group whose mean signature is most similar to their own signature.
    """
    unit = torch.nn.functional.normalize(updates.signatures.double(), dim=1)
    row_of = {client: row for row, client in enumerate(updates.ids)}
    rows_of_clusters = [list(map(row_of.__getitem__, cluster)) for cluster in clusters]
    means = torch.stack([unit[rows].mean(0) for rows in rows_of_clusters])
    labels = (unit @ torch.nn.functional.normalize(means, dim=1).T).argmax(1).cpu().numpy()
    for label, rows in enumerate(rows_of_clusters):
        labels[rows] = label
    return list_clusters(updates.ids, labels)


def _split_leaf(
    tree: ParameterTree,
    tested: _TestedLeaf,
    clients: Clients,
    this_round: Round,
    *,
    models_are_sent: bool,
) -> tuple[ParameterTree, list[Event]]:
    """Split a cluster into the groups that its test found; without groups, change nothing.

    Each new cluster starts from the old model plus the mean of its own members' updates.

    Returns
    -------
    tuple
        The tree after the split, and the events that report the test and the split.
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
        else:  # a run that streams updates stores only their sum over all clients of a model
            again = replace(this_round, purpose="train the parts")
            updates = clients.train(
                child.members,
                node.params[None],
                [0] * len(child.members),
                again,
                work=ClientWork(store=Nothing()),
                sent_before=models_are_sent,
            )
        tree = tree.with_model(child.id, node.params + mean(updates))
    split = core.ClusterSplit(
        node.id,
        **tested.criteria,
        clusters=tuple(tested.groups),
        children=tuple(child.id for child in children),
    )
    return tree, [tested.event, split]


def _draw_sample(clients: list[int], count: int, this_round: Round, node: int) -> list[int]:
    """Draw at most ``count`` of a node's clients at random, in ascending order."""
    if len(clients) <= count:
        return clients
    generator = this_round.generator(f"sample {node}")
    return sorted(generator.choice(clients, count, replace=False).tolist())


def _average_models(nodes: Sequence[Node]) -> torch.Tensor:
    """Return the mean of clusters' models ``[S]``, weighted by their numbers of members."""
    members = torch.tensor([float(len(node.members)) for node in nodes])
    models = torch.stack([node.params for node in nodes])
    return (members / members.sum()).to(models) @ models
