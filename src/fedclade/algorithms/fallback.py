"""Falling back on a more general model: the root's goes on beside the clusters', and validation data chooses.

A client can switch between the models on its path from the root, of which the root's is that of plain federated
learning (CFL, section V-C). But once the root is split nobody trains its model any more, and soon it is far behind. So
here it goes on, and a client that is no better off in its cluster is served with it.

Clients choose together first (:mod:`fedclade.algorithms.served`): all of them have the root's model or all their
leaves', whichever is better on the examples of all; then the members of each node, and at last each client by itself,
may depart from that (``benchmarks/fallback.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedclade.algorithms.served import Scores, departed
from fedclade.core import BESIDE, Clients, ParameterTree, Round, mean


def train_beside(
    tree: ParameterTree, cohort: Sequence[int], clients: Clients, this_round: Round, *, weighted: bool = True
) -> Tensor:
    """Return the root's model ``[S]`` after the cohort has trained it too, as plain federated learning does.

    It costs as much as training the clusters' models. Clients draw what they draw there: where everybody trains in
    every round, the model is that of a FedAvg run of the same seed to the last bit. A cohort was drawn by cluster, from
    small ones more than their share; so there each cluster's mean counts with all of its members.
    """
    root, ids = tree.nodes[0], sorted(cohort)
    everybody = ids == list(root.members)
    cluster_of = {client: 0 if everybody else tree.leaf_of[client] for client in root.members}
    row_of = {cluster: row for row, cluster in enumerate(dict.fromkeys(cluster_of[client] for client in ids))}
    models, rows = root.model.repeat(len(row_of), 1), [row_of[cluster_of[client]] for client in ids]
    updates = clients.train(ids, models, rows, replace(this_round, purpose=BESIDE))
    if len(updates.ids) < this_round.min_clients:
        return root.model
    shares, means = list[float](), list[Tensor]()
    for cluster in row_of:
        mine = updates.select([client for client in ids if cluster_of[client] == cluster])
        if mine.ids:
            members = [client for client, its in cluster_of.items() if its == cluster]
            shares.append(float(sum(clients.sizes[client] if weighted else 1 for client in members)))
            means.append(mean(mine, weighted=weighted))
    moves = [share / sum(shares) * moved for share, moved in zip(shares, means, strict=True)]
    return root.model + torch.stack(moves).sum(0) if moves else root.model


def best_on_validation(tree: ParameterTree, clients: Clients) -> dict[int, int]:
    """Return for each client the node on its path that validation data speaks for, as told at the top of this file.

    Of equals it is the deepest, but the root for all. Who does not answer goes with the others in its cluster.
    """
    paths = {client: [node.id for node in tree.path(client)] for client in clients.ids}
    root, leaves = dict.fromkeys(paths, 0), {client: path[-1] for client, path in paths.items()}
    pairs = [(client, node) for client, path in paths.items() for node in path]
    models, rows = tree.models([node for _, node in pairs], served=True)
    found = clients.evaluate([client for client, _ in pairs], models, rows, "validation")
    answered = set(found.ids)
    scores = Scores.of([pair for pair in pairs if pair[0] in answered], [found])
    of_nodes = [([c for c in node.members if c in paths], tree.above(node.id)) for node in tree.nodes[1:]]
    of_clients = [([client], tree.path(client)) for client in paths]
    ways = [
        [{c: leaves[c] for c in group}, *(dict.fromkeys(group, node.id) for node in reversed(above))]
        for group, above in [*of_nodes, *of_clients]
    ]
    return departed(max(root, leaves, key=scores.total), ways, scores)
