"""A clustering method with a query of its own: k-means on the clients' label histograms.

This file defines everything about the new query: its name in a client's policy, what a client
computes, which replies are valid, and what a reply reveals. The method runs in a simulation, on Ray
actors, and over Flower. Over Flower, a client replies only if its app has the class of the query
and its policy allows the query's name.

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
        """Return the shape of a reply: ``(C,)``, where C is the number of labels."""
        if spec.labels is None:
            raise fedclade.ConfigError(f"examples of a {spec.task} task have no label to count")
        return (spec.labels,)

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Return a client's histogram ``[C]``."""
        counts = torch.bincount(data.targets.long(), minlength=data.spec.labels or 0)
        return counts / counts.sum()

    def is_valid(self, row: Tensor) -> bool:
        """Return whether a row is a histogram: no negative share, and a sum of 1."""
        return bool((row >= 0).all()) and abs(float(row.sum()) - 1) < 1e-3


@dataclass(frozen=True, kw_only=True)
class HistogramKMeans(fedclade.Algorithm):
    """FedAvg in clusters that k-means on the clients' label histograms finds before training."""

    requires = Requires(
        updates=False,  # a step works with sums of updates
        signatures=False,  # a step compares no updates
        reports="shares of their labels",
        disclosures=("label_histograms",),  # facts about each client's data that the server gets
        clusters_from="n_clusters",
    )

    n_clusters: int = 2

    def init(self, params: Tensor, clients: Clients) -> State:
        """Put all clients in one cluster."""
        return State(ParameterTree.root_only(clients.ids, params))

    def step(
        self, state: State, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[State, RoundLog]:
        """Cluster the clients if they are not clustered yet; then train every cluster."""
        tree = state.tree
        if len(tree.nodes) == 1:
            tree = self.cluster(tree, clients, this_round)
        if len(tree.nodes) > 1:  # clients that sent no histogram stay in the root, and do not train
            cohort = [client for client in cohort if tree.leaf_of[client] != 0]
        parts = fedclade.train_clusters(State(tree), cohort, clients, this_round) if cohort else []
        return State(fedclade.move_clusters(tree, parts)), fedclade.log_of(parts)

    def cluster(self, tree: ParameterTree, clients: Clients, this_round: Round) -> ParameterTree:
        """Return a tree with a leaf for each cluster of the clients that sent a histogram.

        The tree is returned unchanged if there are fewer such clients than clusters.
        """
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
