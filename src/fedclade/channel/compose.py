"""The one list of middleware: what lies at the clients' end of the wire, and what at the server's."""

from __future__ import annotations

from fedclade.channel.answering import Answering
from fedclade.channel.central import Aggregating, CentralPrivacy
from fedclade.channel.middleware import Middleware
from fedclade.channel.privacy import DifferentialPrivacy, Noise, Privatizing
from fedclade.channel.replicates import Replicating, Unpacking
from fedclade.channel.retry import Retrying
from fedclade.channel.signature import Permutation, Permuting, Sketch, Sketching
from fedclade.channel.streaming import Streaming


def simulated_privacy(
    privacy: DifferentialPrivacy | CentralPrivacy | None, noise: Noise, sampling: float
) -> tuple[Privatizing | None, Answering, Aggregating]:
    """Return what makes simulated clients and the aggregator private, by one model of privacy, the other, or none."""
    central = privacy if isinstance(privacy, CentralPrivacy) else None
    private = Privatizing(privacy, noise) if isinstance(privacy, DifferentialPrivacy) else None
    return private, Answering(central, noise), Aggregating(central, sampling)


def client_side(
    privatizing: Privatizing | None = None,
    permutation: Permutation | None = None,
    sketch: Sketch | None = None,
    answering: Answering | None = None,
) -> list[Middleware]:
    """Return what an update passes before it leaves a client, in a simulation and on a real client alike.

    The sketch is that of the updates of parts; without one they are sent whole. ``answering`` is for private sums.
    """
    private = [privatizing] if privatizing else []
    permuting = [Permuting(permutation)] if permutation else []
    return [*private, *permuting, *([answering] if answering else []), Replicating(sketch)]


def received(sketch: Sketch | None = None, streaming: Streaming | None = None) -> list[Middleware]:
    """Return what an update passes where it arrives, be that one of the processes that simulate clients.

    Without a sketch the server compares whole updates.
    """
    return [Unpacking(), *([Sketching(sketch)] if sketch else []), *([streaming] if streaming else [])]


def server_side(
    retrying: Retrying, sketch: Sketch | None = None, streaming: Streaming | None = None
) -> list[Middleware]:
    """Return what an update passes once it has arrived."""
    return [*received(sketch, streaming), retrying]
