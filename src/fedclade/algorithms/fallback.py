"""Fallback: evaluate clients with a more general model if validation data favours it.

A client can use any model on its path in the tree of clusters, from the root's model, which is the
model of plain federated learning (CFL, section V-C), to its own cluster's. But once the root is
split, no client trains the root's model any more, and it soon lags far behind. With a fallback the
cohort continues to train the root's model, and clients can be evaluated with it if their clusters'
models are no better.

The choice is made in steps. First all clients together use their clusters' models, unless the
root's model is better on the validation examples of all clients by more than one standard error.
Then the members of each node, and finally each single client, may deviate from that choice
(``benchmarks/fallback.py``, ``studies/model_choice.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, isfinite

import torch

from fedclade.core import (
    BESIDE,
    OWN,
    Clients,
    ClientWork,
    Evaluation,
    FromStored,
    LocalModel,
    NoReply,
    Nothing,
    ParameterTree,
    Round,
    RoundPlan,
    mean,
)

# Choice between several models for each client, by validation data.
#
# A client's few validation examples are weak evidence: on 60 examples, two models with an accuracy
# of about 92 % differ by up to 5 points by chance. So clients choose together first, then in
# groups, and finally each by itself. The first choice starts from the clusters' models, which the
# clustering has found to fit, and replaces them if other models are better by one standard error of
# the difference. A later choice replaces an earlier one by more general models if these are better
# by one standard error, and by other models if they are better by two: a model that more clients
# have trained is more trustworthy.

TOGETHER = 1.0
"""Standard errors by which other models must be better if all clients leave their clusters' models.
"""
UP = 1.0
"""Standard errors by which more general models must be better than the current choice."""
DOWN = 2.0
"""Standard errors by which other models must be better than the current choice."""

Served = Mapping[int, int]
"""Choice of a model for each client: the model's number, by client.

A larger number stands for a more specialised model.
"""


@dataclass(frozen=True)
class Scores:
    """Validation scores of several models for each client.

    Only clients that replied are contained, and only if all of their scores are finite numbers.
    """

    merits: Mapping[tuple[int, int], float]  # score, by client and model
    examples: Mapping[int, float]  # number of validation examples, by client
    are_shares: bool  # whether scores lie in [0, 1] and higher is better, like an accuracy

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], answers: Sequence[Evaluation]) -> Scores:
        """Collect the scores from clients' replies to evaluation queries.

        Parameters
        ----------
        pairs
            Client and model number of each score, in the order of the concatenated ``answers``.
        answers
            Replies to one or more evaluation queries.
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
        """Return the total score of a choice of models.

        It is the sum of the scores of the chosen models, weighted by the clients' numbers of
        validation examples.

        Parameters
        ----------
        way
            The choice: the number of the chosen model, by client.
        """
        return sum(
            self.examples[c] * self.merits[c, model]
            for c, model in way.items()
            if c in self.examples
        )

    def error(self, way: Served, other: Served) -> float:
        """Return a standard error of the difference between the totals of two choices of models.

        The standard error is the root of a variance, to which each client adds a term. Let the
        client's two models have the scores a and b on its n validation examples.

        - If scores are shares of correct examples, such as accuracies, the term is n (2 − a − b).
          This is the largest possible number of examples on which the two models differ, since at
          least one of the models is wrong on each such example.
        - For other scores the term is the square of n (a − b). For a group of one client the
          difference of the totals is then exactly one standard error. As a change of models
          requires more than one standard error, a single client never changes its model.

        Parameters
        ----------
        way, other
            The two choices: the number of the chosen model, by client.
        """
        variance = 0.0
        for client in (c for c in way if c in self.examples and way[c] != other[c]):
            n = self.examples[client]
            a = self.merits[client, way[client]]
            b = self.merits[client, other[client]]
            variance += n * (2 - a - b) if self.are_shares else (n * (a - b)) ** 2
        return variance**0.5

    def paired_error(self, way: Served, other: Served) -> float:
        """Return the standard error of the paired difference between two choices over clients.

        Let d_c be the difference of client c's two scores, times the number of its validation
        examples. The standard error is √(Σ d_c²). For n clients whose d_c have the sample's standard
        deviation s, it differs from the usual √n·s, but the total difference Σ d_c exceeds the one
        if and only if it exceeds the other. For a single client, the difference is exactly one
        standard error.

        In contrast to :meth:`error`, this standard error is an estimate and no bound. It needs many
        clients, and is smaller if all clients gain about the same.

        Parameters
        ----------
        way, other
            The two choices: the number of the chosen model, by client.
        """
        variance = 0.0
        for client in (c for c in way if c in self.examples):
            difference = self.merits[client, way[client]] - self.merits[client, other[client]]
            variance += (self.examples[client] * difference) ** 2
        return variance**0.5


def choose_together(first: Served, others: Sequence[Served], scores: Scores) -> Served:
    """Return the common choice of all clients: the first, unless another is better by a margin.

    The margin is :data:`TOGETHER` standard errors of the difference. For more general models, which
    more clients have trained, it is the paired standard error (:meth:`Scores.paired_error`). For
    other models, such as fine-tuned copies, it is the bound, which is larger for accuracies
    (:meth:`Scores.error`). Among several choices that are better by the margin, the choice with the
    largest total score is returned. ``studies/model_choice.py`` compares this rule with others.

    Parameters
    ----------
    first
        The choice that needs no evidence: the number of the chosen model, by client.
    others
        The alternatives, each for the same clients. If several are equally good, the first is the
        best.
    scores
        Validation scores of the clients with all models in question.
    """
    better = list[Served]()
    for way in others:
        is_more_general = all(way[client] <= first[client] for client in way)
        if is_more_general:
            error = scores.paired_error(way, first)
        else:
            error = scores.error(way, first)
        gain = scores.total(way) - scores.total(first)
        # A single example can be exactly one standard error, which rounded scores may exceed.
        if gain > TOGETHER * error and not isclose(gain, TOGETHER * error, rel_tol=1e-4):
            better.append(way)
    return max(better, key=scores.total, default=first)


def departed(served: Served, groups: Sequence[Sequence[Served]], scores: Scores) -> dict[int, int]:
    """Let groups of clients deviate from a common choice of models, one group after the other.

    A group changes to its best alternative if this improves the group's total score by enough
    standard errors of the difference: more than :data:`UP` if all models of the alternative are at
    least as general as the present ones, otherwise more than :data:`DOWN`.

    Parameters
    ----------
    served
        The choice so far: the number of the chosen model, by client.
    groups
        Alternative choices for each group: one sequence for each group, with at least one choice
        for all clients of the group. If several are equally good, the first is the best.
    scores
        Validation scores of all clients with all models in question.

    Returns
    -------
    dict
        The final choice: the number of the chosen model, by client.
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
    """Let clients fine-tune copies of models, and store a copy if it is better on validation data.

    Parameters
    ----------
    tree
        The tree of clusters with their models.
    starts
        Models that each client fine-tunes, the most general first, as positions on the client's
        path in the tree: ``ROOT`` for the global model, ``LEAF`` for its cluster's model.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.

    Returns
    -------
    tuple of int
        Ids of the clients for which a fine-tuned copy was chosen, in ascending order. Each of these
        clients stores its copy and is to be evaluated with it.
    """
    tuning = replace(this_round, purpose="finetune")
    work = ClientWork(start=FromStored(latest=True), store=LocalModel(state=False), reply=NoReply())
    nodes = {client: tree.path(client) for client in clients.ids}
    models, rows = tree.models(
        [nodes[client][start].id for start in starts for client in clients.ids], served=True
    )
    row_of = dict(
        zip([(client, start) for start in starts for client in clients.ids], rows, strict=True)
    )

    def tuned(ids: Sequence[int], start: int) -> tuple[int, ...]:
        starting_rows = [row_of[client, start] for client in ids]
        return clients.train(ids, models, starting_rows, tuning, work, sent_before=True).ids

    answers = [
        clients.evaluate(clients.ids, models, [row_of[c, k] for c in clients.ids], "validation")
        for k in starts
    ]
    for start in starts:
        mine = tuned(clients.ids, start)
        answers.append(clients.evaluate(mine, models, [OWN] * len(mine), "validation"))
    leaf_of = {client: path[LEAF].id for client, path in nodes.items()}
    found = _choose_models(answers, leaf_of, starts.index(LEAF))
    chosen = {client: starts[k - len(starts)] for client, k in found.items() if k >= len(starts)}
    # A client stores only the copy that it made last. If an earlier copy was chosen, the client
    # makes that copy again.
    for start in starts[:-1]:
        if again := [client for client in chosen if chosen[client] == start]:
            tuned(again, start)
    return tuple(sorted(chosen))


def _choose_models(
    answers: Sequence[Evaluation], leaf_of: Mapping[int, int], first: int
) -> dict[int, int]:
    """Choose one of several models for each client by validation scores, see :func:`choose_models`.

    Parameters
    ----------
    answers
        Replies to the evaluation of each model, the most general model first.
    leaf_of
        The cluster of each client.
    first
        Number of the clusters' models in ``answers``.

    Returns
    -------
    dict
        Number of the chosen model, by client. Clients that did not reply to all evaluations are
        missing.
    """
    ids = sorted(set[int].intersection(*(set(answer.ids) for answer in answers)))
    if not ids:
        return {}
    scores = Scores.of([(c, k) for k, answer in enumerate(answers) for c in answer.ids], answers)
    cluster_of = {client: leaf_of[client] for client in ids}
    return choose_models(scores, range(len(answers)), cluster_of, first)


def choose_models(
    scores: Scores, numbers: Sequence[int], leaf_of: Mapping[int, int], first: int
) -> dict[int, int]:
    """Choose one of several models for each client by validation scores.

    First all clients together choose a model: the clusters' models, unless another is better by a
    margin (:func:`choose_together`). Then the members of each cluster, and finally each single
    client, may deviate (:func:`departed`).

    Parameters
    ----------
    scores
        Validation scores of the clients with all models.
    numbers
        Numbers of the models, the most general model first.
    leaf_of
        The cluster of each client.
    first
        Number of the clusters' models.

    Returns
    -------
    dict
        Number of the chosen model, by client.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for client, leaf in leaf_of.items():
        members[leaf].append(client)
    groups = [*members.values(), *([client] for client in leaf_of)]
    ways = [[dict.fromkeys(group, k) for k in numbers] for group in groups]
    others = [dict.fromkeys(leaf_of, k) for k in numbers if k != first]
    common = choose_together(dict.fromkeys(leaf_of, first), others, scores)
    return departed(common, ways, scores)


def train_beside(
    tree: ParameterTree,
    cohort: Sequence[int],
    clients: Clients,
    this_round: RoundPlan,
    *,
    weighted: bool = True,
) -> torch.Tensor:
    """Train the root's model with the cohort, in addition to the clusters' models.

    This training costs as much as the training of the clusters' models, and clients draw the same
    mini-batches in both. If all clients train in every round, the root's model is therefore
    bit-identical to the model of a FedAvg run with the same seed.

    If the cohort is only a part of the clients, it was sampled from each cluster separately, with
    at least one client of each cluster. A small cluster can thus have a larger share of the cohort
    than of all clients. The mean update of each cluster is therefore weighted by the size of the
    whole cluster, not by the number of its clients in the cohort.

    Parameters
    ----------
    tree
        The tree of clusters before the round.
    cohort
        Ids of the clients sampled for this round.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.
    weighted
        Whether clients are weighted by their numbers of examples.

    Returns
    -------
    Tensor
        The root's model ``[S]`` after the round.
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
    beside = replace(this_round, purpose=BESIDE)
    updates = clients.train(ids, models, rows, beside, ClientWork(store=Nothing()))
    if len(updates.ids) < this_round.min_clients:
        return root.model
    shares = list[float]()
    means = list[torch.Tensor]()
    sizes = clients.sizes
    weights = clients.weigh(sizes if weighted else dict.fromkeys(sizes, 1))
    for cluster in row_of:
        mine = updates.select([client for client in ids if cluster_of[client] == cluster])
        if mine.ids:
            members = [client for client, its in cluster_of.items() if its == cluster]
            shares.append(float(sum(weights[client] for client in members)))
            means.append(mean(mine, weighted=weighted))
    moves = [share / sum(shares) * moved for share, moved in zip(shares, means, strict=True)]
    return root.model + torch.stack(moves).sum(0) if moves else root.model


def best_on_validation(tree: ParameterTree, clients: Clients) -> dict[int, int]:
    """Choose the node on each client's path in the tree that is best on validation data.

    There are three steps. First all clients together choose their leaves, or the root if it is
    better by a margin (:func:`choose_together`). Then the members of each node below the root may
    change to their leaves, or to a node that all of them have on their paths. Finally each client
    may change to any node on its path. A later step replaces an earlier choice only if its own
    choice is better by enough (:func:`departed`). Of equally good nodes the deepest is chosen. A
    client that does not reply follows the other clients of its cluster.

    Returns
    -------
    dict
        The id of the chosen node, by client.
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
    return departed(choose_together(leaves, [root], scores), ways, scores)
