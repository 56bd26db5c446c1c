"""A clustering method of your own: FedAvg, and in one round k-means on the updates of all clients.

python examples/own_method.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

import fedclade
from fedclade import Clients, Event, ParameterTree, RoundLog, RoundPlan, State


@dataclass(frozen=True)
class Grouped(Event):
    """Event: clients were clustered by k-means."""

    kind = "k_means"
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateKMeans(fedclade.Algorithm):
    """FedAvg in each cluster, and in round r k-means on the directions of all updates."""

    r: int = 3
    n_clusters: int = 4

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Train every cluster. In round r, train all clients and split them into clusters."""
        everybody = this_round.number == self.r
        parts = fedclade.train_clusters(
            state, clients.ids if everybody else cohort, clients, this_round
        )
        tree = fedclade.move_clusters(state.tree, parts)
        if not everybody:
            return State(tree), fedclade.log_of(parts)
        updates = parts[0].updates
        directions = normalize(updates.signatures.double()).cpu().numpy()
        labels = fedclade.k_means(directions, self.n_clusters, this_round.generator("k-means"))
        clusters = [
            [c for c, at in zip(updates.ids, labels, strict=True) if at == label]
            for label in set(labels)
        ]
        # A client that joins later trains the model that the tree stores as params, and its update
        # is compared with these updates, which were computed at the same model.
        cached = [updates.signatures_of(members) for members in clusters]
        tree = tree.split(
            0,
            clusters,
            params=state.tree.nodes[0].params,
            cached=cached,
            round_number=self.r,
            criteria={},
        )
        return State(tree), fedclade.log_of(parts, [Grouped(0, tuple(map(len, clusters)))])


if __name__ == "__main__":
    federation = fedclade.load_federation(
        "digits", clients=20, shift="label_permutation", clusters=4
    )
    for algorithm in (
        fedclade.FedAvg(),
        UpdateKMeans(),
        fedclade.Oracle(federation.true_clusters or {}),
    ):
        run = fedclade.simulate(algorithm, "mlp", federation, rounds=15)
        found, accuracy = run.summary["clusters"]["found"], run.summary["accuracy"]["mean"]
        print(f"{type(algorithm).__name__:14} {found} clusters, accuracy {100 * accuracy:.1f} %")
