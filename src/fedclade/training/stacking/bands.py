"""Optimizers of torch's own for the parameters of all clients: one for each run of clients that take the same steps.

Such an optimizer counts its steps for a parameter as a whole, and clients with few batches leave off early. So the
clients are cut into bands, each of which is one large model to its optimizer; of equal sizes there is a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacking.stacked_parameter import StackedParameter


class Bands:
    """The optimizers of one local training. Clients between two of the edges take the same steps."""

    def __init__(self, optimizer: LocalOptimizer, parameters: Sequence[StackedParameter], edges: Sequence[int]) -> None:
        self._parameters = parameters
        self._bands = [
            (start, stop, optimizer.torch_optimizer(views), views)
            for start, stop in pairwise(edges)
            for views in [[p.view(start, stop) for p in parameters]]
        ]

    def step(self, start: int, stop: int, scales: Tensor | None) -> None:
        """Let the clients ``start`` to ``stop`` take a step, whose gradients are clipped by the factors if any."""
        gradients = [p.clipped(scales) for p in self._parameters]
        for first, last, optimizer, views in self._bands:
            if start <= first < stop:
                for view, gradient in zip(views, gradients, strict=True):
                    view.grad = None if gradient is None else gradient[first:last]
                optimizer.step()
