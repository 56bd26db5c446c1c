"""The parts of a model: what is frozen, what stays with a client, and adapters on a base that rests."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  (all of batches and instances)

from fedclade.core import ConfigError, Layout, check_arguments, check_module, matching, rng, shown
from fedclade.models.lora import LoRA

PARTS = ("freeze", "personal", "adapter")
"""Keys of the ``[model]`` section that say which parts a model has; all others are for what makes it."""

Preset = Literal["head", "body", "norm"]
"""Personal parts that need no names: the last layer with parameters, all but that, and all normalisation layers."""

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which parts a model has; patterns are those of :func:`fedclade.core.matching`.

    Parameters
    ----------
    freeze
        What rests: the same for all clients, never sent, averaged or compared; see :func:`freeze`.
    personal
        What stays with a client, in a vector of its own; see :class:`~fedclade.core.Layout`. In place of a list of
        patterns one word may say it, a :data:`Preset`: ``head``, ``body`` or ``norm``.
    adapter
        What is trained in place of the model, as a value or as the ``[model]`` section has it.
    """

    freeze: tuple[str, ...] = ()
    personal: tuple[str, ...] | Preset = ()
    adapter: LoRA | None = None

    def __post_init__(self) -> None:
        if isinstance(self.personal, str) and self.personal not in get_args(Preset):
            raise ConfigError(
                "model.personal should be 'head', 'body' or 'norm', or a list of patterns, got " + shown(self.personal)
            )
        if isinstance(self.adapter, Mapping):
            fitted = check_arguments("model.adapter", LoRA, self.adapter)
            object.__setattr__(self, "adapter", LoRA(**fitted))

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Parts:
        """Return the parts that a ``[model]`` section names."""
        return cls(**check_arguments("[model]", cls, {key: section[key] for key in PARTS if key in section}))

    def as_dict(self) -> dict[str, Any]:
        """Return what a ``[model]`` section says of parts: nothing of those that are not there."""
        return {key: value for key, value in asdict(self).items() if value}

    def applied(self, module: nn.Module, seed: int = 0) -> nn.Module:
        """Return a model with its adapters, which depend on the seed, and with what is to rest at rest.

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
        if not isinstance(self.personal, str):
            return self.personal
        layout = Layout.of(module)
        known = {slot.name: slot.name for slot in (*layout.parameters, *layout.buffers)}
        known |= {name: place for name, place in layout.tied if place in known}
        of_layer: dict[str, list[str]] = {}
        for name, place in known.items():
            of_layer.setdefault(name.rpartition(".")[0], []).append(place)
        if self.personal == "norm":
            layers = [name for name in of_layer if isinstance(module.get_submodule(name), NORMS)]
            if not layers:
                raise ConfigError("model.personal = 'norm', but the model has no normalisation layer to train")
        else:
            trained = {slot.name for slot in layout.parameters}
            order = (name for name, _ in module.named_modules(remove_duplicate=False))
            layers = [name for name in order if trained.intersection(of_layer.get(name, ()))][-1:]
        chosen = {place for name in layers for place in of_layer[name]}
        return tuple(name for name in dict.fromkeys(known.values()) if (name in chosen) != (self.personal == "body"))


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Let those parameters and buffers of a module rest whose names a pattern matches.

    Parameters are trained no more. Parts of which that leaves nothing to train go into evaluation mode, with their
    dropout and the statistics of their BatchNorm; and so do layers of which all buffers match.

    Raises
    ------
    ConfigError
        If a pattern matches nothing.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    saved = module.state_dict(keep_vars=True)
    buffers = [name for name, _ in module.named_buffers(remove_duplicate=False) if name in saved]
    chosen = set(matching(patterns, [*parameters, *buffers], "model.freeze"))
    for name in chosen.intersection(parameters):
        parameters[name].requires_grad_(False)
    for name, part in module.named_modules(remove_duplicate=False):
        inside = [each for each in chosen if not name or each.startswith(f"{name}.")]
        own = [each for each in buffers if each.rpartition(".")[0] == name]
        if inside and not any(p.requires_grad for p in part.parameters()):
            part.eval()
        elif name and own and chosen.issuperset(own):
            part.training = False
