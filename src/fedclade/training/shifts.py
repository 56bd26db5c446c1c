"""Whether the labels of clients' training data have shifted since they last said so, as clients see it themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core import IGNORED, ShiftQuery
from fedclade.data import Federation
from fedclade.training.store import ClientStore

LABELS = "labels"
"""The name under which a client keeps how often it had each label, int64 ``[C]``."""


def shifts(federation: Federation, store: ClientStore, query: ShiftQuery) -> Tensor:
    """Return whose labels have shifted, bool ``[n]``; those clients keep how often they have each label now.

    Who is asked for the first time keeps that as well, and has not shifted.
    """
    count = query.labels(federation.pool.schema)
    shifted = torch.zeros(len(query.ids), dtype=torch.bool)
    for place, client in enumerate(query.ids):
        data = federation.by_id[client]
        seen = data.labels(federation.pool.y[torch.from_numpy(data.train)]).long()
        now = torch.bincount(seen[seen != IGNORED], minlength=count)
        was = store.before(query.round, client).get(LABELS)
        shifted[place] = was is not None and have_shifted(was.to(now.device), now, query)
        if was is None or shifted[place]:
            store.keep(query.round, client, {LABELS: now})
    return shifted


def have_shifted(was: Tensor, now: Tensor, query: ShiftQuery) -> bool:
    """Return whether the counts of C labels ``[C]`` are so far apart as the query says."""
    one, other = (was, now) if query.by_label else (was.sort().values, now.sort().values)
    return float((one - other).abs().sum()) > query.share * float(was.sum())  # both sides times C
