"""Limits on what a single client can do to the others: how much an update may weigh, and how long it may be."""

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

# The rule by which updates of a cluster are aggregated, which they carry from where they have
# arrived.


@dataclass(frozen=True)
class Aggregating(Middleware):
    """Lets :func:`fedclade.core.mean` aggregate updates by a robust rule, wherever an algorithm takes their mean."""

    aggregation: Aggregation

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates, with the rule."""
        return replace(ask(query), aggregation=self.aggregation)


ENOUGH = 3  # updates of a cluster whose median is a measure: of two, either could be the wrong one

PARTS = ("norm", "norm of its buffers")

Norms = tuple[float, float]  # of the parameters and of the buffers, in their units


@dataclass(frozen=True)
class StartModel:
    """The model that some clients start from: a name that is the same when the query is put again, and its norms."""

    name: bytes
    norms: Norms

    @classmethod
    def of(cls, model: Tensor, n_parameters: int) -> StartModel:
        """Return the model ``[S]`` of D = ``n_parameters`` parameters."""
        parts = (model[:n_parameters], model[n_parameters:])
        name = hashlib.blake2b(
            model.detach().cpu().contiguous().numpy().data, digest_size=16
        ).digest()
        return cls(name, (float(row_norms(parts[0][None])), float(row_norms(parts[1][None]))))

    @classmethod
    def of_several(cls, models: Tensor, n_parameters: int) -> StartModel:
        """Return one start for clients of a model each, ``[n, S]``, with the median of their norms."""
        parameters = row_norms(models[:, :n_parameters])
        buffers = row_norms(models[:, n_parameters:])
        return cls(b"own models", (median_low(parameters.tolist()), median_low(buffers.tolist())))


class Limiting(Middleware):
    """Bounds what a single client can do, by rules that an honest one hardly ever meets.

    A client weighs what it says, and at most ``largest_weight`` times as much as the median client;
    so do its scores on validation and training data. An update that is more than ``largest_norm``
    times as long as the median of its cluster is left out; so is one whose buffers are. One that is
    more than ``clip_above`` times as long is shortened to that, its parameters and its buffers each
    by themselves; or, if that is shorter, to so many times the median of all clients of the round,
    since clients that lie may be most of a cluster. A cluster are clients that start from the same
    model. Where fewer than :data:`ENOUGH` of one have answered, the measure is the model that they
    started from, or the median over all clusters, whichever is longer. Clients that go on from
    where they are, each from a model of its own, count as one cluster. In a stream the measure is
    those that have arrived so far.

    This is no robust aggregation: a liar within the limits, or one of a majority, is not found.

    Parameters
    ----------
    limits
        What is bound.
    n_parameters
        D of the model.
    sizes
        The training examples that each client says it has.
    """

    def __init__(
        self, limits: Limits, n_parameters: int, sizes: Callable[[], Mapping[int, int]]
    ) -> None:
        self._limits = limits
        self._n_parameters = n_parameters
        self._sizes = sizes
        self._query: tuple[str, str, int] | None = None
        self._seen: dict[bytes, dict[int, Norms]] = {}
        """By model and client: also what was left out, which may be sent again."""

    @classmethod
    def within(
        cls, limits: Limits, n_parameters: int, sizes: Callable[[], Mapping[int, int]]
    ) -> Limiting | None:
        """Return what holds to limits, or None if there are none."""
        return cls(limits, n_parameters, sizes) if limits.limits else None

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return how many training examples each client counts with, given how many each says it has."""
        if not sizes or math.isinf(self._limits.largest_weight):
            return sizes
        most = self._most(sizes.values())
        return {client: min(size, most) for client, size in sizes.items()}

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates within the limits."""
        if query.is_secret:  # what a client keeps affects no other
            return ask(query)
        if (name := (query.kind, query.round.purpose, query.round.number)) != self._query:
            # put again in the same round, what came still counts
            self._query, self._seen = name, defaultdict(dict)
        starts = self._starts(query)

        def admitted(updates: Updates) -> Updates:
            return self._shortened(self._weighed(updates, query), starts)

        if (sink := query.sink) is not None:
            query = replace(query, sink=lambda updates: sink(admitted(updates)))
        return admitted(ask(query))

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores none of which weighs too much where a choice is made by them; those of test data measure."""
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
        """Return updates none of which weighs too much."""
        if not updates.ids or math.isinf(self._limits.largest_weight):
            return updates
        most = self._most(self._sizes().values())
        if query.data_rounds is not None:  # clients train on more than they hold now
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
        """Return updates that arrived, all or some, without those that are far too long, and others shortened."""
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
        """Return what norm the updates from a model are measured by, what that is, and the median of all or infinity.

        For parameters and for buffers.
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
        """Return the model that each client's update starts from."""
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
    """Return whether each client goes on from a model of its own, which it has and is not sent.

    By the rows of the models, not by what is in them: clients that lie could make theirs equal.
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
