"""Private choice: clusters that do not require the server to see any single update; fedclade's own.

The server queries only sums over all clients, which may carry noise, and one choice of each client,
which may be a randomized response. With ``privacy.model = "central"`` sums are noisy and choices
randomized; otherwise the same queries have exact replies.

1. For some rounds all clients train one model, so that updates differ in the directions in which
   the clusters disagree.
2. In the next round they train from it once more, and store the update. Its sketch to R numbers,
   scaled to length 1, is u. The sum of u uᵀ shows the k directions in which clients lie (k clusters
   span no more).
3. Within the space of these directions, the sphere is divided into cells around random points. Sums
   over each cell give the number of clients in it, and their mean direction. Weighted k-means over
   the cells finds k centres, as a coreset (Har-Peled and Mazumdar 2004) represents all points.
   Choosing the best of many starts costs no privacy, since it uses only the sums.
4. Each client finds the centre nearest to its own direction, without any noise, and reports its
   index: this is its cluster. So centres are as accurate as a mean over hundreds of clients, and a
   choice is wrong only by the randomized response, with a probability of (k − 1)/(e^ε + k − 1). One
   noisy direction of each client would do worse at the same ε (``docs/privacy-results.md``).
5. Every cluster continues separately from the joint model.

Clients that report no choice wait at the root, in no cluster, as newcomers do: they receive no
further queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog, State, never_clusters
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_clusters
from fedclade.clustering import draw_cell_points, find_cell_centres, find_directions
from fedclade.core import (
    Cells,
    Choice,
    Clients,
    ClusterSplit,
    ConfigError,
    Event,
    Joined,
    Moments,
    ParameterTree,
    Postponed,
    Question,
    Round,
    UpdateQuery,
    Updates,
    checked,
    require,
    rng,
)


@dataclass(frozen=True, eq=False)
class PrivateChoiceState(State):
    """State of private choice between rounds.

    Parameters
    ----------
    chosen
        Whether clients have chosen their clusters.
    """

    chosen: bool = False


@checked()
@dataclass(frozen=True, kw_only=True)
class PrivateChoice(Algorithm[PrivateChoiceState]):
    """Clusters found by sums over clients; each client chooses its own by randomized response.

    Parameters
    ----------
    clusters
        Number k of clusters, at least 2.
    rounds_before
        Number of rounds of federated learning before clients choose.
    sketch
        R, the number of entries of an update's sketch. Larger sketches separate clients better, but
        carry more noise in total.
    cells
        B, the number of cells.
    """

    state_type = PrivateChoiceState
    clusters_from = "clusters"
    simulated = "no questions about sums are put over a network yet"

    clusters: int = 2
    rounds_before: int = 3
    sketch: int = 64
    cells: int = 32

    def __post_init__(self) -> None:
        k = self.clusters
        require(
            ("algorithm.clusters", k, k >= 2, "at least 2"),
            ("algorithm.rounds_before", self.rounds_before, self.rounds_before >= 0, "at least 0"),
            ("algorithm.sketch", self.sketch, self.sketch >= k, f"at least clusters, {k}"),
            ("algorithm.cells", self.cells, self.cells >= k, f"at least clusters, {k}"),
        )

    def check_model(self, parameters: int, clients: int, memory: int) -> None:
        """Check that ``sketch`` is not larger than the model, and that replies fit into memory.

        The default of ``sketch`` is always allowed.
        """
        most = max(parameters, type(self).sketch)
        rule = f"at most {most} for a model of {parameters} parameters"
        require(("algorithm.sketch", self.sketch, self.sketch <= most, rule))
        # The replies of all clients at once, and the numbers from which one client computes its.
        for name, numbers in (
            ("sketch", self.sketch * (self.sketch + 1) // 2),
            ("cells", self.cells * (1 + self.clusters)),
        ):
            needed = 8 * numbers * (clients + 5)
            if needed > memory:
                raise ConfigError(
                    f"algorithm.{name} = {getattr(self, name)} needs {needed / 1e9:.1f} GB for the "
                    f"replies of {clients} clients, and a round may take {memory / 1e9:.1f} GB; "
                    f"set a smaller algorithm.{name}, or more memory"
                )

    @property
    def needs_updates(self) -> bool:
        """Return whether a step uses the whole updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Return whether a step uses signatures of updates."""
        return False

    def too_short(self, rounds: int) -> str:
        """Return a warning if the run ends before clients choose their clusters."""
        return never_clusters(self, self.rounds_before + 1, rounds, "rounds_before")

    def init(self, params: Tensor, clients: Clients) -> PrivateChoiceState:
        """Put all clients in one cluster."""
        return PrivateChoiceState(ParameterTree.root_only(clients.ids, params))

    def sample_cohort(
        self, state: PrivateChoiceState, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample clients from every cluster; clients that wait in no cluster are not sampled."""
        inside = {client for leaf in state.tree.leaves for client in leaf.members}
        return tuple(
            client for client in super().sample_cohort(state, fraction, draw) if client in inside
        )

    def step(
        self, state: PrivateChoiceState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[PrivateChoiceState, RoundLog]:
        """Run a round of federated learning in every cluster, or let clients choose clusters."""
        if this_round.number <= self.rounds_before or state.chosen:
            parts = train_clusters(state, cohort, clients, this_round)
            return replace(state, tree=move_clusters(state.tree, parts)), log_of(parts)
        root = state.tree.nodes[0]
        seed = this_round.seed
        k = self.clusters
        here = replace(this_round, require_all=True)

        def asked(question: Question) -> Updates:
            models = root.params[None]
            rows = [0] * len(clients.ids)
            return clients.ask(
                UpdateQuery(clients.ids, "train", models, rows, here, question=question)
            )

        found = asked(Moments(seed, self.sketch))
        if found.sums is None or len(found.ids) < k:
            return state, RoundLog(
                {}, {}, events=(Postponed(0, len(found.ids), k),), phase="cluster"
            )
        basis = find_directions(found.sums.groups[0], self.sketch, k)
        points = draw_cell_points(self.cells, k, rng.generator(seed, "cells", here.number))
        cells = asked(Cells(seed, self.sketch, basis, points)).sums
        if cells is None:
            return state, RoundLog({}, {}, events=(Postponed(0, 0, k),), phase="cluster")
        centres = find_cell_centres(
            cells.groups[0], self.cells, k, cells.noise, here.generator("centres")
        )
        told = asked(Choice(seed, self.sketch, basis, centres))
        tree, event = _chosen(state.tree, told, k, here.number)
        return PrivateChoiceState(tree, chosen=True), RoundLog(
            {}, {}, events=(event,), phase="cluster"
        )

    def join(
        self, state: PrivateChoiceState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[PrivateChoiceState, list[Event]]:
        """Add newcomers at the root, where they wait with the joint model."""
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]


def _chosen(
    tree: ParameterTree, told: Updates, k: int, number: int
) -> tuple[ParameterTree, ClusterSplit]:
    """Return the tree with a leaf for each cluster, the largest first, all with the joint model."""
    assert told.components is not None  # since the query was a Choice
    clusters: list[list[int]] = [[] for _ in range(k)]
    for client, choice in zip(told.ids, told.components.tolist(), strict=True):
        clusters[choice].append(client)
    clusters = sorted((sorted(each) for each in clusters), key=lambda each: (-len(each), each))
    inside = {client for cluster in clusters for client in cluster}
    root = tree.nodes[0]
    star = ParameterTree.star(clusters, root.params, [c for c in root.members if c not in inside])
    nodes = [
        replace(star.nodes[0], split_in=number),
        *(replace(leaf, born=number) for leaf in star.nodes[1:]),
    ]
    children = tuple(leaf.id for leaf in star.leaves)
    event = ClusterSplit(0, clusters=tuple(tuple(each) for each in clusters), children=children)
    return ParameterTree(tuple(nodes)), event
