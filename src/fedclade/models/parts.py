"""Parts of a model: frozen, personal, or common to all clusters; and adapters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

# The base class of the layers for batches and for instances.
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from fedclade.core import ConfigError, Layout, check_arguments, check_module, matching, rng, shown
from fedclade.models.lora import LoRA

PARTS = ("freeze", "personal", "common", "adapter")
"""Keys of the ``[model]`` section about parts; all others are arguments of the factory."""

Preset = Literal["head", "body", "norm"]
"""Named parts: the last layer with parameters, all layers before, all normalization layers."""

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of a model; patterns are those of :func:`fedclade.core.matching`.

    Parameters
    ----------
    freeze
        Frozen entries: the same for all clients, never sent, averaged or compared; see
        :func:`freeze`.
    personal
        Entries that stay with a client, in a vector of their own; see
        :class:`~fedclade.core.Layout`. A list of patterns, or a :data:`Preset`: ``head``, ``body``
        or ``norm``.
    common
        Entries that all clusters share: they are averaged over all clusters, as if these were one;
        each cluster has the rest of the model for itself. Patterns, or a :data:`Preset`.
    adapter
        Adapter that is trained in place of the model, as a value or as in the ``[model]`` section.

    Raises
    ------
    ConfigError
        If a preset is unknown, or the adapter has a wrong field.
    """

    freeze: tuple[str, ...] = ()
    personal: tuple[str, ...] | Preset = ()
    common: tuple[str, ...] | Preset = ()
    adapter: LoRA | None = None

    def __post_init__(self) -> None:
        for key, part in (("personal", self.personal), ("common", self.common)):
            if isinstance(part, str) and part not in get_args(Preset):
                words = "'head', 'body' or 'norm', or a list of patterns"
                raise ConfigError(f"model.{key} should be {words}, got {shown(part)}")
        if isinstance(self.adapter, Mapping):
            fitted = check_arguments("model.adapter", LoRA, self.adapter)
            object.__setattr__(self, "adapter", LoRA(**fitted))

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Parts:
        """Return the parts that a ``[model]`` section names."""
        return cls(
            **check_arguments(
                "[model]", cls, {key: section[key] for key in PARTS if key in section}
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the parts as a ``[model]`` section, without those that are unset."""
        return {key: value for key, value in asdict(self).items() if value}

    def applied(self, module: nn.Module, seed: int = 0) -> nn.Module:
        """Return a model with its adapters, which depend on the seed, and its frozen parts.

        The module is as it was, unless nothing is to be done.

        Raises
        ------
        ConfigError
            If a pattern matches nothing.
        """
        if not self.freeze and self.adapter is None:
            return module
        check_module(module)  # before it is copied, which can fail for the same reason
        module = copy.deepcopy(module)
        if self.adapter is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(rng.torch_seed(seed, "adapter"))
                self.adapter.added_to(module)
        freeze(module, self.freeze)
        return module

    def layout(self, module: nn.Module) -> Layout:
        """Return the layout of a model that has these parts."""
        return Layout.of(module, self.personal_names(module))

    def personal_names(self, module: nn.Module) -> tuple[str, ...]:
        """Return the patterns of what is personal; of a preset, the names.

        Raises
        ------
        ConfigError
            If there are no normalisation layers, and these should be personal.
        """
        return _resolve_names(module, self.personal, "personal")

    def common_entries(self, module: nn.Module) -> Tensor | None:
        """Return whether each entry of a model is common to all clusters, ``[S]``; None if none is.

        Raises
        ------
        ConfigError
            If a pattern matches nothing that is sent, or everything is common.
        """
        if not self.common:
            return None
        layout = self.layout(module)
        slots = {slot.name: slot for slot in (*layout.parameters, *layout.buffers)}
        places = {name: name for name in slots}
        places |= {name: place for name, place in layout.tied if place in slots}
        names = _resolve_names(module, self.common, "common")
        if isinstance(self.common, str):
            # A preset may name personal parts, which are not sent.
            names = [name for name in names if name in slots]
        entries = torch.zeros(layout.size, dtype=torch.bool)
        for name in matching(names, places, "model.common"):
            slot = slots[places[name]]
            entries[slot.start : slot.stop] = True
        if entries[: layout.n_parameters].all():
            raise ConfigError(
                "model.common leaves the clusters no parameters of their own; take less, or FedAvg"
            )
        return entries if entries.any() else None


def _resolve_names(module: nn.Module, part: tuple[str, ...] | Preset, key: str) -> tuple[str, ...]:
    """Return the patterns of a part; for a preset, the names of its parameters and buffers."""
    if not isinstance(part, str):
        return part
    layout = Layout.of(module)
    slots = {slot.name: slot.name for slot in (*layout.parameters, *layout.buffers)}
    slots |= {name: slot for name, slot in layout.tied if slot in slots}
    slots_by_layer: dict[str, list[str]] = {}
    for name, slot in slots.items():
        slots_by_layer.setdefault(name.rpartition(".")[0], []).append(slot)
    if part == "norm":
        layers = _find_norms(module, slots_by_layer)
        if not layers:
            raise ConfigError(
                f"model.{key} = 'norm', but the model has no normalisation layer to train"
            )
    else:
        layers = _find_last_layer(module, layout, slots_by_layer)
    chosen = {slot for name in layers for slot in slots_by_layer[name]}
    names = dict.fromkeys(slots.values())
    if part == "body":
        return tuple(name for name in names if name not in chosen)
    return tuple(name for name in names if name in chosen)


def _find_norms(module: nn.Module, layers: Iterable[str]) -> list[str]:
    """Return the names of the normalization layers."""
    return [name for name in layers if isinstance(module.get_submodule(name), NORMS)]


def _find_last_layer(
    module: nn.Module, layout: Layout, slots_by_layer: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the name of the last layer with parameters, or no name."""
    trained = {slot.name for slot in layout.parameters}
    last: list[str] = []
    for name, _ in module.named_modules(remove_duplicate=False):
        if trained.intersection(slots_by_layer.get(name, ())):
            last = [name]
    return last


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters and buffers of a module whose names match a pattern.

    Frozen parameters are not trained. Parts with frozen entries and nothing left to train go into
    evaluation mode, including their dropout and the statistics of their BatchNorm; so do layers
    of which all buffers match.

    Raises
    ------
    ConfigError
        If a pattern matches nothing.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    saved = module.state_dict(keep_vars=True)
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False) if name in saved]
    frozen = set(matching(patterns, [*parameters, *buffers], "model.freeze"))
    for name in frozen.intersection(parameters):
        parameters[name].requires_grad_(False)
    for name, part in module.named_modules(remove_duplicate=False):
        own_buffers = [buffer for buffer in buffers if buffer.rpartition(".")[0] == name]
        is_trained = any(parameter.requires_grad for parameter in part.parameters())
        if not is_trained and _has_frozen(name, frozen):
            part.eval()
        elif name and own_buffers and frozen.issuperset(own_buffers):
            part.training = False


def _has_frozen(part: str, frozen: Collection[str]) -> bool:
    """Return whether a part, or the whole module for an empty name, has frozen entries."""
    if not part:
        return len(frozen) > 0
    return any(name.startswith(f"{part}.") for name in frozen)
