"""FLUX: Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski 2025 (NeurIPS).

FedAvg trains one model until its accuracy grows slowly. Then clients describe their data by the
latent representation that this model computes of it: mean and standard deviation of some components
of the latent, over all examples and over the examples of each label (:class:`DescriptorQuery`).
Clients are clustered once, by density, without a given number of clusters; then FedAvg trains each
cluster. Newcomers are assigned without labels, to the cluster of the nearest mean.

This file follows the authors' code (``flux/server.py``, ``public/models.py``), with these
departures:

- *Latent.* It is the input of the first dense layer behind the last convolution, flattened. For the
  authors' LeNet-5 and ResNet-9 this is their latent, the last pooled images. For models without
  convolutions, which they do not use, it is the input of the last dense layer.
- *Directions* of the components are drawn with the run's seed. The code always uses seed 1, so that
  its results are those of one draw. The number of clusters depends on the draw
  (``studies/flux_directions.py``). ``directions`` fixes the draw, whatever the run's seed; the same
  number does not give the points of the code.
- *Accuracy* is that of the cohort on its training data; in the code it is that of all clients on a
  fifth of their data that is not used for training. The same holds for the largest entry of all
  latents, which sets the origin of the components.
- *Time of clustering.* The code clusters at the latest after 80 % of the rounds. A method does not
  know the number of rounds, so ``latest`` gives the round: 8 of their 10.
- *DBSCAN* with at least two points, and with each noise point as a cluster, equals single linkage
  cut at ε. If the curve has no knee, the code fails; here ε is then the largest distance of a
  client to its nearest neighbour, so that no client is alone.
- *Availability.* In the code all clients are always available. Here clients that do not send a
  descriptor wait at the root, with its model. When they send it, they join the cluster of the
  nearest mean, compared by labels as well; so do newcomers during a run. Blocks are scaled to the
  range of all descriptors that the server received.
- *Outliers.* A client whose descriptor has numbers more than ten times as large as the median
  client's waits at the root, too, and an event names it (``left_out``). In the code such a
  descriptor would extend the range, so that all others lie close together.
- *Noise.* Laplace noise on descriptors, which the code has turned off, is omitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  (all convolutions)

from fedclade.algorithms.base import Algorithm, RoundLog, State, never_clusters
from fedclade.algorithms.cluster_update import (
    log_of,
    membership_events,
    merged,
    move_clusters,
    train_clusters,
)
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
    IGNORED,
    Clients,
    ConfigError,
    DataSpec,
    Event,
    Group,
    Joined,
    LeftOut,
    LocalData,
    LocalStore,
    ModelError,
    Node,
    ParameterTree,
    Postponed,
    Round,
    RowQuery,
    UpdateError,
    checked,
    has_replied,
    require,
    rng,
)

FAR = 10.0
"""Largest plausible ratio of a descriptor's numbers to those of the median client."""

COMPONENTS = 10
"""Default number of components for examples without labels.

With labels the default is the number of labels.
"""

HUGE = 1e30
"""Value of every number of a false descriptor; finite in float32, so that servers accept it."""

POINTS = 200
"""Number of random points whose principal directions give the components, as in FLUX's code."""

EXAMPLES_AT_A_TIME = 1024
"""Number of examples in a forward pass."""


@dataclass(frozen=True, eq=False)
class DescriptorQuery(RowQuery):
    """Query for descriptions of training data by a model's latent; float32 ``[n, 2 + B, C]``.

    The latent of an example is the input of the first dense layer behind the last convolution,
    flattened; for a model without convolutions, the input of its last dense layer. It is projected
    to C components, along directions that depend only on the seed and the width of the latent. The
    rows of a client's descriptor are

    - the largest entry of its latents, C times;
    - the components of a point near the centre of the cube of side 1 in which the directions were
      found;
    - mean and standard deviation of its components (B = 2);
    - with ``per_label`` also the means, and then the deviations, of the examples of each of L
      labels, as the client sees labels (B = 2 + 2L). They are −1 for a label with fewer than two
      examples.

    Parameters
    ----------
    model
        θ ``[S]``.
    seed
        Seed of the directions.
    components
        C. With 0 it is the number of labels; the last components are 0 if the latent has fewer
        entries.
    per_label
        Whether the data of each label is described separately as well.
    """

    kind = "descriptors"
    mechanism = "none"
    discloses = "descriptors"
    reveals = "descriptors of their data"
    reply_name = "descriptor"

    model: Tensor
    seed: int
    components: int = 0
    per_label: bool = True

    def __post_init__(self) -> None:
        components = self.components
        require(
            ("the seed of a descriptor", self.seed, self.seed >= 0, "at least 0"),
            ("the components of a descriptor", components, components >= 0, "at least 0"),
        )

    def shape(self, spec: DataSpec) -> tuple[int, int]:
        """Return 2 + B and C.

        Raises
        ------
        ConfigError
            If each label is to be described separately, and examples have no label or several.
        """
        if self.per_label and spec.labels is None:
            raise ConfigError(
                f"each label's data cannot be described by itself in a {spec.task} task, whose "
                "examples do not have one label each; set algorithm.per_label = false"
            )
        groups = 1 + (spec.labels or 0) if self.per_label else 1
        return 2 + 2 * groups, self.components or spec.labels or COMPONENTS

    @torch.inference_mode()
    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Return a client's descriptor.

        Raises
        ------
        ConfigError
            If the latent has fewer entries than ``components``.
        ModelError
            If the model has no dense layer.
        """
        found = latents(data.load_model(self.model), data.inputs)
        targets = data.targets
        if data.spec.task == "language":  # each next token is an example
            found = found[targets != IGNORED]
        found = found.flatten(1).double().cpu()
        _, count = self.shape(data.spec)
        most = min(found.shape[1], POINTS - 1)
        if most < self.components:
            raise ConfigError(
                f"algorithm.components should be at most {most}, as the model's latent has "
                f"{found.shape[1]} entries, got {self.components}"
            )
        directions, centre = projection(self.seed, found.shape[1], min(most, count))
        missing = (0, count - min(most, count))
        directions = functional.pad(directions, missing)
        centre = functional.pad(centre, missing)
        projected = found @ directions
        mean, deviation = _moments(projected)
        blocks = [found.max().expand(count), centre, mean, deviation]
        if self.per_label:
            labels = range(data.spec.labels or 0)
            of_labels = [_moments(projected[targets == label]) for label in labels]
            blocks += [mean for mean, _ in of_labels]
            blocks += [deviation for _, deviation in of_labels]
        return torch.stack(blocks).float()

    def amounts(self, spec: DataSpec) -> Mapping[str, int]:
        """Return the number of components, which a client's policy can limit."""
        _, count = self.shape(spec)
        return {"max_components": count}

    def false_row(self, row: Tensor, key: int) -> Tensor:
        """Return a descriptor of huge numbers."""
        return torch.full_like(row, HUGE)


def latents(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the latent of each example, ``[n, ...]``: the input of :func:`latent_layer`."""
    caught: list[Tensor] = []
    layer = latent_layer(module, inputs[:1])
    handle = layer.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0]))
    try:
        found: list[Tensor] = []
        for part in inputs.split(EXAMPLES_AT_A_TIME):
            module(part)
            found.append(caught[-1])
            caught.clear()
    finally:
        handle.remove()
    return torch.cat(found)


def latent_layer(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Return the dense layer whose input is the latent.

    It is the first dense layer behind the last convolution, or without convolutions the last dense
    layer.

    Raises
    ------
    ModelError
        If there is no such layer.
    """
    called: list[nn.Module] = []
    kinds = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | _ConvNd) and not name.endswith(("lora_A", "lora_B"))
    ]
    handles = [
        layer.register_forward_pre_hook(lambda layer, _: called.append(layer)) for layer in kinds
    ]
    try:
        module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    convolutions = [place for place, layer in enumerate(called) if isinstance(layer, _ConvNd)]
    first = convolutions[-1] + 1 if convolutions else 0
    dense = [layer for layer in called[first:] if isinstance(layer, nn.Linear)]
    if not dense:
        raise ModelError(
            f"{type(module).__name__} has no dense layer (nn.Linear) behind its last convolution, "
            "whose input would describe data; take another model, or an algorithm that goes by "
            "updates"
        )
    return dense[0] if convolutions else dense[-1]


@lru_cache(maxsize=8)
def projection(seed: int, width: int, components: int) -> tuple[Tensor, Tensor]:
    """Return principal directions of random points in a cube, and the points' mean along them.

    The cube has side 1; for a cube of side s the directions are the same, and the mean is s times
    as large. The sign of each direction makes its entry of largest magnitude positive.

    Parameters
    ----------
    seed
        Seed of the points.
    width
        Number of dimensions d of the cube.
    components
        Number of directions C, those of largest variance first.

    Returns
    -------
    tuple of Tensor
        Directions ``[d, C]``, and the coordinates ``[C]`` of the mean in them.
    """
    points = rng.generator(seed, "descriptor points", width).random((POINTS, width))
    rows = np.linalg.svd(points - points.mean(0), full_matrices=False)[2][:components]
    largest = np.take_along_axis(rows, np.abs(rows).argmax(1)[:, None], 1)
    rows = rows * np.sign(largest)
    return torch.from_numpy(rows.T.copy()), torch.from_numpy(rows @ points.mean(0))


def _moments(projected: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation ``[C]`` of components ``[n, C]``; −1 if n < 2."""
    if len(projected) < 2:
        none = projected.new_full(projected.shape[1:], -1.0)
        return none, none
    return projected.mean(0), projected.std(0, correction=0)


@dataclass(frozen=True, eq=False)
class FLUXState(State):
    """State of FLUX between rounds.

    Parameters
    ----------
    accuracies
        Mean accuracy after each round, until clients are clustered.
    """

    accuracies: tuple[float, ...] = ()


@checked()
@dataclass(frozen=True, kw_only=True)
class FLUX(Algorithm[FLUXState]):
    """FLUX (Fenoglio et al. 2025): clients are clustered once by descriptors of their data.

    The root stores the model that computes descriptors, and each cluster caches its members'
    descriptors.

    Parameters
    ----------
    th_round
        Clients are clustered as soon as a round has raised the accuracy by less than this; for a
        task with another main metric, in the unit of that metric.
    earliest, latest
        Rounds after which clients are clustered at the earliest and at the latest.
    components
        Number C of components of the latent. None: the number of labels.
    per_label
        Whether the data of each label is described separately as well.
    eps_scaling
        Ratio of ε to the distance at the knee.
    clusters
        Number of clusters, if it is known: k-means replaces the search for the knee (FLUX-prior).
    directions
        Seed of the components' directions. None: the run's seed.
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
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    @property
    def has_fixed_round(self) -> bool:
        """Return whether the round of clustering is fixed, independent of training accuracies."""
        return self.earliest == self.latest

    @property
    def discloses(self) -> tuple[str, ...]:
        """Kinds of data that the server must see of each client.

        It is empty if the server also needs training accuracies, for which there is no name.
        """
        return ("descriptors",) if self.has_fixed_round else ()

    def asks(self, clients: int, fraction: float) -> str:
        """Return :attr:`asks_for`, without training accuracies if the clustering round is fixed."""
        return "descriptors of their data" if self.has_fixed_round else self.asks_for

    def too_short(self, rounds: int) -> str:
        """Return a warning if the run ends before clients are clustered."""
        return never_clusters(self, self.earliest + 1, rounds, "earliest")

    def check_data(self, spec: DataSpec) -> None:
        """Check that examples have labels, if the data of each label is described separately."""
        self._query((), torch.empty(0), seed=0).shape(spec)

    def init(self, params: Tensor, clients: Clients) -> FLUXState:
        """Put all clients in one cluster."""
        return FLUXState(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: FLUXState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FLUXState, RoundLog]:
        """Cluster all clients, if it is time; then run one round of FedAvg in every cluster."""
        before = state.tree
        events = list[Event]()
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
        """Add newcomers at the root; they join a cluster when they are first sampled."""
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Assign newcomers to the cluster with the nearest mean, by descriptors without labels."""
        if not (leaves := _clusters(tree)):
            return assign_to_root(ids)
        count = int(tree.nodes[0].criteria["components"])
        model = tree.nodes[0].params
        seed = self._draw(this_round)
        found = clients.ask(DescriptorQuery(ids, model, seed, count, per_label=False))
        members = {leaf.id: _descriptors(leaf, count) for leaf in leaves}
        space = DescriptorSpace.of(torch.cat([*members.values()]))
        return assign_to_nearest_descriptor(tree, require_descriptors(ids, found), members, space)

    def _draw(self, this_round: Round) -> int:
        """Return the seed of the components' directions."""
        return this_round.seed if self.directions is None else self.directions

    def _is_time(self, state: FLUXState, this_round: Round) -> bool:
        """Return whether clients are clustered before this round."""
        if (rounds := this_round.number - 1) < self.earliest:
            return False
        return rounds >= self.latest or bool((np.diff(state.accuracies) < self.th_round).any())

    def _accuracy(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients
    ) -> list[float]:
        """Return the mean accuracy on the cohort's training data, weighted by examples.

        The list has one number, or none if no client reported an accuracy.
        """
        found = clients.evaluate(cohort, tree.nodes[0].params[None], [0] * len(cohort), "train")
        has_score = ~found.merit.isnan()
        merits = found.merit[has_score]
        examples = found.examples[has_score]
        return [float(merits @ examples.double() / examples.sum())] if len(merits) else []

    def _clustered(
        self, tree: ParameterTree, clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Cluster all clients that send a descriptor; if too few do, postpone the clustering."""
        root = tree.nodes[0]
        everybody = sorted(clients.ids)
        ids, rows = self._described(everybody, root, clients, this_round)
        ids, rows, odd = self._plausible(ids, rows, rows)
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

    def _placed(
        self, tree: ParameterTree, waiting: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, list[Event]]:
        """Let waiting clients that now send a descriptor join the cluster of the nearest mean."""
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
            tree = tree.with_members(
                leaves[nearest].id, [client], row.flatten()[None].to(members[0])
            )
        return tree, odd

    def _plausible(
        self, ids: Sequence[int], rows: Tensor, measure: Tensor
    ) -> tuple[list[int], Tensor, list[Event]]:
        """Return the clients and descriptors without outliers, and an event about the outliers.

        Outliers have numbers far larger than the descriptors in ``measure``. One descriptor of huge
        numbers would stretch the space of all descriptors, so that the others would lie close
        together.
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
                f"a descriptor of numbers up to {size:.3g}, more than {FAR:g} times the median "
                f"client's, {usual:.3g}"
            )
            for client, size, far in zip(ids, sizes.tolist(), is_far, strict=True)
            if far
        }
        return [ids[place] for place in kept], rows[kept], [LeftOut(0, "descriptors", why)]

    def _described(
        self, ids: Sequence[int], root: Node, clients: Clients, this_round: Round
    ) -> tuple[list[int], Tensor]:
        """Return the clients that send their descriptors, and the descriptors ``[m, 2 + B, C]``."""
        found = clients.ask(self._query(ids, root.params, self._draw(this_round)))
        came = has_replied(found)
        replied = [client for client, has_come in zip(ids, came.tolist(), strict=True) if has_come]
        return replied, found[came]

    def _query(self, ids: Sequence[int], model: Tensor, seed: int) -> DescriptorQuery:
        return DescriptorQuery(ids, model, seed, self.components or 0, per_label=self.per_label)


def _clusters(tree: ParameterTree) -> list[Node]:
    """Return the clusters that have members."""
    return [leaf for leaf in tree.leaves if leaf.id and leaf.members]


def _descriptors(cluster: Node, components: int) -> Tensor:
    """Return the descriptors of a cluster's members, ``[k, 2 + B, C]``."""
    assert cluster.cached is not None  # every cluster with members has cached descriptors
    return cluster.cached.view(len(cluster.members), -1, components)


def without_labels(
    tree: ParameterTree, ids: Sequence[int], newcomers: Clients, members: Clients, seed: int
) -> list[Assignment]:
    """Assign newcomers to the leaf whose members' data is most similar to theirs.

    Similarity is that of descriptors by the root's model, without statistics of labels, so that the
    naming of labels does not matter. Members are queried for their descriptors.

    Raises
    ------
    UpdateError
        If a newcomer does not reply, or if no member does.
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
            "no member of the run describes its data, so no newcomer can be assigned; assign by "
            "labels"
        )
    found = newcomers.ask(DescriptorQuery(ids, model, seed, per_label=False))
    space = DescriptorSpace.of(torch.cat([*rows.values()]))
    return assign_to_nearest_descriptor(tree, require_descriptors(ids, found), rows, space)
