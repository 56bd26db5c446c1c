"""Models of the clients' own beside the clusters': each fine-tunes its cluster's, and keeps it where that is better.

As in :mod:`~fedclade.algorithms.finetune`, copies are made anew in every round that is evaluated, by a round of local
training, and nothing travels for them. Whether clients are served with theirs, validation data says: all are, or none,
by the examples of all; then each cluster, and at last each client, may depart from that
(:mod:`~fedclade.algorithms.served`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from fedclade.algorithms.served import Scores, departed
from fedclade.core import OWN, Clients, ParameterTree, Round

CLUSTERS, MINE = 0, 1
"""The model of the cluster, and that of the client's own."""


def keep_better(tree: ParameterTree, served: Mapping[int, int], clients: Clients, this_round: Round) -> tuple[int, ...]:
    """Let all clients fine-tune the model of the node that they are served with; return who is to keep its own."""
    models, rows = tree.models([served[client] for client in clients.ids], served=True)
    at_home = replace(this_round, purpose="finetune", communicates="nothing")
    tuned = clients.train(clients.ids, models, rows, at_home, own=True).ids
    row_of = dict(zip(clients.ids, rows, strict=True))
    mine = clients.evaluate(tuned, models, [OWN] * len(tuned), "validation")
    theirs = clients.evaluate(mine.ids, models, [row_of[client] for client in mine.ids], "validation")
    if not theirs.ids:
        return ()
    pairs = [*((client, CLUSTERS) for client in theirs.ids), *((client, MINE) for client in mine.ids)]
    scores, ids = Scores.of(pairs, [theirs, mine]), theirs.ids
    members: dict[int, list[int]] = defaultdict(list)
    for client in ids:
        members[served[client]].append(client)
    groups = [*members.values(), *([client] for client in ids)]
    ways = [[dict.fromkeys(group, model) for model in (CLUSTERS, MINE)] for group in groups]
    all_alike = max((dict.fromkeys(ids, model) for model in (CLUSTERS, MINE)), key=scores.total)
    return tuple(sorted(client for client, model in departed(all_alike, ways, scores).items() if model == MINE))
