"""Dense layers and activations one after another, forward and backward by hand, without autograd.

With the smallest models autograd takes a good part of a step, and so does finding the memory of
each operation. On one thread ``mclr`` and ``mlp`` are 1.5 times as fast so (``benchmarks/gains.py
--only tape``).

The module's own forward runs in every step, on a batch that hands over to the tape what is done
with it. So it may be anybody's: where it does what the tape does not know, the module is left to
autograd.
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
"""A function, what it gets behind its first tensor, and by name."""

KNOWN = StackedLinear, StackedDropout  # of the layers that are stacked

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
"""What may be asked of a tensor without doing anything with it."""

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
"""What may give the same numbers in the same memory, if in another shape."""

_aten = torch.ops.aten


class Activation(NamedTuple):
    """Writes what it gives for a tensor to ``out``, and the gradient to ``grad_input``, which its own may lie in."""

    forward: Callable[..., object]
    backward: Callable[..., object]
    from_result: bool
    """Whether backward goes by what forward has given, and not by what it was given."""


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
    """A forward pass does what a tape does not know. Not an Exception, which the forward pass might catch."""


class Taped(Tensor):
    """A tensor that hands over to a tape what is done with it."""

    tape: Tape
    plain: Tensor  # with the same memory

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what is done with it."""
        if not args or not isinstance(args[0], Taped):
            raise NotOnTape
        return args[0].tape.run(func, args[0], args[1:], kwargs or {})


class _Entry(NamedTuple):
    """What was done with ``x``, and has given ``out``."""

    call: Call
    x: Taped
    out: Taped
    forward: Operation | None  # none for a view
    backward: Callable[[Tensor, bool], tuple[Sequence[Operation], Tensor]]
    """From the gradient of ``out``, and whether that of ``x`` is wanted: what is to be done, and where it will be."""
    parameters: Sequence[StackedParameter] = ()


class Tape:
    """What a module does with a batch, every operation with its memory, kept for all steps alike."""

    def __init__(self, module: nn.Module, constant: bool) -> None:
        self._module = module
        self._constant = constant  # does the same in every step
        self._first: Taped | None = None
        self._entries: list[_Entry] = []
        self._at = 0  # how many entries this step has come to
        self._last: Taped | None = None  # what the step ends with that _backward is of
        self._length = 0  # and how many entries it has
        self._gradient = torch.empty(0)
        self._forward: Sequence[Operation] = ()
        self._backward: Sequence[Operation] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Tape | None:
        """Return a tape for a module with stacked layers, or None if it is known not to fit on one."""
        parts = [*module.modules()]
        stacked = [part for part in parts if isinstance(part, Stacked)]
        if _hooked(parts, "backward") or any(type(layer) not in KNOWN for layer in stacked):
            return None
        of_torch = sum(type(part).__module__.startswith("torch.nn.modules.") for part in parts)
        return cls(
            module, constant=of_torch + len(stacked) == len(parts) and not _hooked(parts, "forward")
        )

    def forget(self) -> None:
        """Look for the parameters' memory anew in the next forward pass."""
        self._first = None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module gives for inputs ``[k·B, ...]``; the next call may write there again.

        Raises
        ------
        NotOnTape
            If its forward pass is more than a chain of what the tape knows.
        """
        first = self._first
        # On a GPU, a step that is recorded has to have memory of its own.
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
        """Hand every parameter its gradient, from that of what forward has returned."""
        self._gradient.copy_(gradient)
        for operation in self._backward:
            operation()

    def run(self, func: Any, x: Taped, rest: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Do what the module does with a tensor."""
        call = func, rest, options
        known = self._entries[self._at] if self._at < len(self._entries) else None
        if known is None or known.x is not x or known.call != call:
            if func in QUESTIONS:
                return func(x.plain, *rest, **options)
            known = self._entry(call, x)
            self._entries[self._at :] = [known]
            self._last = None
        if not torch.is_grad_enabled():
            raise NotOnTape  # what is done here is a constant for those who differentiate
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
        # What is frozen may be there once, for the rows of all clients: k is 1.
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
                # before the weights change
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
                raise NotOnTape  # what was there may be needed, or be known in another shape, too
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
        """Find the way from a result back to the batch, and give every gradient on it its memory."""
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
