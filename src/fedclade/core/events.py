"""What happened in a round, as the log of a run keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something worth telling that happened in a round.

    Parameters
    ----------
    kind
        ``split``, ``rejected``, ...
    node
        The cluster it happened to.
    details
        Numbers and members, ready for JSON.
    """

    kind: str
    node: int
    details: Mapping[str, object]
