"""Doors for what clients say of themselves: how much an update may weigh, and how long it may be."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from torch import Tensor

from fedclade.core import (
    Updates,
    row_norms,
)

ENOUGH = 3
"""Updates of a cluster from which their median tells what is usual: of two, either could be the wrong one."""

_log = logging.getLogger(__name__)

Norms = tuple[float, float]
"""Of the parameters and of the buffers, in their units."""


@dataclass(frozen=True)
class Start:
    """The model that some clients were asked to start from.

    Parameters
    ----------
    name
        By which it is known when the same question is asked again.
    norms
        Its own.
    """

    name: str
    norms: Norms

    @classmethod
    def of(cls, name: str, model: Tensor, n_parameters: int) -> Start:
        """Return the model ``[S]`` of D = ``n_parameters`` parameters."""
        parts = (model[:n_parameters], model[n_parameters:])
        return cls(name, (float(row_norms(parts[0][None])), float(row_norms(parts[1][None]))))


class Doors:
    """Two rules that bound what a single client can do, and that hardly an honest one meets.

    A client weighs what it said when it joined, and at most so many times as much as the median client. An update that
    is many times longer than the median of its cluster is left out; so is one whose buffers are. Where fewer than
    :data:`ENOUGH` of a cluster have answered, the measure is the model that they started from, or the median of all who
    were asked the same, whichever is longer.

    This is no robust aggregation: a liar within the limits, or one of a majority, is not found.

    Parameters
    ----------
    largest_weight
        In weights of the median client; infinity for no limit.
    largest_norm
        In norms of the median update; infinity for no limit.
    """

    def __init__(self, largest_weight: float, largest_norm: float) -> None:
        self._largest_weight = largest_weight
        self._largest_norm = largest_norm
        self._question: Hashable = None
        self._start_of: Mapping[int, Start] = {}
        self._told = set[int]()
        """Whose weight was said to be limited."""
        self._seen: dict[str, dict[int, Norms]] = {}
        """By model and client: also what was left out, which may be sent again."""

    def weights(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """Return how many training examples each client counts with, given how many each has by its own account."""
        if not sizes or math.isinf(self._largest_weight):
            return dict(sizes)
        most = max(1, math.floor(self._largest_weight * median_low(sizes.values())))
        for client in (client for client, size in sizes.items() if size > most and client not in self._told):
            self._told.add(client)
            _log.warning(
                "client %d says that it has %d training examples, and counts with %d: %g times as many as the median "
                "client (network.largest_weight)",
                *(client, sizes[client], most, self._largest_weight),
            )
        return {client: min(size, most) for client, size in sizes.items()}

    def ask(self, question: Hashable, start_of: Mapping[int, Start]) -> None:
        """Begin to hear the answers to a question; asked again in the same round, what came before still counts.

        Parameters
        ----------
        question
            What sets it apart: its kind, purpose and round.
        start_of
            The model that each client was asked to start from.
        """
        if question != self._question:
            self._question, self._seen = question, defaultdict(dict)
        self._start_of = start_of

    def admit(self, updates: Updates) -> Updates:
        """Return updates that came, all or some, without those that are too long; they are left out with the reason."""
        if math.isinf(self._largest_norm) or not updates.ids:
            return updates
        buffers = row_norms(updates.required_deltas[:, updates.n_parameters :])
        norms = dict(zip(updates.ids, zip(updates.norms.tolist(), buffers.tolist(), strict=True), strict=True))
        for client, mine in norms.items():
            self._seen[self._start_of[client].name][client] = mine
        why = {client: reason for client, mine in norms.items() if (reason := self._objection(client, mine))}
        if not why:
            return updates
        admitted = updates.select([client for client in updates.ids if client not in why])
        return replace(admitted, left_out={**updates.left_out, **why})

    def _objection(self, client: int, norms: Norms) -> str | None:
        start = self._start_of[client]
        cluster, everybody = self._seen[start.name].values(), [n for seen in self._seen.values() for n in seen.values()]
        for part, what in enumerate(("norm", "norm of its buffers")):
            measure, whose = _median([each[part] for each in cluster]), "its cluster's median"
            if not measure:
                measure, whose = (
                    max(start.norms[part], _median([each[part] for each in everybody])),
                    "what it began with",
                )
            if measure and norms[part] > self._largest_norm * measure:
                return f"{what} {norms[part]:.3g}, more than {self._largest_norm:g} times {whose}, {measure:.3g}"
        return None


def _median(values: list[float]) -> float:
    """Return the median of enough values, or 0."""
    return median_low(values) if len(values) >= ENOUGH else 0.0
