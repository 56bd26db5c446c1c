"""Local optimizers: the step of one client, and the same step for k clients at once.

Every engine takes its steps from here. Plain SGD has formulas of its own for k clients at once. If
:attr:`LocalOptimizer.can_fuse` is set, stacked parameters and the large dense layers of
:mod:`~fedclade.training.channels_last` fuse a step: they add the product that is the gradient to
the parameters directly, and never write the gradient. Other optimizers are torch's own classes,
unchanged. Those of :data:`ELEMENT_WISE` take the steps of k clients as if the clients were one
large model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn, optim

from fedclade.core import ConfigError, LocalTraining, optimizer_class, own_defaults

ELEMENT_WISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Rprop, optim.ASGD),
    }
)
"""Optimizers, by exact type, in which each entry of a parameter is independent of all others."""

FUSED = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})
"""Optimizers that can take a step in one kernel on any device."""


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer, with the symbols of :class:`~fedclade.core.local.LocalTraining`.

    ``lr`` is the step size of the round.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    mu: float = 0.0
    clip_norm: float | None = None
    kind: type[optim.Optimizer] = optim.SGD
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    keeps_state: bool = False

    @classmethod
    def of(cls, spec: LocalTraining, lr: float) -> LocalOptimizer:
        """Return the optimizer of local training, with the step size of a round."""
        kind = optimizer_class(str(spec.optimizer))
        arguments = spec.momentum or 0.0, spec.weight_decay or 0.0, spec.mu, spec.clip_norm
        return cls(lr, *arguments, kind, spec.options, spec.keep_state)

    @property
    def is_plain(self) -> bool:
        """Whether this is SGD as implemented here, rather than one of torch's classes."""
        return (
            self.kind is optim.SGD and not self.options and not (self.keeps_state and self.momentum)
        )

    @property
    def is_element_wise(self) -> bool:
        """Whether the steps of several clients can be taken as those of one large model."""
        return self.kind in ELEMENT_WISE

    @property
    def has_kernel(self) -> bool:
        """Whether a step can be one kernel, which passes over memory once."""
        return self.kind in FUSED and not {"foreach", "fused"}.intersection(self.options)

    @property
    def can_fuse(self) -> bool:
        """Whether a step is only θ ← β·θ + α·g, so that the gradient need not be stored."""
        return self.is_plain and self.momentum == 0 and self.mu == 0 and self.clip_norm is None

    @property
    def fused(self) -> tuple[float, float]:
        """Factors β and α of a fused step."""
        return 1 - self.lr * self.weight_decay, -self.lr

    @property
    def carried(self) -> float:
        """Factor of a gradient buffer at the next step, which turns it into a momentum buffer."""
        return self.momentum if self.is_plain and self.clip_norm is None else 0.0

    @property
    def keeps_velocity(self) -> bool:
        """Whether momentum needs a buffer of its own.

        It does if gradients are clipped: a gradient must be complete before it is clipped, so it
        cannot be accumulated in the momentum buffer.
        """
        return self.is_plain and bool(self.momentum) and self.clip_norm is not None

    @property
    def states(self) -> frozenset[str]:
        """Names of state tensors with one number per entry of a parameter.

        Other state is per parameter as a whole.
        """
        return _states(replace(self, lr=1.0))

    def torch_optimizer(
        self, parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]], fused: bool = False
    ) -> optim.Optimizer:
        """Return torch's optimizer for the parameters of one or several clients.

        Call :meth:`adjust` before each of its steps.

        Parameters
        ----------
        parameters
            The parameters, or groups of parameters.
        fused
            Whether to take a step in one kernel, if the optimizer has one and its options do not
            specify otherwise.
        """
        options = dict(self.options)
        if fused and self.has_kernel:
            options["fused"] = True
        arguments = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        taken = {
            name: value for name, value in arguments.items() if name in own_defaults(self.kind)
        }
        return self.kind(parameters, **taken, **options)  # pyright: ignore[reportCallIssue]

    def for_one_client(self, parameters: Sequence[nn.Parameter]) -> optim.Optimizer | PlainSGD:
        """Return the optimizer that takes the steps of one client.

        Call :meth:`adjust` before each of its steps. On a GPU it is torch's own, which takes a step
        with all parameters at once.
        """
        if self.is_plain and all(parameter.is_cpu for parameter in parameters):
            return PlainSGD(parameters, self.lr, self.momentum, weight_decay=self.weight_decay)
        return self.torch_optimizer(parameters)

    def apart(self, state: Mapping[str, Tensor]) -> tuple[tuple[str, float], ...]:
        """Return the entries of a state that must agree for clients to share one optimizer."""
        whole = ((name, value) for name, value in state.items() if not self.is_of_entries(name))
        return (
            *((name, float(value)) for name, value in sorted(whole)),
            *((name, 0.0) for name in sorted(state)),
        )

    def is_of_entries(self, name: str) -> bool:
        """Return whether a state tensor has one number per entry of the parameter."""
        return name.rpartition(".")[2] in self.states

    def set_state(
        self,
        optimizer: optim.Optimizer | PlainSGD,
        parameters: Mapping[str, nn.Parameter],
        state: Mapping[str, Tensor],
    ) -> None:
        """Set the state of torch's optimizer to copies of tensors; parameters are given by name."""
        for name, value in state.items():
            parameter, _, key = name.rpartition(".")
            if (own := parameters.get(parameter)) is not None:
                optimizer.state[own][key] = (
                    value.to(own, copy=True) if self.is_of_entries(name) else value.clone()
                )

    def adjust(self, parameters: Sequence[nn.Parameter], anchors: Sequence[Tensor]) -> None:
        """Add the gradient of μ/2·‖θ − θ_anchor‖² to one client's gradients, and clip them."""
        if self.mu:
            for parameter, anchor in zip(parameters, anchors, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - anchor, alpha=self.mu)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def scales(self, gradients: Iterable[Tensor]) -> Tensor | None:
        """Return the factors ``[k]`` of clipping; None if gradients are not clipped.

        ``gradients`` has a tensor ``[k, ...]`` for each parameter.
        """
        gradients = list(gradients)
        return (
            None if self.clip_norm is None or not gradients else clipping(gradients, self.clip_norm)
        )

    def step(
        self, value: Tensor, gradient: Tensor, velocity: Tensor | None, scales: Tensor | None
    ) -> None:
        """Take a step of k clients in place; values, gradients and velocities are ``[k, ...]``.

        Without a velocity, momentum is already part of the gradient.
        """
        if scales is not None:
            gradient.mul_(per_client(scales, gradient))
        if self.weight_decay:
            gradient.add_(value, alpha=self.weight_decay)
        if velocity is not None:
            gradient = velocity.mul_(self.momentum).add_(gradient)
        value.add_(gradient, alpha=-self.lr)

    def stepped(
        self, value: Tensor, gradient: Tensor, velocity: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """Return the values after a step, as needed by ``torch.func``.

        Only the velocity changes in place.
        """
        if scales is not None:
            gradient = gradient * per_client(scales, gradient)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        if velocity is not None:
            gradient = velocity.copy_(self.momentum * velocity + gradient)
        return value - self.lr * gradient


class PlainSGD:
    """SGD with momentum and weight decay, whose steps equal those of ``torch.optim.SGD`` exactly.

    Torch imports its compiler with the first instance of one of its optimizers. That takes two
    seconds in every process, and each reply of a Flower client is a process.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], lr: float, momentum: float, *, weight_decay: float
    ) -> None:
        self._parameters = parameters
        self._lr = lr
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._velocities: dict[nn.Parameter, Tensor] = {}
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
        """Always empty: momentum that is kept between rounds needs torch's own optimizer."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever the argument."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with all parameters that have a gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.add_(self._direction(parameter, parameter.grad), alpha=-self._lr)

    def _direction(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if self._weight_decay:
            gradient = gradient.add(parameter, alpha=self._weight_decay)
        if not self._momentum:
            return gradient
        velocity = self._velocities.get(parameter)
        if velocity is None:
            velocity = self._velocities[parameter] = gradient.clone()
        else:
            velocity.mul_(self._momentum).add_(gradient)
        return velocity


@lru_cache(maxsize=16)
def _states(rule: LocalOptimizer) -> frozenset[str]:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.ones(2, 3)
    optimizer = rule.torch_optimizer([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    return frozenset(
        name for name, value in state.items() if isinstance(value, Tensor) and value.shape == (2, 3)
    )


def get_state(
    optimizer: optim.Optimizer | PlainSGD, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the state of an optimizer, with tensors named ``<parameter>.<entry>``.

    Raises
    ------
    ConfigError
        If the state has an entry that is not a number or tensor.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor | int | float | None):
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} in its state "
                    f"({key!r}), which cannot be kept from round to round; set local.keep_state = "
                    "false"
                )
            if value is not None:
                found[f"{name}.{key}"] = torch.as_tensor(value)
    return found


def clipping(gradients: Iterable[Tensor], largest: float) -> Tensor:
    """Return the factor ``[k]`` that scales each client's gradient to at most an L2 norm.

    It agrees with ``torch.nn.utils.clip_grad_norm_``, which also adds a small number to the norm.
    """
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
    return (largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1)


def per_client(factors: Tensor, values: Tensor) -> Tensor:
    """Return factors ``[k]`` in a shape that multiplies each client's values, ``[k, ...]``."""
    return factors.view(-1, *(1,) * (values.dim() - 1))
