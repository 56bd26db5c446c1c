"""Low-rank adapters (LoRA): trained pairs of small matrices beside frozen dense layers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedclade.core import (
    ConfigError,
    ModelError,
    checked,
    fitting,
    matching,
    require,
    shown,
    write_tensors,
)

SHOWN_LAYERS = 5
"""Number of layers that a message lists."""


@checked()
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation of the dense layers of a frozen model (Hu et al. 2021).

    Source: arXiv:2106.09685.

    The output of a layer is W₀·x + α/r · B·A·x (their eq. 3, and section 4.1 for α): W₀ is frozen,
    A ``[r, inputs]`` and B ``[outputs, r]`` are trained. Names and initial values are those of
    peft: ``lora_A`` is initialized as the weight of a dense layer, ``lora_B`` with zeros.

    Parameters
    ----------
    targets
        Patterns for the names of dense layers, at least one. Only an ``nn.Linear`` takes an
        adapter: a convolution or an embedding is frozen, unless ``train`` names it.
    rank, alpha
        r and α.
    train
        Patterns for the parameters that are trained as well, such as those of a new head.
    kind
        ``lora``, the only kind.

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    targets: tuple[str, ...] = ()
    rank: int = 8
    alpha: float = 16.0
    train: tuple[str, ...] = ()
    kind: Literal["lora"] = "lora"

    def __post_init__(self) -> None:
        require(
            ("model.adapter.kind", self.kind, self.kind == "lora", "'lora'"),
            (
                "model.adapter.targets",
                self.targets,
                len(self.targets) > 0,
                "at least one pattern, such as 'fc*'",
            ),
            ("model.adapter.rank", self.rank, self.rank >= 1, "at least 1"),
            ("model.adapter.alpha", self.alpha, self.alpha > 0, "greater than 0"),
        )

    def added_to(self, module: nn.Module) -> None:
        """Add adapters to the matching layers, and freeze all else but the layers of ``train``.

        Dropout of the layers stays active in training. The entries of A are drawn from torch's
        generator.

        Raises
        ------
        ConfigError
            If a pattern matches nothing, or layers of another kind alone.
        """
        dense = [
            name for name, layer in module.named_modules() if name and type(layer) is nn.Linear
        ]
        self._check_kinds(module, dense)
        names = matching(self.targets, dense, "model.adapter.targets", "dense layer")
        parameters = dict(module.named_parameters(remove_duplicate=False))
        trained = {
            id(parameters[name]) for name in matching(self.train, parameters, "model.adapter.train")
        }
        for parameter in parameters.values():
            parameter.requires_grad_(id(parameter) in trained)
        for name in names:
            parent, _, attribute = name.rpartition(".")
            place = module.get_submodule(parent)
            setattr(place, attribute, LoRALinear(module.get_submodule(name), self.rank, self.alpha))
            if isinstance(place, nn.TransformerEncoderLayer):
                place.activation_relu_or_gelu = (
                    0  # no fast path: it reads the weights, and would miss the adapters
                )

    def _check_kinds(self, module: nn.Module, dense: Sequence[str]) -> None:
        """Check that no target matches only layers that are not dense."""
        layers = {
            name: type(layer).__name__
            for name, layer in module.named_modules()
            if [*layer.parameters(False)]
        }
        for target in self.targets:
            if not fitting(target, dense) and (others := fitting(target, layers)):
                raise ConfigError(
                    f"model.adapter.targets = {shown(target)} names {others[0]!r}, which is of "
                    f"type {layers[others[0]]}, and adapters go around nn.Linear alone; the model "
                    "has "
                    f"{_list_layers(dense)}"
                )


def _list_layers(names: Sequence[str]) -> str:
    """Return the first few names of layers, for a message."""
    if not names:
        return "none"
    more = ", ..." if len(names) > SHOWN_LAYERS else ""
    return ", ".join(map(repr, names[:SHOWN_LAYERS])) + more


class LoRALinear(nn.Module):
    """Frozen dense layer with a trained low-rank pair."""

    def __init__(self, base_layer: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        assert isinstance(base_layer, nn.Linear)
        like = {"device": base_layer.weight.device, "dtype": base_layer.weight.dtype}
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, **like)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer plus that of the pair."""
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


# Adapters as files in peft's format: ``adapter_model.safetensors`` and ``adapter_config.json``.

PREFIX = "base_model.model."
"""How peft's names begin: the model is wrapped twice."""

NAME_OF_ADAPTER = re.compile(r"(?<=\.lora_[AB])\.[^.]+(?=\.weight$)|\.modules_to_save\.[^.]+(?=\.)")
"""What peft's parameters are called in memory and not in a file."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "layers_to_transform": (None,),
    "fan_in_fan_out": (False,),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Required values of keys of peft's config, if present: others mean another kind of LoRA."""


@checked()
def save_adapter(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    alpha: float,
    header: Mapping[str, str] | None = None,
) -> Path:
    """Write an adapter in peft's format, for peft's ``PeftModel`` and :func:`load_adapter`.

    Parameters
    ----------
    folder
        To make, or to write into.
    tensors
        What is trained, by name: ``...lora_A.weight``, ``...lora_B.weight``, and parameters of
        other layers. Such as ``layout.unflatten(vector)`` of a run's
        :class:`~fedclade.core.Layout`. The names may be those of a PeftModel.
    alpha
        α of the low-rank pairs.
    header
        What to write into the header of the file besides.

    Raises
    ------
    ModelError
        If there are no low-rank pairs among the tensors, or some of another rank.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        named[NAME_OF_ADAPTER.sub("", name.removeprefix(PREFIX))] = tensor
    first = ".lora_A.weight"
    pairs = {name.removesuffix(first): t for name, t in named.items() if name.endswith(first)}
    others = {name.rpartition(".")[0] for name in named if ".lora_" not in name}
    ranks = sorted({len(tensor) for tensor in pairs.values()})
    if len(ranks) != 1:
        raise ModelError(
            f"an adapter has low-rank pairs lora_A and lora_B of one rank, got ranks {ranks}"
        )
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": ranks[0],
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(pairs),
        "modules_to_save": sorted(others) or None,
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    copies = {
        f"{PREFIX}{name}": tensor.detach().cpu().clone().contiguous()
        for name, tensor in named.items()
    }
    write_tensors(path / "adapter_model.safetensors", copies, {"format": "pt", **(header or {})})
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path


@checked()
def load_adapter(folder: str | Path, base: nn.Module) -> nn.Module:
    """Return a copy of a model with an adapter that peft or :func:`save_adapter` wrote.

    The base rests, and what the adapter has is trained: so it is a model for
    :func:`fedclade.simulate` to begin with.

    Raises
    ------
    ModelError
        If the folder holds no such adapter, or one of another model or another kind than LoRA's
        plain one.
    """
    path = Path(folder)
    rank, alpha, targets, tensors = _read_adapter(path)
    module = copy.deepcopy(base)
    dense = [name for name, layer in module.named_modules() if name and type(layer) is nn.Linear]
    trained = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    adapted = tuple(name for name in dense if f"{name}.lora_A.weight" in trained)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    others = tuple(name for name in names if name in trained)
    adapter = LoRA(targets=adapted or targets, rank=rank, alpha=alpha, train=others)
    adapter.added_to(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _check_names(path, parameters, trained)
    with torch.no_grad():
        for name, tensor in trained.items():
            parameter = parameters[name]
            if tensor.shape != parameter.shape:
                raise ModelError(
                    f"the adapter in {path} has {name} of shape {tuple(tensor.shape)}, the model "
                    f"{tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)
    return module


def _check_names(
    path: Path, parameters: Mapping[str, nn.Parameter], trained: Mapping[str, Tensor]
) -> None:
    """Check that an adapter has exactly the trained parameters of a model."""
    unmatched = [name for name in trained if name not in parameters]
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in trained:
            unmatched.append(name)
    if unmatched:
        raise ModelError(
            f"the adapter in {path} does not fit the model: {shown(unmatched[0])} is in one of "
            "them alone"
        )


def _read_adapter(path: Path) -> tuple[int, float, tuple[str, ...], dict[str, Tensor]]:
    """Return rank, α, target modules and tensors of an adapter's folder."""
    try:
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / "adapter_model.safetensors")
        rank = int(config["r"])
        alpha = float(config["lora_alpha"])
        targets: Any = config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"no adapter can be read from {path}: {type(error).__name__}: {error}"
        ) from error
    for key, values in PLAIN.items():
        if key in config and config[key] not in values:
            raise ModelError(
                f"the adapter in {path} has {key} = {shown(config[key])}, expected {values[0]!r}"
            )
    if not isinstance(targets, list):  # a regular expression
        raise ModelError(
            f"the adapter in {path} should list its target_modules, got {shown(targets)}"
        )
    return rank, alpha, tuple(targets), tensors
