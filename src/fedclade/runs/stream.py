"""Whether a run streams, where that is left to it."""

from __future__ import annotations

import logging

from fedclade.algorithms import Algorithm
from fedclade.runs.settings import RunSettings

SHARE_OF_UPDATES = 4
"""A run streams by itself if the updates of all clients would take more than one part in so many of its memory."""

_log = logging.getLogger(__name__)


def decide_stream(settings: RunSettings, algorithm: Algorithm, size: int, budget: int, remote: bool = False) -> bool:
    """Decide whether to stream, given the bytes of all clients' updates and those that may be taken.

    Updates that come from ``remote`` actors are only sent one by one if they have to be.
    """
    if settings.is_central:
        return True
    if settings.stream != "auto":
        return settings.stream
    needs_updates = algorithm.needs_updates or settings.aggregate.is_robust
    needs_updates |= settings.aggregate.leave_out_opposed is True
    if needs_updates or (size <= budget // SHARE_OF_UPDATES and not remote):
        return False
    can = settings.signature.kind != "full" or not algorithm.compares
    if not can and size > budget // SHARE_OF_UPDATES:
        _log.warning(
            "the updates of all clients take %.1f GB, the run may take %.1f GB; with signature.kind = 'projected' it "
            "would stream and keep none of them",
            size / 1e9,
            budget / 1e9,
        )
    return can
