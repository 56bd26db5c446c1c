"""Order of middleware at the clients' end and at the server's end of the channel."""

from __future__ import annotations

from fedclade.channel.central import Answering
from fedclade.channel.limits import Aggregating, Limiting
from fedclade.channel.lying import Lying, LyingOfMeans
from fedclade.channel.matching_parts import MatchingParts
from fedclade.channel.middleware import Middleware
from fedclade.channel.opposing import OpposingUpdates
from fedclade.channel.privacy import Withholding
from fedclade.channel.retry import Retrying
from fedclade.channel.signature import (
    Permutation,
    Permuting,
    Replicating,
    Sketch,
    Sketching,
    Unpacking,
)
from fedclade.channel.streaming import Streaming
from fedclade.core import Aggregation


def client_side(
    privatizing: Withholding | None = None,
    permutation: Permutation | None = None,
    sketch: Sketch | None = None,
    lying: Lying | None = None,
    answering: Answering | None = None,
) -> list[Middleware]:
    """Return the middleware at a client's end, in the order in which a reply passes it.

    It is the same in a simulation and on a real client.

    Parameters
    ----------
    privatizing
        Privacy of clients.
    permutation
        Permutation of model vectors.
    sketch
        Sketch of the updates of parts of the data; None: these updates are sent whole.
    lying
        Adversaries. They act after their own privacy, so that false updates are neither clipped nor
        noisy.
    answering
        Middleware for privacy of sums only. It also clips false updates, as any party that adds up
        updates would have to.
    """
    private = [*([privatizing] if privatizing else []), *([lying] if lying else [])]
    permuting = [Permuting(permutation)] if permutation else []
    of_means = [LyingOfMeans(lying)] if lying else []
    return [
        *private,
        *permuting,
        *([answering] if answering else []),
        Replicating(sketch),
        *of_means,
    ]


def received(
    sketch: Sketch | None = None,
    streaming: Streaming | None = None,
    limiting: Limiting | None = None,
    matching: MatchingParts | None = None,
) -> list[Middleware]:
    """Return the middleware that replies pass first at the server, in order.

    In a simulation with several processes, each of these has this middleware. A limit on norms
    changes updates, so updates are first checked against their parts.

    Parameters
    ----------
    sketch
        Sketch by which the server compares updates; None: it compares whole updates.
    streaming, limiting, matching
        Further middleware; None to leave it out.
    """
    within = [*([matching] if matching else []), *([limiting] if limiting else [])]
    return [
        *within,
        Unpacking(),
        *([Sketching(sketch)] if sketch else []),
        *([streaming] if streaming else []),
    ]


def arrived(
    retrying: Retrying,
    aggregation: Aggregation,
    limiting: Limiting | None = None,
    opposing: OpposingUpdates | None = None,
) -> list[Middleware]:
    """Return the middleware that replies pass last at the server, in order."""
    within = [*([limiting] if limiting else []), *([opposing] if opposing else [])]
    return [*within, retrying, *([Aggregating(aggregation)] if aggregation.is_robust else [])]


def server_side(
    retrying: Retrying,
    sketch: Sketch | None = None,
    streaming: Streaming | None = None,
    limiting: Limiting | None = None,
    aggregation: Aggregation | None = None,
    *,
    matching: MatchingParts | None = None,
    opposing: OpposingUpdates | None = None,
) -> list[Middleware]:
    """Return the middleware at the server's end, in the order in which a reply passes it."""
    last = arrived(retrying, aggregation or Aggregation(), opposing=opposing)
    return [*received(sketch, streaming, limiting, matching), *last]
