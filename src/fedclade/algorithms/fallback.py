"""Falling back on a more general model: the root's goes on beside the clusters', and validation data chooses.

A client can switch between the models on its path from the root, of which the root's is that of
plain federated learning (CFL, section V-C). But once the root is split nobody trains its model any
more, and soon it is far behind. So here it goes on, and a client that is no better off in its
cluster is served with it.

Clients choose together first (:mod:`fedclade.algorithms.fallback`): all of them have the root's
model or all their leaves', whichever is better on the examples of all; then the members of each
node, and at last each client by itself, may depart from that (``benchmarks/fallback.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from fedclade.core import BESIDE, OWN, Clients, Evaluation, ParameterTree, Round, mean

# Which of several models each client is served with, by validation data.
#
# A client's few validation examples tell little: of 60 examples, two models that are right about 92
# of 100 differ by up to 5 points for no reason. So clients choose together first, then in groups,
# and at last each by itself. Who comes later departs from what is chosen for more general models if
# these are better by a standard error of the difference, for others by two, since what more clients
# have trained is more to be trusted.

UP = 1.0
DOWN = 2.0
"""By how many standard errors more general models, or others, must be better than what is served."""

Served = Mapping[int, int]
"""The model of each client, by a number: the greater, the more special."""


@dataclass(frozen=True)
class Scores:
    """How clients fare with several models: those that answered, with a score that is a number."""

    merits: Mapping[tuple[int, int], float]  # by client and model
    examples: Mapping[int, float]  # by client
    are_shares: bool  # of examples, or something like it

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], answers: Sequence[Evaluation]) -> Scores:
        """Return the scores of clients with models, in the order of the answers, which are one behind the other."""
        found = Evaluation.concat(answers)
        merits = dict(zip(pairs, found.merit.tolist(), strict=True))
        unclear = {client for (client, _), merit in merits.items() if not isfinite(merit)}
        merits = {pair: merit for pair, merit in merits.items() if pair[0] not in unclear}
        examples = {
            c: n
            for c, n in zip(found.ids, found.examples.tolist(), strict=True)
            if c not in unclear
        }
        return cls(
            merits,
            examples,
            found.higher_is_better and all(0 <= merit <= 1 for merit in merits.values()),
        )

    def total(self, way: Served) -> float:
        """Return the sum of the scores over all examples of some clients if they are served like this."""
        return sum(
            self.examples[c] * self.merits[c, model]
            for c, model in way.items()
            if c in self.examples
        )

    def error(self, way: Served, other: Served) -> float:
        """Return the standard error of the difference of two totals, at most.

        Examples about which two models differ are such that one of them gets wrong. Of scores that
        are no shares, the differences themselves show how much is chance; so one client alone never
        departs.
        """
        variance = 0.0
        for client in (c for c in way if c in self.examples and way[c] != other[c]):
            n = self.examples[client]
            a = self.merits[client, way[client]]
            b = self.merits[client, other[client]]
            variance += n * (2 - a - b) if self.are_shares else (n * (a - b)) ** 2
        return variance**0.5


def departed(served: Served, groups: Sequence[Sequence[Served]], scores: Scores) -> dict[int, int]:
    """Return what clients are served with after one group after the other has looked at its ways.

    Each of a group's ways names the models of the same clients; of equals the first is taken.
    """
    served = dict(served)
    for ways in groups:
        best = max(ways, key=scores.total)
        now = {client: served[client] for client in best}
        errors = UP if all(best[client] <= now[client] for client in best) else DOWN
        if scores.total(best) - scores.total(now) > errors * scores.error(best, now):
            served |= best
    return served


# Models of the clients' own beside the clusters': each fine-tunes its cluster's, and keeps it where
# that is better.
#
# As in :mod:`~fedclade.algorithms.finetune`, copies are made anew in every round that is evaluated,
# by a round of local training, and nothing travels for them. Where a model for all goes on beside
# the clusters', it is fine-tuned as well. What clients are served with, validation data says: what
# does best on the examples of all; then each cluster, and at last each client, may depart from that
# (:mod:`~fedclade.algorithms.fallback`).

ROOT = 0
LEAF = -1
"""Of a client's path: the model for all, and its cluster's."""


def keep_better(
    tree: ParameterTree, starts: Sequence[int], clients: Clients, this_round: Round
) -> tuple[int, ...]:
    """Let all clients fine-tune models on their paths; return who is to be served with a model of its own.

    Parameters
    ----------
    tree
        With the models.
    starts
        Which models on a client's path are fine-tuned, the most general first: ``ROOT``, ``LEAF``.
    clients, this_round
        All of them, and the round.
    """
    at_home = replace(this_round, purpose="finetune", communicates="nothing")
    nodes = {client: tree.path(client) for client in clients.ids}
    models, rows = tree.models(
        [nodes[client][start].id for start in starts for client in clients.ids], served=True
    )
    row_of = dict(
        zip([(client, start) for start in starts for client in clients.ids], rows, strict=True)
    )

    def tuned(ids: Sequence[int], start: int) -> tuple[int, ...]:
        return clients.train(
            ids, models, [row_of[client, start] for client in ids], at_home, own=True
        ).ids

    answers = [
        clients.evaluate(clients.ids, models, [row_of[c, k] for c in clients.ids], "validation")
        for k in starts
    ]
    for start in starts:
        mine = tuned(clients.ids, start)
        answers.append(clients.evaluate(mine, models, [OWN] * len(mine), "validation"))
    ids = sorted(set[int].intersection(*(set(answer.ids) for answer in answers)))
    if not ids:
        return ()
    scores = Scores.of([(c, k) for k, answer in enumerate(answers) for c in answer.ids], answers)
    members: dict[int, list[int]] = defaultdict(list)
    for client in ids:
        members[nodes[client][LEAF].id].append(client)
    numbers = range(len(answers))
    groups = [*members.values(), *([client] for client in ids)]
    ways = [[dict.fromkeys(group, k) for k in numbers] for group in groups]
    found = departed(max((dict.fromkeys(ids, k) for k in numbers), key=scores.total), ways, scores)
    chosen = {client: starts[k - len(starts)] for client, k in found.items() if k >= len(starts)}
    for start in starts[:-1]:  # what is tuned last is what they hold
        if again := [client for client in chosen if chosen[client] == start]:
            tuned(again, start)
    return tuple(sorted(chosen))


def train_beside(
    tree: ParameterTree,
    cohort: Sequence[int],
    clients: Clients,
    this_round: Round,
    *,
    weighted: bool = True,
) -> Tensor:
    """Return the root's model ``[S]`` after the cohort has trained it too, as plain federated learning does.

    It costs as much as training the clusters' models. Clients draw what they draw there: where
    everybody trains in every round, the model is that of a FedAvg run of the same seed to the last
    bit. A cohort was drawn by cluster, from small ones more than their share; so there each
    cluster's mean counts with all of its members.
    """
    root = tree.nodes[0]
    ids = sorted(cohort)
    everybody = ids == list(root.members)
    cluster_of = {client: 0 if everybody else tree.leaf_of[client] for client in root.members}
    row_of = {
        cluster: row
        for row, cluster in enumerate(dict.fromkeys(cluster_of[client] for client in ids))
    }
    models = root.model.repeat(len(row_of), 1)
    rows = [row_of[cluster_of[client]] for client in ids]
    updates = clients.train(ids, models, rows, replace(this_round, purpose=BESIDE))
    if len(updates.ids) < this_round.min_clients:
        return root.model
    shares = list[float]()
    means = list[Tensor]()
    for cluster in row_of:
        mine = updates.select([client for client in ids if cluster_of[client] == cluster])
        if mine.ids:
            members = [client for client, its in cluster_of.items() if its == cluster]
            shares.append(
                float(sum(clients.sizes[client] if weighted else 1 for client in members))
            )
            means.append(mean(mine, weighted=weighted))
    moves = [share / sum(shares) * moved for share, moved in zip(shares, means, strict=True)]
    return root.model + torch.stack(moves).sum(0) if moves else root.model


def best_on_validation(tree: ParameterTree, clients: Clients) -> dict[int, int]:
    """Return for each client the node on its path that validation data speaks for, as told at the top of this file.

    Of equals it is the deepest, but the root for all. Who does not answer goes with the others in
    its cluster.
    """
    paths = {client: [node.id for node in tree.path(client)] for client in clients.ids}
    root = dict.fromkeys(paths, 0)
    leaves = {client: path[-1] for client, path in paths.items()}
    pairs = [(client, node) for client, path in paths.items() for node in path]
    models, rows = tree.models([node for _, node in pairs], served=True)
    found = clients.evaluate([client for client, _ in pairs], models, rows, "validation")
    answered = set(found.ids)
    scores = Scores.of([pair for pair in pairs if pair[0] in answered], [found])
    of_nodes = [
        ([c for c in node.members if c in paths], tree.above(node.id)) for node in tree.nodes[1:]
    ]
    of_clients = [([client], tree.path(client)) for client in paths]
    ways = [
        [
            {c: leaves[c] for c in group},
            *(dict.fromkeys(group, node.id) for node in reversed(above)),
        ]
        for group, above in [*of_nodes, *of_clients]
    ]
    return departed(max(root, leaves, key=scores.total), ways, scores)
