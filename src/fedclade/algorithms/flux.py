"""FLUX, clustering by descriptors of clients' data (Fenoglio et al. 2025, NeurIPS).

Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski. FedAvg trains one model until its accuracy
grows slowly. Then each client sends a descriptor of its data. A *descriptor* consists of statistics
of the *latent*, the representation that the model computes of an example: mean and standard
deviation of some components of the latent, over all examples and over the examples of each label
(:class:`~fedclade.algorithms.DescriptorQuery`). Clients are clustered once, by density, without a
given number of clusters; then FedAvg trains each cluster. Newcomers are assigned without labels, to
the cluster of the nearest mean descriptor.

This file follows the authors' code (``flux/server.py``, ``public/models.py``), with these
departures:

- *Latent.* It is the input of the first dense layer after the last convolution, flattened. For the
  authors' LeNet-5 and ResNet-9 this is their latent, the last pooled images. For models without
  convolutions, which they do not use, it is the input of the last dense layer.
- *Directions* of the components are drawn with the run's seed. The code always uses seed 1, so that
  its results are those of one draw. The number of clusters depends on the draw
  (``studies/flux_directions.py``). ``directions`` is a seed for the draw in place of the run's
  seed. Even with the code's seed, the directions are not those of the code.
- *Accuracy* is that of the cohort on its training data; in the code it is that of all clients on a
  fifth of their data that is not used for training. The largest entry of all latents, which
  determines the origin of the components, is likewise taken over training data here, and over that
  fifth in the code.
- *Time of clustering.* The code clusters at the latest after 80 % of the rounds. A method does not
  know the number of rounds, so ``latest`` gives the round: 8 of their 10.
- *DBSCAN* with at least two points, and with each noise point as a cluster, equals single linkage
  cut at ε, which is used here. The code takes ε from the knee of the curve of sorted
  nearest-neighbour distances, and fails if the curve has no knee; here ε is then the largest
  distance of a client to its nearest neighbour, so that no client is alone.
- *Availability.* In the code all clients are always available. Here clients that do not send a
  descriptor are members of the root only, and use its model. When they send a descriptor later,
  they join the cluster of the nearest mean descriptor; the statistics of labels count in this
  comparison, too. The same holds for newcomers during a run. Blocks of a descriptor are scaled to
  the range of all descriptors that the server received.
- *Outliers.* A client whose descriptor has numbers more than ten times as large as the median
  client's is a member of the root only, too, and an event names it (``left_out``). In the code such
  a descriptor would extend the range, so that all other descriptors lie close together.
- *Noise.* Laplace noise on descriptors, which the code has turned off, is omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedclade.algorithms.base import Algorithm, RoundLog, State, never_clusters
from fedclade.algorithms.cluster_update import (
    log_of,
    membership_events,
    merged,
    move_clusters,
    train_clusters,
)
from fedclade.algorithms.descriptor_query import DescriptorQuery
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.clustering import (
    Assignment,
    DescriptorSpace,
    agglomerate,
    assign_to_nearest_descriptor,
    assign_to_root,
    choose_epsilon_by_knee,
    compute_point_distances,
    k_means,
    require_descriptors,
)
from fedclade.core import (
    Clients,
    Event,
    Group,
    Joined,
    LeftOut,
    Node,
    ParameterTree,
    Postponed,
    Round,
    RoundPlan,
    UpdateError,
    checked,
    has_replied,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

FAR = 10.0
"""Largest plausible ratio of a descriptor's numbers to those of the median client."""


@dataclass(frozen=True, eq=False)
class FLUXState(State):
    """State of FLUX between rounds.

    Parameters
    ----------
    accuracies
        Mean accuracy of the cohort on its training data after each round so far; empty once clients
        are clustered.
    """

    accuracies: tuple[float, ...] = ()


@checked()
@dataclass(frozen=True, kw_only=True)
class FLUX(Algorithm[FLUXState]):
    """FLUX (Fenoglio et al. 2025): clients are clustered once by descriptors of their data.

    In the tree of clusters, the root stores the model that computes descriptors, and each cluster
    stores its members' descriptors.

    Parameters
    ----------
    th_round
        Increase of accuracy in a round, below which clients are clustered. If the task has another
        main metric, the threshold is in the unit of that metric.
    earliest, latest
        Rounds after which clients are clustered at the earliest and at the latest.
    components
        Number C of components of the latent. None: the number of labels.
    per_label
        Whether the data of each label is described separately as well.
    eps_scaling
        Ratio of ε, the distance up to which clients are linked, to the distance at the knee of the
        sorted nearest-neighbour distances.
    clusters
        Number of clusters, if it is known: clients are then clustered by k-means, without ε
        (FLUX-prior). None: the number of clusters follows from ε.
    directions
        Seed of the components' directions. None: the run's seed.
    """

    state_type = FLUXState

    th_round: float = 0.06
    earliest: int = 3
    latest: int = 8
    components: int | None = None
    per_label: bool = True
    eps_scaling: float = 1.0
    clusters: int | None = None
    directions: int | None = None

    def __post_init__(self) -> None:
        count = self.components
        known = self.clusters
        require(
            ("algorithm.earliest", self.earliest, self.earliest >= 1, "at least 1"),
            (
                "algorithm.latest",
                self.latest,
                self.latest >= self.earliest,
                f"at least earliest, {self.earliest}",
            ),
            ("algorithm.components", count, count is None or count >= 1, "at least 1, or left out"),
            ("algorithm.eps_scaling", self.eps_scaling, self.eps_scaling > 0, "greater than 0"),
            ("algorithm.clusters", known, known is None or known >= 1, "at least 1, or left out"),
            (
                *(
                    "algorithm.directions",
                    self.directions,
                    self.directions is None or self.directions >= 0,
                ),
                "at least 0, or left out",
            ),
        )

    @property
    def requires(self) -> Requires:
        """Needs of FLUX that a run checks: clients report descriptors and training accuracies.

        Accuracies are not needed if the round of the clustering is fixed. If they are needed,
        ``disclosures`` is empty, since accuracies are not among the kinds of information that
        clients' policies name. Secure aggregation then refuses the method.
        """
        reports = "training accuracies and descriptors of their data"
        disclosures: tuple[str, ...] = ()
        if self.has_fixed_round:
            reports = "descriptors of their data"
            disclosures = ("descriptors",)
        return Requires(
            updates=False,
            signatures=False,
            reports=reports,
            disclosures=disclosures,
            data_queries=("descriptors",),
            clusters_from="clusters",
        )

    @property
    def has_fixed_round(self) -> bool:
        """Whether the round of the clustering is fixed, independent of training accuracies."""
        return self.earliest == self.latest

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that the data has the labels that descriptors need.

        The result contains a warning if the run ends before clients are clustered.
        """
        warnings = super().check(run)
        if run.data is not None:
            self._build_query((), torch.empty(0), seed=0).shape(run.data)
        return (*warnings, *never_clusters(self, self.earliest + 1, run, "earliest"))

    def init(self, params: Tensor, clients: Clients) -> FLUXState:
        """Return the state before round 1: all clients share one model."""
        return FLUXState(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: FLUXState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FLUXState, RoundLog]:
        """Run one round of FLUX: one round of FedAvg in every cluster.

        Some work comes before the training. In the round in which the clustering is due, all
        clients are clustered by their descriptors. In later rounds, sampled clients without a
        cluster are assigned to one.
        """
        before = state.tree
        events = list[Event]()
        tree = before
        if len(tree.nodes) == 1:
            if self._is_time(state, this_round):
                tree, events = self._cluster_clients(tree, clients, this_round)
        elif waiting := [client for client in cohort if client in tree.stragglers.get(0, ())]:
            tree, odd = self._place_waiting_clients(tree, waiting, clients, this_round)
            events = [*odd, *membership_events(before, tree)]
        clustered = len(tree.nodes) > 1
        cohort = [client for client in cohort if tree.leaf_of[client] or not clustered]
        parts = train_clusters(State(tree), cohort, clients, this_round) if cohort else []
        tree = move_clusters(tree, parts)
        accuracies: tuple[float, ...] = ()
        if not clustered and not self.has_fixed_round:
            accuracies = (*state.accuracies, *self._query_accuracy(tree, cohort, clients))
        return FLUXState(tree, accuracies), log_of(parts, events)

    def join(
        self, state: FLUXState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FLUXState, list[Event]]:
        """Add clients that join during a run as members of the root only.

        They join a cluster by their descriptors when they are first sampled.
        """
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Assign new clients of a finished run to clusters, without using their labels.

        Each newcomer is assigned to the cluster whose mean descriptor is nearest to its own.
        """
        if not (leaves := _list_clusters(tree)):
            return assign_to_root(ids)
        count = int(tree.nodes[0].criteria["components"])
        model = tree.nodes[0].params
        seed = self._choose_seed(this_round)
        found = clients.ask(DescriptorQuery(ids, model, seed, count, per_label=False))
        members = {leaf.id: _get_descriptors(leaf, count) for leaf in leaves}
        space = DescriptorSpace.of(torch.cat([*members.values()]))
        return assign_to_nearest_descriptor(tree, require_descriptors(ids, found), members, space)

    def _choose_seed(self, this_round: Round) -> int:
        """Return the seed of the directions along which latents are projected."""
        return this_round.seed if self.directions is None else self.directions

    def _is_time(self, state: FLUXState, this_round: Round) -> bool:
        """Return whether the clustering is due, before the training of this round."""
        if (rounds := this_round.number - 1) < self.earliest:
            return False
        return rounds >= self.latest or bool((np.diff(state.accuracies) < self.th_round).any())

    def _query_accuracy(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients
    ) -> list[float]:
        """Query the cohort for the accuracy of the root's model on its training data.

        Returns
        -------
        list of float
            The mean accuracy, weighted by numbers of examples, as the only element; empty if no
            client reported an accuracy.
        """
        found = clients.evaluate(cohort, tree.nodes[0].params[None], [0] * len(cohort), "train")
        has_score = ~found.merit.isnan()
        merits = found.merit[has_score]
        examples = found.examples[has_score]
        return [float(merits @ examples.double() / examples.sum())] if len(merits) else []

    def _cluster_clients(
        self, tree: ParameterTree, clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Query all clients for descriptors, and cluster the clients that replied.

        Returns
        -------
        tuple
            The tree with a leaf for each cluster, and the events that report the clusters. If too
            few clients replied, the clustering is postponed: the tree is unchanged.
        """
        root = tree.nodes[0]
        everybody = sorted(clients.ids)
        ids, rows = self._query_descriptors(everybody, root, clients, this_round)
        ids, rows, odd = self._remove_outliers(ids, rows, rows)
        needed = min(len(everybody), max(2, self.clusters or 0))
        if len(ids) < needed:
            return tree, [*odd, Postponed(0, len(ids), needed)]
        points = DescriptorSpace.of(rows).points(rows)
        criteria = {"components": float(rows.shape[2])}
        events = list[Event]()
        if self.clusters is not None:
            labels = k_means(points, self.clusters, this_round.generator("descriptors"))
            found = [
                [ids[i] for i in np.flatnonzero(labels == label)]
                for label in range(labels.max() + 1)
            ]
        elif len(ids) < 2:
            found = [ids]
        else:
            distances = compute_point_distances(points)
            epsilon = self.eps_scaling * choose_epsilon_by_knee(distances)
            how = "descriptor", "single", epsilon, None
            found, _, event = merged(ids, agglomerate(distances, "single"), *how)
            criteria["epsilon"] = epsilon
            events.append(event)
        row_of = {client: row.flatten() for client, row in zip(ids, rows, strict=True)}
        groups = [
            Group(tuple(c), 0, root.params, torch.stack([row_of[i] for i in sorted(c)]))
            for c in found
        ]
        after = tree.regrouped(
            groups, params=root.params, round_number=this_round.number, criteria=criteria
        )
        return after, [*odd, *(events or membership_events(tree, after))]

    def _place_waiting_clients(
        self, tree: ParameterTree, waiting: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Query clients without a cluster for descriptors, and assign the clients that reply.

        Each one joins the cluster of the nearest mean descriptor.

        Returns
        -------
        tuple
            The tree after the assignments, and an event about outliers if there are any.
        """
        ids, rows = self._query_descriptors(waiting, tree.nodes[0], clients, this_round)
        leaves = _list_clusters(tree)
        if not ids or not leaves:
            return tree, []
        members = [_get_descriptors(leaf, rows.shape[2]) for leaf in leaves]
        ids, rows, odd = self._remove_outliers(ids, rows, torch.cat(members))
        space = DescriptorSpace.of(torch.cat(members))
        means = np.stack([space.points(each).mean(0) for each in members])
        for client, row in zip(ids, rows, strict=True):
            nearest = np.linalg.norm(means - space.points(row[None]), axis=1).argmin()
            tree = tree.with_members(
                leaves[nearest].id, [client], row.flatten()[None].to(members[0])
            )
        return tree, odd

    def _remove_outliers(
        self, ids: Sequence[int], rows: Tensor, measure: Tensor
    ) -> tuple[list[int], Tensor, list[Event]]:
        """Remove outliers: clients whose descriptors have far larger numbers than usual.

        A single descriptor of huge numbers would extend the range to which all descriptors are
        scaled, so that all others would lie close together and form one cluster.

        Parameters
        ----------
        ids
            Ids of the n clients to check.
        rows
            Descriptors of these clients, ``[n, 2 + B, C]``.
        measure
            Descriptors that define which numbers are usual, ``[m, 2 + B, C]``. With one or two
            descriptors, no client is removed.

        Returns
        -------
        tuple
            The remaining clients; their descriptors; and an event that names the outliers, if there
            are any.
        """
        sizes = rows.flatten(1).abs().amax(dim=1)
        usual = float(measure.flatten(1).abs().amax(dim=1).median())
        is_far = (
            (sizes > FAR * usual).tolist() if len(measure) > 2 and usual else [False] * len(ids)
        )
        if not any(is_far):
            return list(ids), rows, []
        kept = [place for place, far in enumerate(is_far) if not far]
        why = {
            client: (
                f"its descriptor has numbers up to {size:.3g}, more than {FAR:g} times the median "
                f"client's {usual:.3g}"
            )
            for client, size, far in zip(ids, sizes.tolist(), is_far, strict=True)
            if far
        }
        return [ids[place] for place in kept], rows[kept], [LeftOut(0, "descriptors", why)]

    def _query_descriptors(
        self, ids: Sequence[int], root: Node, clients: Clients, this_round: Round
    ) -> tuple[list[int], Tensor]:
        """Query clients for descriptors of their data.

        Returns
        -------
        tuple
            The m clients that replied, and their descriptors ``[m, 2 + B, C]`` as in
            :class:`DescriptorQuery`.
        """
        found = clients.ask(self._build_query(ids, root.params, self._choose_seed(this_round)))
        came = has_replied(found)
        replied = [client for client, has_come in zip(ids, came.tolist(), strict=True) if has_come]
        return replied, found[came]

    def _build_query(self, ids: Sequence[int], model: Tensor, seed: int) -> DescriptorQuery:
        """Build the query for descriptors with the hyper-parameters of this method."""
        return DescriptorQuery(ids, model, seed, self.components or 0, per_label=self.per_label)


def _list_clusters(tree: ParameterTree) -> list[Node]:
    """Return the leaves of the tree that have members, without the root."""
    return [leaf for leaf in tree.leaves if leaf.id and leaf.members]


def _get_descriptors(cluster: Node, components: int) -> Tensor:
    """Return the descriptors of a cluster's k members that the tree stores.

    Their shape is ``[k, 2 + B, C]``, as in :class:`DescriptorQuery`.
    """
    assert cluster.cached is not None  # every cluster with members has cached descriptors
    return cluster.cached.view(len(cluster.members), -1, components)


def without_labels(
    tree: ParameterTree, ids: Sequence[int], newcomers: Clients, members: Clients, seed: int
) -> list[Assignment]:
    """Assign new clients without labels to the clusters of a finished run of any method.

    Each newcomer is assigned to the leaf whose members' data is most similar to its own. Data is
    compared by FLUX's descriptors, computed by the root's model without statistics of labels, so
    that labels are neither needed nor compared. Members are queried for their descriptors.

    Parameters
    ----------
    tree
        The tree of the finished run.
    ids
        Ids of the newcomers.
    newcomers
        Clients through which the newcomers are queried.
    members
        Clients through which the members of the run are queried.
    seed
        Seed of the directions along which latents are projected.

    Raises
    ------
    UpdateError
        If a newcomer does not reply, or if no member replies.
    """
    if len(tree.nodes) == 1:
        return assign_to_root(ids)
    model = tree.nodes[0].model
    there = set(members.ids)
    rows: dict[int, Tensor] = {}
    for leaf in tree.leaves:
        clients = [client for client in leaf.members if client in there]
        if not clients:
            continue
        found = members.ask(DescriptorQuery(clients, model, seed, per_label=False))
        came = has_replied(found)
        if came.any():
            rows[leaf.id] = found[came]
    if not rows:
        raise UpdateError(
            "no member of the run replied with a descriptor of its data, so newcomers cannot be "
            "assigned without labels; to assign them with labels, leave out --without-labels, and "
            "newcomers.without_labels in the config"
        )
    found = newcomers.ask(DescriptorQuery(ids, model, seed, per_label=False))
    space = DescriptorSpace.of(torch.cat([*rows.values()]))
    return assign_to_nearest_descriptor(tree, require_descriptors(ids, found), rows, space)
