"""Forward and backward passes of chains of dense layers and activations, without autograd.

In the smallest models, autograd takes a large part of a step, and so does the allocation of memory
for each operation. On one thread ``mclr`` and ``mlp`` are 1.5 times as fast with a tape
(``benchmarks/gains.py --only tape``).

The module's own forward runs in every step, on a batch that passes every operation on it to the
tape. So any forward is possible: if it uses an operation that the tape does not support, autograd
is used for the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.training.stacking.functions import Product, hand_over, linear
from fedclade.training.stacking.layers import Stacked, StackedDropout, StackedLinear
from fedclade.training.stacking.stacked_parameter import StackedParameter

Operation = Callable[[], object]
Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""A function, its arguments after the first tensor, and its keyword arguments."""

KNOWN = StackedLinear, StackedDropout  # stacked layers that a tape supports

DENSE = linear, functional.linear

QUESTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")),
    *(
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.__len__,
        Tensor.is_floating_point,
        Tensor.is_contiguous,
    ),
}
"""Functions that read a property of a tensor without an operation on its values."""

VIEWS = {
    *(
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.unflatten,
        Tensor.squeeze,
        Tensor.unsqueeze,
    ),
    *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze),
    *(Tensor.contiguous, Tensor.float, Tensor.double, Tensor.to),
}
"""Functions whose result may have the same values in the same memory, in another shape."""

_aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation: ``forward`` writes to ``out``, ``backward`` to ``grad_input``.

    The gradient of the result may be in the memory of ``grad_input``.
    """

    forward: Callable[..., object]
    backward: Callable[..., object]
    from_result: bool
    """Whether backward needs the result of forward, rather than its argument."""


RELU = Activation(
    partial(torch.clamp_min, min=0), partial(_aten.threshold_backward.grad_input, threshold=0), True
)
TANH = Activation(torch.tanh, _aten.tanh_backward.grad_input, True)
SIGMOID = Activation(torch.sigmoid, _aten.sigmoid_backward.grad_input, True)
GELU = Activation(_aten.gelu.out, _aten.gelu_backward.grad_input, False)
SILU = Activation(_aten.silu.out, _aten.silu_backward.grad_input, False)

ACTIVATIONS: Mapping[Any, Activation] = {
    **dict.fromkeys((functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), RELU),
    **dict.fromkeys((torch.tanh, Tensor.tanh), TANH),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), SIGMOID),
    functional.gelu: GELU,
    functional.silu: SILU,
}


class NotOnTape(BaseException):
    """Error for an operation that a tape does not support.

    It is not an ``Exception``, since a forward pass might catch that.
    """


class Taped(Tensor):
    """Tensor that passes operations on it to a tape."""

    tape: Tape
    plain: Tensor  # the same memory as a plain tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass a function to the tape and return its result."""
        if not args or not isinstance(args[0], Taped):
            raise NotOnTape
        return args[0].tape.run(func, args[0], args[1:], kwargs or {})


class _Entry(NamedTuple):
    """An operation with the argument ``x`` and the result ``out``."""

    call: Call
    x: Taped
    out: Taped
    forward: Operation | None  # None for a view
    backward: Callable[[Tensor, bool], tuple[Sequence[Operation], Tensor]]
    """Plans the backward pass: returns operations, and the memory of the gradient of ``x``.

    The arguments are the gradient of ``out``, and whether ``x`` needs a gradient.
    """
    parameters: Sequence[StackedParameter] = ()


class Tape:
    """Operations of a module on a batch, each with its memory, reused in all equal steps.

    Parameters
    ----------
    module
        The module.
    constant
        Whether its forward pass has the same operations in every step.
    """

    def __init__(self, module: nn.Module, constant: bool) -> None:
        self._module = module
        self._constant = constant
        self._first: Taped | None = None
        self._entries: list[_Entry] = []
        self._at = 0  # number of entries that the current step has reached
        self._last: Taped | None = None  # result of the step for which _backward is planned
        self._length = 0  # number of entries of that step
        self._gradient = torch.empty(0)
        self._forward: Sequence[Operation] = ()
        self._backward: Sequence[Operation] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Tape | None:
        """Return a tape for a module with stacked layers, or None if it is known not to fit."""
        parts = [*module.modules()]
        stacked = [part for part in parts if isinstance(part, Stacked)]
        if _hooked(parts, "backward") or any(type(layer) not in KNOWN for layer in stacked):
            return None
        of_torch = sum(type(part).__module__.startswith("torch.nn.modules.") for part in parts)
        return cls(
            module, constant=of_torch + len(stacked) == len(parts) and not _hooked(parts, "forward")
        )

    def forget(self) -> None:
        """Rebuild the entries in the next forward pass: the parameters' memory has changed."""
        self._first = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs ``[k·B, ...]``; the next call may overwrite them.

        Raises
        ------
        NotOnTape
            If the forward pass is not a chain of operations that the tape supports.
        """
        first = self._first
        # On a GPU, a step that is recorded must have memory of its own.
        if (
            first is None
            or x.is_cuda
            or x.data_ptr() != first.plain.data_ptr()
            or x.shape != first.plain.shape
        ):
            first = self._first = self._taped(x.contiguous())
            self._entries = []
        elif self._constant and self._last is not None:
            for operation in self._forward:
                operation()
            return self._last.plain
        self._at = 0
        out = self._module(first)
        if out is not self._last or self._at != self._length:
            self._plan_backward(out)
        return out.plain

    def backward(self, gradient: Tensor) -> None:
        """Hand the gradients to all parameters, given the gradient of the result of forward."""
        self._gradient.copy_(gradient)
        for operation in self._backward:
            operation()

    def run(self, func: Any, x: Taped, rest: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Execute an operation of the module on a tensor."""
        call = func, rest, options
        known = self._entries[self._at] if self._at < len(self._entries) else None
        if known is None or known.x is not x or known.call != call:
            if func in QUESTIONS:
                return func(x.plain, *rest, **options)
            known = self._entry(call, x)
            self._entries[self._at :] = [known]
            self._last = None
        if not torch.is_grad_enabled():
            raise NotOnTape  # without gradients, autograd treats the result as a constant
        self._at += 1
        if known.forward is not None:
            known.forward()
        return known.out

    def _entry(self, call: Call, x: Taped) -> _Entry:
        func, rest, options = call
        if func in DENSE and not options:
            return self._dense(call, x, *rest)
        if func in ACTIVATIONS and not rest:
            return self._activation(call, x, ACTIVATIONS[func])
        if func in VIEWS or (
            func is functional.dropout and not (options["training"] and options["p"])
        ):
            return self._view(call, x)
        raise NotOnTape

    def _dense(self, call: Call, x: Taped, of_weight: Any, of_bias: Any = None) -> _Entry:
        parameters = [p for p in (of_weight, of_bias) if isinstance(p, StackedParameter)]
        if not parameters and (
            of_weight.requires_grad or (of_bias is not None and of_bias.requires_grad)
        ):
            raise NotOnTape
        # Frozen parameters may exist once, for the rows of all clients: then k is 1.
        value = attrgetter("state") if parameters else partial(torch.unsqueeze, dim=0)
        weight, bias = value(of_weight), None if of_bias is None else value(of_bias)
        k, outputs, inputs = weight.shape
        rows, out = x.plain.view(k, -1, inputs), x.plain.new_empty((*x.plain.shape[:-1], outputs))
        product = Product(rows, weight.mT, out.view(k, -1, outputs), bias)

        def backward(gradient: Tensor, onward: bool) -> tuple[Sequence[Operation], Tensor]:
            of_out = gradient.view(k, -1, outputs)
            of_x = gradient
            operations = list[Operation]()
            if onward:
                of_x = torch.empty_like(x.plain)
                # Computed before the weights change: hand_over may take a fused step.
                operations.append(Product(of_out, weight, of_x.view_as(rows)))
            if parameters:
                operations.append(partial(hand_over, of_out, rows, of_weight, of_bias))
            return operations, of_x

        return _Entry(call, x, self._taped(out), product, backward, parameters)

    def _activation(self, call: Call, x: Taped, activation: Activation) -> _Entry:
        func, _, options = call
        options = dict(options)
        out = x
        if not (options.pop("inplace", False) or func.__name__.endswith("_")):
            out = self._taped(torch.empty_like(x.plain))
        else:
            before = self._entries[self._at - 1] if self._at else None
            if (
                before is None
                or before.out is not x
                or before.call[0] not in DENSE
                or not activation.from_result
            ):
                # The overwritten values may be needed, or be used in another shape as well.
                raise NotOnTape
        seen = out.plain if activation.from_result else x.plain

        def backward(gradient: Tensor, onward: bool) -> tuple[Sequence[Operation], Tensor]:
            return [
                partial(activation.backward, gradient, seen, grad_input=gradient, **options)
            ], gradient

        return _Entry(
            call, x, out, partial(activation.forward, x.plain, out=out.plain, **options), backward
        )

    def _view(self, call: Call, x: Taped) -> _Entry:
        func, rest, options = call
        plain = x.plain
        out = func(plain, *rest, **options)
        alike = out.dtype == plain.dtype and out.numel() == plain.numel() and out.is_contiguous()
        if not alike or out.data_ptr() != plain.data_ptr():
            raise NotOnTape
        return _Entry(
            call, x, self._taped(out), None, lambda gradient, _: ([], gradient.view_as(plain))
        )

    def _taped(self, plain: Tensor) -> Taped:
        taped = plain.as_subclass(Taped)
        taped.tape = weakref.proxy(self)
        taped.plain = plain
        return taped

    def _plan_backward(self, out: object) -> None:
        """Find the chain from a result back to the batch, and allocate the gradients on it."""
        way = list[_Entry]()
        wanted = out
        for entry in reversed(self._entries[: self._at]):
            if entry.out is wanted:
                way.insert(0, entry)
                wanted = entry.x
        parameters = [parameter for entry in way for parameter in entry.parameters]
        trained = [any(parameter.trained for parameter in entry.parameters) for entry in way]
        if (
            not isinstance(out, Taped)
            or wanted is not self._first
            or not any(trained)
            or len(set(parameters)) < len(parameters)
        ):
            raise NotOnTape
        self._last = out
        self._length = self._at
        gradient = self._gradient = torch.empty_like(out.plain)
        self._forward = [entry.forward for entry in way if entry.forward is not None]
        self._backward = backward = list[Operation]()
        first = trained.index(True)
        for place in reversed(range(first, len(way))):
            operations, gradient = way[place].backward(gradient, place > first)
            backward.extend(operations)


def _hooked(parts: Sequence[nn.Module], way: str) -> bool:
    return any(vars(part)[f"_{way}{when}_hooks"] for part in parts for when in ("", "_pre"))
