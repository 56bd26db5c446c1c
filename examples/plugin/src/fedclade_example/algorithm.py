"""An algorithm: a frozen dataclass whose fields are keys of ``[algorithm]``, and its record.

The entry point names the record, ``METHOD``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.nn.functional import normalize

import fedclade
from fedclade import Clients, RoundLog, RoundPlan, State
from fedclade.algorithms import Method, Paper


@dataclass(frozen=True, kw_only=True)
class UpdateKMeans(fedclade.FedAvg):
    """Federated averaging, and in round r k-means on the directions of all updates."""

    r: int = 1
    n_clusters: int = 2

    # n_clusters is the number of clusters: a config with fewer clients is refused.
    requires = replace(fedclade.FedAvg.requires, clusters_from="n_clusters")

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Train every cluster. In round r, train all clients and split them into clusters."""
        if this_round.number != self.r:
            return super().step(state, cohort, clients, this_round)
        parts = fedclade.train_clusters(state, clients.ids, clients, this_round)
        tree, updates = fedclade.move_clusters(state.tree, parts), parts[0].updates
        directions = normalize(updates.signatures.double()).cpu().numpy()
        labels = fedclade.k_means(directions, self.n_clusters, this_round.generator("k-means"))
        groups = [
            [c for c, at in zip(updates.ids, labels, strict=True) if at == label]
            for label in set(labels)
        ]
        # A client that joins later trains the model that the tree stores as params, and its update
        # is compared with these updates, which were computed at the same model.
        cached = [updates.signatures_of(members) for members in groups]
        start = state.tree.nodes[0].params
        tree = tree.split(0, groups, params=start, cached=cached, round_number=self.r, criteria={})
        return State(tree), fedclade.log_of(parts)


METHOD = Method(
    name="update_kmeans",
    algorithm=UpdateKMeans,
    papers=(Paper(("Author", "Coauthor"), 2026, "k-means on updates"),),  # for `fedclade ls`
    citations=("@misc{updatekmeans, title = {k-means on updates}}",),  # for `fedclade cite`
)
