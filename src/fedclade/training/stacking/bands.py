"""Use of one of torch's optimizers for the parameters of all clients at once.

Such an optimizer counts the steps of each parameter, but clients with few batches stop early. So
the clients are divided into bands: the clients of a band take the same number of steps, and their
values of a parameter form one parameter of the optimizer. If all clients have equally many
examples, there is a single band. All bands belong to one optimizer, which skips parameters without
a gradient, so that a call costs little more with many bands.
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
    """Optimizer for one local training of n clients, divided into bands with equal steps.

    Parameters
    ----------
    rule
        The optimizer and its settings.
    parameters
        Stacked parameters that the optimizer trains.
    edges
        Boundaries between clients. Clients between two adjacent edges take the same number of
        steps.
    states
        State with which the optimizer of each client starts; empty if states are not stored between
        rounds.
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
        self._views: list[list[nn.Parameter]] = []
        for parameter in parameters:
            self._views.append([parameter.view(start, stop) for start, stop in self._bands])
        views = [view for views in self._views for view in views]
        # State that is stored between rounds must have the same form in every engine. With steps in
        # one kernel on a GPU it has another form.
        fused = not rule.keeps_state or all(view.is_cpu for view in views)
        # If each band has a parameter group, torch checks for each band whether its state is new.
        # That takes longer, so groups are used only if states are stored between rounds.
        of_bands = [{"params": views} for views in zip(*self._views, strict=True)]
        self._optimizer = rule.torch_optimizer(of_bands if rule.keeps_state else views, fused)
        # The step method without torch's wrappers for profilers and compilers, whose cost is
        # noticeable for small models.
        self._step = inspect.unwrap(type(self._optimizer).step)
        for band, (start, stop) in enumerate(self._bands):
            if of_band := states[start:stop]:
                rule.set_state(self._optimizer, self._named(band), _stack_states(rule, of_band))

    def step(self, start: int, stop: int, scales: Tensor | None) -> None:
        """Take an optimizer step of some clients, with the gradients of the stacked parameters.

        Parameters
        ----------
        start, stop
            Range of the clients that take the step.
        scales
            Factors of clipping, ``[k]``; None if gradients are not clipped.
        """
        for parameter, views in zip(self._parameters, self._views, strict=True):
            gradients = parameter.clipped(scales)
            for (first, last), view in zip(self._bands, views, strict=True):
                if gradients is None or not start <= first < stop:
                    view.grad = None
                elif view.grad is None:  # later steps write to the same memory
                    view.grad = gradients[first:last]
        with torch.no_grad():
            self._step(self._optimizer)

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each client's optimizer, by name of the tensor."""
        found: list[dict[str, Tensor]] = []
        for band, (first, last) in enumerate(self._bands):
            of_band = get_state(self._optimizer, self._named(band))
            found += [_state_of_client(self._rule, of_band, k) for k in range(last - first)]
        return found

    def _named(self, band: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a band, by name."""
        return {
            p.slot.name: views[band] for p, views in zip(self._parameters, self._views, strict=True)
        }


def _stack_states(rule: LocalOptimizer, states: Sequence[State]) -> dict[str, Tensor]:
    """Return the optimizer state of a band, given the states of its k clients.

    Tensors with one number per entry of a parameter are stacked, ``[k, *shape]``. Other entries of
    the state are equal for all clients of a band.
    """
    stacked = dict(states[0])
    for name in stacked:
        if rule.is_of_entries(name):
            stacked[name] = torch.stack([state[name] for state in states])
    return stacked


def _state_of_client(rule: LocalOptimizer, of_band: State, k: int) -> dict[str, Tensor]:
    """Return the optimizer state of the k-th client of a band."""
    state: dict[str, Tensor] = {}
    for name, tensor in of_band.items():
        if rule.is_of_entries(name):
            tensor = tensor[k]
        state[name] = tensor.clone()
    return state
