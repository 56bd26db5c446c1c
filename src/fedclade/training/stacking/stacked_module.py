"""Copy of a module in which every layer with parameters has the parameters of many clients.

Such a stacked module trains all clients of a block by one forward and one backward pass per step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core import Layout, Slot, has_same_values
from fedclade.training.input_hooks import CastInputs, CopyInputs, SelectOutput, UnpackInputs
from fedclade.training.jobs import CannotTrainTogether
from fedclade.training.memory import hot_bytes
from fedclade.training.optimizer import Factors, LocalOptimizer
from fedclade.training.stacking import layers
from fedclade.training.stacking.bands import Bands
from fedclade.training.stacking.layers import (
    Find,
    Refused,
    Stacked,
    StackedAttention,
    StackedGRU,
    StackedLSTM,
)
from fedclade.training.stacking.stacked_parameter import (
    Active,
    BufferPool,
    ByExample,
    StackedParameter,
)
from fedclade.training.stacking.tape import NotOnTape, Tape

LAYERS: Mapping[type[nn.Module], Callable[[Any, Find, Active], Stacked]] = {
    nn.Linear: layers.StackedLinear,
    nn.Embedding: layers.StackedEmbedding,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), layers.StackedConv),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), layers.StackedConv
    ),
    nn.LSTM: StackedLSTM,
    nn.GRU: StackedGRU,
    nn.BatchNorm1d: layers.StackedBatchNorm,
    nn.BatchNorm2d: layers.StackedBatchNorm,
    nn.BatchNorm3d: layers.StackedBatchNorm,
    nn.LayerNorm: layers.StackedLayerNorm,
    nn.GroupNorm: layers.StackedLayerNorm,
    nn.Dropout: layers.StackedDropout,
    nn.MultiheadAttention: StackedAttention,
}
"""Stacked form of each type of layer.

The type must be exactly the same, since a subclass may have another forward method.
"""


BY_NAME: Mapping[str, Callable[[Any, Find, Active], Stacked]] = {
    "transformers.pytorch_utils.Conv1D": layers.StackedConv1D
}
"""Stacked form of layers of other packages, by the full name of their type.

The packages are not imported.
"""


def stacked_form(layer: nn.Module) -> Callable[[Any, Find, Active], Stacked] | None:
    """Return the class that stacks layers of the type of a layer; None if there is none."""
    kind = type(layer)
    return LAYERS.get(kind) or BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


class CannotStack(CannotTrainTogether):
    """Error for a module that the stacked engine does not support.

    The message names the layer and the reason, as in ``'features.norm' (InstanceNorm2d) has a
    parameter of its own, 'weight', but no stacked form``.
    """

    @classmethod
    def of(cls, name: str, layer: nn.Module, reason: str) -> CannotStack:
        """Return the error for a layer or tensor of a given name, with the reason."""
        where = "the module"
        if name:
            where = repr(name)
        return cls(f"{where} ({type(layer).__name__}) {reason}")


class StackedModule:
    """Copy of a module in which layers with trained parameters have those of many clients.

    The original module stays unchanged. Frozen parameters exist once, in the copy's own memory. A
    layer whose parameters are all frozen is not replaced by a stacked layer: it processes the rows
    of all clients.

    Parameters
    ----------
    module
        The module of the model.
    layout
        Layout of the model's parameter vector.

    Raises
    ------
    CannotStack
        If a layer with parameters is not one of :data:`LAYERS`, or has an option that no stacked
        layer supports.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.active = Active()
        try:
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            copied = copy.deepcopy(
                module, {id(tensors[name]): tensors[name] for name in layout.frozen}
            )
        except Exception as error:  # a user's module may contain anything
            raise CannotStack.of(
                "",
                module,
                f"cannot be copied, as the stacked engine requires: {error} (engine loop needs no "
                "copy)",
            ) from error
        swap = _Swap(copied, layout, self.active)
        self.module = swap.module
        self._parameters = tuple(swap.parameters.values())
        self._trained = [p for p in self._parameters if p.trained]
        self._frozen = [p for p in self._parameters if p.slot.name in layout.frozen]
        self._moving = [p for p in self._parameters if p.slot.name not in layout.frozen]
        owned = {p.slot.name for p in self._parameters}
        self._shared = [slot for slot in layout.buffers if slot.name not in owned]
        inside = dict(self.module.named_buffers())
        self._unsent = [name for name in layout.frozen if name in layout.unsent and name in inside]
        self.padding_shows = any(
            isinstance(layer, Stacked) and layer.padding_shows for layer in self.module.modules()
        )
        self.hot_bytes = hot_bytes(module, layout)
        self._pool = BufferPool()
        self._factors_pool = BufferPool()
        self._factors_memory = torch.empty(0)
        self._clients = 0
        self._device = torch.device("cpu")
        self._optimizer = LocalOptimizer(0.0)
        self._bands: Bands | None = None
        self._tape = Tape.of(self.module)
        # Whether the current training uses the tape.
        self._by_tape = self._tape is not None

    def load(self, models: Tensor, rows: Sequence[int]) -> None:
        """Load the models of n clients.

        Parameters
        ----------
        models
            K models as parameter vectors, ``[K, S]``.
        rows
            For each of n clients, the row of its model.

        Raises
        ------
        CannotStack
            If a buffer outside the stacked layers is not the same in all models.
        """
        n = len(rows)
        self._device = models.device
        if self._clients != n:
            self._clients = n
            self.active.start = self.active.stop = 0
            memory = self._pool.room(models, n * self.layout.size)
            for p in self._moving:
                p.allocate(memory[n * p.slot.start : n * p.slot.stop].view(n, *p.slot.shape))
            for p in self._frozen:
                value = self.layout.frozen[p.slot.name].to(models)
                p.allocate(value.expand(n, *value.shape))
        # A buffer outside the stacked layers exists once, so it must be equal in all clients'
        # models.
        for slot in self._shared:
            values = _of_clients(models, rows, slot)
            if not torch.equal(values, values[:1].expand_as(values)):
                raise CannotStack.of(
                    slot.name,
                    self.module,
                    "is a buffer that differs between the models, but the stacked engine stores it "
                    "only once for all clients (engine loop can train these clients)",
                )
            self.module.get_buffer(slot.name).copy_(
                _round_integers(values[0], slot).view(slot.shape)
            )
        for p in self._moving:
            p.everyone.copy_(
                _round_integers(_of_clients(models, rows, p.slot), p.slot).view(p.everyone.shape)
            )

    def begin(
        self,
        optimizer: LocalOptimizer,
        seeds: Sequence[int],
        anchors: Tensor | None,
        edges: Sequence[int],
        fixed: Collection[str] = (),
        states: Sequence[Mapping[str, Tensor]] = (),
        by_example: ByExample | None = None,
        *,
        recorded: bool = False,
        rounded: bool = False,
    ) -> None:
        """Start local training of the models that have been loaded.

        Parameters
        ----------
        optimizer
            The optimizer.
        seeds
            Seed of each client's random generator, for dropout.
        anchors
            Models to which the proximal term pulls each client, ``[n, S]``; None without a proximal
            term.
        edges
            Boundaries between clients. Clients between two adjacent edges take the same number of
            steps.
        fixed
            Names of parameters that are not trained.
        states
            State of each client's optimizer; empty if states are not stored between rounds.
        by_example
            Collector for the gradients of single examples; None if they are not needed.
        recorded
            Whether steps may be recorded, and so read step size, momentum and μ from the device.
        rounded
            Whether forward passes are in a lower precision than the parameters, by
            ``torch.autocast``, which acts on operations of autograd only.

        Raises
        ------
        CannotStack
            If gradients of single examples are needed, and a layer cannot compute them.
        """
        if by_example is not None:
            self._check_by_example()
        for p in self._parameters:
            p.by_example = by_example
        self._optimizer = optimizer
        self._by_tape = self._tape is not None and not rounded
        self.layout.set_training(self.module)
        self.active.seed(seeds, self._device)
        moving = [p for p in self._trained if p.slot.name not in fixed]
        self._bands = None
        if not optimizer.is_plain:
            self._bands = Bands(optimizer, moving, edges, states)
        factors: Factors | None = None
        if recorded and self._trained:
            like = self._trained[0].everyone
            self._factors_memory = self._factors_pool.room(like, len(fields(Factors)))
            factors = Factors.on_device(optimizer, self._factors_memory)
        for p in self._trained:
            p.held = p.slot.name in fixed
            anchor = None if anchors is None else anchors[:, p.slot.start : p.slot.stop]
            p.begin(optimizer, anchor, factors)

    def _check_by_example(self) -> None:
        """Raise CannotStack if a layer cannot compute a separate gradient for each example."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, Stacked) and not layer.by_example:
                raise CannotStack.of(
                    name,
                    layer,
                    "has no stacked form that computes a gradient for each example, as DP-SGD "
                    "requires (engine loop can train this layer)",
                )

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs ``[k·B, ...]`` of the k clients that train."""
        self.active.rows = len(x)
        if self._tape is not None and self._by_tape:
            try:
                return self._tape.forward(x)
            except (NotOnTape, Exception):  # the call below raises the module's own errors again
                self._tape = None
                self._by_tape = False
        return self.module(x)

    def backward(self, logits: Tensor, gradient: Tensor) -> None:
        """Compute the gradients of all parameters, given the gradient of the outputs."""
        if self._tape is None or not self._by_tape:
            torch.autograd.backward(logits, gradient)
        else:
            self._tape.backward(gradient)

    def add(self, gradient: Tensor) -> None:
        """Add vectors, such as noise, to the gradients of the clients that train.

        ``gradient`` is ``[k, D]`` for k clients and D parameters, in the order of the layout.
        """
        for p in self._trained:
            if p.learns:
                p.add(gradient[:, p.slot.start : p.slot.stop].view(p.state.shape))

    def step(self) -> None:
        """Complete and clip the gradients of the clients that train; take an optimizer step."""
        scales = self._optimizer.scales(
            [g for p in self._trained if (g := p.complete()) is not None]
        )
        if self._bands is not None:
            self._bands.step(self.active.start, self.active.stop, scales)
            return
        for p in self._trained:
            p.step(scales)

    def states(self) -> list[dict[str, Tensor]]:
        """Return the state of each client's optimizer, which is empty for plain SGD."""
        if self._bands is None:
            return [{} for _ in range(self._clients)]
        return self._bands.states()

    def addresses(self) -> tuple[int, ...]:
        """Return the memory addresses that a step reads or writes.

        A recorded step is valid for these addresses only. The addresses of the batch, and of
        buffers that clients share, are not included.
        """
        of_parameters = [address for p in self._parameters for address in p.addresses()]
        return (self._factors_memory.data_ptr(), *of_parameters)

    def bind(self, start: int, stop: int) -> None:
        """Select the range of clients, ``start`` to ``stop``, that train in the next steps."""
        if (start, stop) != (self.active.start, self.active.stop):
            self.active.start = start
            self.active.stop = stop
            for p in self._parameters:
                p.bind(start, stop)
            if self._tape is not None:
                self._tape.forget()

    def updates(
        self, models: Tensor, rows: Sequence[int], out: Tensor, places: Sequence[int]
    ) -> None:
        """Write each client's update, its new model minus its first model, to a row of ``out``.

        Parameters
        ----------
        models
            Models from which the clients started, ``[K, S]``.
        rows
            For each client, the row of its model.
        out
            Memory for the updates of all N clients of the round, ``[N, S]``.
        places
            For each client of this block, the row of its update.

        Raises
        ------
        CannotStack
            If training has changed a buffer outside the stacked layers. Such a buffer exists once,
            so the change would mix the clients.
        """
        n = len(rows)
        side_by_side = list(places) == list(range(places[0], places[0] + n))
        if side_by_side:
            updates = out[places[0] : places[0] + n]
        else:
            updates = out.new_empty(n, self.layout.size)
        for p in self._moving:
            update = updates[:, p.slot.start : p.slot.stop]
            torch.sub(p.everyone.view(n, -1), _of_clients(models, rows, p.slot), out=update)
        for slot in self._shared:
            before = _of_clients(models, rows, slot)
            buffer = self.module.get_buffer(slot.name)
            if not torch.equal(
                buffer, _round_integers(before[0], slot).view(slot.shape).to(buffer.dtype)
            ):
                raise CannotStack.of(
                    slot.name,
                    self.module,
                    "is a buffer that training changes, but the stacked engine stores it only once "
                    "for all clients (engine loop can train these clients)",
                )
            updates[:, slot.start : slot.stop] = buffer.flatten() - before
        for name in self._unsent:
            if not has_same_values(self.module.get_buffer(name), self.layout.unsent[name]):
                raise CannotStack.of(
                    name,
                    self.module,
                    "is a buffer that training changes, but the stacked engine stores it only once "
                    "for all clients (engine loop can train these clients)",
                )
        if not side_by_side:
            out[places] = updates


def _of_clients(models: Tensor, rows: Sequence[int], slot: Slot) -> Tensor:
    """Return the values of one parameter or buffer in the models of n clients, ``[n, entries]``."""
    values = models[:, slot.start : slot.stop]
    if len(models) == 1:
        return values.expand(len(rows), -1)
    return values[rows]


def _round_integers(values: Tensor, slot: Slot) -> Tensor:
    """Return the values of a parameter or buffer, rounded if the buffer has an integer type."""
    if slot.dtype.is_floating_point:
        return values
    return values.round()


class _Swap:
    """Conversion of a module in place: its layers are replaced by stacked layers.

    ``parameters`` has the stacked form of each parameter and buffer, by the Python id of the
    original tensor.
    """

    def __init__(self, module: nn.Module, layout: Layout, active: Active) -> None:
        self.module = module
        self.parameters: dict[int, StackedParameter] = {}
        self._active = active
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # Frozen tensors are not part of vectors, so their position is arbitrary.
        frozen = (Slot(name, tuple(p.shape), p.dtype, 0) for name, p in layout.frozen.items())
        self._slots = {
            id(tensors[s.name]): s for s in (*layout.parameters, *layout.buffers, *frozen)
        }
        self._frozen = {id(tensors[name]) for name in layout.frozen}
        self._resting = set(layout.resting)
        done: dict[nn.Module, nn.Module] = {}
        # Name prefixes of inner layers that are replaced with the layer around them, such as the
        # output projection of attention.
        inside: list[str] = []
        for name, layer in [*module.named_modules(remove_duplicate=False)]:
            if stacked_form(layer) is not None and not self._is_common(name, layer):
                done[layer] = done.get(layer) or self._stacked(name, layer)
                parent, _, attribute = name.rpartition(".")
                if name:
                    setattr(self.module.get_submodule(parent), attribute, done[layer])
                else:
                    self.module = done[layer]
                inside.append(f"{name}." if name else "")
            self._refuse_rest(name, layer, stacked=layer in done or name.startswith(tuple(inside)))

    def _is_common(self, name: str, layer: nn.Module) -> bool:
        """Return whether all clients can share one layer.

        They can if all tensors of the layer are frozen, and the layer has neither random operations
        nor statistics of its inputs.
        """
        tensors = [*layer.parameters(), *(b for b in layer.buffers() if id(b) in self._slots)]
        if not tensors or not self._frozen.issuperset(map(id, tensors)):
            return False
        normalization = nn.modules.batchnorm._NormBase  # pyright: ignore[reportPrivateUsage]
        own_statistics = isinstance(layer, normalization) and layer.running_mean is None
        draws = bool(getattr(layer, "dropout", 0)) and name not in self._resting
        return not own_statistics and not draws and getattr(layer, "max_norm", None) is None

    def _refuse_rest(self, name: str, layer: nn.Module, stacked: bool) -> None:
        """Raise an error for a layer with trained tensors that have no stacked form.

        A layer of a type with a stacked form can have such tensors, too, if a user has added them.

        Parameters
        ----------
        name, layer
            The layer, and its name in the module.
        stacked
            Whether the layer, or a layer that contains it, is replaced by a stacked layer.

        Raises
        ------
        CannotStack
            If the layer has such a tensor.
        """
        own = dict[str, Tensor](layer.named_parameters(recurse=False))
        if stacked:  # a layer that is not stacked keeps its own buffers
            own |= {
                buffer: b
                for buffer, b in layer.named_buffers(recurse=False)
                if id(b) in self._slots
            }
        known = self._frozen
        if stacked:
            known = self.parameters.keys()
        for tensor, value in own.items():
            if id(value) not in known:
                kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
                raise CannotStack.of(
                    name,
                    layer,
                    f"has a {kind} of its own, {tensor!r}, but no stacked form (engine loop can train "
                    "this layer)",
                )

    def _stacked(self, name: str, layer: nn.Module) -> nn.Module:
        """Return the stacked form of a layer; raise CannotStack if an option or hook forbids it."""
        before = vars(layer)["_forward_pre_hooks"]
        after = vars(layer)["_forward_hooks"]
        # Hooks that prepare the inputs of the whole module, or select its output, treat each row in
        # the same way, so they can run on the rows of all clients.
        are_own = not name and all(
            isinstance(hook, CopyInputs | CastInputs | UnpackInputs | SelectOutput)
            for hook in (*before.values(), *after.values())
        )
        if ((before or after) and not are_own) or vars(layer)["_backward_hooks"]:
            raise CannotStack.of(
                name, layer, "has hooks, which engine loop runs, but the stacked engine would not"
            )
        try:
            form = stacked_form(layer)
            assert form is not None  # as the caller has checked
            stacked = form(layer, self._find, self._active)
        except Refused as refused:
            raise CannotStack.of(name, layer, f"cannot be stacked: {refused}") from refused
        for hook in before.values():
            stacked.register_forward_pre_hook(hook, with_kwargs=isinstance(hook, UnpackInputs))
        for hook in after.values():
            stacked.register_forward_hook(hook)
        # Attributes such as hidden_size, which a user's forward may read.
        for attribute, value in vars(layer).items():
            if not attribute.startswith("_"):
                setattr(stacked, attribute, value)
        return stacked

    def _find(self, tensor: Tensor | None) -> StackedParameter | None:
        """Return the stacked form of a parameter or buffer; None if a layer has no such tensor."""
        if tensor is None:
            return None
        if id(tensor) not in self._slots:
            raise Refused(
                "the layer has a parameter that is computed from other parameters (a "
                "parametrization), which the stacked engine does not support"
            )
        return self.parameters.setdefault(
            id(tensor), StackedParameter(self._slots[id(tensor)], tensor.requires_grad)
        )
