"""The gradients of single examples of all clients: their norms, and their sums with factors of one's own.

Of a dense layer whose input has no further dimensions, an example's gradient is the product δxᵀ of two vectors. Its
norm is ‖δ‖·‖x‖, and the sum with factors c is Σ c·δxᵀ, the product that the plain gradient is: so no example's gradient
is ever written (Goodfellow 2015, arXiv:1510.01799; Bu et al. 2023, arXiv:2210.00038). Others are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedclade.training.stacking.stacked_parameter import StackedParameter


class _Dense(NamedTuple):
    """A gradient of each example, as its factors: of the outputs ``[k, B, o]``, and the inputs ``[k, B, i]``."""

    gradient: Tensor
    rows: Tensor | None  # None for a bias, whose gradient is that of the outputs

    def squares(self) -> Tensor:
        """Return the squared norms, ``[k, B]``."""
        of_outputs = self.gradient.square().sum(2)
        return of_outputs if self.rows is None else of_outputs.mul_(self.rows.square().sum(2))

    def written(self) -> Tensor:
        """Return the gradients themselves, ``[k, B, ...]``."""
        return self.gradient if self.rows is None else self.gradient.unsqueeze(3) * self.rows.unsqueeze(2)


class ByExample:
    """The gradients of a step: every parameter hands in its own, then all are clipped and summed."""

    def __init__(self) -> None:
        self.width = 0
        """Examples of each client in the step: B."""
        self._found: dict[StackedParameter, list[_Dense | Tensor]] = {}
        self._broken: Tensor | None = None  # which examples have no norm, [k, B, 1], if any

    def begin(self, width: int) -> None:
        """Begin a step of so many examples of each client."""
        self.width = width
        self._found = {}

    def add(self, parameter: StackedParameter, gradients: Tensor) -> None:
        """Take the gradient of each example, ``[k·B, *shape]``."""
        if parameter.learns:
            self._found.setdefault(parameter, []).append(gradients.unflatten(0, (-1, self.width)))

    def add_dense(
        self, gradient: Tensor, rows: Tensor, weight: StackedParameter, bias: StackedParameter | None
    ) -> None:
        """Take those of a dense layer, from the gradients of its outputs, and its inputs, ``[k, B·..., ·]`` both."""
        k, each = len(rows), rows.shape[1] // self.width
        if each == 1:
            of_weight, of_bias = _Dense(gradient, rows), _Dense(gradient, None)
        else:
            outputs, inputs = (t.reshape(k, self.width, each, -1) for t in (gradient, rows))
            of_weight = torch.matmul(outputs.mT, inputs) if weight.learns else outputs
            of_bias = outputs.sum(2)
        if weight.learns:
            self._found.setdefault(weight, []).append(of_weight)
        if bias is not None and bias.learns:
            self._found.setdefault(bias, []).append(of_bias)

    def squares(self) -> Tensor:
        """Return the squared norm of each example's gradient, of all parameters together, ``[k, B]``."""
        self._found = {parameter: [_together(parts)] for parameter, parts in self._found.items()}
        each = [parts[0] for parts in self._found.values()]
        squares = [e.squares() if isinstance(e, _Dense) else e.flatten(2).square().sum(2) for e in each]
        found = torch.stack(squares).sum(0)
        broken = ~found.isfinite()
        self._broken = broken.unsqueeze(2) if bool(broken.any()) else None
        return found

    def deliver(self, factors: Tensor) -> None:
        """Give every parameter the sum of its examples' gradients, each times a factor ``[k, B]``; 0 leaves one out."""
        left_out = (factors == 0).unsqueeze(2)
        weights = factors.unsqueeze(1)
        for parameter, (found,) in self._found.items():
            if isinstance(found, _Dense):
                outputs = (found.gradient * factors.unsqueeze(2)).masked_fill_(left_out, 0)
                if found.rows is None:
                    parameter.add(outputs.sum(1).view(parameter.state.shape))
                else:
                    rows = found.rows if self._broken is None else found.rows.masked_fill(self._broken, 0)
                    parameter.add_product(outputs.mT, rows)
            else:
                flat = found.flatten(2) if found.dim() > 2 else found.unsqueeze(2)
                parameter.add(torch.bmm(weights, flat.masked_fill(left_out, 0)).view(parameter.state.shape))


def _together(parts: list[_Dense | Tensor]) -> _Dense | Tensor:
    """Return the sum of what several uses of a parameter have given."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.written() if isinstance(part, _Dense) else part for part in parts]).sum(0)
