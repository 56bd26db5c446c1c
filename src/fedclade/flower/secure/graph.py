"""Who shares masks with whom."""

from __future__ import annotations

import secrets
from collections.abc import Sequence


def neighbours_of(clients: Sequence[int], count: int) -> dict[int, list[int]]:
    """Return the neighbours of each client: with ``count`` 0 all others, else ``count``, if even, of a random circle.

    A circle on which everybody knows the nearest ``count`` is the graph of SecAgg+ (Bell et al. 2020, a Harary graph on
    a random order). The order is drawn from the operating system: no sum depends on it.
    """
    if not 0 < count < len(clients) - 1:
        return {client: [other for other in clients if other != client] for client in clients}
    circle = list(clients)
    secrets.SystemRandom().shuffle(circle)
    half = -(-count // 2)
    near = [*range(-half, 0), *range(1, half + 1)]
    found = {
        client: {circle[(place + step) % len(circle)] for step in near} - {client}
        for place, client in enumerate(circle)
    }
    return {client: sorted(others) for client, others in found.items()}
