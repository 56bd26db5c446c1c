"""Optimizers of torch's own for the parameters of all clients: one for each run of clients that take the same steps.

Such an optimizer counts its steps for a parameter as a whole, and clients with few batches leave off early. So the
clients are cut into bands, each of which is one large model to its optimizer; of equal sizes there is a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedclade.training.optimizer import LocalOptimizer, get_state
from fedclade.training.stacking.stacked_parameter import StackedParameter

State = Mapping[str, Tensor]

_Band = tuple[int, int, Optimizer, dict[str, nn.Parameter]]
"""From which client to which, and their parameters by name."""


class Bands:
    """The optimizers of one local training of n clients.

    Clients between two of the edges take the same steps. They begin with ``states``, one for each client, if any.
    """

    def __init__(
        self,
        optimizer: LocalOptimizer,
        parameters: Sequence[StackedParameter],
        edges: Sequence[int],
        states: Sequence[State] = (),
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        keys = [optimizer.apart(state) for state in states]
        cuts = {k for k in range(1, len(keys)) if keys[k] != keys[k - 1]}
        self._bands = [self._band(start, stop, states[start:stop]) for start, stop in pairwise(sorted({*edges, *cuts}))]

    def _band(self, start: int, stop: int, states: Sequence[State]) -> _Band:
        views = {p.slot.name: p.view(start, stop) for p in self._parameters}
        # What is kept has to be as any other engine leaves it, which a step in one kernel on a GPU has not.
        band = self._optimizer.torch_optimizer([*views.values()], fused=not self._optimizer.keeps_state)
        if states:
            entries = self._optimizer.is_of_entries
            state = {n: torch.stack([s[n] for s in states]) if entries(n) else states[0][n] for n in states[0]}
            self._optimizer.set_state(band, views, state)
        return start, stop, band, views

    def step(self, start: int, stop: int, scales: Tensor | None) -> None:
        """Let the clients ``start`` to ``stop`` take a step, whose gradients are clipped by the factors if any."""
        gradients = [p.clipped(scales) for p in self._parameters]
        for first, last, optimizer, views in self._bands:
            if start <= first < stop:
                for view, gradient in zip(views.values(), gradients, strict=True):
                    view.grad = None if gradient is None else gradient[first:last]
                optimizer.step()

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each client's optimizer."""
        found: list[dict[str, Tensor]] = []
        for first, last, optimizer, views in self._bands:
            of_band = get_state(optimizer, views).items()
            entries = self._optimizer.is_of_entries
            found += [
                {name: (t[k] if entries(name) else t).clone() for name, t in of_band} for k in range(last - first)
            ]
        return found
