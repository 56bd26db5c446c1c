"""Middleware that gives clients the weights of ``aggregate.weights`` in means of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedclade.channel.middleware import Middleware
from fedclade.core import Aggregation, ConfigError, TrainQuery, shown


@dataclass(frozen=True)
class Weighing(Middleware):
    """Middleware that sets the weights of clients in means of updates, at the server.

    Parameters
    ----------
    how
        ``examples``, ``uniform``, or the weights of clients by their names or ids.
    names
        Function that returns the name of each client, by client id.
    sizes
        Function that returns the number of training examples of each client, by client id.
    """

    queries = (TrainQuery,)

    how: str | Mapping[str, float]
    names: Callable[[], Mapping[int, str]]
    sizes: Callable[[], Mapping[int, int]]

    @classmethod
    def of(
        cls,
        aggregation: Aggregation,
        names: Callable[[], Mapping[int, str]],
        sizes: Callable[[], Mapping[int, int]],
    ) -> Weighing | None:
        """Return the middleware for the settings of a run; None if the method decides."""
        if aggregation.weights == "auto":
            return None
        return cls(aggregation.weights, names, sizes)

    def after(self, query: Any, reply: Any) -> Any:
        """Return the updates with a column of weights."""
        if not reply.ids or not query.work.sends_update:
            return reply
        if self.how == "examples":
            weights = reply.sizes.clone()
        else:
            weights = torch.tensor([self._weight(c) for c in reply.ids], dtype=torch.float64)
        return reply.with_columns(weights=weights)

    def weigh(self, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weight of each client in means over all clients."""
        if self.how == "examples":
            sizes = self.sizes()
            return {client: sizes[client] for client in weights}
        return {client: self._weight(client) for client in weights}

    def _weight(self, client: int) -> float:
        """Return the weight of a client; 1 if the mapping does not list the client."""
        if isinstance(self.how, str):
            return 1.0
        return float(self.how.get(self.names().get(client, ""), self.how.get(str(client), 1.0)))


def check_weights(aggregation: Aggregation, names: Mapping[int, str]) -> None:
    """Check that ``aggregate.weights`` lists only clients of the run, by their names or ids.

    Raises
    ------
    ConfigError
        If a key is neither the name nor the id of a client, or all clients have weight 0.
    """
    if isinstance(aggregation.weights, str):
        return
    known = {*names.values(), *map(str, names)}
    if odd := [key for key in aggregation.weights if key not in known]:
        raise ConfigError(
            f"aggregate.weights lists {shown(odd[0])}, which is neither the name nor the id of a "
            f"client; the clients are {shown(sorted(names.values())[:5])} and so on"
        )
    weighing = Weighing(aggregation.weights, lambda: names, dict)
    if not any(weighing.weigh(dict.fromkeys(names, 1.0)).values()):
        raise ConfigError("aggregate.weights gives all clients the weight 0; raise a weight")
