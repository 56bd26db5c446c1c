"""Limits on a single client: the weight of its update and scores, and the norm of its update."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    OWN,
    Aggregation,
    Ask,
    Evaluation,
    EvaluationQuery,
    Limits,
    UpdateQuery,
    Updates,
    packed,
    row_norms,
)

# Updates carry the rule by which they are aggregated, from their arrival at the server on.


@dataclass(frozen=True)
class Aggregating(Middleware):
    """Middleware that attaches a robust aggregation rule to updates.

    :func:`fedclade.core.mean` applies it where an algorithm takes the mean of updates.
    """

    aggregation: Aggregation

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates, with the rule."""
        return replace(ask(query), aggregation=self.aggregation)


# Fewest updates of a cluster whose median is a measure: of two, either could be the false one.
ENOUGH = 3

PARTS = ("norm", "norm of its buffers")

# Norms of the parameters and of the buffers, in their units.
Norms = tuple[float, float]


@dataclass(frozen=True)
class StartModel:
    """Model from which some clients start.

    Attributes
    ----------
    name
        Digest of the model, which is the same when a query is repeated.
    norms
        Norms of its parameters and of its buffers.
    """

    name: bytes
    norms: Norms

    @classmethod
    def of(cls, model: Tensor, n_parameters: int) -> StartModel:
        """Return the start for a model ``[S]`` with D = ``n_parameters`` parameters."""
        parts = (model[:n_parameters], model[n_parameters:])
        name = hashlib.blake2b(
            model.detach().cpu().contiguous().numpy().data, digest_size=16
        ).digest()
        return cls(name, (float(row_norms(parts[0][None])), float(row_norms(parts[1][None]))))

    @classmethod
    def of_several(cls, models: Tensor, n_parameters: int) -> StartModel:
        """Return a common start for clients with a model each, ``[n, S]``.

        Its norms are the medians of the models' norms.
        """
        parameters = row_norms(models[:, :n_parameters])
        buffers = row_norms(models[:, n_parameters:])
        return cls(b"own models", (median_low(parameters.tolist()), median_low(buffers.tolist())))


class Limiting(Middleware):
    """Middleware that limits weights and norms of updates, to bound a single client's effect.

    A client's weight is the number of examples that it reports, but at most ``largest_weight``
    times the median client's. The same holds for the weight of its scores on validation and
    training data.

    A cluster is the set of clients that start from the same model. An update whose parameters or
    buffers have more than ``largest_norm`` times the median norm of its cluster is left out. An
    update with more than ``clip_above`` times that norm is scaled down to that multiple, parameters
    and buffers separately; or to ``clip_above`` times the median over all clients of the round if
    that is smaller, since adversaries may be the majority of a cluster. If fewer than
    :data:`ENOUGH` clients of a cluster have replied, the measure is the norm of the model from
    which they started, or the median over all clusters, whichever is larger. Clients that continue
    from models of their own count as one cluster. In a round that streams, the measures use the
    updates that have arrived so far.

    Honest clients hardly ever exceed these limits. The limits are not a robust aggregation:
    adversaries within the limits, or that are a majority, are not detected.

    Parameters
    ----------
    limits
        The limits.
    n_parameters
        D of the model.
    sizes
        Returns the number of training examples that each client reports.
    """

    def __init__(
        self, limits: Limits, n_parameters: int, sizes: Callable[[], Mapping[int, int]]
    ) -> None:
        self._limits = limits
        self._n_parameters = n_parameters
        self._sizes = sizes
        self._query: tuple[str, str, int] | None = None
        self._seen: dict[bytes, dict[int, Norms]] = {}
        """Norms by start model and client, also of updates left out, which may be sent again."""

    @classmethod
    def within(
        cls, limits: Limits, n_parameters: int, sizes: Callable[[], Mapping[int, int]]
    ) -> Limiting | None:
        """Return a middleware that enforces the limits, or None if no limit is set."""
        return cls(limits, n_parameters, sizes) if limits.limits else None

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return each client's weight, given the number of training examples that it reports."""
        if not sizes or math.isinf(self._limits.largest_weight):
            return sizes
        most = self._most(sizes.values())
        return {client: min(size, most) for client, size in sizes.items()}

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates within the limits."""
        # With a secret query clients keep their updates, which then affect no other client.
        if query.is_secret:
            return ask(query)
        if (name := (query.kind, query.round.purpose, query.round.number)) != self._query:
            # If a query is repeated in the same round, the updates of the first try still count.
            self._query, self._seen = name, defaultdict(dict)
        starts = self._starts(query)

        def admitted(updates: Updates) -> Updates:
            return self._shortened(self._weighed(updates, query), starts)

        if (sink := query.sink) is not None:
            query = replace(query, sink=lambda updates: sink(admitted(updates)))
        return admitted(ask(query))

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores with limited weights, except on test data, which measure the run."""
        found = ask(query)
        if (
            query.split == "test"
            or not len(found.examples)
            or math.isinf(self._limits.largest_weight)
        ):
            return found
        return replace(
            found, examples=found.examples.clamp(max=self._most(found.examples.tolist()))
        )

    def _most(self, sizes: Collection[float]) -> int:
        return max(1, math.floor(self._limits.largest_weight * median_low(sizes)))

    def _weighed(self, updates: Updates, query: UpdateQuery) -> Updates:
        """Return updates with limited weights."""
        if not updates.ids or math.isinf(self._limits.largest_weight):
            return updates
        most = self._most(self._sizes().values())
        # Clients train on the data of several rounds, which is more than their reported size.
        if query.data_rounds is not None:
            most = max(most, self._most(updates.sizes.tolist()))
        limited = {
            client: f"weight {size:.0f}, counts with {most}: {self._limits.largest_weight:g} times the median client's"
            for client, size in zip(updates.ids, updates.sizes.tolist(), strict=True)
            if size > most
        }
        if not limited:
            return updates
        capped = updates.sizes.clamp(max=most)
        return replace(
            updates, sizes=capped, uncapped=updates.sizes, limited={**updates.limited, **limited}
        )

    def _shortened(self, updates: Updates, starts: Mapping[int, StartModel]) -> Updates:
        """Return updates without those that are far too long, and with other long ones scaled down.

        ``updates`` may be all updates of a query, or those that have arrived together.
        """
        if not updates.ids or (
            math.isinf(self._limits.largest_norm) and math.isinf(self._limits.clip_above)
        ):
            return updates
        deltas = updates.required_deltas
        D = updates.n_parameters
        norms = torch.stack([updates.norms, row_norms(deltas[:, D:])], 1)
        each: list[Norms] = [
            (of_parameters, of_buffers) for of_parameters, of_buffers in norms.tolist()
        ]
        for client, mine in zip(updates.ids, each, strict=True):
            self._seen[starts[client].name][client] = mine
        measures = {
            start: self._measures(start) for start in {starts[client] for client in updates.ids}
        }
        factors = torch.ones_like(norms)
        left_out = dict[int, str]()
        limited = dict(updates.limited)
        for place, (client, mine) in enumerate(zip(updates.ids, each, strict=True)):
            for part, (norm, (measure, whose, of_all)) in enumerate(
                zip(mine, measures[starts[client]], strict=True)
            ):
                what = f"{PARTS[part]} {norm:.3g}"
                shortest = min(measure, of_all)
                if norm > self._limits.largest_norm * measure > 0:
                    more = f"more than {self._limits.largest_norm:g} times {whose}, {measure:.3g}"
                    left_out.setdefault(client, f"{what}, {more}")
                elif norm > self._limits.clip_above * shortest > 0:
                    factors[place, part] = self._limits.clip_above * shortest / norm
                    whose = whose if shortest == measure else "the median of all"
                    shortened = f"{what}, shortened to {self._limits.clip_above:g} times {whose}, {shortest:.3g}"
                    limited[client] = (
                        f"{limited[client]}; {shortened}" if client in limited else shortened
                    )
        if bool((factors < 1).any()):
            by = factors.to(deltas)
            deltas = torch.cat([deltas[:, :D] * by[:, :1], deltas[:, D:] * by[:, 1:]], 1)
            of_parameters = factors[:, 0]
            updates = replace(
                updates, deltas=deltas, norms=updates.norms * of_parameters, shortened=of_parameters
            )
        updates = replace(
            updates,
            limited={client: what for client, what in limited.items() if client not in left_out},
        )
        if not left_out:
            return updates
        admitted = updates.select([client for client in updates.ids if client not in left_out])
        return replace(admitted, left_out={**updates.left_out, **left_out})

    def _measures(self, start: StartModel) -> list[tuple[float, str, float]]:
        """Return the measures of updates from a start, for parameters and for buffers.

        A measure is a norm, the name of that norm, and the median norm over all clients or
        infinity.
        """
        cluster = self._seen[start.name].values()
        overall = [n for seen in self._seen.values() for n in seen.values()]
        found: list[tuple[float, str, float]] = []
        for part in range(len(PARTS)):
            of_all = _median([each[part] for each in overall])
            if measure := _median([each[part] for each in cluster]):
                found.append((measure, "its cluster's median", of_all or math.inf))
            else:
                found.append((max(start.norms[part], of_all), "what it began with", math.inf))
        return found

    def _starts(self, query: UpdateQuery) -> Mapping[int, StartModel]:
        """Return the model from which each client's update starts, by client."""
        models = query.models
        D = self._n_parameters
        if query.mixture is not None:
            start = StartModel.of(packed(models, D), len(models) * D)
            return dict.fromkeys(query.ids, start)
        if _goes_on(query):
            return dict.fromkeys(
                query.ids, StartModel.of_several(models[list(query.assignment)], D)
            )
        anchors = query.anchors if query.shares and query.anchors is not None else query.assignment
        of = {row: StartModel.of(models[row], D) for row in {*anchors} - {OWN}}
        return {
            client: of[row] for client, row in zip(query.ids, anchors, strict=True) if row in of
        }


def _goes_on(query: UpdateQuery) -> bool:
    """Return whether each client continues from a model of its own, which it has and is not sent.

    The rows of the models decide, not their values: adversaries could make their values equal.
    """
    rows = set(query.assignment)
    return (
        query.kind == "train"
        and query.round.communicates == "updates"
        and len(rows) == len(query.ids)
    )


def _median(values: list[float]) -> float:
    """Return the median of enough values, or 0."""
    return median_low(values) if len(values) >= ENOUGH else 0.0
