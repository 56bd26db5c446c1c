"""What a check of replicated clustering finds in the updates of parts, and whether the clusters change by it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.algorithms.base import State
from fedclade.clustering import (
    VIEWS,
    Labels,
    Replicates,
    client_similarity,
    find_by_parts,
    find_clusters,
    gain,
    gain_by_parts,
    gammas_of,
    lowest_p_value,
    noise_of,
    part_similarity,
    parts_for,
    same_partition,
)
from fedclade.core import Check, Clients, Group, ParameterTree, Postponed, Round, Updates, row_norms

# What replicated clustering carries from round to round.


@dataclass(frozen=True, eq=False)
class ReplicatedState(State):
    """What was checked so far, and at what cost."""

    checks: int = 0  # after the first rounds
    halves: int = 0  # checks of halves
    changes: int = 0  # tests of parts that had changed
    trained: int = 0  # clients that trained, over all rounds
    asked: int = 0  # clients that were asked besides
    parts: int = 0  # of the data of each client; 0 if they cannot be parted
    part_size: int = 0  # examples of each part
    initial: Tensor | None = None  # the model [S] at which parts are asked for again
    tested: tuple[int, ...] = ()  # clients, of whose parts at that model these are the cosines
    cosines: Tensor | None = None
    keepers: tuple[int, ...] = ()  # clients that are served with models of their own
    on_cohorts: bool = False  # whether nobody is asked but the cohort
    early: tuple[int, ...] = ()  # then: clients that trained before there were clusters


# Clients that are clustered anew, and the models that their new clusters go on from.

SHARING_FADES = 0.9
"""What is left of the sharing of new clusters from one round to the next."""

TOO_FAR = 3.0
"""How many times as far as the median cluster one may move; honest ones of one federation are nearer to each other."""

LEAST_SHARING = 1e-3
"""Less of the way has no effect, and is not gone."""


def clusters_of(ids: Sequence[int], labels: Labels) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each cluster, by labels ``[n]``."""
    return tuple(tuple(ids[i] for i in np.flatnonzero(labels == k).tolist()) for k in np.unique(labels))


def regrouped(
    tree: ParameterTree,
    clusters: Sequence[tuple[int, ...]],
    made: Updates,
    at: Tensor,
    *,
    round_number: int,
    criteria: Mapping[str, float],
) -> ParameterTree:
    """Return the tree with these clusters, found by updates that their members made at a model ``[S]``."""
    groups = [Group(cluster, *_origin(tree, cluster), made.signatures_of(cluster)) for cluster in clusters]
    return tree.regrouped(groups, params=at, round_number=round_number, criteria=criteria)


def divided(tree: ParameterTree, node: int, clusters: Sequence[tuple[int, ...]], round_number: int) -> ParameterTree:
    """Return the star after members of one of its leaves went apart; they keep the signatures that they have there.

    Members in none of the clusters are the root's alone.
    """
    others = [leaf for leaf in tree.leaves if leaf.id != node and leaf.members]
    groups = [Group(leaf.members, leaf.id, leaf.params, leaf.cached) for leaf in others]
    apart = tree.nodes[node]
    for cluster in clusters:
        rows = [apart.members.index(client) for client in cluster]
        cached = None if apart.cached is None else apart.cached[rows]
        groups.append(Group(cluster, *_origin(tree, cluster), cached))
    return tree.regrouped(groups, round_number=round_number)


def joint_model(tree: ParameterTree, sizes: Mapping[int, int]) -> Tensor:
    """Return the mean of the clusters' models, by the training examples of their members.

    A cluster that has moved more than :data:`TOO_FAR` times as far as the median one since all had one model is left
    out: the model of clients that lie has no bound where they have a cluster of their own, and nobody else is to learn
    from it. The median is by examples, and of clusters that have moved.
    """
    leaves = [leaf for leaf in tree.leaves if leaf.members]
    weights = torch.tensor([float(sum(sizes[client] for client in leaf.members)) for leaf in leaves])
    models = torch.stack([leaf.params for leaf in leaves])
    moved = row_norms(models, tree.nodes[0].params)
    ordered, order = moved.sort()
    up_to = weights.where(moved > 0, 0.0)[order].cumsum(0)
    median = ordered[min(int((2 * up_to <= up_to[-1]).sum()), len(leaves) - 1)]
    weights = weights.where(moved <= TOO_FAR * median, 0.0)
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


def drawn_together(tree: ParameterTree, sizes: Mapping[int, int], number: int, sharing: float) -> ParameterTree:
    """Move the models of clusters that are new towards the mean of all, after a round in which they trained apart.

    What they have in common they go on learning together for a while, though nobody knows which part of a model that
    is; then each is on its own. In the round in which a cluster was found its model goes this share of the way, in each
    further one a tenth less.

    Parameters
    ----------
    tree
        After the round.
    sizes
        Training examples of each client.
    number
        Of the round.
    sharing
        A share of the way, in [0, 1).
    """
    pulls = {
        leaf.id: sharing * SHARING_FADES ** (number - leaf.born - 1)
        for leaf in tree.leaves
        if leaf.members and leaf.parent is not None
    }
    if len(pulls) < 2 or max(pulls.values()) < LEAST_SHARING:
        return tree
    joint = joint_model(tree, sizes)
    for node, pull in pulls.items():
        model = tree.nodes[node].params
        tree = tree.with_model(node, model + pull * (joint - model))
    return tree


# Rounds in which clients train on equal parts of their data one by one, which tells whether there
# are clusters.
#
# A client's update is then the mean of its parts' updates. So a model that such rounds led to owes
# no part more than another, and shuffling parts (:mod:`fedclade.clustering.part_test`) is exact
# there, as it is at the initial model. A model that clients trained on all of their data has learnt
# examples by heart, and the parts of a client have that in common: there the test would part
# clients of one distribution.
#
# A part has an r-th of the data, and would move the model by an r-th of what all of it does. So it
# is trained in smaller batches, and takes as many steps
# (:meth:`~fedclade.core.LocalTraining.on_part`).

SMALLEST_PART = 10
"""Examples that a part should have, where a client has enough for two."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parting:
    """How clients part their data: r parts of s examples each; what is left over is in none.

    With s = 0 parts are as large as they can be, and drawn anew each time.
    """

    parts: int
    size: int

    @classmethod
    def of(cls, sizes: Mapping[int, int], level: float) -> Parting | None:
        """Choose r and s for these clients; None if their data cannot be parted.

        Parts are of one size, or they would not be exchangeable. A few clients that have much less than the others do
        not decide: those with less than half of what nine in ten have are left out, and those with less than a quarter
        of what half of them have, since sizes are only claimed, and few examples would leave nothing to test.
        """
        every = np.fromiter(sizes.values(), dtype=np.int64, count=len(sizes))
        most = every[2 * every >= max(np.quantile(every, 0.1), np.median(every) / 2)]
        return cls._of(len(most), int(most.min()), level)

    @classmethod
    def of_cohorts(cls, sizes: Mapping[int, int], level: float, sample: int) -> Parting | None:
        """Choose r and s for tests on samples of cohorts; None if their data cannot be parted.

        There are others to draw from, so that the half of the clients that has less is not tested.
        """
        every = np.fromiter(sizes.values(), dtype=np.int64, count=len(sizes))
        return cls._of(sample, int(np.quantile(every, 0.5, method="lower")), level)

    @classmethod
    def _of(cls, clients: int, least: int, level: float) -> Parting | None:
        if clients < 2 or least < 2:
            return None
        parts = parts_for(clients, least, level, SMALLEST_PART)
        return cls(parts, least // parts)

    @classmethod
    def to_test(cls, method: str, clients: Clients, level: float) -> Parting | None:
        """Choose r and s; say in the log if a test at half of the level cannot find anything."""
        parting, needed = cls.of(clients.sizes, level), level / 2 / VIEWS
        if parting is None:
            _log.warning("%s cannot part the data of these clients: fewer than two have two training examples", method)
            return None
        able = parting.able(clients.sizes, clients.ids)
        if (lowest := lowest_p_value(len(able), parting.parts)) > needed:
            _log.warning(
                "%s finds no clusters at algorithm.level = %g in the first rounds: from %d parts of the data of %d "
                "clients no p-value is below %.2g, and %.2g is needed; raise the level, or take more clients or data",
                *(method, level, parting.parts, len(able), lowest, needed),
            )
        return parting

    @property
    def examples(self) -> int:
        """How many a client needs."""
        return self.parts * max(1, self.size)

    def able(self, sizes: Mapping[int, int], clients: Iterable[int]) -> list[int]:
        """Return which of some clients have enough examples, ascending."""
        return [client for client in sorted(clients) if sizes[client] >= self.examples]

    def ask(
        self,
        clients: Clients,
        ids: list[int],
        models: Tensor,
        this_round: Round,
        *,
        rows: Sequence[int] | None = None,
        compares: bool = True,
    ) -> Updates:
        """Let clients train on their parts, and send signatures of these if they are compared.

        They start from ``models [K, S]``, each from that in its row; from the first, if no rows are given.
        """
        in_parts = replace(this_round, replicates=self.parts, part_size=self.size, require_all=True)
        in_parts = replace(in_parts, compares_parts=compares)
        return clients.train(ids, models, rows or [0] * len(ids), in_parts).select(ids)

    def train(
        self,
        tree: ParameterTree,
        members: Iterable[int],
        cohort: Iterable[int],
        clients: Clients,
        this_round: Round,
        *,
        compares: bool,
    ) -> tuple[Updates, Updates]:
        """Train clusters' models in parts; return the updates by which they move, and those of them made in parts.

        All of ``members`` that are able to are asked, one at least. Others of the cohort train on all that they have.
        """
        able = self.able(clients.sizes, members)
        models, rows = tree.models([tree.leaf_of[client] for client in able])
        in_parts = updates = self.ask(clients, able, models, this_round, rows=rows, compares=compares)
        if others := sorted(set(cohort).difference(able)):
            models, rows = tree.models([tree.leaf_of[client] for client in others])
            alone = replace(this_round, purpose="train the smallest")
            updates = updates.concat(clients.train(others, models, rows, alone))
            updates = updates.select(sorted([*able, *others]))
        return updates, in_parts


HALVES = Parting(2, 0)
"""Two parts of all data."""

CHANGED = 0.01
"""Cosines of parts that differ by more than this are those of other data: rounding changes them by less."""

CHANCE = 0.05
"""Share of shuffles inside the present clusters that may gain more than clusters beyond those that there are."""

FOR_PEOPLE = 0.01
"""Level at which p-values are resolved that decide nothing."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """The clusters to go on with, and what that was decided by."""

    labels: Labels  # [n]
    p_value: float  # 1 where there was nothing to test
    gain: float  # of the clusters found, per client
    gain_before: float  # of those that there were
    gamma: float | None  # median of γ_i (CFL eq. 39); None if it is infinite
    tested: bool = True  # False where parts are as they were

    @property
    def criteria(self) -> dict[str, float]:
        """The numbers, as the tree keeps them and events tell them."""
        return {"p_value": self.p_value, "gain": self.gain, "gain_before": self.gain_before}

    def event(self, kind: type[Check], node: int, ids: Sequence[int], level: float) -> Check:
        """Tell it of the clients ``[n]`` of a node."""
        clusters = clusters_of(ids, self.labels)
        return kind(node, **self.criteria, level=level, gamma=self.gamma, clusters=clusters)


def signatures_of_parts(updates: Updates) -> Tensor:
    """Return the signatures of all parts, ``[n, m, R]``."""
    assert updates.parts is not None  # they were asked for
    return updates.parts


def cosines_of(updates: Updates) -> Tensor:
    """Return the cosines of all parts, ``[n·m, n·m]``, as a checkpoint keeps them."""
    return torch.from_numpy(part_similarity(signatures_of_parts(updates))).float()


def too_few(node: int, answers: int, this_round: Round) -> Postponed | None:
    """Return the event that a check waits, if too few of a node's clients answered for one."""
    needed = max(2, this_round.min_clients)
    return Postponed(node, answers, needed) if answers < needed else None


def of_cluster(
    node: int, made: Updates, parts: int, level: float, this_round: Round, *, level_inside: float
) -> Verdict:
    """Test whether a cluster's members, who made updates of equal parts at its model, are of one distribution."""
    draw, together = this_round.generator(f"shuffles {node}"), np.zeros(len(made.ids), dtype=np.int64)
    return by_parts(cosines_of(made), parts, together, level, draw, level_inside=level_inside)


def by_parts(
    cosines: Tensor,
    parts: int,
    now: Labels,
    level: float,
    draw: np.random.Generator,
    *,
    level_inside: float,
    known: Tensor | None = None,
) -> Verdict:
    """Cluster by equal parts; if they are as known already, whatever they tell was decided before."""
    of_parts = cosines.double().numpy()
    similarity = client_similarity(of_parts, parts)
    gamma = _median(gammas_of(similarity, parts))
    if known is not None and known.shape == cosines.shape and bool((known - cosines).abs().max() <= CHANGED):
        gained = gain_by_parts(similarity, now, noise_of(similarity, parts))
        return Verdict(now, 1.0, gained, gained, gamma, tested=False)
    found = find_by_parts(of_parts, parts, level, draw, level_inside)
    kept, gained = found.gains(now), found.gains(found.labels)[found.view]
    changes = gained > kept[found.view]
    labels = found.labels if changes else now if max(kept) > 0 else np.zeros_like(now)
    return Verdict(labels, found.p_value, gained, kept[found.view], gamma)


def by_halves(updates: Updates, now: Labels, level: float, draw: np.random.Generator) -> Verdict:
    """Cluster by two halves of the data of each client."""
    replicates = Replicates(*signatures_of_parts(updates).unbind(1))
    found = find_clusters(replicates)
    kept = gain(found.similarity, now, found.noise, found.own)
    more = now.any() and found.labels.max() > now.max() and found.gain > kept
    if more and found.exceeded(now, draw) > CHANCE:
        found = found.at_most(int(now.max()) + 1)
    changes = found.gain > max(kept, 0.0) and not same_partition(found.labels, now)
    # Where nothing depends on it, the p-value is for people, and may be less exact.
    p_value = found.p_value(level if changes else max(level, FOR_PEOPLE), draw)
    labels = found.labels if changes and p_value <= level else now if kept > 0 else np.zeros_like(now)
    return Verdict(labels, p_value, found.gain, kept, _median(replicates.gammas))


def _median(gammas: NDArray[np.float64]) -> float | None:
    gamma = float(np.median(gammas))
    return gamma if np.isfinite(gamma) else None
