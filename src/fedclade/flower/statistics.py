"""What clients' training examples come to, in messages and in a run's folder: each tells its own, all get the sum."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from fedclade.core import Statistics, StatisticsQuery, UpdateError, bounded
from fedclade.flower.replies import MOST_EXAMPLES, fits_size
from fedclade.flower.wire import Content, shown, typed

TYPES: Mapping[str, tuple[type, torch.dtype]] = {
    "means": (float, torch.float64),
    "squares": (float, torch.float64),
    "numbers": (bool, torch.bool),
    "labels": (int, torch.int64),
}
"""What statistics are lists of besides the count."""

_log = logging.getLogger(__name__)

Request = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], Statistics], dict[int, str]],
    Iterator[tuple[int, Statistics]],
]


def as_values(found: Statistics) -> dict[str, Any]:
    """Return statistics as plain values, of a message or of JSON; without the lists that are empty."""
    lists = {name: getattr(found, name).tolist() for name in TYPES}
    return {"count": found.count, **{name: values for name, values in lists.items() if values}}


def read_statistics(values: Mapping[str, Any], columns: int, labels: int) -> Statistics:
    """Check and read what training examples come to, of so many columns and labels; else it is an UpdateError."""
    count, lists = typed(values, "count", int), dict[str, Tensor]()
    for name, (kind, dtype) in TYPES.items():
        found, length = values.get(name, []), labels if name == "labels" else columns
        if not isinstance(found, list) or len(found) != length or not all(type(each) is kind for each in found):
            raise UpdateError(f"expected {length} {name} of type {kind.__name__}, got {shown(found)}")
        lists[name] = torch.tensor(found, dtype=dtype)
    read = Statistics(count, **lists)
    counted = sum(read.labels.tolist())  # which the tensor's own sum might not hold
    possible = 1 <= count <= MOST_EXAMPLES and bool((read.labels >= 0).all()) and counted <= count
    if not possible or not bool((read.means.isfinite() & (read.squares >= 0) & read.squares.isfinite()).all()):
        raise UpdateError(f"sums of {count} training examples that no examples come to: {shown(as_values(read))}")
    return read


def summed(
    query: StatisticsQuery, sizes: Mapping[int, int], columns: int, content: RecordDict, ask: Request
) -> Statistics:
    """Ask clients for theirs, and add those, within bounds, in the query's order.

    An UpdateError unless most tell: a few could otherwise end every run, or set by what all scale.
    """
    left_out: dict[int, str] = {}

    def read(client: int, content: Content) -> Statistics:
        content.has_only(())
        found = read_statistics(content.values, columns if query.inputs else 0, query.labels)
        if not fits_size(found.count, sizes[client]):
            raise UpdateError(f"sums of {found.count} training examples, but the client joined with {sizes[client]}")
        return found

    found = dict(ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "statistics", read, left_out))
    if left_out:
        told = f"{len(found)} of {len(query.ids)} clients tell what their examples come to, by which all scale or weigh"
        why = "; ".join(f"client {client}: {why}" for client, why in sorted(left_out.items()))
        needed = max(len(query.ids) // 2 + 1, min(3, len(query.ids)))  # of two nobody's can be bounded
        if len(found) < needed:
            raise UpdateError(f"{told}, and {needed} are needed: {why}")
        _log.warning("%s: %s", told, why)
    of_most = [found[client] for client in query.ids if client in found]
    return reduce(Statistics.plus, bounded(of_most, query.largest_weight))
