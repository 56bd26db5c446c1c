"""Models of the clients' own beside the clusters': each fine-tunes its cluster's, and keeps it where that is better.

As in :mod:`~fedclade.algorithms.finetune`, copies are made anew in every round that is evaluated, by a round of local
training, and nothing travels for them. Where a model for all goes on beside the clusters', it is fine-tuned as well.
What clients are served with, validation data says: what does best on the examples of all; then each cluster, and at
last each client, may depart from that (:mod:`~fedclade.algorithms.served`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fedclade.algorithms.served import Scores, departed
from fedclade.core import OWN, Clients, ParameterTree, Round

ROOT, LEAF = 0, -1
"""Of a client's path: the model for all, and its cluster's."""


def keep_better(tree: ParameterTree, starts: Sequence[int], clients: Clients, this_round: Round) -> tuple[int, ...]:
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
    models, rows = tree.models([nodes[client][start].id for start in starts for client in clients.ids], served=True)
    row_of = dict(zip([(client, start) for start in starts for client in clients.ids], rows, strict=True))

    def tuned(ids: Sequence[int], start: int) -> tuple[int, ...]:
        return clients.train(ids, models, [row_of[client, start] for client in ids], at_home, own=True).ids

    answers = [clients.evaluate(clients.ids, models, [row_of[c, k] for c in clients.ids], "validation") for k in starts]
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
    numbers, groups = range(len(answers)), [*members.values(), *([client] for client in ids)]
    ways = [[dict.fromkeys(group, k) for k in numbers] for group in groups]
    found = departed(max((dict.fromkeys(ids, k) for k in numbers), key=scores.total), ways, scores)
    chosen = {client: starts[k - len(starts)] for client, k in found.items() if k >= len(starts)}
    for start in starts[:-1]:  # what is tuned last is what they hold
        if again := [client for client in chosen if chosen[client] == start]:
            tuned(again, start)
    return tuple(sorted(chosen))
