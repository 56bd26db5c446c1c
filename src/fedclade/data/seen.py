"""Examples written out as clients see them, where they are not simply the pool's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core import DataError, Indices
from fedclade.data.client_data import ClientData, mapped
from fedclade.data.federation import Federation
from fedclade.data.pool import Pool
from fedclade.data.shift import View

SPLITS = ("train", "validation", "test")
PLAIN: dict[str, Any] = {"label_map": None, "quarter_turns": 0}
"""How a client sees examples that are written out as it sees them."""

Seen = tuple[tuple[Indices, int], ...]
"""Examples, each lot with the number of the view that shows them."""


@dataclass(frozen=True, eq=False)
class Hand:
    """What a client has in one stage."""

    client: ClientData  # who it is
    train: Seen
    validation: Seen
    test: Seen


def as_seen(federation: Federation, views: Sequence[View]) -> Federation:
    """Return a federation, whose true clusters see it by these views, with images as the views transform them."""
    if not any(view.transform for view in views):
        return federation
    parts = [each for each in (federation, federation.newcomers) if each is not None]
    hands: list[list[list[Hand]]] = []
    for part in parts:
        known = part.true_clusters or dict.fromkeys(part.ids, 0)
        hands.append([[_hand(client, known[client.id]) for client in part.clients]])
    pool, held = written_out(federation.pool, views, hands)
    made: Federation | None = None
    for part, (clients,) in reversed([*zip(parts, held, strict=True)]):
        made = replace(part, pool=pool, clients=tuple(clients), newcomers=made)
    assert made is not None  # there is one part at least
    return made


def _hand(client: ClientData, view: int) -> Hand:
    return Hand(client, ((client.train, view),), ((client.validation, view),), ((client.test, view),))


def written_out(
    pool: Pool, views: Sequence[View], hands: Sequence[Sequence[Sequence[Hand]]]
) -> tuple[Pool, list[list[list[ClientData]]]]:
    """Return a pool of the examples as they are seen by the views, each once by each, and the clients of each stage."""
    n, lots = len(pool.x), dict[tuple[tuple[int, int], ...], Indices]()

    def key(seen: Seen) -> tuple[tuple[int, int], ...]:
        found = tuple((id(indices), view) for indices, view in seen)
        if found not in lots:
            each = [view * n + indices for indices, view in seen]
            lots[found] = each[0] if len(each) == 1 else np.unique(np.concatenate(each))
        return found

    keys = [[[[key(getattr(hand, split)) for split in SPLITS] for hand in now] for now in of] for of in hands]
    there = np.unique(np.concatenate([*lots.values()]))
    of_view, rows = np.divmod(there, n)
    x, y = _as_they_show(pool, views, of_view, rows)
    every, natural = np.arange(len(there)), None if pool.natural is None else pool.natural[rows]
    seen = replace(pool, x=x, y=y, groups=pool.groups[rows], train=every, test=every[:0], natural=natural)
    places = {found: np.searchsorted(there, lot) for found, lot in lots.items()}  # one array for who has the same
    clients = [
        [
            [replace(hand.client, **dict(zip(SPLITS, (places[k] for k in mine), strict=True)), **PLAIN)
             for hand, mine in zip(now, found, strict=True)]
            for now, found in zip(of, of_keys, strict=True)
        ]
        for of, of_keys in zip(hands, keys, strict=True)
    ]  # fmt: skip
    return seen, clients


def _as_they_show(pool: Pool, views: Sequence[View], of_view: Indices, rows: Indices) -> tuple[Tensor, Tensor]:
    """Return inputs ``[n, ...]`` and targets of examples, each as its view shows it; views are in ascending order."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for number in np.unique(of_view).tolist():
        mine, view = torch.from_numpy(rows[of_view == number]), views[number]
        x, y = pool.x[mine], pool.y[mine]
        if view.transform is not None:
            x = torch.from_numpy(np.ascontiguousarray(view.transform(x.numpy(), y.numpy(), mine.numpy())))
        xs.append(torch.rot90(x, view.quarter_turns, (-2, -1)) if view.quarter_turns else x)
        ys.append(y if view.label_map is None else mapped(y, view.label_map))
    if len(shapes := {tuple(x.shape[1:]) for x in xs}) > 1:
        raise DataError(f"all clients should see images of one shape, but views show them as {sorted(shapes)}")
    return torch.cat(xs), torch.cat(ys)
