"""The rule by which updates of a cluster are aggregated, which they carry from where they have arrived."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedclade.channel.middleware import Middleware
from fedclade.core import Aggregation, Ask, UpdateQuery, Updates


@dataclass(frozen=True)
class Aggregating(Middleware):
    """Lets :func:`fedclade.core.mean` aggregate updates by a robust rule, wherever an algorithm takes their mean."""

    aggregation: Aggregation

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the updates, with the rule."""
        return replace(ask(query), aggregation=self.aggregation)
