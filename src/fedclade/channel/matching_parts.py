"""Middleware that checks that a client's update is the mean of the updates from its data's parts.

The check detects malicious clients that send a false update with honest signatures. The updates
from the parts of a client's data are sent only as signatures, which are short linear projections
(sketches).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.channel.signature import SignSketch, Sketch
from fedclade.core import Splits, TrainQuery, Updates

ROUNDING = 64.0
"""Tolerance of the check, in units of rounding.

The signature of a mean and the mean of signatures are sums of the same numbers in another order.
Honest clients with float32 differ by a few units.
"""


@dataclass(frozen=True)
class MatchingParts(Middleware):
    """Middleware that leaves out clients whose update is not the mean of their parts' updates.

    If clients are compared by updates from several parts of their data, a client sends the mean of
    these updates, by which a model moves, and the signature (a sketch) of each of them. A malicious
    client could send honest signatures with a false mean. Since a sketch is linear, the signature
    of the mean has to equal the mean of the signatures.

    The check comes before any middleware that changes the clients' updates, such as a limit on
    norms. The check cannot detect a difference that the sketch maps to zero; a sketch with as many
    numbers as the model has parameters maps no difference to zero. Signs are not linear: if
    signatures are signs, nothing is checked.

    Parameters
    ----------
    sketch
        Sketch that makes the signature of an update.
    """

    queries = (TrainQuery,)

    sketch: Sketch

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Return only the updates that match the signatures of their clients' parts."""
        splits = query.work.compared_splits
        if splits is None or reply.parts is None or isinstance(self.sketch, SignSketch):
            return reply
        return self._select_matching(reply, reply.parts, splits)

    def _select_matching(self, updates: Updates, parts: Tensor, splits: Splits) -> Updates:
        """Leave out the clients whose update does not match the signatures of their parts.

        Parameters
        ----------
        updates
            Updates of n clients.
        parts
            Signatures ``[n, m, R]``: R numbers for each of the m parts of each client's data.
        splits
            Division of each client's data into parts.
        """
        left_out: dict[int, str] = {}
        counts = updates.sizes.tolist()
        # Over a network updates travel in float32, whatever the model is in.
        unit = max(torch.finfo(updates.required_deltas.dtype).eps, torch.finfo(torch.float32).eps)
        rows = zip(updates.ids, updates.required_deltas, parts.double(), counts, strict=True)
        for client, update, signatures, count in rows:
            difference = self._measure_difference(
                update[: updates.n_parameters], signatures, shares_of(splits, int(count))
            )
            length = float(signatures.norm(dim=1).mean())
            spread = math.sqrt(max(1.0, updates.n_parameters / max(1, signatures.shape[1])))
            bound = ROUNDING * unit * spread * length
            if not difference <= bound:  # NaN is not less than anything
                left_out[client] = (
                    "the update is not the mean of the updates from the client's parts of its "
                    f"data: their signatures differ by {difference:.3g}, more than {bound:.3g}"
                )
        if not left_out:
            return updates
        matching = updates.select([client for client in updates.ids if client not in left_out])
        return replace(matching, left_out={**updates.left_out, **left_out})

    def _measure_difference(self, mean: Tensor, signatures: Tensor, shares: list[float]) -> float:
        """Return the distance of the signature of a mean update from the mean of m signatures.

        Parameters
        ----------
        mean
            Mean update that a client sent, ``[D]`` (one number for each model parameter).
        signatures
            Signatures of the client's m parts, ``[m, R]``.
        shares
            Weights of the signatures, ``[m]``, which sum to 1.
        """
        expected = torch.tensor(shares, dtype=torch.float64, device=signatures.device) @ signatures
        return float((self.sketch.apply(mean.double()) - expected).norm())


def shares_of(splits: Splits, examples: int) -> list[float]:
    """Return the share of a client's examples in each of the m parts of its data, ``[m]``."""
    parts = splits.count
    if splits.size:
        return [1 / parts] * parts
    sizes = [len(range(place, examples, parts)) for place in range(parts)]
    return [size / examples for size in sizes]
