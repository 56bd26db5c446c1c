"""Local optimizers: the optimizer step of one client, and of k clients at once.

All engines use the optimizers of this module. Plain SGD has its own implementation for k clients at
once. An SGD step without momentum, proximal term and clipping can be fused (see
:attr:`LocalOptimizer.can_fuse`): the matrix product that computes the gradient is added to the
parameters directly, so that the gradient is never stored. Stacked parameters and the large dense
layers of :mod:`~fedclade.training.channels_last` use fused steps. Other optimizers are torch's own
classes. The optimizers in :data:`ELEMENT_WISE` take the steps of k clients as if the clients were
one large model.
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
"""Optimizers, by exact type, that update each entry of a parameter independently."""

FUSED = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})
"""Optimizers that can take a step in one kernel on any device."""


@dataclass(frozen=True)
class LocalOptimizer:
    """Optimizer of local training, with the fields of :class:`~fedclade.core.local.LocalTraining`.

    ``lr`` is the step size of the round, and ``mu`` the weight μ of the proximal term.
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
        """Return the optimizer for the settings of local training and the step size of a round."""
        return cls(
            lr,
            momentum=spec.momentum or 0.0,
            weight_decay=spec.weight_decay or 0.0,
            mu=spec.mu,
            clip_norm=spec.clip_norm,
            kind=optimizer_class(str(spec.optimizer)),
            options=spec.options,
            keeps_state=spec.keep_state,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer is SGD as implemented in this module, not a class of torch."""
        return (
            self.kind is optim.SGD and not self.options and not (self.keeps_state and self.momentum)
        )

    @property
    def is_element_wise(self) -> bool:
        """Whether the steps of several clients can be computed as steps of one large model."""
        return self.kind in ELEMENT_WISE

    @property
    def has_kernel(self) -> bool:
        """Whether torch can take a whole step in one kernel, which reads each tensor only once."""
        return self.kind in FUSED and not {"foreach", "fused"}.intersection(self.options)

    @property
    def can_fuse(self) -> bool:
        """Whether a step has the form θ ← β·θ + α·g, so that the gradient g need not be stored.

        Here θ are the parameters, and α and β are constants (:attr:`fused`). The steps of plain SGD
        without momentum, proximal term and clipping have this form.
        """
        return self.is_plain and self.momentum == 0 and self.mu == 0 and self.clip_norm is None

    @property
    def fused(self) -> tuple[float, float]:
        """Factors (β, α) of a fused step θ ← β·θ + α·g with parameters θ and gradient g."""
        return 1 - self.lr * self.weight_decay, -self.lr

    @property
    def carried(self) -> float:
        """Factor by which a gradient buffer is multiplied before the next gradient is added to it.

        For SGD with momentum, it is the momentum factor, so that the gradient buffer is also the
        momentum buffer. It is 0 if the optimizer has no momentum or has a separate momentum buffer.
        """
        if not self.is_plain or self.clip_norm is not None:
            return 0.0
        return self.momentum

    @property
    def keeps_velocity(self) -> bool:
        """Whether momentum needs a buffer in addition to the gradient buffer.

        If gradients are clipped, momentum needs its own buffer: a gradient must be complete before
        it is clipped, so it cannot be accumulated in the momentum buffer.
        """
        return self.is_plain and bool(self.momentum) and self.clip_norm is not None

    @property
    def states(self) -> frozenset[str]:
        """Names of the optimizer's state tensors that have one number per entry of a parameter.

        Other state, such as the number of steps, is one number per parameter.
        """
        return _states(replace(self, lr=1.0))

    @property
    def kind_of_steps(self) -> LocalOptimizer:
        """The optimizer with step size, momentum and μ replaced by 1, or by 0 if they are 0.

        It is equal for optimizers whose steps consist of the same operations.
        """
        return replace(self, lr=1.0, momentum=float(bool(self.momentum)), mu=float(bool(self.mu)))

    def torch_optimizer(
        self, parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]], fused: bool = False
    ) -> optim.Optimizer:
        """Return torch's optimizer for the parameters of one or several clients.

        The caller has to call :meth:`adjust` before each step.

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

        The caller has to call :meth:`adjust` before each step. On a CPU, plain SGD is implemented
        by :class:`PlainSGD`. In all other cases, the result is an optimizer of torch.
        """
        if self.is_plain and all(parameter.is_cpu for parameter in parameters):
            return PlainSGD(parameters, self.lr, self.momentum, weight_decay=self.weight_decay)
        return self.torch_optimizer(parameters)

    def apart(self, state: Mapping[str, Tensor]) -> tuple[tuple[str, float], ...]:
        """Return the part of a state that must be equal for clients to share one optimizer.

        The part consists of the numbers per parameter, such as the number of steps, and the names
        of all state tensors.
        """
        whole = ((name, value) for name, value in state.items() if not self.is_of_entries(name))
        return (
            *((name, float(value)) for name, value in sorted(whole)),
            *((name, 0.0) for name in sorted(state)),
        )

    def is_of_entries(self, name: str) -> bool:
        """Return whether a state tensor has one number per entry of its parameter."""
        return name.rpartition(".")[2] in self.states

    def set_state(
        self,
        optimizer: optim.Optimizer | PlainSGD,
        parameters: Mapping[str, nn.Parameter],
        state: Mapping[str, Tensor],
    ) -> None:
        """Set the state of an optimizer to copies of tensors that :func:`get_state` returned.

        ``parameters`` has the optimizer's parameters by name. Tensors of other parameters are
        ignored.
        """
        for name, value in state.items():
            parameter, _, key = name.rpartition(".")
            if (own := parameters.get(parameter)) is None:
                continue
            if self.is_of_entries(name):
                optimizer.state[own][key] = value.to(own, copy=True)
            else:
                optimizer.state[own][key] = value.clone()

    def adjust(self, parameters: Sequence[nn.Parameter], anchors: Sequence[Tensor]) -> None:
        """Complete the gradients of one client before an optimizer step.

        The gradient of the proximal term μ/2·‖θ − θ_anchor‖² is added, then the gradients are
        clipped. ``anchors`` has the values θ_anchor of each parameter.
        """
        if self.mu:
            for parameter, anchor in zip(parameters, anchors, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - anchor, alpha=self.mu)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    def scales(self, gradients: Iterable[Tensor]) -> Tensor | None:
        """Return the factors ``[k]`` that clip the gradients of k clients; None without clipping.

        ``gradients`` has one tensor ``[k, ...]`` for each parameter.
        """
        gradients = list(gradients)
        if self.clip_norm is None or not gradients:
            return None
        return clipping(gradients, self.clip_norm)

    def step(
        self,
        factors: Factors,
        value: Tensor,
        gradient: Tensor,
        *,
        velocity: Tensor | None,
        scales: Tensor | None,
    ) -> None:
        """Take an SGD step of k clients in place.

        Parameters
        ----------
        factors
            Step size and momentum of the step.
        value
            A parameter of each client, ``[k, ...]``.
        gradient
            Gradients of the parameter, ``[k, ...]``, which are overwritten.
        velocity
            Momentum buffers of the parameter, ``[k, ...]``; None if the gradients include momentum.
        scales
            Factors of clipping, ``[k]``; None if gradients are not clipped.
        """
        if scales is not None:
            gradient.mul_(per_client(scales, gradient))
        if self.weight_decay:
            gradient.add_(value, alpha=self.weight_decay)
        if velocity is not None:
            gradient = velocity.mul_(factors.momentum).add_(gradient)
        add_multiple(value, gradient, factors.minus_lr)

    def stepped(
        self, value: Tensor, gradient: Tensor, velocity: Tensor | None, scales: Tensor | None
    ) -> Tensor:
        """Return the values ``[k, ...]`` of a parameter of k clients after an SGD step.

        ``torch.func`` needs a new tensor; only the momentum buffer ``velocity`` changes in place.
        The parameters are described in :meth:`step`.
        """
        if scales is not None:
            gradient = gradient * per_client(scales, gradient)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * value
        if velocity is not None:
            gradient = velocity.copy_(self.momentum * velocity + gradient)
        return value - self.lr * gradient


@dataclass(frozen=True)
class Factors:
    """Numbers by which the steps of plain SGD multiply tensors.

    They are Python numbers, or tensors of one number on the device of the parameters. A recorded
    step contains the values of Python numbers, but reads tensors each time that it is launched, so
    it stays valid if their values change.
    """

    minus_lr: float | Tensor
    momentum: float | Tensor
    mu: float | Tensor
    minus_mu: float | Tensor
    shrinkage: float | Tensor
    """Factor of the parameters in a fused step, β = 1 − lr·weight decay; 1 if nothing decays."""

    @classmethod
    def of(cls, optimizer: LocalOptimizer) -> Factors:
        """Return the factors of an optimizer as Python numbers."""
        return cls(*cls._values(optimizer))

    @classmethod
    def on_device(cls, optimizer: LocalOptimizer, memory: Tensor) -> Factors:
        """Write the factors of an optimizer to memory, ``[5]``, and return views of its entries.

        The shrinkage is the number 1 if parameters do not decay, so that it needs no product.
        """
        values = cls._values(optimizer)
        memory.copy_(torch.tensor(values, dtype=memory.dtype))
        minus_lr, momentum, mu, minus_mu, shrinkage = memory.unbind()
        return cls(
            minus_lr=minus_lr,
            momentum=momentum,
            mu=mu,
            minus_mu=minus_mu,
            shrinkage=shrinkage if optimizer.weight_decay else 1.0,
        )

    @staticmethod
    def _values(optimizer: LocalOptimizer) -> tuple[float, float, float, float, float]:
        shrinkage, minus_lr = optimizer.fused
        return minus_lr, optimizer.momentum, optimizer.mu, -optimizer.mu, shrinkage


def add_multiple(target: Tensor, values: Tensor, factor: float | Tensor) -> None:
    """Add the product of values and a factor to a tensor in place."""
    if isinstance(factor, Tensor):
        target.addcmul_(values, factor)
    else:
        target.add_(values, alpha=factor)


class PlainSGD:
    """SGD with momentum and weight decay, whose steps equal those of ``torch.optim.SGD`` exactly.

    Torch imports its compiler when the first of its optimizers is created. The import takes two
    seconds in every process, and each reply of a Flower client is a new process. This class needs
    no import.
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
        """Always empty: momentum that is stored between rounds needs torch's own optimizer."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None; the argument ``set_to_none`` is ignored."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take an SGD step with all parameters that have a gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.add_(self._direction(parameter, parameter.grad), alpha=-self._lr)

    def _direction(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return the gradient of a parameter with weight decay and momentum."""
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
    """Return the names of an optimizer's state tensors that have the shape of their parameter.

    The names are found by a step on a small parameter.
    """
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
    """Return the state of an optimizer as tensors with names of the form ``<parameter>.<entry>``.

    Raises
    ------
    ConfigError
        If the state has an entry that is neither a number nor a tensor.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor | int | float | None):
                raise ConfigError(
                    f"optimizer {type(optimizer).__name__} has a {type(value).__name__} in its "
                    f"state ({key!r}), which cannot be stored between rounds; set local.keep_state "
                    "= false"
                )
            if value is not None:
                found[f"{name}.{key}"] = torch.as_tensor(value)
    return found


def clipping(gradients: Iterable[Tensor], largest: float) -> Tensor:
    """Return the factors ``[k]`` that clip the gradients of k clients to an L2 norm of ``largest``.

    The factors agree with ``torch.nn.utils.clip_grad_norm_``, which also adds 1e-6 to the norm.
    ``gradients`` has one tensor ``[k, ...]`` for each parameter.
    """
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
    return (largest / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1)


def per_client(factors: Tensor, values: Tensor) -> Tensor:
    """Return factors ``[k]`` of k clients in a shape that multiplies values ``[k, ...]``."""
    return factors.view(-1, *(1,) * (values.dim() - 1))
