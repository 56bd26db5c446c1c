"""The one list of middleware: what lies at the clients' end of the wire, and what at the server's."""

from __future__ import annotations

from fedclade.channel.middleware import Middleware
from fedclade.channel.privacy import Privatizing
from fedclade.channel.replicates import Replicating
from fedclade.channel.retry import Retrying
from fedclade.channel.signature import CountSketch, Permutation, Permuting, Sketching
from fedclade.channel.streaming import Streaming


def client_side(
    privatizing: Privatizing | None = None, permutation: Permutation | None = None, sketch: CountSketch | None = None
) -> list[Middleware]:
    """Return what is done to an update before it leaves a client, in a simulation and on a real client alike.

    Parameters
    ----------
    privatizing
        Clips it and puts noise on it.
    permutation
        P, if clients share a secret.
    sketch
        The projection of the signatures that stand for replicates.
    """
    private = [privatizing] if privatizing else []
    permuting = [Permuting(permutation)] if permutation else []
    return [*private, *permuting, Replicating(sketch)]


def server_side(
    retrying: Retrying, sketch: CountSketch | None = None, streaming: Streaming | None = None
) -> list[Middleware]:
    """Return what is done to an update once it has arrived.

    Parameters
    ----------
    retrying
        Counts who answered.
    sketch
        The projection that clients are compared by; None for whole updates.
    streaming
        Keeps sums in place of updates.
    """
    sketching = [Sketching(sketch)] if sketch else []
    return [*sketching, *([streaming] if streaming else []), retrying]
