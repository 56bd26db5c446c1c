"""One of torch's optimizers for the parameters of all clients, split into bands with equal steps.

Such an optimizer counts the steps of a parameter as a whole, and clients with few batches stop
early. So each band of clients with equal steps has parameters of its own; if all clients have equal
sizes there is a single band, as in one large model. All bands belong to one optimizer, which skips
parameters without a gradient, so that a call costs little more with many bands.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedclade.training.optimizer import LocalOptimizer, get_state
from fedclade.training.stacking.stacked_parameter import StackedParameter

State = Mapping[str, Tensor]


class Bands:
    """Optimizer of one local training of n clients.

    Parameters
    ----------
    rule
        The optimizer and its settings.
    parameters
        Stacked parameters that it trains.
    edges
        Boundaries between clients. Clients between two adjacent edges take the same steps.
    states
        State with which each client begins; empty if states are not kept.
    """

    def __init__(
        self,
        rule: LocalOptimizer,
        parameters: Sequence[StackedParameter],
        edges: Sequence[int],
        states: Sequence[State] = (),
    ) -> None:
        self._rule = rule
        self._parameters = parameters
        keys = [rule.apart(state) for state in states]
        cuts = {k for k in range(1, len(keys)) if keys[k] != keys[k - 1]}
        self._bands = [*pairwise(sorted({*edges, *cuts}))]
        self._views = [[p.view(start, stop) for start, stop in self._bands] for p in parameters]
        views = [view for views in self._views for view in views]
        # State that is kept must have the same form in every engine. After steps in one kernel on a
        # GPU it has not.
        fused = not rule.keeps_state or all(view.is_cpu for view in views)
        # With a group per band, torch checks for each band whether its state is new. That takes
        # longer, so groups are used only if states are kept.
        of_bands = [{"params": views} for views in zip(*self._views, strict=True)]
        self._optimizer = rule.torch_optimizer(of_bands if rule.keeps_state else views, fused)
        # Without torch's wrappers for profilers and compilers, whose cost is noticeable for small
        # models.
        self._step = inspect.unwrap(type(self._optimizer).step)
        for band, (start, stop) in enumerate(self._bands):
            if of_band := states[start:stop]:
                entries = rule.is_of_entries
                state = {
                    n: torch.stack([s[n] for s in of_band]) if entries(n) else t
                    for n, t in of_band[0].items()
                }
                rule.set_state(self._optimizer, self._named(band), state)

    def step(self, start: int, stop: int, scales: Tensor | None) -> None:
        """Take a step of some clients.

        Parameters
        ----------
        start, stop
            The clients ``start`` to ``stop``.
        scales
            Factors of clipping, ``[k]``; None if gradients are not clipped.
        """
        for parameter, views in zip(self._parameters, self._views, strict=True):
            gradients = parameter.clipped(scales)
            for (first, last), view in zip(self._bands, views, strict=True):
                if gradients is None or not start <= first < stop:
                    view.grad = None
                elif view.grad is None:  # later steps use the same memory
                    view.grad = gradients[first:last]
        with torch.no_grad():
            self._step(self._optimizer)

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each client's optimizer."""
        found: list[dict[str, Tensor]] = []
        for band, (first, last) in enumerate(self._bands):
            of_band = get_state(self._optimizer, self._named(band)).items()
            entries = self._rule.is_of_entries
            found += [
                {name: (t[k] if entries(name) else t).clone() for name, t in of_band}
                for k in range(last - first)
            ]
        return found

    def _named(self, band: int) -> dict[str, nn.Parameter]:
        return {
            p.slot.name: views[band] for p, views in zip(self._parameters, self._views, strict=True)
        }
