"""Parts of a model that are frozen, personal, or common to all clusters; and adapters.

A frozen part is not trained. A personal part stays with each client. A common part is averaged over
all clusters, while each cluster has the rest of the model for itself.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from fedclade.core import (
    ConfigError,
    Layout,
    check_arguments,
    check_module,
    document_settings,
    matching,
    rng,
    setting,
    shown,
)
from fedclade.models.lora import LoRA

if TYPE_CHECKING:
    from torch import Tensor

PARTS = ("freeze", "personal", "common", "adapter")
"""Keys of the ``[model]`` section that name parts; other keys are arguments of the factory."""

Preset = Literal["head", "body", "norm"]
"""Names of parts: ``head``, the last layer with parameters; ``body``, all other layers; ``norm``,
all normalization layers."""


@document_settings
@dataclass(frozen=True, kw_only=True)
class Parts:
    """Specification of the frozen, personal and common parts of a model, and of its adapter.

    Each part is given by patterns for the names of parameters and buffers, as in
    :func:`fedclade.core.matching`.

    Raises
    ------
    ConfigError
        If a preset is unknown, or the adapter has a wrong field.
    """

    freeze: tuple[str, ...] = setting(
        (),
        doc="""Frozen entries: they are the same for all clients, and never sent, averaged or
        compared; see :func:`freeze`.""",
    )
    personal: tuple[str, ...] | Preset = setting(
        (),
        doc="""Entries that stay with each client, which stores them in a separate vector; see
        :class:`~fedclade.core.Layout`. A list of patterns, or a :data:`Preset`: ``head``, ``body``
        or ``norm``.""",
    )
    common: tuple[str, ...] | Preset = setting(
        (),
        doc="""Entries that all clusters share: they are averaged over the clients of all clusters,
        while each cluster has the rest of the model for itself. A list of patterns, or a
        :data:`Preset`.""",
    )
    adapter: LoRA | None = setting(
        None,
        doc="""Adapter that is trained instead of the model's own parameters: a :class:`LoRA`, or
        its settings as in the ``[model]`` section.""",
    )

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
        """Create the parts from a ``[model]`` section of a config; other keys are ignored."""
        return cls(
            **check_arguments(
                "[model]", cls, {key: section[key] for key in PARTS if key in section}
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the parts that are set as a dict, in the form of a ``[model]`` section."""
        return {key: value for key, value in asdict(self).items() if value}

    def applied(self, module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
        """Return a copy of a model with its adapter added and its frozen parts frozen.

        If neither an adapter nor a frozen part is set, the model itself is returned.

        Parameters
        ----------
        module
            The model, which is not changed.
        seed
            Seed of the adapter's initial parameters.

        Raises
        ------
        ConfigError
            If a pattern matches no parameter.
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

    def layout(self, module: torch.nn.Module) -> Layout:
        """Return the layout of a model: which entries of its vector are shared, which personal."""
        return Layout.of(module, self.personal_names(module))

    def personal_names(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Return patterns or names of the personal parameters and buffers of a model.

        These are the patterns of ``personal``; for a preset, the names of its parameters and
        buffers.

        Raises
        ------
        ConfigError
            If normalization layers should be personal, and the model has none.
        """
        return _resolve_names(module, self.personal, "personal")

    def common_entries(self, module: torch.nn.Module) -> Tensor | None:
        """Return a mask of the entries of a model's parameter vector that all clusters share.

        The mask is a boolean tensor ``[S]``, for the S entries that clients send to the server. The
        result is None if no entry is common.

        Raises
        ------
        ConfigError
            If a pattern matches no entry that is sent to the server, or if all parameters are
            common.
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
                "model.common makes all parameters common, so that clusters have none of their "
                "own; name fewer parameters, or use the algorithm fedavg"
            )
        return entries if entries.any() else None


def _resolve_names(
    module: torch.nn.Module, part: tuple[str, ...] | Preset, key: str
) -> tuple[str, ...]:
    """Return the patterns of a part; for a preset, the names of its parameters and buffers.

    Parameters
    ----------
    module
        The model.
    part
        Patterns, or a preset.
    key
        Name of the setting, for messages.

    Raises
    ------
    ConfigError
        If the preset is ``norm``, and the model has no normalization layers.
    """
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
                f"model.{key} = 'norm', but the model has no normalisation layer to train; name "
                "other layers, or use a model with normalisation layers"
            )
    else:
        layers = _find_last_layer(module, layout, slots_by_layer)
    chosen = {slot for name in layers for slot in slots_by_layer[name]}
    names = dict.fromkeys(slots.values())
    if part == "body":
        return tuple(name for name in names if name not in chosen)
    return tuple(name for name in names if name in chosen)


def _find_norms(module: torch.nn.Module, layers: Iterable[str]) -> list[str]:
    """Return the names in ``layers`` that belong to normalization layers of a model."""
    from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  (base of BatchNorm and InstanceNorm)

    norms = (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)
    return [name for name in layers if isinstance(module.get_submodule(name), norms)]


def _find_last_layer(
    module: torch.nn.Module, layout: Layout, slots_by_layer: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a list with the name of the last layer that has trained parameters; may be empty."""
    trained = {slot.name for slot in layout.parameters}
    last: list[str] = []
    for name, _ in module.named_modules(remove_duplicate=False):
        if trained.intersection(slots_by_layer.get(name, ())):
            last = [name]
    return last


def freeze(module: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters and buffers of a module whose names match a pattern.

    Frozen parameters are not trained. Submodules with frozen entries and no trained parameters are
    put into evaluation mode, which turns off their dropout and stops the updates of BatchNorm's
    statistics. Layers whose own buffers are all frozen are put into evaluation mode, too.

    Parameters
    ----------
    module
        The module, which is changed in place.
    patterns
        Patterns for names, as in :func:`fedclade.core.matching`.

    Raises
    ------
    ConfigError
        If a pattern matches no parameter or buffer.
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
    """Return whether a submodule has entries whose names are in ``frozen``.

    ``part`` is the submodule's name; an empty name stands for the whole module.
    """
    if not part:
        return len(frozen) > 0
    return any(name.startswith(f"{part}.") for name in frozen)
