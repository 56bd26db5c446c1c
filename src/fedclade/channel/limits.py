"""Limits on the influence of a single client, and the robust aggregation rule of updates.

The limits bound the weight of a client's update and scores, and the norm of its update.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    OWN,
    Aggregation,
    DistanceToAnchor,
    Evaluation,
    EvaluationQuery,
    Limits,
    OfRounds,
    TrainQuery,
    Updates,
    packed,
    row_norms,
)

# Updates carry the rule by which they are aggregated, from their arrival at the server on.


@dataclass(frozen=True)
class Aggregating(Middleware):
    """Middleware that attaches a robust aggregation rule to updates.

    :func:`fedclade.core.mean` applies the rule where an algorithm computes the mean of updates.

    Parameters
    ----------
    aggregation
        The rule, such as a trimmed mean, with its settings.
    """

    queries = (TrainQuery,)

    aggregation: Aggregation

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Return the updates, with the robust aggregation rule attached."""
        return reply.with_common(aggregation=self.aggregation)


# Fewest norms whose median is compared with: of two norms, either could be that of an adversary.
ENOUGH = 3

PARTS = ("norm", "norm of its buffers")

# Norms of an update's (or a model's) parameters and of its buffers, in their units.
Norms = tuple[float, float]


@dataclass(frozen=True)
class StartModel:
    """Identity and norms of a model from which clients start their training.

    Attributes
    ----------
    name
        Digest of the model's entries, which is the same when a query is repeated.
    norms
        Norm of the model's parameters, and norm of its buffers.
    """

    name: bytes
    norms: Norms

    @classmethod
    def of(cls, model: Tensor, n_parameters: int) -> StartModel:
        """Return the identity and the norms of one start model.

        Parameters
        ----------
        model
            Entries of the model, ``[S]``: parameters, followed by buffers.
        n_parameters
            Number of parameters.
        """
        parts = (model[:n_parameters], model[n_parameters:])
        name = hashlib.blake2b(
            model.detach().cpu().contiguous().numpy().data, digest_size=16
        ).digest()
        return cls(name, (float(row_norms(parts[0][None])), float(row_norms(parts[1][None]))))

    @classmethod
    def of_several(cls, models: Tensor, n_parameters: int) -> StartModel:
        """Return a common start model for clients that each continue from a model of their own.

        The norms of the common start model are the medians of the models' norms.

        Parameters
        ----------
        models
            Models of n clients, ``[n, S]``: each row has parameters, followed by buffers.
        n_parameters
            Number of parameters of a model.
        """
        parameters = row_norms(models[:, :n_parameters])
        buffers = row_norms(models[:, n_parameters:])
        return cls(b"own models", (median_low(parameters.tolist()), median_low(buffers.tolist())))


class Limiting(Middleware):
    """Middleware that limits weights and norms of updates, to bound a single client's effect.

    A client's weight is the number of examples that the client reports, but at most
    ``largest_weight`` times the median of these numbers over all clients. The same limit applies to
    the weight of a client's scores on validation and training data.

    The norms of an update's parameters and of its buffers are limited separately. A cluster is
    here the set of clients that start from the same model:

    - An update is left out if one of these norms is more than ``largest_norm`` times the median
      norm of its cluster.
    - Otherwise a norm above ``clip_above`` times the median norm of the cluster is scaled down to
      this limit. If the median norm of all clients of the round is smaller, it replaces the
      cluster's in this limit, since adversaries may be the majority of a cluster.
    - If fewer than :data:`ENOUGH` clients of a cluster have replied, both limits are instead
      multiples of the norm of the model from which these clients started, or of the median norm of
      all clients, whichever is larger.

    Clients that continue from models of their own count as one cluster. In a run that streams (adds
    up updates as they arrive), the medians are computed from the updates that have arrived so far.

    Honest clients hardly ever exceed these limits. The limits are not a robust aggregation:
    adversaries that stay within the limits, or that are a majority, are not detected.

    Parameters
    ----------
    limits
        The limits.
    n_parameters
        Number of parameters of the model; its other entries are buffers.
    sizes
        Function that returns the number of training examples that each client reports.
    """

    queries = (TrainQuery, EvaluationQuery)

    def __init__(
        self, limits: Limits, n_parameters: int, sizes: Callable[[], Mapping[int, int]]
    ) -> None:
        self._limits = limits
        self._n_parameters = n_parameters
        self._sizes = sizes
        self._query: tuple[str, str, int] | None = None
        self._seen: dict[bytes, dict[int, Norms]] = {}
        """Norms of updates by start model and client.

        Updates that are left out are included, since a repeated query may request them again.
        """
        self._starts: Mapping[int, StartModel] = {}
        """Model from which each client of the present query starts."""

    @classmethod
    def within(
        cls, limits: Limits, n_parameters: int, sizes: Callable[[], Mapping[int, int]]
    ) -> Limiting | None:
        """Return a middleware that limits single clients, or None if no limit is set."""
        return cls(limits, n_parameters, sizes) if limits.limits else None

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return the limited weight of each client, given the reported number of examples."""
        if not sizes or math.isinf(self._limits.largest_weight):
            return sizes
        most = self._find_largest_weight(sizes.values())
        return {client: min(size, most) for client, size in sizes.items()}

    def before(self, query: Any) -> Any:
        """Record the models from which the clients of a training query start; return the query."""
        # Clients that send no updates affect no other client.
        if isinstance(query, TrainQuery) and query.work.sends_update:
            name = (query.kind, query.round.purpose, query.round.number)
            if name != self._query:
                # If a query is repeated in the same round, the updates of the first try still
                # count.
                self._query, self._seen = name, defaultdict(dict)
            self._starts = self._start_models(query)
        return query

    def after(self, query: Any, reply: Any) -> Any:
        """Return updates within the limits, or an evaluation with limited weights.

        Weights are not limited in an evaluation on test data, which measures the run.
        """
        if isinstance(query, TrainQuery):
            if not query.work.sends_update:
                return reply
            return self._limit_norms(self._limit_weights(reply, query), self._starts)
        return reply if query.split == "test" else self._with_limited_scores(reply)

    def _with_limited_scores(self, evaluation: Evaluation) -> Evaluation:
        """Limit the number of examples with which each client's scores count in means."""
        examples = evaluation.examples
        if not len(examples) or math.isinf(self._limits.largest_weight):
            return evaluation
        return replace(
            evaluation, examples=examples.clamp(max=self._find_largest_weight(examples.tolist()))
        )

    def _find_largest_weight(self, sizes: Collection[float]) -> int:
        """Return the largest weight that a client may have, given the sizes of all clients."""
        return max(1, math.floor(self._limits.largest_weight * median_low(sizes)))

    def _limit_weights(self, updates: Updates, query: TrainQuery) -> Updates:
        """Limit the weights of updates, and record which clients were limited."""
        if not updates.ids or math.isinf(self._limits.largest_weight):
            return updates
        most = self._find_largest_weight(self._sizes().values())
        # Clients train on the data of several rounds, which is more than their reported size.
        if isinstance(query.work.data, OfRounds):
            most = max(most, self._find_largest_weight(updates.sizes.tolist()))
        limited = {
            client: f"weight {size:.0f}, limited to {most}: "
            f"{self._limits.largest_weight:g} times the median weight of all clients"
            for client, size in zip(updates.ids, updates.sizes.tolist(), strict=True)
            if size > most
        }
        if not limited:
            return updates
        capped = updates.sizes.clamp(max=most)
        weighed = updates.with_columns(sizes=capped, uncapped=updates.sizes)
        return replace(weighed, limited={**updates.limited, **limited})

    def _limit_norms(self, updates: Updates, starts: Mapping[int, StartModel]) -> Updates:
        """Leave out updates with a norm above ``largest_norm``, and scale others to ``clip_above``.

        Both limits are multiples of a median norm, as in the docstring of the class.

        Parameters
        ----------
        updates
            Updates of a query: all, or only a group that has arrived together.
        starts
            Model from which each client started, by client.
        """
        if not updates.ids or (
            math.isinf(self._limits.largest_norm) and math.isinf(self._limits.clip_above)
        ):
            return updates
        buffers = updates.required_deltas[:, updates.n_parameters :]
        norms = torch.stack([updates.norms, row_norms(buffers)], 1)
        each: list[Norms] = [
            (of_parameters, of_buffers) for of_parameters, of_buffers in norms.tolist()
        ]
        for client, mine in zip(updates.ids, each, strict=True):
            self._seen[starts[client].name][client] = mine
        measures = {
            start: self._find_reference_norms(start)
            for start in {starts[client] for client in updates.ids}
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
                    whose = whose if shortest == measure else "the median norm of all clients"
                    shortened = (
                        f"{what}, scaled down to {self._limits.clip_above:g} times {whose}, "
                        f"{shortest:.3g}"
                    )
                    limited[client] = (
                        f"{limited[client]}; {shortened}" if client in limited else shortened
                    )
        updates = replace(
            _scale_down(updates, factors),
            limited={client: what for client, what in limited.items() if client not in left_out},
        )
        if not left_out:
            return updates
        admitted = updates.select([client for client in updates.ids if client not in left_out])
        return replace(admitted, left_out={**updates.left_out, **left_out})

    def _find_reference_norms(self, start: StartModel) -> list[tuple[float, str, float]]:
        """Return the norms with which updates from one start model are compared.

        The result has one tuple for parameters and one for buffers. A tuple has the norm for
        comparison, a description of this norm for messages, and the median norm of all clients. The
        latter is infinite if it does not limit the updates.
        """
        cluster = self._seen[start.name].values()
        overall = [n for seen in self._seen.values() for n in seen.values()]
        found: list[tuple[float, str, float]] = []
        for part in range(len(PARTS)):
            of_all = _median([each[part] for each in overall])
            if measure := _median([each[part] for each in cluster]):
                found.append((measure, "the median norm of its cluster", of_all or math.inf))
            else:
                of_start = start.norms[part]
                whose = "the median norm of all clients"
                if of_start >= of_all:
                    whose = "the norm of its start model"
                found.append((max(of_start, of_all), whose, math.inf))
        return found

    def _start_models(self, query: TrainQuery) -> Mapping[int, StartModel]:
        """Return the model from which each client of a query starts, by client."""
        models = query.models.vectors
        rows = query.models.start
        D = self._n_parameters
        if query.work.mixture is not None:
            start = StartModel.of(packed(models, D), len(models) * D)
            return dict.fromkeys(query.ids, start)
        if _continues_own_models(query):
            start = StartModel.of_several(models[list(rows)], D)
            return dict.fromkeys(query.ids, start)
        if isinstance(query.work.reply, DistanceToAnchor) and query.models.anchor is not None:
            rows = query.models.anchor
        of = {row: StartModel.of(models[row], D) for row in {*rows} - {OWN}}
        return {client: of[row] for client, row in zip(query.ids, rows, strict=True) if row in of}


def _scale_down(updates: Updates, factors: Tensor) -> Updates:
    """Scale down the updates whose norms exceed a limit.

    The rows of these updates are changed in place: a reply that is on its way has no other user,
    and a copy of all updates would double the memory of the server.

    Parameters
    ----------
    updates
        Updates of n clients.
    factors
        Factors of each client's parameters and buffers, ``[n, 2]``; 1 for no change.
    """
    if not bool((factors < 1).any()):
        return updates
    D = updates.n_parameters
    deltas = updates.required_deltas
    of_parameters = factors[:, 0]
    for row in (factors < 1).any(dim=1).nonzero().flatten().tolist():
        by = factors[row].to(deltas)
        deltas[row, :D] *= by[0]
        deltas[row, D:] *= by[1]
    return updates.with_columns(norms=updates.norms * of_parameters, shortened=of_parameters)


def _continues_own_models(query: TrainQuery) -> bool:
    """Return whether each client of a query continues from its own model, which is not sent again.

    The query's row numbers decide whether the models are different, not the models' values:
    adversaries could make their values equal.
    """
    models = query.models
    is_continued = query.kind == "train" and models.sent_before and query.work.sends_update
    return is_continued and len(set(models.start)) == len(query.ids)


def _median(values: list[float]) -> float:
    """Return the median of norms, or 0 if there are fewer than :data:`ENOUGH` norms."""
    return median_low(values) if len(values) >= ENOUGH else 0.0
