"""A clustering method with a client answer of its own: k-means on the clients' label histograms.

Everything about the new answer is in this file: what a client computes, its name in a client's
policy, which answers are valid, and what they reveal. It runs in a simulation, on Ray actors, and
over Flower, where clients answer if their policy names the kind.

python examples/own_query_method.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fedclade
from fedclade import (
    Clients,
    DataSpec,
    LocalData,
    LocalStore,
    ParameterTree,
    Requires,
    Round,
    RoundLog,
    RoundPlan,
    State,
)


@dataclass(frozen=True, eq=False)
class LabelHistogramQuery(fedclade.RowQuery):
    """Query for the share of each label in a client's training data, float32 ``[n, C]``."""

    kind = "label_histograms"
    mechanism = "none"  # no noise: clients with differential privacy refuse
    discloses = "label_histograms"
    reveals = "shares of their labels"

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        """Return C."""
        if spec.labels is None:
            raise fedclade.ConfigError(f"examples of a {spec.task} task have no label to count")
        return (spec.labels,)

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Return a client's histogram."""
        counts = torch.bincount(data.targets.long(), minlength=data.spec.labels or 0)
        return counts / counts.sum()

    def is_valid(self, row: Tensor) -> bool:
        """Return whether a row is a histogram."""
        return bool((row >= 0).all()) and abs(float(row.sum()) - 1) < 1e-3


@dataclass(frozen=True, kw_only=True)
class HistogramKMeans(fedclade.Algorithm):
    """Clusters are found once, before training, by k-means on the clients' label histograms."""

    requires = Requires(
        updates=False,  # a step works with sums of updates
        signatures=False,  # a step compares no updates
        reports="shares of their labels",
        disclosures=("label_histograms",),  # what of each client's data the server must see
        clusters_from="n_clusters",
    )

    n_clusters: int = 2

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Cluster all clients, if that is still to be done; then train every cluster."""
        tree = state.tree
        if len(tree.nodes) == 1:
            tree = self.cluster(tree, clients, this_round)
        if len(tree.nodes) > 1:  # clients without a histogram are the root's, and wait
            cohort = [client for client in cohort if tree.leaf_of[client] != 0]
        parts = fedclade.train_clusters(State(tree), cohort, clients, this_round) if cohort else []
        return State(fedclade.move_clusters(tree, parts)), fedclade.log_of(parts)

    def cluster(self, tree: ParameterTree, clients: Clients, this_round: Round) -> ParameterTree:
        """Return a tree with a leaf for each cluster of clients that send their histogram."""
        everyone = sorted(clients.ids)
        rows = clients.ask(LabelHistogramQuery(everyone))
        has_replied = fedclade.has_replied(rows)
        ids = [client for client, came in zip(everyone, has_replied.tolist(), strict=True) if came]
        if len(ids) < self.n_clusters:
            return tree
        points = rows[has_replied].double().numpy()
        labels = fedclade.k_means(points, self.n_clusters, this_round.generator("histograms"))
        clusters: list[list[int]] = [[] for _ in range(self.n_clusters)]
        for client, label in zip(ids, labels.tolist(), strict=True):
            clusters[label].append(client)
        found = [cluster for cluster in clusters if cluster]
        waiting = sorted(set(everyone) - set(ids))
        return ParameterTree.star(found, tree.nodes[0].params, unassigned=waiting)


if __name__ == "__main__":
    data = fedclade.load_federation("digits", clients=20, partition="pathological")
    for method in (fedclade.FedAvg(), HistogramKMeans(n_clusters=4)):
        run = fedclade.simulate(method, "mlp", data, rounds=15)
        clusters, accuracy = run.summary["clusters"]["found"], run.summary["accuracy"]["mean"]
        print(f"{type(method).__name__:16} {clusters} clusters, accuracy {100 * accuracy:.1f} %")
