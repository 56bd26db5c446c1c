"""An algorithm: a frozen dataclass whose fields are the keys of ``[algorithm]``, and its record, the entry point."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import normalize

import fedclade
from fedclade import Clients, Round, RoundLog, State
from fedclade.algorithms import Method, Paper


@dataclass(frozen=True, kw_only=True)
class UpdateKMeans(fedclade.FedAvg):
    """Federated averaging, and in round r k-means on the directions of all updates."""

    r: int = 1
    n_clusters: int = 2

    clusters_from: ClassVar[str] = "n_clusters"  # with fewer clients than that a config is refused

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[State, RoundLog]:
        """Train every cluster; in round r train all clients, and split them."""
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
        # newcomers are compared with them
        cached = [updates.signatures_of(members) for members in groups]
        tree = tree.split(
            0, groups, params=tree.nodes[0].params, cached=cached, round_number=self.r, criteria={}
        )
        return State(tree), fedclade.log_of(parts)


METHOD = Method(
    name="update_kmeans",
    algorithm=UpdateKMeans,
    papers=(Paper(("Author", "Coauthor"), 2026, "k-means on updates"),),  # for `fedclade ls`
    citations=("@misc{updatekmeans, title = {k-means on updates}}",),  # for `fedclade cite`
)
