"""Check that a client's update is the mean of the updates of its parts, by their signatures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.channel.signature import SignSketch, Sketch
from fedclade.core import Ask, Round, UpdateQuery, Updates

ROUNDING = 64.0
"""Tolerance of the check, in units of rounding.

The signature of a mean and the mean of signatures are sums of the same numbers in another order.
Honest clients with float32 differ by a few units.
"""


@dataclass(frozen=True)
class MatchingParts(Middleware):
    """Middleware that leaves out clients whose update is not the mean of the updates of its parts.

    If clients are compared by updates of parts of their data, they send the mean of these updates,
    by which a model moves, and the signature of each. A client could send honest signatures with a
    false mean. Since a signature is linear, the signature of the mean has to equal the mean of the
    signatures.

    The check comes before any middleware that changes the clients' updates, such as a limit on
    norms. It cannot detect a difference that the sketch maps to zero; a sketch with as many numbers
    as the model has parameters maps none to zero. Signs are not linear: if signatures are signs,
    nothing is checked.

    Parameters
    ----------
    sketch
        Signature of a part.
    """

    sketch: Sketch

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates ``[n, S + m·R]`` of the clients whose mean matches their parts."""
        compares = query.round.replicates > 1 and query.round.compares_parts
        if query.kind == "gradients" or not compares or isinstance(self.sketch, SignSketch):
            return ask(query)
        size = query.models.shape[1]
        this_round = query.round
        if (sink := query.sink) is not None:
            query = replace(
                query, sink=lambda updates: sink(self._matching(updates, size, this_round))
            )
        return self._matching(ask(query), size, this_round)

    def _matching(self, updates: Updates, size: int, this_round: Round) -> Updates:
        left_out: dict[int, str] = {}
        counts = updates.sizes.tolist()
        # Over a network updates travel in float32, whatever the model is in.
        unit = max(torch.finfo(updates.required_deltas.dtype).eps, torch.finfo(torch.float32).eps)
        for client, sent, count in zip(updates.ids, updates.required_deltas, counts, strict=True):
            signatures = sent[size:].view(this_round.replicates, -1).double()
            difference = self._difference(
                sent[: updates.n_parameters], signatures, shares_of(this_round, int(count))
            )
            length = float(signatures.norm(dim=1).mean())
            spread = math.sqrt(max(1.0, updates.n_parameters / max(1, signatures.shape[1])))
            bound = ROUNDING * unit * spread * length
            if not difference <= bound:  # NaN is not less than anything
                left_out[client] = (
                    "its update is not the mean of those of its parts: their signatures differ by "
                    f"{difference:.3g}, more than {bound:.3g}"
                )
        if not left_out:
            return updates
        matching = updates.select([client for client in updates.ids if client not in left_out])
        return replace(matching, left_out={**updates.left_out, **left_out})

    def _difference(self, mean: Tensor, signatures: Tensor, shares: list[float]) -> float:
        """Return the distance of the signature of a mean ``[D]`` from the mean of signatures.

        ``signatures [m, R]`` are weighted by ``shares``.
        """
        expected = torch.tensor(shares, dtype=torch.float64, device=signatures.device) @ signatures
        return float((self.sketch.apply(mean.double()) - expected).norm())


def shares_of(this_round: Round, examples: int) -> list[float]:
    """Return the shares ``[m]`` of a client's examples in the m parts of a round."""
    parts = this_round.replicates
    if this_round.part_size:
        return [1 / parts] * parts
    sizes = [len(range(place, examples, parts)) for place in range(parts)]
    return [size / examples for size in sizes]
