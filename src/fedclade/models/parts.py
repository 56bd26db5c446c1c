"""The parts of a model: what is frozen, what stays with a client, and adapters on a base that rests."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fedclade.core import Layout, check_arguments, check_module, matching, rng
from fedclade.models.lora import LoRA

PARTS = ("freeze", "personal", "adapter")
"""Keys of the ``[model]`` section that say which parts a model has; all others are for what makes it."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which parts a model has; patterns are those of :func:`fedclade.core.matching`.

    Parameters
    ----------
    freeze
        What rests: the same for all clients, never sent, averaged or compared; see :func:`freeze`.
    personal
        What stays with a client, in a vector of its own; see :class:`~fedclade.core.Layout`.
    adapter
        What is trained in place of the model, as a value or as the ``[model]`` section has it.
    """

    freeze: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    adapter: LoRA | None = None

    def __post_init__(self) -> None:
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
        return Layout.of(module, self.personal)


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
