"""A model as one flat vector: parameters first, buffers behind them.

Servers only add, average and compare vectors. Buffers (the running statistics of BatchNorm) travel in the same vector,
so that they are averaged with the parameters, but everything that compares clients looks at the parameters alone.
Parameters that do not require a gradient are the same everywhere: they stay in the module, outside the vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fedclade.core.errors import ModelError


@dataclass(frozen=True)
class Slot:
    """Place of one tensor of a module in the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        """First entry behind the tensor's."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a module lies in a flat vector ``[S]`` of D parameters and S - D buffer entries.

    Tied weights have one place, and further names in ``tied``, each with the name of the place. ``resting`` names the
    modules that stay in evaluation mode while the others train: those that were in ``eval()`` inside a module that was
    not, and those in ``eval()`` of which every parameter is frozen.
    """

    parameters: tuple[Slot, ...]  # in the module's own order
    buffers: tuple[Slot, ...]
    dtype: torch.dtype  # of the flat vector
    tied: tuple[tuple[str, str], ...] = ()
    frozen: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor], compare=False, repr=False)  # in no vector
    resting: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a module that :func:`check_module` accepts.

        Raises
        ------
        ModelError
            If the module has no parameters to train, or parameters of several types.
        """
        check_module(module)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        if not trained:
            raise ModelError(f"{type(module).__name__} has no trainable parameters")
        dtypes = {p.dtype for _, p in trained}
        if len(dtypes) > 1:
            raise ModelError(f"parameters should share one type, got {sorted(map(str, dtypes))}; cast the model first")
        parameters, end = _slots(trained, 0)
        buffers, _ = _slots(_saved_buffers(module), end)
        tied = _tied(module, [*(slot.name for slot in (*parameters, *buffers)), *frozen])
        return cls(parameters, buffers, dtypes.pop(), tied, frozen, _resting(module))

    @property
    def n_parameters(self) -> int:
        """Number D of entries that are trained and compared."""
        return self.parameters[-1].stop

    @property
    def size(self) -> int:
        """Length S of the whole vector."""
        return self.buffers[-1].stop if self.buffers else self.n_parameters

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's state as a vector ``[S]``."""
        tensors = _tensors(module)
        slots = (*self.parameters, *self.buffers)
        return torch.cat([tensors[slot.name].detach().reshape(-1).to(self.dtype) for slot in slots])

    def load(self, vector: Tensor, module: nn.Module) -> None:
        """Copy a vector ``[S]`` into the module; raise a ModelError if it has another length."""
        if vector.shape != (self.size,):
            raise ModelError(f"a vector of {self.size} entries was expected, got shape {tuple(vector.shape)}")
        tensors = _tensors(module)
        with torch.no_grad():
            for name, value in self.unflatten(vector).items():
                tensors[name].copy_(value)

    def set_training(self, module: nn.Module) -> None:
        """Put the module into training mode, except the parts of it that rest."""
        module.train()
        for name in self.resting:
            module.get_submodule(name).training = False

    def difference(self, module: nn.Module, vector: Tensor, out: Tensor) -> Tensor:
        """Write how far the module's state is from a vector ``[S]`` into another one, and return that."""
        tensors = _tensors(module)
        for s in (*self.parameters, *self.buffers):
            before, there = (v[s.start : s.stop].view(s.shape) for v in (vector, out))
            torch.sub(tensors[s.name].detach().to(self.dtype), before, out=there)
        return out

    def unflatten(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Return the named tensors of a vector ``[S]``; floats are views, whole numbers are rounded copies.

        Of several vectors, ``[..., S]``, each tensor gets the same leading dimensions.
        """
        leading = vector.shape[:-1]
        return {
            s.name: _typed(vector[..., s.start : s.stop].view((*leading, *s.shape)), s.dtype)
            for s in (*self.parameters, *self.buffers)
        }

    def state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector ``[S]`` as the module's ``load_state_dict`` takes it: copies on the CPU, by all its names."""
        placed = {**self.unflatten(vector.cpu()), **{name: p.cpu() for name, p in self.frozen.items()}}
        names = {**{name: name for name in placed}, **dict(self.tied)}
        return {name: placed[place].clone() for name, place in names.items()}


def check_module(module: nn.Module) -> None:
    """Check that a module's state is that of its parameters and buffers, so that a vector can hold it.

    Raises
    ------
    ModelError
        If parameters have no shape yet, or are computed from others before each pass; names the module.
    """
    for name, part in module.named_modules():
        where = f"{name!r} ({type(part).__name__})" if name else type(part).__name__
        if any(is_lazy(tensor) for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise ModelError(
                f"{where} is lazy: its parameters have no shape yet; pass a batch through the model first, or name the "
                "sizes"
            )
        hooks: Mapping[int, object] = part._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]  (no other way)
        if is_parametrized(part) or any(isinstance(hook, _COMPUTING) for hook in hooks.values()):
            raise ModelError(
                f"{where} computes its weights from other parameters, as weight norm, spectral norm and pruning do, "
                "but models are averaged by their parameters; remove that (torch.nn.utils.parametrize."
                "remove_parametrizations), or take a layer without it"
            )


_COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)
"""Hooks that compute a weight before each pass; what came after them are parametrisations."""


def _typed(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if dtype.is_floating_point else value.round().to(dtype)


def _slots(named: Sequence[tuple[str, Tensor]], start: int) -> tuple[tuple[Slot, ...], int]:
    slots: list[Slot] = []
    for name, tensor in named:
        slots.append(Slot(name, tuple(tensor.shape), tensor.dtype, start))
        start = slots[-1].stop
    return tuple(slots), start


def _saved_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    saved = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def _resting(module: nn.Module) -> tuple[str, ...]:
    own = {part: list(part.parameters()) for part in module.modules()}
    frozen = {
        inner
        for part, parameters in own.items()
        if parameters and not any(p.requires_grad for p in parameters)
        for inner in part.modules()
    }
    at_rest = {part for part in own if not part.training and (module.training or part in frozen)}
    return tuple(name for name, part in module.named_modules() if part in at_rest)


def _tied(module: nn.Module, places: Sequence[str]) -> tuple[tuple[str, str], ...]:
    tensors = _tensors(module)
    place_of = {id(tensors[name]): name for name in places}
    saved: dict[str, Any] = module.state_dict(keep_vars=True)
    names = ((name, place_of.get(id(tensor))) for name, tensor in saved.items())
    return tuple((name, place) for name, place in names if place is not None and place != name)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
