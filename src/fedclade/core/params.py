"""Conversion between PyTorch modules and flat vectors of their parameters and buffers.

A server only adds, averages and compares vectors. A vector has the parameters of a module, followed
by its buffers. Buffers that are running statistics (of BatchNorm) are part of the vector, so that
they are averaged like parameters, but clients are compared by their parameters alone. Three kinds
of tensors are not part of the vector:

- Frozen tensors have the same values everywhere and stay in the module.
- Buffers that are not running statistics stay in the module too; see :mod:`fedclade.core.buffers`.
- Personal tensors stay with a client, which stores them in a second vector.

The vector has the type of the parameters. For parameters in half precision (bfloat16, float16) it
is float32, so that a mean over clients is not rounded to the few digits that one model has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from fedclade.core.buffers import has_same_values, restore_buffer, unsent_buffers
from fedclade.core.errors import ConfigError, ModelError, shown

if TYPE_CHECKING:
    from torch import nn

# Patterns over parameter names, such as ``head.*``: settings use them to select parts of a model.


def matching(
    patterns: Sequence[str], names: Collection[str], setting: str, what: str = "parameter"
) -> tuple[str, ...]:
    """Return the parameter names that match at least one pattern, in the order of ``names``.

    Settings use patterns to select parts of a model. A pattern matches a whole name, or the
    beginning of a name up to a dot: ``head`` and ``head.*`` match the same names. A pattern that
    matches no name in this way is compared with the parts of names between dots: ``lora_B`` matches
    ``blocks.0.lora_B.weight``.

    Parameters
    ----------
    patterns
        Patterns with the wildcards of a shell: ``*``, ``?``, ``[seq]``.
    names
        Names of parameters or buffers, such as ``head.weight``.
    setting
        Name of the setting that the patterns come from, such as ``model.personal``, for messages.
    what
        Noun for the named objects in messages, such as ``parameter``.

    Raises
    ------
    ConfigError
        If a pattern matches no name; the message suggests the nearest name.
    """
    found: set[str] = set()
    for pattern in patterns:
        fits = fitting(pattern, names)
        if not fits:
            near = get_close_matches(pattern.removesuffix(".*"), names, 1, 0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{setting} = {shown(pattern)} matches no {what} of the model{hint}")
        found.update(fits)
    return tuple(name for name in names if name in found)


def fitting(pattern: str, names: Collection[str]) -> list[str]:
    """Return the parameter names that match a single pattern; there may be none.

    See :func:`matching` for the form of a pattern.
    """
    return [name for name in names if _matches_beginning(pattern, name)] or [
        name for name in names if _matches_inner_part(pattern, name)
    ]


def _matches_beginning(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name, or the beginning of a name up to a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _matches_inner_part(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a part of a name that is delimited by dots."""
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


@dataclass(frozen=True)
class Slot:
    """Position of one tensor of a module in the flat vector, with its name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        """Index of the vector's first entry after the entries of this tensor."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Positions of a module's tensors in a flat vector of S entries.

    The vector has D parameter entries, followed by S − D buffer entries. Tied weights have a single
    slot. Their additional names are in ``tied``, each paired with the name of the slot.

    ``resting`` names the submodules that stay in evaluation mode during training: submodules that
    were in ``eval()`` mode inside a module in training mode, and submodules in ``eval()`` mode with
    frozen parameters only.

    ``frozen`` has the parameters that do not require a gradient, and the buffers of resting
    submodules.

    ``personal`` tensors are stored by each client in a second vector of P entries. The ``full``
    layout describes a vector of F = S + P entries with both the shared and the personal tensors.

    ``unsent`` buffers are not running statistics and are not part of any vector: every client
    starts from the values stored here, and does not change them. Unsent buffers that are in the
    module's state dict are ``frozen`` as well.
    """

    parameters: tuple[Slot, ...]  # in the order of the module
    buffers: tuple[Slot, ...]
    dtype: torch.dtype  # type of the flat vector
    tied: tuple[tuple[str, str], ...] = ()
    # tensors that are in no vector
    frozen: Mapping[str, torch.Tensor] = field(
        default_factory=dict[str, Any], compare=False, repr=False
    )
    resting: tuple[str, ...] = ()
    personal: tuple[Slot, ...] = ()  # parameters first, then buffers
    # the full layout, if this one lacks personal tensors
    whole: Layout | None = field(default=None, repr=False)
    unsent: Mapping[str, torch.Tensor] = field(
        default_factory=dict[str, Any], compare=False, repr=False
    )

    @classmethod
    def of(cls, module: nn.Module, personal: Sequence[str] = ()) -> Layout:
        """Return the layout of a module's tensors in a flat vector.

        Parameters
        ----------
        module
            The module; :func:`check_module` is called first.
        personal
            Patterns over the names of parameters and saved buffers, see
            :func:`fedclade.core.matching`. The matching tensors are personal: they stay with the
            client. A tied tensor is matched by each of its names.

        Raises
        ------
        ModelError
            If the module has no trainable parameters, parameters of several types or complex
            parameters; or if all trainable parameters are personal.
        ConfigError
            If a pattern matches no tensor.
        """
        check_module(module)
        resting = _find_resting(module)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        if not trained:
            raise ModelError(
                f"{type(module).__name__} has no trainable parameters; at least one parameter "
                "should require a gradient"
            )
        dtypes = {p.dtype for _, p in trained}
        if len(dtypes) > 1:
            raise ModelError(
                "the trainable parameters of a model should all have the same type, got "
                f"{sorted(map(str, dtypes))}; convert them to one type, such as by model.float()"
            )
        dtype = _vector_dtype(module, dtypes.pop())
        buffers = _saved_buffers(module)
        frozen |= {name: buffer for name, buffer in buffers if name.rpartition(".")[0] in resting}
        unsent = _copy_unsent_buffers(module, saved=dict(buffers), frozen=frozen)
        frozen |= {name: unsent[name] for name, _ in buffers if name in unsent}
        moving = [(name, buffer) for name, buffer in buffers if name not in frozen]
        parameter_slots, end = _make_slots(trained, 0)
        buffer_slots, _ = _make_slots(moving, end)
        tied = _find_tied_names(
            module, [*(slot.name for slot in (*parameter_slots, *buffer_slots)), *frozen]
        )
        layout = cls(parameter_slots, buffer_slots, dtype, tied, frozen, resting, unsent=unsent)
        places = {slot.name: slot.name for slot in (*parameter_slots, *buffer_slots)}
        places |= {name: place for name, place in tied if place in places}
        return layout.without(
            {places[name] for name in matching(personal, places, "model.personal")}
        )

    def without(self, personal: Collection[str]) -> Layout:
        """Return the layout of the shared tensors alone, given the names of the personal tensors.

        Parameters
        ----------
        personal
            Names of the personal tensors, which stay with the client.

        Raises
        ------
        ModelError
            If all trainable parameters are personal.
        """
        if not personal:
            return self
        shared, end = _place_slots((s for s in self.parameters if s.name not in personal), 0)
        if not shared:
            raise ModelError(
                "all trainable parameters of the model are personal, so clients share none with "
                "the server; make fewer parameters personal"
            )
        buffers, _ = _place_slots((s for s in self.buffers if s.name not in personal), end)
        own, _ = _place_slots(
            (s for s in (*self.parameters, *self.buffers) if s.name in personal), 0
        )
        return replace(self, parameters=shared, buffers=buffers, personal=own, whole=self)

    @property
    def full(self) -> Layout:
        """Layout of the whole module, including personal tensors; the engines train with it."""
        return self.whole or self

    @property
    def personal_size(self) -> int:
        """Number P of entries in a client's vector of personal tensors; 0 if there are none."""
        return self.personal[-1].stop if self.personal else 0

    @property
    def n_parameters(self) -> int:
        """Number D of parameter entries at the beginning of the vector; the rest are buffers."""
        return self.parameters[-1].stop

    @property
    def size(self) -> int:
        """Number S of entries in the vector: parameters and buffers."""
        return self.buffers[-1].stop if self.buffers else self.n_parameters

    @property
    def is_rounded(self) -> bool:
        """Whether parameters have a less precise type than the vector, such as bfloat16."""
        return any(slot.dtype != self.dtype for slot in self.parameters)

    def flatten(self, module: nn.Module) -> torch.Tensor:
        """Return a copy of a module's shared parameters and buffers as a flat vector ``[S]``."""
        return self._flatten_slots(module, (*self.parameters, *self.buffers))

    def flatten_personal(self, module: nn.Module) -> torch.Tensor:
        """Return a copy of a module's personal tensors as a flat vector ``[P]``."""
        return self._flatten_slots(module, self.personal)

    def _flatten_slots(self, module: nn.Module, slots: Sequence[Slot]) -> torch.Tensor:
        tensors = _named_tensors(module)
        flat = [tensors[slot.name].detach().reshape(-1).to(self.dtype) for slot in slots]
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype)

    def joined(self, shared: torch.Tensor, personal: torch.Tensor) -> torch.Tensor:
        """Combine shared vectors ``[..., S]`` and personal vectors ``[..., P]`` to whole models.

        The result has the :attr:`full` layout, ``[..., F]``. :meth:`parted` is the inverse.
        """
        if not self.personal:
            return shared
        parts = {
            slot.name: shared[..., slot.start : slot.stop]
            for slot in (*self.parameters, *self.buffers)
        }
        parts |= {slot.name: personal[..., slot.start : slot.stop] for slot in self.personal}
        return torch.cat(
            [parts[slot.name] for slot in (*self.full.parameters, *self.full.buffers)], -1
        )

    def parted(self, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split vectors of whole models into vectors of shared and of personal tensors.

        Parameters
        ----------
        full
            Vectors ``[..., F]`` of the :attr:`full` layout.

        Returns
        -------
        tuple
            Shared vectors ``[..., S]`` and personal vectors ``[..., P]``.
        """
        if not self.personal:
            return full, full[..., :0]
        whole = {
            slot.name: full[..., slot.start : slot.stop]
            for slot in (*self.full.parameters, *self.full.buffers)
        }
        shared = torch.cat([whole[slot.name] for slot in (*self.parameters, *self.buffers)], -1)
        return shared, torch.cat([whole[slot.name] for slot in self.personal], -1)

    def load(self, vector: torch.Tensor, module: nn.Module) -> None:
        """Copy a flat vector ``[S]`` into a module's parameters and buffers.

        Buffers that are not part of the vector are reset to the initial values of the model.

        Raises
        ------
        ModelError
            If the vector does not have S entries.
        """
        if vector.shape != (self.size,):
            raise ModelError(
                f"the vector of a model should have {self.size} entries, got shape "
                f"{tuple(vector.shape)}"
            )
        tensors = _named_tensors(module)
        with torch.no_grad():
            for name, value in self.unflatten(vector).items():
                tensors[name].copy_(value)
            for name, value in self.unsent.items():
                restore_buffer(module, name, value)

    def check_unsent(self, module: nn.Module) -> None:
        """Check that training has not changed float buffers that were treated as constants.

        Float buffers that the first forward passes do not change are not averaged over clients.

        Raises
        ------
        ModelError
            If training has changed such a buffer.
        """
        for name, value in self.unsent.items():
            could_be_averaged = name in self.frozen and value.is_floating_point()
            if could_be_averaged and not has_same_values(module.get_buffer(name), value):
                raise ModelError(
                    f"training changes buffer {name!r} of {type(module).__name__}, but the first "
                    "forward passes did not, so the buffer was treated as a constant, which is not "
                    "averaged; change the buffer in every forward pass in training mode, or "
                    "register it with persistent=False"
                )

    def set_training(self, module: nn.Module) -> None:
        """Put a module into training mode, except submodules that stay in evaluation mode."""
        module.train()
        for name in self.resting:
            module.get_submodule(name).training = False

    def difference(
        self, module: nn.Module, vector: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Compute a module's current state minus a vector, such as the model it was trained from.

        Parameters
        ----------
        module
            The module with the current parameters and buffers.
        vector
            The vector ``[S]`` that is subtracted.
        out
            Tensor ``[S]`` that the difference is written to, and that is returned.
        """
        tensors = _named_tensors(module)
        for s in (*self.parameters, *self.buffers):
            before, there = (v[s.start : s.stop].view(s.shape) for v in (vector, out))
            torch.sub(tensors[s.name].detach().to(self.dtype), before, out=there)
        return out

    def unflatten(self, vector: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensors in a flat vector ``[S]`` by name, each in its own shape and type.

        Float tensors of the vector's type are views of the vector. Integer tensors are copies with
        rounded values. For several vectors ``[..., S]``, each tensor has the same leading
        dimensions.
        """
        return _unflatten_slots(vector, (*self.parameters, *self.buffers))

    def unflatten_personal(self, vector: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensors in a personal vector ``[P]`` by name; see :meth:`unflatten`."""
        return _unflatten_slots(vector, self.personal)

    def state_dict(
        self, vector: torch.Tensor, personal: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return a state dict for the module's ``load_state_dict``, with copies on the CPU.

        The state dict contains tied tensors by all their names, and frozen tensors. It contains
        personal tensors only if ``personal`` is given.

        Parameters
        ----------
        vector
            Flat vector ``[S]`` of the shared tensors.
        personal
            Flat vector ``[P]`` of a client's personal tensors.
        """
        placed = {
            **self.unflatten(vector.cpu()),
            **{name: p.cpu() for name, p in self.frozen.items()},
        }
        if personal is not None:
            placed |= self.unflatten_personal(personal.cpu())
        names = {
            **{name: name for name in placed},
            **{name: place for name, place in self.tied if place in placed},
        }
        return {name: placed[place].clone() for name, place in names.items()}


def check_module(module: nn.Module) -> None:
    """Check that a module's state consists of ordinary parameters and buffers that have values.

    Raises
    ------
    ModelError
        If the module is a TorchScript module, or if parameters have no shape or no values yet, or
        are computed from other parameters before each forward pass. The message names the
        submodule.
    """
    for name, part in module.named_modules():
        where = f"{name!r} ({type(part).__name__})" if name else type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is a TorchScript module, which torch cannot copy with its parameters; "
                "give the module that torch.jit.script or torch.jit.trace was called with"
            )
        if any(
            torch.nn.parameter.is_lazy(tensor)
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        ):
            raise ModelError(
                f"{where} is lazy: its parameters have no shape yet; pass a batch through the "
                "model first, or give the sizes of the layer explicitly"
            )
        if _computes_weights(part):
            raise ModelError(
                f"{where} computes its weights from other parameters, as weight norm, spectral "
                "norm and pruning do, but models are averaged by their parameters; remove the "
                "computation (torch.nn.utils.parametrize.remove_parametrizations), or use a layer "
                "without it"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name!r} of the model is on the 'meta' device and has no values; make the model "
                "on the CPU, or call model.to_empty(device='cpu') and initialise it"
            )


def _computes_weights(module: nn.Module) -> bool:
    """Return whether a module computes a weight from other parameters before each forward pass."""
    from torch.nn.utils.parametrize import is_parametrized
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    hooks: Mapping[int, object] = module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]  (no other way)
    kinds = (WeightNorm, SpectralNorm, BasePruningMethod)  # before torch had parametrizations
    return is_parametrized(module) or any(isinstance(hook, kinds) for hook in hooks.values())


def _unflatten_slots(vector: torch.Tensor, slots: Collection[Slot]) -> dict[str, torch.Tensor]:
    leading = vector.shape[:-1]
    return {
        s.name: _cast_values(vector[..., s.start : s.stop].view((*leading, *s.shape)), s.dtype)
        for s in slots
    }


def _cast_values(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float values in another type; for an integer type, the values are rounded first."""
    return value.to(dtype) if dtype.is_floating_point else value.round().to(dtype)


def _make_slots(
    named: Sequence[tuple[str, torch.Tensor]], start: int
) -> tuple[tuple[Slot, ...], int]:
    return _place_slots(
        (Slot(name, tuple(tensor.shape), tensor.dtype, 0) for name, tensor in named), start
    )


def _place_slots(slots: Iterable[Slot], start: int) -> tuple[tuple[Slot, ...], int]:
    """Return the slots with consecutive positions in a vector, from ``start`` on.

    The result is a tuple of the new slots and the position after the last slot.
    """
    moved: list[Slot] = []
    for slot in slots:
        moved.append(replace(slot, start=start))
        start = moved[-1].stop
    return tuple(moved), start


def _vector_dtype(module: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a model's flat vector, given the type of the model's parameters.

    Raises
    ------
    ModelError
        If the parameters are not real numbers.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    if dtype in (torch.float32, torch.float64):
        return dtype
    raise ModelError(
        f"parameters of {type(module).__name__} should be real numbers (float32, float64, bfloat16 "
        f"or float16), got {dtype}; replace a complex parameter by two real parameters "
        "(torch.view_as_real)"
    )


def _saved_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    saved = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]


def _copy_unsent_buffers(
    module: nn.Module, saved: Collection[str], frozen: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that are not averaged over clients, by name.

    Parameters
    ----------
    module
        The module.
    saved
        Names of the buffers in the module's state dict. All other buffers are not averaged, nor are
        buffers that are not running statistics.
    frozen
        Names of frozen tensors, which are left out of the result.
    """
    names = unsent_buffers(module)
    found: dict[str, torch.Tensor] = {}
    for name, buffer in module.named_buffers():
        if (name in names or name not in saved) and name not in frozen:
            found[name] = buffer.detach().clone()  # a forward pass may write into the module's own
    return found


def _find_resting(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the submodules that stay in evaluation mode, see :class:`Layout`."""
    own = {part: list(part.parameters()) for part in module.modules()}
    frozen = {
        inner
        for part, parameters in own.items()
        if parameters and not any(p.requires_grad for p in parameters)
        for inner in part.modules()
    }
    at_rest = {part for part in own if not part.training and (module.training or part in frozen)}
    return tuple(name for name, part in module.named_modules() if part in at_rest)


def _find_tied_names(module: nn.Module, places: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the additional names of tied tensors, each with the tensor's name in ``places``."""
    tensors = _named_tensors(module)
    place_of = {id(tensors[name]): name for name in places}
    saved: dict[str, Any] = module.state_dict(keep_vars=True)
    names = ((name, place_of.get(id(tensor))) for name, tensor in saved.items())
    return tuple((name, place) for name, place in names if place is not None and place != name)


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
