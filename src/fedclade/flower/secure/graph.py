"""Whom a client deals shares of its secrets to."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fedclade.flower.secure.parameters import Graph


def draw_holders(client: int, members: Sequence[int], graph: Graph) -> list[int]:
    """Return the others that a client deals shares to, ascending: all, or so many as the graph says.

    The client draws them from the operating system, after it has seen the list. So neither the
    server nor other clients can choose them, nor try lists until the draw suits them.
    """
    others = [member for member in members if member != client]
    if graph.holders == 0:
        return others
    return sorted(secrets.SystemRandom().sample(others, graph.holders))
