"""Fallback on more general models, such as the root's, chosen by validation data.

A client can use any model on its path from the root, and the root's model is that of plain
federated learning (CFL, section V-C). But once the root is split, no client trains its model any
more, and it soon lags far behind. With a fallback the cohort continues to train it, and a client
that is no better off in its cluster is evaluated with it.

Clients decide together first: all of them use the root's model or all their leaves' models,
whichever is better on the examples of all. Then the members of each node, and finally each client
by itself, may deviate from that (``benchmarks/fallback.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from fedclade.core import BESIDE, OWN, Clients, Evaluation, ParameterTree, Round, mean

# Choice between several models for each client, by validation data.
#
# A client's few validation examples are weak evidence: on 60 examples, two models with an accuracy
# of about 92 % differ by up to 5 points by chance. So clients choose together first, then in
# groups, and finally each by itself. A later choice replaces an earlier one by more general models
# if these are better by one standard error of the difference, and by other models if they are
# better by two: a model that more clients have trained is more trustworthy.

UP = 1.0
"""Standard errors by which more general models must be better than the current choice."""
DOWN = 2.0
"""Standard errors by which other models must be better than the current choice."""

Served = Mapping[int, int]
"""The model chosen for each client, by a number. Larger numbers are more specialised models."""


@dataclass(frozen=True)
class Scores:
    """Validation scores of clients with several models.

    It contains the clients that replied, without those for which some score is not a finite number.
    """

    merits: Mapping[tuple[int, int], float]  # score, by client and model
    examples: Mapping[int, float]  # number of validation examples, by client
    are_shares: bool  # whether scores lie in [0, 1] and higher is better, like an accuracy

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], answers: Sequence[Evaluation]) -> Scores:
        """Return the scores of pairs of client and model.

        Parameters
        ----------
        pairs
            Client and model of each score, in the order of the concatenated ``answers``.
        answers
            Evaluations by the clients.
        """
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
        """Return the sum of scores over all validation examples, with the models of ``way``."""
        return sum(
            self.examples[c] * self.merits[c, model]
            for c, model in way.items()
            if c in self.examples
        )

    def error(self, way: Served, other: Served) -> float:
        """Return an upper bound on the standard error of the difference of two totals.

        If scores are shares, two models of a client with scores a and b can differ only on examples
        that at least one of them gets wrong, at most n (2 − a − b) of n. For other scores the
        clients' differences themselves estimate the variance, so a single client by itself never
        deviates.
        """
        variance = 0.0
        for client in (c for c in way if c in self.examples and way[c] != other[c]):
            n = self.examples[client]
            a = self.merits[client, way[client]]
            b = self.merits[client, other[client]]
            variance += n * (2 - a - b) if self.are_shares else (n * (a - b)) ** 2
        return variance**0.5


def departed(served: Served, groups: Sequence[Sequence[Served]], scores: Scores) -> dict[int, int]:
    """Return the choice of models after each group in turn has compared its alternatives.

    Parameters
    ----------
    served
        The choice so far, with a model for each client.
    groups
        Alternatives of each group. All alternatives of a group choose models for the same clients;
        of equally good ones the first counts.
    scores
        Validation scores of all clients with all these models.
    """
    served = dict(served)
    for ways in groups:
        best = max(ways, key=scores.total)
        now = {client: served[client] for client in best}
        errors = UP if all(best[client] <= now[client] for client in best) else DOWN
        if scores.total(best) - scores.total(now) > errors * scores.error(best, now):
            served |= best
    return served


# Fine-tuned copies as further alternatives: each client fine-tunes its cluster's model, and uses
# the copy if it is better.
#
# As in :class:`~fedclade.algorithms.FineTune`, copies are made again in every round that is
# evaluated, by a round of local training, and nothing is sent for them. If a global model is
# trained in addition to the clusters', it is fine-tuned as well. Validation data decides between
# them, first for all clients, then for each cluster, and finally for each client, as above.

ROOT = 0
"""Position of the global model on a client's path in the tree."""
LEAF = -1
"""Position of the cluster's model on a client's path in the tree."""


def keep_better(
    tree: ParameterTree, starts: Sequence[int], clients: Clients, this_round: Round
) -> tuple[int, ...]:
    """Let all clients fine-tune models on their paths; return the clients that use their copy.

    Parameters
    ----------
    tree
        The tree with the models.
    starts
        Positions on a client's path of the models to fine-tune, the most general first: ``ROOT``,
        ``LEAF``.
    clients
        All clients.
    this_round
        Round number, seed and local training.

    Returns
    -------
    tuple of int
        Ids of the clients for which a fine-tuned copy was chosen, in ascending order. Each of them
        stores that copy.
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
    # A client stores the copy that it made last, so it makes an earlier copy again.
    for start in starts[:-1]:
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
    """Return the root's model ``[S]`` after the cohort has trained it as well.

    This is training in addition to that of the clusters' models, at the same cost. Clients make the
    same random draws as there: if all clients train in every round, the model is bit-identical to
    that of a FedAvg run with the same seed. A smaller cohort was sampled by cluster and contains a
    more than proportional share of small clusters. The mean of each cluster is therefore weighted
    by all of its members.
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
    """Return for each client the node on its path that validation data favours.

    Of equally good nodes the deepest is chosen, but when all clients decide together, the root. A
    client that does not reply follows the others in its cluster.
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
