"""The one list of middleware: what lies at the clients' end of the wire, and what at the server's."""

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
    """Return what an update passes before it leaves a client, in a simulation and on a real client alike.

    The sketch is that of the updates of parts; without one they are sent whole. Adversaries lie
    behind their privacy, but where only sums are private: ``answering`` clips lies, too, as whoever
    adds updates up would have to.
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
    """Return what an update passes where it arrives, be that one of the processes that simulate clients.

    Without a sketch the server compares whole updates. That an update matches its parts is checked
    before a limit shortens it.
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
    """Return what an update passes last."""
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
    """Return what an update passes once it has arrived."""
    last = arrived(retrying, aggregation or Aggregation(), opposing=opposing)
    return [*received(sketch, streaming, limiting, matching), *last]
