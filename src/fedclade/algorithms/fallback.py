"""Falling back on a more general model: the root's goes on beside the clusters', and validation data chooses.

A client can switch between the models on its path from the root, of which the root's is that of plain federated
learning (CFL, section V-C). But once the root is split nobody trains its model any more, and soon it is far behind. So
here it goes on, and a client that is no better off in its cluster is served with it.

A client's few validation examples tell little: of 60 examples, two models that are right about 92 of 100 differ by up
to 5 points for no reason. So clients choose together first. All of them have the root's model or all their leaves',
whichever is better on the examples of all; then the members of each node, and at last each client by itself, may
depart from that: for more general models if these are better by a standard error of the difference, for others by two,
since what more clients have trained is more to be trusted (``benchmarks/fallback.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from fedclade.core import BESIDE, Clients, ParameterTree, Round, mean

UP, DOWN = 1.0, 2.0
"""By how many standard errors more general models, or others, must be better than what is served."""

Served = Mapping[int, int]
"""The node whose model each client is served with."""


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
    scores = _Scores.of(tree, paths, clients)
    served = max(root, leaves, key=scores.total)
    of_nodes = [([c for c in node.members if c in paths], tree.above(node.id)) for node in tree.nodes[1:]]
    of_clients = [([client], tree.path(client)) for client in paths]
    for group, above in [*of_nodes, *of_clients]:
        ways = [{c: leaves[c] for c in group}, *(dict.fromkeys(group, node.id) for node in reversed(above))]
        best, now = max(ways, key=scores.total), {client: served[client] for client in group}
        errors = UP if all(best[client] <= now[client] for client in group) else DOWN
        if scores.total(best) - scores.total(now) > errors * scores.error(best, now):
            served = {**served, **best}
    return served


@dataclass(frozen=True)
class _Scores:
    """How clients fare with the models on their paths: those that answered, with a score that is a number."""

    merits: Mapping[tuple[int, int], float]  # by client and node
    examples: Mapping[int, float]  # by client
    are_shares: bool  # of examples, or something like it

    @classmethod
    def of(cls, tree: ParameterTree, paths: Mapping[int, Sequence[int]], clients: Clients) -> _Scores:
        """Ask all clients about all models on their paths; who answers does so for all of its models."""
        pairs = [(client, node) for client, path in paths.items() for node in path]
        models, rows = tree.models([node for _, node in pairs], served=True)
        found = clients.evaluate([client for client, _ in pairs], models, rows, "validation")
        answered = set(found.ids)
        merits = dict(zip([pair for pair in pairs if pair[0] in answered], found.merit.tolist(), strict=True))
        unclear = {client for (client, _), merit in merits.items() if not isfinite(merit)}
        merits = {pair: merit for pair, merit in merits.items() if pair[0] not in unclear}
        examples = {c: n for c, n in zip(found.ids, found.examples.tolist(), strict=True) if c not in unclear}
        return cls(merits, examples, found.higher_is_better and all(0 <= merit <= 1 for merit in merits.values()))

    def total(self, way: Served) -> float:
        """Return the sum of the scores over all examples of some clients if they are served like this."""
        return sum(self.examples[c] * self.merits[c, node] for c, node in way.items() if c in self.examples)

    def error(self, way: Served, other: Served) -> float:
        """Return the standard error of the difference of two totals, at most.

        Examples about which two models differ are such that one of them gets wrong. Of scores that are no shares, the
        differences themselves show how much is chance; so one client alone never departs.
        """
        variance = 0.0
        for client in (c for c in way if c in self.examples and way[c] != other[c]):
            n, a, b = self.examples[client], self.merits[client, way[client]], self.merits[client, other[client]]
            variance += n * (2 - a - b) if self.are_shares else (n * (a - b)) ** 2
        return variance**0.5
