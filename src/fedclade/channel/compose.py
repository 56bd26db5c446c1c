"""Order of middleware at the clients' end and at the server's end of the channel.

A middleware is an object that changes queries on their way to clients and replies on their way
back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedclade.channel.limits import Aggregating
from fedclade.channel.lying import LyingOfMeans
from fedclade.channel.signature import Permuting, Replicating, Sketching
from fedclade.core import Aggregation

if TYPE_CHECKING:  # a client's process starts sooner without the modules of the server's middleware
    from fedclade.channel.central import Answering
    from fedclade.channel.limits import Limiting
    from fedclade.channel.lying import Lying
    from fedclade.channel.matching_parts import MatchingParts
    from fedclade.channel.middleware import Middleware
    from fedclade.channel.opposing import OpposingUpdates
    from fedclade.channel.privacy import Withholding
    from fedclade.channel.retry import Retrying
    from fedclade.channel.signature import Permutation, Sketch
    from fedclade.channel.streaming import Streaming
    from fedclade.channel.weighing import Weighing


def client_side(
    privatizing: Withholding | None = None,
    permutation: Permutation | None = None,
    sketch: Sketch | None = None,
    lying: Lying | None = None,
    answering: Answering | None = None,
) -> list[Middleware]:
    """Return the middleware at a client's end, in the order in which replies pass through it.

    Simulated and real clients have the same middleware.

    Parameters
    ----------
    privatizing
        Middleware for the differential privacy of clients; None for no privacy.
    permutation
        Permutation of model vectors; None for no permutation.
    sketch
        Sketch of the updates from parts of a client's data; None: these updates are sent whole.
    lying
        Middleware that simulates adversaries; None without adversaries. It acts after the privacy
        middleware, so that false updates are neither clipped nor noisy.
    answering
        Middleware for central privacy, in which the server receives only noisy sums of updates. It
        also clips false updates, as any party that adds up updates would have to.
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
    *,
    weighing: Weighing | None = None,
) -> list[Middleware]:
    """Return the middleware that replies pass through first when they arrive at the server.

    The list is in the order in which replies pass through it. In a simulation with several
    processes, each process has this middleware. ``matching``, which checks that a client's update
    is the mean of the updates from parts of its data, comes before ``limiting``, which changes
    updates.

    Parameters
    ----------
    sketch
        Sketch by which the server compares updates; None: the server compares whole updates.
    streaming
        Middleware that adds up updates as they arrive; None to leave it out.
    limiting
        Middleware that limits the weights and norms of updates; None to leave it out.
    matching
        Middleware that checks a client's update against the updates from parts of its data; None to
        leave it out.
    weighing
        Middleware that sets the weights of clients; None to leave it out. It comes after
        ``limiting``, since weights by numbers of examples are limited.
    """
    within = [each for each in (matching, limiting, weighing) if each is not None]
    return [*within, *([Sketching(sketch)] if sketch else []), *([streaming] if streaming else [])]


def arrived(
    retrying: Retrying,
    aggregation: Aggregation,
    limiting: Limiting | None = None,
    opposing: OpposingUpdates | None = None,
) -> list[Middleware]:
    """Return the middleware that replies pass through last at the server.

    This middleware acts on the complete reply of all clients. The list is in the order in which
    replies pass through it.
    """
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
    weighing: Weighing | None = None,
) -> list[Middleware]:
    """Return all middleware at the server's end, in the order in which replies pass through it."""
    last = arrived(retrying, aggregation or Aggregation(), opposing=opposing)
    first = received(sketch, streaming, limiting, matching, weighing=weighing)
    return [*first, *last]
