"""Stacked parameters: the values of one parameter or buffer for all clients, with their gradients.

The module also has the gradients of single examples (for DP-SGD), a pool of reused memory, and the
selection of the clients that train in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedclade.core import Slot
from fedclade.training.optimizer import Factors, LocalOptimizer, add_multiple, per_client

FEW_ROWS = 32
"""Largest number of rows for which a gradient, a matrix product, is added to parameters directly.

The contribution of each row is then rounded to the precision of the parameter, which is coarser
than the precision of the gradient. With many rows this is not worthwhile: writing the gradient
takes little time compared with computing it.
"""


class StackedParameter:
    """Parameter or buffer of n clients, ``[n, *shape]`` in contiguous memory.

    In the forward pass, a layer gets the value from :meth:`use`. In the backward pass,
    :meth:`receive` returns the memory to which the gradient is added: a buffer that is reused in
    every step, or, if the optimizer's step can be fused, the parameters themselves. A step is fused
    only if the forward pass uses the parameter once. A second use is detected in the forward pass,
    before any gradient has been added.
    """

    def __init__(self, slot: Slot, trained: bool) -> None:
        self.slot = slot
        self.trained = trained
        # Whether the parameter is not trained in this local training, but may be in another one.
        self.held = False
        self.everyone = torch.empty(0)
        self.state = self.everyone
        self._value = self.everyone
        self._gradients: Tensor | None = None
        self._velocity: Tensor | None = None
        self._anchor: Tensor | None = None
        self._anchor_memory: Tensor | None = None
        self._optimizer = LocalOptimizer(0.0)
        self._factors = Factors.of(self._optimizer)
        self._places: Tensor | None = None
        self._range = (0, 0)
        self._fused = self._used = self._touched = False
        self.by_example: ByExample | None = None
        """Collector of the gradients of single examples; None if they are not needed.

        If set, gradients are added to the collector instead of the memory that :meth:`receive`
        returns.
        """

    def allocate(self, memory: Tensor) -> None:
        """Use ``memory``, ``[n, *shape]``, for the values of n clients."""
        # ``.data`` is used here and in bind because a fused step changes a parameter without
        # autograd's knowledge, after the parameter's last use in the backward pass. Autograd must
        # not mistake this for a change of other parameters in the same memory.
        self.everyone = memory.data
        self._gradients = self._velocity = self._places = None
        self._anchor = self._anchor_memory = None

    def begin(
        self, optimizer: LocalOptimizer, anchor: Tensor | None, factors: Factors | None = None
    ) -> None:
        """Start local training from the current values.

        Parameters
        ----------
        optimizer
            The optimizer.
        anchor
            Values to which the proximal term pulls the n clients, ``[n, entries]``; None without a
            proximal term.
        factors
            Factors of the optimizer's steps on the device, if steps are recorded; None to take the
            factors from ``optimizer``.
        """
        self._optimizer = optimizer
        self._factors = Factors.of(optimizer) if factors is None else factors
        # DP-SGD adds noise after the last gradient, so its gradient cannot be fused into the step.
        fused = optimizer.can_fuse and self.by_example is None
        self._fused = fused
        self._used = False
        self._touched = False
        # Anchors and momentum stay in the same memory, at whose addresses recorded steps use them.
        self._anchor = None if anchor is None else anchor.reshape(self.everyone.shape)
        if self._anchor is not None and factors is not None:
            if self._anchor_memory is None:
                self._anchor_memory = torch.empty_like(self.everyone)
            self._anchor = self._anchor_memory.copy_(self._anchor)
        if self._gradients is not None:
            self._gradients.zero_()
        if not optimizer.keeps_velocity:
            self._velocity = None
        elif self._velocity is None:
            self._velocity = torch.zeros_like(self.everyone)
        else:
            self._velocity.zero_()

    def addresses(self) -> tuple[int, ...]:
        """Return the memory addresses that a step reads or writes; 0 for memory that is unset.

        They are those of values, gradients, momentum, anchors and places of table rows.
        """
        tensors = self.everyone, self._gradients, self._velocity, self._anchor, self._places
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def bind(self, start: int, stop: int) -> None:
        """Select the range of clients, ``start`` to ``stop``, that train in the next steps."""
        self._range = start, stop
        self.state = self.everyone[start:stop]
        self._value = self.state.data.requires_grad_(self.trained)

    def use(self) -> Tensor:
        """Return the value ``[k, *shape]`` of the k clients that train, for a forward pass."""
        if self.trained and torch.is_grad_enabled():
            self._fused = self._fused and not self._used
            self._used = True
        return self._value

    @property
    def learns(self) -> bool:
        """Whether optimizer steps change this parameter in the current local training."""
        return self.trained and not self.held

    def receive(self) -> tuple[Tensor, float | Tensor, float | Tensor]:
        """Return the memory to which the gradient of the clients that train must be added.

        Returns
        -------
        tuple
            Target, β and α: the caller has to add the gradient g by target ← β·target + α·g. For a
            fused step, the target is the parameter itself.
        """
        if self.held:
            return self._gradient(), 0.0, 1.0  # the gradient is computed, but no step uses it
        if self._fused:
            self._used = False
            return self.state, self._factors.shrinkage, self._factors.minus_lr
        beta: float | Tensor = 1.0
        if not self._touched:
            beta = self._factors.momentum if self._optimizer.carried else 0.0
        self._touched = True
        return self._gradient(), beta, 1.0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the k clients that train, ``[k, *shape]``."""
        target, beta, alpha = self.receive()
        add_multiple(scaled(target, beta), gradient, alpha)

    def add_rows(self, index: Tensor, gradients: Tensor) -> None:
        """Add gradients of rows of the k clients' tables, each of which is ``[rows, width]``.

        The gradients of equal rows are summed first: if they were added to the table one by one,
        each addition would be rounded to the precision of the table's entries. Every operation has
        a result of a shape that is known in advance, so that nothing waits for a GPU, and steps can
        be recorded. On a CPU, the result does not depend on the number of threads.

        Parameters
        ----------
        index
            Numbers of the rows in the concatenated tables of the k clients, int64 ``[n]``; a number
            may occur several times.
        gradients
            Gradients of these rows, ``[n, width]``.
        """
        target, beta, alpha = self.receive()
        n, width = gradients.shape
        table = scaled(target, beta).view(-1, width)
        # For each row of the table that occurs in the index, any one place where it occurs.
        if self._places is None:
            rows = self.everyone.numel() // width
            self._places = index.new_empty(rows)
        self._places[index] = torch.arange(n, device=index.device)
        place = self._places.index_select(0, index)
        # The sums are at the places of the rows; equal rows of the index have equal values below,
        # so the order in which they are written does not matter.
        sums = torch.ops.aten.embedding_dense_backward(gradients.contiguous(), place, n, -1, False)
        changed = table.index_select(0, index)
        add_multiple(changed, sums.index_select(0, place), alpha)
        table.index_copy_(0, index, changed)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a gradient that is the product of ``[k, m, rows]`` and ``[k, rows, n]``.

        The product is added without being written to separate memory, unless the destination is the
        parameter itself and there are many rows.
        """
        target, beta, alpha = self.receive()
        if target is self.state and right.shape[1] > FEW_ROWS:
            add_multiple(scaled(target, beta), torch.bmm(left, right), alpha)
            return
        # A product takes only Python numbers as factors.
        if isinstance(beta, Tensor):
            target.mul_(beta)
            beta = 1.0
        if isinstance(alpha, Tensor):
            left = left * alpha
            alpha = 1.0
        target.baddbmm_(left, right, beta=beta, alpha=alpha)

    def complete(self) -> Tensor | None:
        """Add the gradient of the proximal term, and return the gradient ``[k, *shape]``.

        The result is None if the step was fused, or if the loss does not depend on the parameter.
        In the second case, the step leaves the parameter unchanged: not even weight decay is
        applied, as in torch's SGD.
        """
        if not self._touched:
            return None
        gradient = self._gradient()
        if self._anchor is not None:
            add_multiple(gradient, self.state, self._factors.mu)
            add_multiple(gradient, self._anchor[slice(*self._range)], self._factors.minus_mu)
        return gradient

    def step(self, scales: Tensor | None) -> None:
        """Take an SGD step with the complete gradient.

        ``scales`` has the factors of clipping, ``[k]``, or is None without clipping. In the next
        step, the buffer of the gradient is multiplied by the momentum factor before gradients are
        added, which makes it the momentum buffer of SGD.
        """
        if self._touched:
            self._touched = False
            velocity = None
            if self._velocity is not None:
                velocity = self._velocity[slice(*self._range)]
            self._optimizer.step(
                self._factors, self.state, self._gradient(), velocity=velocity, scales=scales
            )

    def view(self, start: int, stop: int) -> nn.Parameter:
        """Return the values of the clients ``start`` to ``stop``, as an optimizer's parameter."""
        return nn.Parameter(self.everyone[start:stop])

    def clipped(self, scales: Tensor | None) -> Tensor | None:
        """Return the complete gradients for a step of one of torch's optimizers, ``[n, *shape]``.

        ``scales`` has the factors of clipping, ``[k]``, by which the gradients of the k clients
        that train are multiplied; it is None without clipping. The result is None if the loss does
        not depend on the parameter.
        """
        if not self._touched:
            return None
        self._touched = False
        if scales is not None:
            self._gradient().mul_(per_client(scales, self._gradient()))
        return self._gradients

    def _gradient(self) -> Tensor:
        """Return the gradient buffer of the clients that train, ``[k, *shape]``."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.everyone)
        return self._gradients[slice(*self._range)]


def scaled(target: Tensor, beta: float | Tensor) -> Tensor:
    """Multiply a tensor by a factor in place.

    With the number 0 as the factor, NaN and infinity become 0 as well.
    """
    if isinstance(beta, Tensor):
        return target.mul_(beta)
    if beta == 0:
        return target.zero_()
    if beta == 1:
        return target
    return target.mul_(beta)


# Gradients of single examples of all clients: their norms, and their sums weighted by factors.
#
# In a dense layer whose input has no further dimensions, the gradient of an example is the product
# δxᵀ of two vectors. Its norm is ‖δ‖·‖x‖. The weighted sum with factors c is Σ c·δxᵀ, a product of
# the same form as the plain gradient. So the gradients of single examples are never written to
# memory (Goodfellow 2015, arXiv:1510.01799; Bu et al. 2023, arXiv:2210.00038). Gradients of other
# layers are written.


class _Dense(NamedTuple):
    """Gradients of single examples for a dense layer's parameter, stored as two factors.

    The factors are the gradients of the outputs ``[k, B, o]`` and the inputs ``[k, B, i]``, for B
    examples of each of k clients.
    """

    gradient: Tensor
    rows: Tensor | None  # None for a bias: its gradient equals the gradient of the outputs

    def squares(self) -> Tensor:
        """Return the squared L2 norms of the gradients of single examples, ``[k, B]``."""
        of_outputs = self.gradient.square().sum(2)
        if self.rows is None:
            return of_outputs
        return of_outputs.mul_(self.rows.square().sum(2))

    def written(self) -> Tensor:
        """Return the gradients of single examples as one tensor, ``[k, B, ...]``."""
        if self.rows is None:
            return self.gradient
        return self.gradient.unsqueeze(3) * self.rows.unsqueeze(2)


class ByExample:
    """Collector of the gradients of single examples in a step, which are clipped and then summed.

    In the backward pass, every parameter adds its gradients. After that, :meth:`squares` returns
    the squared norms, from which the caller computes factors, and :meth:`deliver` adds the weighted
    sum of the gradients to every parameter.
    """

    def __init__(self) -> None:
        self.width = 0
        """Number of examples of each client in the step: B."""
        self._found: dict[StackedParameter, list[_Dense | Tensor]] = {}
        # Mask of examples whose gradient's norm is not finite, [k, B, 1]; None without such
        # examples.
        self._broken: Tensor | None = None

    def begin(self, width: int) -> None:
        """Start a step with ``width`` examples of each client.

        The gradients of the step before are deleted.
        """
        self.width = width
        self._found = {}

    def add(self, parameter: StackedParameter, gradients: Tensor) -> None:
        """Add a parameter's gradients of single examples, ``[k·B, *shape]``."""
        if parameter.learns:
            self._found.setdefault(parameter, []).append(gradients.unflatten(0, (-1, self.width)))

    def add_dense(
        self,
        gradient: Tensor,
        rows: Tensor,
        weight: StackedParameter,
        bias: StackedParameter | None,
    ) -> None:
        """Add gradients of single examples for a dense layer, given as two factors.

        Parameters
        ----------
        gradient
            Gradients of the outputs of k clients' layers, ``[k, B·..., outputs]``.
        rows
            Inputs of the layers, ``[k, B·..., inputs]``.
        weight, bias
            Stacked parameters of the layers; no bias if None.
        """
        k = len(rows)
        each = rows.shape[1] // self.width
        if each == 1:
            of_weight = _Dense(gradient, rows)
            of_bias = _Dense(gradient, None)
        else:
            outputs = gradient.reshape(k, self.width, each, -1)
            inputs = rows.reshape(k, self.width, each, -1)
            of_weight = outputs
            if weight.learns:
                of_weight = torch.matmul(outputs.mT, inputs)
            of_bias = outputs.sum(2)
        if weight.learns:
            self._found.setdefault(weight, []).append(of_weight)
        if bias is not None and bias.learns:
            self._found.setdefault(bias, []).append(of_bias)

    def squares(self) -> Tensor:
        """Return the squared L2 norm of each example's gradient over all parameters, ``[k, B]``."""
        self._found = {parameter: [_together(parts)] for parameter, parts in self._found.items()}
        found = torch.stack([_squares(parts[0]) for parts in self._found.values()]).sum(0)
        broken = ~found.isfinite()
        self._broken = None
        if bool(broken.any()):
            self._broken = broken.unsqueeze(2)
        return found

    def deliver(self, factors: Tensor) -> None:
        """Add to every parameter the weighted sum of the gradients of its client's examples.

        ``factors`` has the weights of the examples, ``[k, B]``. An example with weight 0 is left
        out, even if its gradient is not finite.
        """
        left_out = (factors == 0).unsqueeze(2)
        weights = factors.unsqueeze(1)
        for parameter, (found,) in self._found.items():
            if isinstance(found, _Dense):
                outputs = (found.gradient * factors.unsqueeze(2)).masked_fill_(left_out, 0)
                if found.rows is None:
                    parameter.add(outputs.sum(1).view(parameter.state.shape))
                else:
                    rows = found.rows
                    if self._broken is not None:
                        rows = rows.masked_fill(self._broken, 0)
                    parameter.add_product(outputs.mT, rows)
            else:
                # The shape is [k, B, entries], also for a parameter that is a single number.
                flat = found.flatten(2) if found.dim() > 2 else found.unsqueeze(2)
                parameter.add(
                    torch.bmm(weights, flat.masked_fill(left_out, 0)).view(parameter.state.shape)
                )


def _squares(gradients: _Dense | Tensor) -> Tensor:
    """Return the squared L2 norm of each example's gradient of one parameter, ``[k, B]``."""
    if isinstance(gradients, _Dense):
        return gradients.squares()
    return gradients.flatten(2).square().sum(2)


def _written(gradients: _Dense | Tensor) -> Tensor:
    """Return the gradients of single examples as one tensor, ``[k, B, ...]``."""
    if isinstance(gradients, _Dense):
        return gradients.written()
    return gradients


def _together(parts: list[_Dense | Tensor]) -> _Dense | Tensor:
    """Return the sum of the gradients of single examples from several uses of a parameter."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([_written(part) for part in parts]).sum(0)


# Memory that is reused.


class BufferPool:
    """Memory that is reused for one tensor after another, such as the inputs of each step.

    New memory would have to be mapped page by page each time, since the C library returns memory at
    the end of its heap to the system as soon as it is freed. The mapping can take longer than a
    step of a small model.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """Return a tensor of a given shape in the memory of the pool.

        The tensor has the data type and the device of ``like``. Earlier contents of the memory are
        overwritten.
        """
        size = prod(shape)
        memory = self._memory
        if memory.numel() < size or memory.dtype != like.dtype or memory.device != like.device:
            memory = self._memory = like.new_empty(size)
        return memory[:size].view(shape)


# The clients that are training at the moment.


class Active:
    """Range of clients, ``start`` to ``stop``, that train in a step, with generators for dropout.

    Each client has its own generator for dropout, so the dropout masks of a client do not depend on
    other clients. The generator has the seed with which the loop would seed torch's global
    generator, and it draws masks of the same shapes as the loop. On a CPU, the masks therefore
    equal those of the loop, except in attention layers, where the loop draws the entries of a mask
    in another order.
    """

    def __init__(self) -> None:
        self.start = self.stop = 0
        self.rows = 1  #: number k·B of rows of the current step
        self._seeds: Sequence[int] = ()
        self._device = torch.device("cpu")
        self._generators: list[torch.Generator] = []

    @property
    def count(self) -> int:
        """Number k of clients that train in the current step."""
        return self.stop - self.start

    def seed(self, seeds: Sequence[int], device: torch.device) -> None:
        """Set the seed of each client's random generator, and the device of the generators."""
        self._seeds = seeds
        self._device = device
        self._generators = []

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Apply dropout to the values ``[k, ...]`` of the k clients that train.

        Entries are set to 0 with probability p, by each client's random generator. The other
        entries are divided by 1 − p.
        """
        kept = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not self._generators:  # created only if something is dropped
            self._generators = [
                torch.Generator(self._device).manual_seed(seed) for seed in self._seeds
            ]
        for mask, generator in zip(kept, self._generators[self.start : self.stop], strict=True):
            mask.bernoulli_(1 - p, generator=generator)
        if p < 1:
            kept.div_(1 - p)
        return x * kept
