"""Private choice: a clustered method in which the server never sees an update of a single client.

The method is fedclade's own. The server queries only sums over all clients, and from each client
one choice of a cluster. With ``privacy.model = "central"`` noise is added to the sums, and the
choices are randomized responses, for differential privacy; otherwise the same queries have exact
replies.

1. For some rounds all clients train one model, so that updates differ in the directions in which
   the clusters disagree.
2. In the next round all clients train once more from that model, and store the update. A client's u
   is a random projection (sketch) of its update to R numbers, scaled to length 1. The sum of u uᵀ
   over clients reveals the k directions in which their updates differ (k clusters span no more).
3. Within the space of these directions, the sphere is divided into cells around random points. Sums
   over each cell give the number of clients in the cell, and their mean direction. Weighted k-means
   over the cells finds k centres; the cells represent all clients, like a coreset (Har-Peled and
   Mazumdar 2004). k-means is run from many starts, which costs no privacy, since it uses only the
   sums.
4. Each client computes, without any noise, which centre is nearest to its own direction, and
   reports the index of this centre: this is the client's cluster.
5. Every cluster continues separately from the joint model.

With differential privacy, a centre is as accurate as a mean over hundreds of clients. A choice is
wrong only if the randomized response changes it, with a probability of (k − 1)/(e^ε + k − 1). A
method in which each client sends its direction with noise would do worse at the same ε
(``docs/privacy-results.md``).

Clients that report no choice become members of the root only and are in no cluster, like newcomers:
they receive no further queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedclade.algorithms.base import Algorithm, RoundLog, State, never_clusters
from fedclade.algorithms.cluster_update import log_of, move_clusters, train_clusters
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.clustering import draw_cell_points, find_cell_centres, find_directions
from fedclade.core import (
    Answer,
    Cells,
    Choice,
    Clients,
    ClientWork,
    ClusterSplit,
    ConfigError,
    Event,
    Joined,
    Moments,
    ParameterTree,
    Postponed,
    Question,
    Round,
    RoundPlan,
    Updates,
    checked,
    require,
    rng,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PrivateChoiceState(State):
    """State of the method :class:`PrivateChoice` between rounds.

    Parameters
    ----------
    chosen
        Whether the round in which clients choose their clusters is over.
    """

    chosen: bool = False


@checked()
@dataclass(frozen=True, kw_only=True)
class PrivateChoice(Algorithm[PrivateChoiceState]):
    """Method that finds clusters from sums over clients; each client then chooses its cluster.

    With central differential privacy the sums carry noise, and a choice is a randomized response.

    Parameters
    ----------
    clusters
        Number k of clusters, at least 2.
    rounds_before
        Number of rounds of federated learning before clients choose.
    sketch
        R, the number of entries of an update's sketch (its random projection). Larger sketches
        separate clients better, but carry more noise in total.
    cells
        B, the number of cells into which the space of updates' directions is divided.
    """

    state_type = PrivateChoiceState
    requires = Requires(
        updates=False,
        signatures=False,
        clusters_from="clusters",
        simulation="queries for sums over clients are not available over a network yet",
    )

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

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check that ``sketch`` is not larger than the model, and that replies fit into memory.

        The result contains a warning if the run ends before clients choose their clusters.
        """
        warnings = super().check(run)
        if run.parameters is not None:
            self._check_sketch(run.parameters)
        if run.replies is not None and run.memory is not None:
            self._check_replies(run.replies, run.memory)
        return (*warnings, *never_clusters(self, self.rounds_before + 1, run, "rounds_before"))

    def _check_sketch(self, parameters: int) -> None:
        """Check that the sketch has no more entries than the model has parameters.

        The default size is allowed for every model.
        """
        most = max(parameters, type(self).sketch)
        rule = f"at most {most} for a model of {parameters} parameters"
        require(("algorithm.sketch", self.sketch, self.sketch <= most, rule))

    def _check_replies(self, clients: int, memory: int) -> None:
        """Check that the replies of ``clients`` clients fit into ``memory`` bytes."""
        # All replies are in memory together; the 5 is for the arrays with which one reply is
        # computed.
        for name, numbers in (
            ("sketch", self.sketch * (self.sketch + 1) // 2),
            ("cells", self.cells * (1 + self.clusters)),
        ):
            needed = 8 * numbers * (clients + 5)
            if needed > memory:
                raise ConfigError(
                    f"algorithm.{name} = {getattr(self, name)} needs {needed / 1e9:.1f} GB for the "
                    f"replies of {clients} clients, but a round may use {memory / 1e9:.1f} GB; "
                    f"set a smaller algorithm.{name}, or a larger --memory"
                )

    def init(self, params: Tensor, clients: Clients) -> PrivateChoiceState:
        """Return the state before round 1: all clients are in one cluster."""
        return PrivateChoiceState(ParameterTree.root_only(clients.ids, params))

    def sample_cohort(
        self, state: PrivateChoiceState, fraction: float, draw: np.random.Generator
    ) -> tuple[int, ...]:
        """Sample the clients of a round from every cluster; clients in no cluster are left out."""
        inside = {client for leaf in state.tree.leaves for client in leaf.members}
        return tuple(
            client for client in super().sample_cohort(state, fraction, draw) if client in inside
        )

    def step(
        self,
        state: PrivateChoiceState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: RoundPlan,
    ) -> tuple[PrivateChoiceState, RoundLog]:
        """Run one round: federated averaging in every cluster, or the choice of clusters.

        Clients choose their clusters in the round after the first ``rounds_before`` rounds. In that
        round the server first queries the sums from which it computes the clusters' centres. If too
        few clients reply in that round, the choice is postponed to the next round.
        """
        if this_round.number <= self.rounds_before or state.chosen:
            parts = train_clusters(state, cohort, clients, this_round)
            return replace(state, tree=move_clusters(state.tree, parts)), log_of(parts)
        root = state.tree.nodes[0]
        seed = this_round.seed
        k = self.clusters
        number = this_round.number

        def asked(question: Question) -> Updates:
            models = root.params[None]
            rows = [0] * len(clients.ids)
            work = ClientWork(reply=Answer(question))
            return clients.train(clients.ids, models, rows, this_round, work, require_all=True)

        found = asked(Moments(seed, self.sketch))
        if found.sums is None or len(found.ids) < k:
            return state, RoundLog(
                {}, {}, events=(Postponed(0, len(found.ids), k),), phase="cluster"
            )
        basis = find_directions(found.sums.groups[0], self.sketch, k)
        points = draw_cell_points(self.cells, k, rng.generator(seed, "cells", number))
        cells = asked(Cells(seed, self.sketch, basis, points)).sums
        if cells is None:
            return state, RoundLog({}, {}, events=(Postponed(0, 0, k),), phase="cluster")
        centres = find_cell_centres(
            cells.groups[0], self.cells, k, cells.noise, this_round.generator("centres")
        )
        told = asked(Choice(seed, self.sketch, basis, centres))
        tree, event = _create_clusters(state.tree, told, k, number)
        return PrivateChoiceState(tree, chosen=True), RoundLog(
            {}, {}, events=(event,), phase="cluster"
        )

    def join(
        self, state: PrivateChoiceState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[PrivateChoiceState, list[Event]]:
        """Add newcomers as members of the root only, in no cluster, and report them as joined.

        They are evaluated with the joint model, and do not train.
        """
        return replace(state, tree=state.tree.with_newcomers(ids)), [Joined(0, tuple(ids))]


def _create_clusters(
    tree: ParameterTree, told: Updates, k: int, number: int
) -> tuple[ParameterTree, ClusterSplit]:
    """Create the clusters that clients have chosen.

    Parameters
    ----------
    tree
        The tree before, which consists of the root.
    told
        The clients' replies to the query for their choices.
    k
        Number of clusters.
    number
        Number of the round.

    Returns
    -------
    tuple
        The tree with a leaf for each cluster, the largest first, all with the root's model; and the
        event that reports the clusters.
    """
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
