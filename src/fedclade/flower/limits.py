"""Limits on what a single client can do to the others: how much an update may weigh, and how long it may be."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from torch import Tensor

from fedclade.core import Updates, row_norms

ENOUGH = 3  # updates of a cluster whose median is a measure: of two, either could be the wrong one

_log = logging.getLogger(__name__)

Norms = tuple[float, float]  # of the parameters and of the buffers, in their units


@dataclass(frozen=True)
class StartModel:
    """The model that some clients start from: a name that is the same when the query is put again, and its norms."""

    name: str
    norms: Norms

    @classmethod
    def of(cls, name: str, model: Tensor, n_parameters: int) -> StartModel:
        """Return the model ``[S]`` of D = ``n_parameters`` parameters."""
        parts = (model[:n_parameters], model[n_parameters:])
        return cls(name, (float(row_norms(parts[0][None])), float(row_norms(parts[1][None]))))


class UpdateLimits:
    """Two rules that bound what a single client can do, and that an honest one hardly ever meets.

    A client weighs what it registered with, and at most ``largest_weight`` times as much as the median client. An
    update that is more than ``largest_norm`` times as long as the median of its cluster is left out; so is one whose
    buffers are. Where fewer than :data:`ENOUGH` clients of a cluster have answered, the measure is the model that they
    started from, or the median over all clusters, whichever is longer. Infinity is no limit.

    This is no robust aggregation: a liar within the limits, or one of a majority, is not found.
    """

    def __init__(self, largest_weight: float, largest_norm: float) -> None:
        self._largest_weight = largest_weight
        self._largest_norm = largest_norm
        self._query: Hashable = None
        self._start_of: Mapping[int, StartModel] = {}
        self._logged = set[int]()  # clients whose weight was reported to be limited
        self._seen: dict[str, dict[int, Norms]] = {}
        """By model and client: also what was left out, which may be sent again."""

    def weights(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """Return how many training examples each client counts with, given how many each says it has."""
        if not sizes or math.isinf(self._largest_weight):
            return dict(sizes)
        most = max(1, math.floor(self._largest_weight * median_low(sizes.values())))
        for client in (client for client, size in sizes.items() if size > most and client not in self._logged):
            self._logged.add(client)
            _log.warning(
                "client %d says that it has %d training examples, and counts with %d: %g times as many as the median "
                "client (network.largest_weight)",
                *(client, sizes[client], most, self._largest_weight),
            )
        return {client: min(size, most) for client, size in sizes.items()}

    def begin(self, query: Hashable, start_of: Mapping[int, StartModel]) -> None:
        """Begin a query (its kind, purpose and round), given the model that each client starts from.

        If it is put again in the same round, what came before still counts.
        """
        if query != self._query:
            self._query, self._seen = query, defaultdict(dict)
        self._start_of = start_of

    def admit(self, updates: Updates) -> Updates:
        """Return updates that arrived, all or some, without those that are too long; the reason is noted."""
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
        cluster, overall = self._seen[start.name].values(), [n for seen in self._seen.values() for n in seen.values()]
        for part, what in enumerate(("norm", "norm of its buffers")):
            measure, whose = _median([each[part] for each in cluster]), "its cluster's median"
            if not measure:
                measure = max(start.norms[part], _median([each[part] for each in overall]))
                whose = "what it began with"
            if measure and norms[part] > self._largest_norm * measure:
                return f"{what} {norms[part]:.3g}, more than {self._largest_norm:g} times {whose}, {measure:.3g}"
        return None


def _median(values: list[float]) -> float:
    """Return the median of enough values, or 0."""
    return median_low(values) if len(values) >= ENOUGH else 0.0
