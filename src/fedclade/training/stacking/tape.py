"""Forward and backward passes of small models without autograd.

A tape is a list of the operations of a module's forward pass, with memory that is reused in every
step. In the smallest models, autograd and the allocation of memory take a large part of a step. On
one thread, ``mclr`` and ``mlp`` are 1.5 times as fast with a tape (``benchmarks/gains.py --only
tape``).

The module's own forward method runs on a special tensor, which passes every operation on it to the
tape. If the method uses an operation that the tape does not support, autograd is used for the
module. Supported are chains of dense layers, activations and changes of shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.training.stacking.functions import Product, hand_over, linear
from fedclade.training.stacking.layers import Stacked, StackedDropout, StackedLinear
from fedclade.training.stacking.stacked_parameter import StackedParameter

Operation = Callable[[], object]
Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""Call: a function, its arguments after the first tensor, and its keyword arguments."""

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
"""Functions that return a property of a tensor, such as its shape, not values of the tensor."""

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
"""Functions whose result may be a view: the same values in the same memory, in another shape."""

_aten = torch.ops.aten


class Activation(NamedTuple):
    """Activation function that writes to given memory, with its backward pass.

    ``forward`` writes to ``out``, and ``backward`` writes to ``grad_input``, which may be the
    memory of the gradient of the result.
    """

    forward: Callable[..., object]
    backward: Callable[..., object]
    from_result: bool
    """Whether ``backward`` needs the result of ``forward``; otherwise it needs the argument."""


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

    This error is not a subclass of ``Exception``, since a user's forward method might catch
    exceptions.
    """


class Taped(Tensor):
    """Tensor that passes every operation on it to a tape, which executes and records it."""

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
        """Pass a call of a torch function to the tape, and return its result."""
        if not args or not isinstance(args[0], Taped):
            raise NotOnTape
        return args[0].tape.run(func, args[0], args[1:], kwargs or {})


class _Entry(NamedTuple):
    """Operation on a tape, with its argument ``x`` and its result ``out``."""

    call: Call
    x: Taped
    out: Taped
    forward: Operation | None  # None for a view
    backward: Callable[[Tensor, bool], tuple[Sequence[Operation], Tensor]]
    """Function that plans the backward pass of the operation.

    Its arguments are the gradient of ``out``, and whether ``x`` needs a gradient. It returns the
    operations of the backward pass, and the memory of the gradient of ``x``.
    """
    parameters: Sequence[StackedParameter] = ()

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of the operation is trained."""
        return any(parameter.trained for parameter in self.parameters)


class Tape:
    """Recorded operations of a module's forward pass, with memory that later steps reuse.

    Parameters
    ----------
    module
        The stacked module.
    constant
        Whether the module's forward pass has the same operations in every step, so that its
        ``forward`` method need not be called again.
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
        """Return a tape for a stacked module; None if it has layers that no tape supports."""
        parts = [*module.modules()]
        stacked = [part for part in parts if isinstance(part, Stacked)]
        if _has_hooks(parts, "backward") or any(type(layer) not in KNOWN for layer in stacked):
            return None
        of_torch = sum(type(part).__module__.startswith("torch.nn.modules.") for part in parts)
        return cls(
            module,
            constant=of_torch + len(stacked) == len(parts) and not _has_hooks(parts, "forward"),
        )

    def forget(self) -> None:
        """Let the next forward pass build a new list of operations.

        A new list is necessary if the memory of the parameters has changed.
        """
        self._first = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the module for inputs ``[k·B, ...]``.

        The next call may overwrite the outputs.

        Raises
        ------
        NotOnTape
            If the forward pass is not a chain of operations that the tape supports.
        """
        first = self._first
        # On a GPU, the memory of a step that is recorded must not be used by other steps.
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
        """Compute the gradients of all parameters, given the gradient of the module's outputs."""
        self._gradient.copy_(gradient)
        for operation in self._backward:
            operation()

    def run(self, func: Any, x: Taped, rest: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Execute an operation of the module's forward pass on a tensor, and return its result.

        Raises
        ------
        NotOnTape
            If the tape does not support the operation.
        """
        call = func, rest, options
        known: _Entry | None = None
        if self._at < len(self._entries):
            known = self._entries[self._at]
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
        """Return the entry for a call of a function on a tensor; raise NotOnTape if unsupported."""
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
        """Return the entry for a dense layer, which is stacked or frozen."""
        parameters = [p for p in (of_weight, of_bias) if isinstance(p, StackedParameter)]
        if not parameters and (
            of_weight.requires_grad or (of_bias is not None and of_bias.requires_grad)
        ):
            raise NotOnTape
        if parameters:
            weight = of_weight.state
            bias = None if of_bias is None else of_bias.state
        else:  # frozen parameters may exist once, for the rows of all clients: then k is 1
            weight = of_weight.unsqueeze(0)
            bias = None if of_bias is None else of_bias.unsqueeze(0)
        k, outputs, inputs = weight.shape
        rows = x.plain.view(k, -1, inputs)
        out = x.plain.new_empty((*x.plain.shape[:-1], outputs))
        product = Product(rows, weight.mT, out.view(k, -1, outputs), bias)

        def backward(gradient: Tensor, onward: bool) -> tuple[Sequence[Operation], Tensor]:
            of_out = gradient.view(k, -1, outputs)
            of_x = gradient
            operations = list[Operation]()
            if onward:
                of_x = torch.empty_like(x.plain)
                # Computed first, since a fused step in hand_over may change the weights.
                operations.append(Product(of_out, weight, of_x.view_as(rows)))
            if parameters:
                operations.append(partial(hand_over, of_out, rows, of_weight, of_bias))
            return operations, of_x

        return _Entry(
            call, x, self._taped(out), forward=product, backward=backward, parameters=parameters
        )

    def _activation(self, call: Call, x: Taped, activation: Activation) -> _Entry:
        """Return the entry for an activation function, which may overwrite its argument."""
        func, _, options = call
        options = dict(options)
        out = x
        if not (options.pop("inplace", False) or func.__name__.endswith("_")):
            out = self._taped(torch.empty_like(x.plain))
        else:
            if not self._at or not activation.from_result:
                raise NotOnTape
            before = self._entries[self._at - 1]
            if before.out is not x or before.call[0] not in DENSE:
                # The values that would be overwritten may be needed by another operation.
                raise NotOnTape
        seen = out.plain if activation.from_result else x.plain

        def backward(gradient: Tensor, onward: bool) -> tuple[Sequence[Operation], Tensor]:
            operation = partial(activation.backward, gradient, seen, grad_input=gradient, **options)
            return [operation], gradient

        forward = partial(activation.forward, x.plain, out=out.plain, **options)
        return _Entry(call, x, out, forward=forward, backward=backward)

    def _view(self, call: Call, x: Taped) -> _Entry:
        """Return the entry for a function that only changes the shape of a tensor."""
        func, rest, options = call
        plain = x.plain
        out = func(plain, *rest, **options)
        alike = out.dtype == plain.dtype and out.numel() == plain.numel() and out.is_contiguous()
        if not alike or out.data_ptr() != plain.data_ptr():
            raise NotOnTape

        def backward(gradient: Tensor, onward: bool) -> tuple[Sequence[Operation], Tensor]:
            return [], gradient.view_as(plain)

        return _Entry(call, x, self._taped(out), forward=None, backward=backward)

    def _taped(self, plain: Tensor) -> Taped:
        """Return a tensor that shares a plain tensor's memory and passes operations to this tape."""
        taped = plain.as_subclass(Taped)
        taped.tape = weakref.proxy(self)
        taped.plain = plain
        return taped

    def _plan_backward(self, out: object) -> None:
        """Plan the backward pass from a result to the batch, and allocate memory for its gradients.

        Raises
        ------
        NotOnTape
            If the operations are not a chain from the batch to the result, no parameter is trained,
            or a parameter is used twice.
        """
        way = list[_Entry]()
        wanted = out
        for entry in reversed(self._entries[: self._at]):
            if entry.out is wanted:
                way.insert(0, entry)
                wanted = entry.x
        parameters = [parameter for entry in way for parameter in entry.parameters]
        trained = [entry.is_trained for entry in way]
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


def _has_hooks(parts: Sequence[nn.Module], way: str) -> bool:
    """Return whether one of some modules has hooks of a kind, ``forward`` or ``backward``."""
    return any(vars(part)[f"_{way}{when}_hooks"] for part in parts for when in ("", "_pre"))
