"""FLUX: Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski 2025 (NeurIPS).

One model is trained by FedAvg until its accuracy grows slowly. Then clients describe their data by what that model
makes of it: mean and standard deviation of some components of its latent, over all examples and over those of each
label (:class:`~fedclade.core.DescriptorQuery`). They are clustered once, by density, with no number of clusters given;
then each cluster goes on by FedAvg. Newcomers are assigned without labels, to the cluster of the nearest mean.

This file follows the authors' code (``flux/server.py``, ``public/models.py``), and departs from it so:

- The latent is the input of the first dense layer behind the last convolution, flattened, which for their LeNet-5 and
  ResNet-9 is theirs, the last pooled images; without convolutions, of which they have no case, that of the last layer.
- The components' directions are drawn by the run's seed; in the code always by the same, 1, so that its results are
  those of one draw. The number of clusters depends on the draw (``studies/flux_directions.py``). ``directions`` fixes
  the draw, whatever the run's seed; the points that a number stands for are not those of the code.
- Accuracy is that of the cohort on its training data; in the code of all clients on a fifth that they keep for it. So
  is the largest entry of all latents, which sets the origin of the components.
- The code clusters at the latest after 80 % of the rounds; a method does not know how many there are, so ``latest``
  says it: 8 of their 10.
- DBSCAN with at least two points, and every noise point a cluster of its own, is single linkage cut at ε. Where the
  curve has no knee the code fails; here ε is the largest of the distances to a nearest client, so nobody is alone.
- In the code all clients are always there. Here those that do not send a descriptor wait at the root, with its model,
  and join the cluster of the nearest mean when they do, by labels as well; so do newcomers during a run. The range
  that blocks are scaled to is that of all descriptors that came.
- A client whose descriptor has numbers ten times as large as the median client's waits there, too, and an event names
  it (``left_out``): the code would stretch the range to it, so that all others lie together.
- Laplace noise on descriptors, which the code has turned off, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog, State, never_clusters
from fedclade.algorithms.cluster_update import log_of, membership_events, merged, move_clusters, train_clusters
from fedclade.clustering import (
    Assignment,
    DescriptorSpace,
    agglomerate,
    apart,
    described,
    epsilon_by_knee,
    k_means,
    to_nearest_descriptor,
    to_root,
)
from fedclade.core import (
    Clients,
    DataSpec,
    DescriptorQuery,
    Event,
    Group,
    Joined,
    LeftOut,
    Node,
    ParameterTree,
    Postponed,
    Round,
    checked,
    require,
)

FAR = 10.0
"""How many times as large as the median client's the numbers of a descriptor may be."""


@dataclass(frozen=True, eq=False)
class FLUXState(State):
    """The mean accuracy after each round, until clients are clustered."""

    accuracies: tuple[float, ...] = ()


@checked()
@dataclass(frozen=True, kw_only=True)
class FLUX(Algorithm[FLUXState]):
    """FLUX (Fenoglio et al. 2025): clients are clustered once by what the model makes of their data.

    The root keeps the model that describes, and each cluster caches its members' descriptors.

    Parameters
    ----------
    th_round
        Clients are clustered as soon as some round has raised the accuracy by less; of another first metric, in its
        unit.
    earliest, latest
        After which round they are, at the earliest and at the latest.
    components
        Of the latent, C; as many as there are labels if left out.
    per_label
        Whether the data of each label is described by itself as well.
    eps_scaling
        ε is so many times the distance at the knee.
    clusters
        Their number, where it is known: k-means takes the place of the knee (FLUX-prior).
    directions
        Number of the draw of the components' directions; left out: the run's seed.
    """

    state_type = FLUXState
    clusters_from = "clusters"
    asks_for = "training accuracies and descriptors of their data"

    th_round: float = 0.06
    earliest: int = 3
    latest: int = 8
    components: int | None = None
    per_label: bool = True
    eps_scaling: float = 1.0
    clusters: int | None = None
    directions: int | None = None

    def __post_init__(self) -> None:
        count, known = self.components, self.clusters
        require(
            ("algorithm.earliest", self.earliest, self.earliest >= 1, "at least 1"),
            ("algorithm.latest", self.latest, self.latest >= self.earliest, f"at least earliest, {self.earliest}"),
            ("algorithm.components", count, count is None or count >= 1, "at least 1, or left out"),
            ("algorithm.eps_scaling", self.eps_scaling, self.eps_scaling > 0, "greater than 0"),
            ("algorithm.clusters", known, known is None or known >= 1, "at least 1, or left out"),
            (
                *("algorithm.directions", self.directions, self.directions is None or self.directions >= 0),
                "at least 0, or left out",
            ),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    @property
    def has_fixed_round(self) -> bool:
        """Whether clients are clustered in a round that is fixed, so that no training accuracy decides about it."""
        return self.earliest == self.latest

    @property
    def discloses(self) -> tuple[str, ...]:
        """What of each client's data the server must see; training accuracies have no name."""
        return ("descriptors",) if self.has_fixed_round else ()

    def asks(self, clients: int, fraction: float) -> str:
        """Return :attr:`asks_for`, without training accuracies where the round of clustering is fixed."""
        return "descriptors of their data" if self.has_fixed_round else self.asks_for

    def too_short(self, rounds: int) -> str:
        """Return what a run of so few rounds may miss: the clusters."""
        return never_clusters(self, self.earliest + 1, rounds, "earliest")

    def check_data(self, spec: DataSpec) -> None:
        """Check that examples have labels, if each one's data is described by itself."""
        DescriptorQuery((), torch.empty(0), 0, per_label=self.per_label).shape(spec)

    def init(self, params: Tensor, clients: Clients) -> FLUXState:
        """Put all clients in one cluster."""
        return FLUXState(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: FLUXState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FLUXState, RoundLog]:
        """Cluster all clients, if it is time; then run one round of FedAvg in every cluster."""
        before, events = state.tree, list[Event]()
        tree = before
        if len(tree.nodes) == 1:
            if self._is_time(state, this_round):
                tree, events = self._clustered(tree, clients, this_round)
        elif waiting := [client for client in cohort if client in tree.stragglers.get(0, ())]:
            tree, odd = self._placed(tree, waiting, clients, this_round)
            events = [*odd, *membership_events(before, tree)]
        clustered = len(tree.nodes) > 1
        cohort = [client for client in cohort if tree.leaf_of[client] or not clustered]
        parts = train_clusters(State(tree), cohort, clients, this_round) if cohort else []
        tree = move_clusters(tree, parts)
        accuracies: tuple[float, ...] = ()
        if not clustered and not self.has_fixed_round:
            accuracies = (*state.accuracies, *self._accuracy(tree, cohort, clients))
        return FLUXState(tree, accuracies), log_of(parts, events)

    def join(
        self, state: FLUXState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FLUXState, list[Event]]:
        """Take newcomers in, who are in no cluster until they are sampled."""
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Assign newcomers to the cluster of the nearest mean, by descriptors that need no labels."""
        if not (leaves := _clusters(tree)):
            return to_root(ids)
        count = int(tree.nodes[0].criteria["components"])
        found = clients.descriptors(ids, tree.nodes[0].params, self._draw(this_round), count, per_label=False)
        members = {leaf.id: _descriptors(leaf, count) for leaf in leaves}
        space = DescriptorSpace.of(torch.cat([*members.values()]))
        return to_nearest_descriptor(tree, described(ids, found), members, space)

    def _draw(self, this_round: Round) -> int:
        """Return the number of the draw of the components' directions."""
        return this_round.seed if self.directions is None else self.directions

    def _is_time(self, state: FLUXState, this_round: Round) -> bool:
        """Whether clients are clustered before a round is run."""
        if (rounds := this_round.number - 1) < self.earliest:
            return False
        return rounds >= self.latest or bool((np.diff(state.accuracies) < self.th_round).any())

    def _accuracy(self, tree: ParameterTree, cohort: Sequence[int], clients: Clients) -> list[float]:
        """Return the mean accuracy of the model on clients' training data, weighted by examples; none of nobody."""
        found = clients.evaluate(cohort, tree.nodes[0].params[None], [0] * len(cohort), "train")
        has_score = ~found.merit.isnan()
        merits, examples = found.merit[has_score], found.examples[has_score]
        return [float(merits @ examples.double() / examples.sum())] if len(merits) else []

    def _clustered(self, tree: ParameterTree, clients: Clients, this_round: Round) -> tuple[ParameterTree, list[Event]]:
        """Cluster all clients that send a descriptor; with too few of them go on with one model."""
        root, everybody = tree.nodes[0], sorted(clients.ids)
        ids, rows = self._described(everybody, root, clients, this_round)
        ids, rows, odd = self._plausible(ids, rows, rows)
        needed = min(len(everybody), max(2, self.clusters or 0))
        if len(ids) < needed:
            return tree, [*odd, Postponed(0, len(ids), needed)]
        points = DescriptorSpace.of(rows).points(rows)
        criteria, events = {"components": float(rows.shape[2])}, list[Event]()
        if self.clusters is not None:
            labels = k_means(points, self.clusters, this_round.generator("descriptors"))
            found = [[ids[i] for i in np.flatnonzero(labels == label)] for label in range(labels.max() + 1)]
        elif len(ids) < 2:
            found = [ids]
        else:
            distances = apart(points)
            epsilon = self.eps_scaling * epsilon_by_knee(distances)
            how = "descriptor", "single", epsilon, None
            found, _, event = merged(ids, agglomerate(distances, "single"), *how)
            criteria["epsilon"] = epsilon
            events.append(event)
        row_of = {client: row.flatten() for client, row in zip(ids, rows, strict=True)}
        groups = [Group(tuple(c), 0, root.params, torch.stack([row_of[i] for i in sorted(c)])) for c in found]
        after = tree.regrouped(groups, params=root.params, round_number=this_round.number, criteria=criteria)
        return after, [*odd, *(events or membership_events(tree, after))]

    def _placed(
        self, tree: ParameterTree, waiting: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Let each that waits, and now sends its descriptor, join the cluster of the nearest mean."""
        ids, rows = self._described(waiting, tree.nodes[0], clients, this_round)
        leaves = _clusters(tree)
        if not ids or not leaves:
            return tree, []
        members = [_descriptors(leaf, rows.shape[2]) for leaf in leaves]
        ids, rows, odd = self._plausible(ids, rows, torch.cat(members))
        space = DescriptorSpace.of(torch.cat(members))
        means = np.stack([space.points(each).mean(0) for each in members])
        for client, row in zip(ids, rows, strict=True):
            nearest = np.linalg.norm(means - space.points(row[None]), axis=1).argmin()
            tree = tree.with_members(leaves[nearest].id, [client], row.flatten()[None].to(members[0]))
        return tree, odd

    def _plausible(self, ids: Sequence[int], rows: Tensor, measure: Tensor) -> tuple[list[int], Tensor, list[Event]]:
        """Return clients and descriptors without those whose numbers are far larger than the measure's, and the event.

        One descriptor of huge numbers would stretch the space of all, so that the others lie together.
        """
        sizes = rows.flatten(1).abs().amax(dim=1)
        usual = float(measure.flatten(1).abs().amax(dim=1).median())
        is_far = (sizes > FAR * usual).tolist() if len(measure) > 2 and usual else [False] * len(ids)
        if not any(is_far):
            return list(ids), rows, []
        kept = [place for place, far in enumerate(is_far) if not far]
        why = {
            client: (
                f"a descriptor of numbers up to {size:.3g}, more than {FAR:g} times the median client's, {usual:.3g}"
            )
            for client, size, far in zip(ids, sizes.tolist(), is_far, strict=True)
            if far
        }
        return [ids[place] for place in kept], rows[kept], [LeftOut(0, "descriptors", why)]

    def _described(
        self, ids: Sequence[int], root: Node, clients: Clients, this_round: Round
    ) -> tuple[list[int], Tensor]:
        """Return the clients that send their descriptors by the root's model, and these, ``[m, 2 + B, C]``."""
        count = self.components or 0
        found = clients.descriptors(ids, root.params, self._draw(this_round), count, per_label=self.per_label)
        came = found.flatten(1).any(dim=1).tolist()
        return [client for client, answers in zip(ids, came, strict=True) if answers], found[came]


def _clusters(tree: ParameterTree) -> list[Node]:
    """Return the clusters that have members."""
    return [leaf for leaf in tree.leaves if leaf.id and leaf.members]


def _descriptors(cluster: Node, components: int) -> Tensor:
    """Return the descriptors of a cluster's members, ``[k, 2 + B, C]``."""
    assert cluster.cached is not None  # as of every cluster with members
    return cluster.cached.view(len(cluster.members), -1, components)
