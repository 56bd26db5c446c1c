"""Low-rank adapters (LoRA): pairs of small trained matrices, added to frozen dense layers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from fedclade.core import (
    ConfigError,
    ModelError,
    Range,
    at_least,
    check_settings,
    checked,
    document_settings,
    fitting,
    greater_than,
    lazy_names,
    matching,
    one_of,
    setting,
    shown,
    write_tensors,
)

if TYPE_CHECKING:
    from fedclade.models.lora_layer import LoRALinear as LoRALinear
else:  # files of models, pickled by earlier versions, name the class as a class of this module
    __getattr__ = lazy_names(__name__)

SHOWN_LAYERS = 5
"""Largest number of layers that a message lists."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation of the dense layers of a frozen model (Hu et al. 2021).

    Source: arXiv:2106.09685.

    For an input x, the output of a layer with an adapter of rank r and scale α is W₀·x + α/r ·
    B·A·x (eq. 3 of the paper, and section 4.1 for α). The layer's weight W₀ is frozen, and the
    low-rank pair A ``[r, inputs]`` and B ``[outputs, r]`` is trained. Names and initial values are
    as in the package peft: ``lora_A`` is initialized like the weight of a dense layer, and
    ``lora_B`` with zeros.

    Raises
    ------
    ConfigError
        If a setting is out of range.
    """

    targets: tuple[str, ...] = setting(
        (),
        Range("at least one pattern, such as 'fc*'", bool),
        doc="""Patterns for the names of dense layers that get an adapter, at least one. Only an
        ``nn.Linear``, or a ``Conv1D`` of the package transformers (as in GPT-2), can get one; all
        other layers are frozen, unless ``train`` names them.""",
    )
    rank: int = setting(8, at_least(1), doc="Rank r of the low-rank pairs.")
    alpha: float = setting(16.0, greater_than(0), doc="Scale α of the low-rank pairs.")
    train: tuple[str, ...] = setting(
        (), doc="Patterns for further parameters that are trained, such as the head's."
    )
    kind: Literal["lora"] = setting("lora", one_of("lora"), doc="``lora``, the only kind.")

    def __post_init__(self) -> None:
        check_settings(self, "model.adapter")

    def added_to(self, module: torch.nn.Module) -> None:
        """Add adapters to the dense layers that match ``targets``, and freeze the module itself.

        All parameters of the module are frozen except for those that match ``train``. Dropout of
        frozen layers stays active in training. The initial entries of A are drawn from torch's
        global generator.

        Raises
        ------
        ConfigError
            If a pattern in ``targets`` matches no dense layer, or one in ``train`` no parameter.
        """
        from fedclade.models.lora_layer import LoRALinear

        dense = _dense_layers(module)
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
            if isinstance(place, torch.nn.TransformerEncoderLayer):
                # 0 turns off torch's fast path, which reads weights and would ignore adapters.
                place.activation_relu_or_gelu = 0

    def _check_kinds(self, module: torch.nn.Module, dense: Sequence[str]) -> None:
        """Raise a ConfigError if a pattern in ``targets`` matches only layers that are not dense.

        Patterns that match no layer at all are accepted here; :meth:`added_to` reports them.
        """
        layers = {
            name: type(layer).__name__
            for name, layer in module.named_modules()
            if [*layer.parameters(False)]
        }
        for target in self.targets:
            if not fitting(target, dense) and (others := fitting(target, layers)):
                raise ConfigError(
                    f"model.adapter.targets = {shown(target)} names {others[0]!r}, which is of "
                    f"type {layers[others[0]]}, but adapters can be added to nn.Linear, and Conv1D of "
                    f"transformers, only; such layers of the model: {_list_layers(dense)}"
                )


def dense_sizes(layer: torch.nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a dense layer; None for other layers.

    A dense layer is an ``nn.Linear``, or a ``Conv1D`` of the package transformers, which stores its
    weight as ``[inputs, outputs]``.
    """
    kind = type(layer)
    if isinstance(layer, torch.nn.Linear) and kind is torch.nn.Linear:
        return layer.in_features, layer.out_features
    if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        inputs, outputs = layer.get_parameter("weight").shape
        return inputs, outputs
    return None


def _dense_layers(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's dense layers, to which adapters can be added."""
    return [
        name for name, layer in module.named_modules() if name and dense_sizes(layer) is not None
    ]


def _list_layers(names: Sequence[str]) -> str:
    """Return the names of the first few layers as a text, for a message."""
    if not names:
        return "none"
    more = ", ..." if len(names) > SHOWN_LAYERS else ""
    return ", ".join(map(repr, names[:SHOWN_LAYERS])) + more


# Adapters as files in peft's format: ``adapter_model.safetensors`` and ``adapter_config.json``.

PREFIX = "base_model.model."
"""Prefix of parameter names in peft's files, since peft wraps the model twice."""

NAME_OF_ADAPTER = re.compile(r"(?<=\.lora_[AB])\.[^.]+(?=\.weight$)|\.modules_to_save\.[^.]+(?=\.)")
"""Parts of peft's parameter names that occur in memory, but not in files."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "layers_to_transform": (None,),
    "fan_in_fan_out": (False, True),  # True for Conv1D, whose adapter has the same form
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Values that keys of peft's config must have, if present; others mean another kind of LoRA."""


@checked()
def save_adapter(
    folder: str | Path,
    tensors: Mapping[str, torch.Tensor],
    alpha: float,
    header: Mapping[str, str] | None = None,
) -> Path:
    """Write an adapter to a folder in the format of the package peft.

    Peft's ``PeftModel`` and :func:`load_adapter` can read the folder.

    Parameters
    ----------
    folder
        Folder to write to, which is created if it does not exist.
    tensors
        Trained parameters by name: the low-rank pairs ``...lora_A.weight`` and
        ``...lora_B.weight``, and parameters of other layers; for example
        ``layout.unflatten(vector)`` of a run's :class:`~fedclade.core.Layout`. The names may also
        be as in a ``PeftModel``.
    alpha
        Scale α of the low-rank pairs.
    header
        Further entries for the header of the file with the tensors.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ModelError
        If the tensors contain no low-rank pairs, or pairs of different ranks.
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        named[NAME_OF_ADAPTER.sub("", name.removeprefix(PREFIX))] = tensor
    first = ".lora_A.weight"
    pairs = {name.removesuffix(first): t for name, t in named.items() if name.endswith(first)}
    others = {name.rpartition(".")[0] for name in named if ".lora_" not in name}
    ranks = sorted({len(tensor) for tensor in pairs.values()})
    if len(ranks) != 1:
        raise ModelError(
            f"an adapter should have low-rank pairs lora_A and lora_B of one rank, got ranks {ranks}; "
            "save the trained parameters of a model that fedclade.LoRA has adapted"
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
def load_adapter(folder: str | Path, base: torch.nn.Module) -> torch.nn.Module:
    """Load an adapter that peft or :func:`save_adapter` wrote, and add it to a copy of a model.

    In the returned model the parameters of the base model are frozen, and the adapter's parameters
    are trained, so that :func:`fedclade.simulate` can continue to train the adapter.

    Parameters
    ----------
    folder
        Folder with the adapter.
    base
        The base model, which is not changed.

    Raises
    ------
    ModelError
        If the folder does not contain an adapter, or if the adapter does not fit the model or is of
        another kind than plain LoRA.
    """
    path = Path(folder)
    rank, alpha, targets, tensors = _read_adapter(path)
    module = copy.deepcopy(base)
    dense = _dense_layers(module)
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
                    f"the adapter in {path} has {name} of shape {tuple(tensor.shape)}, but the "
                    f"model's shape is {tuple(parameter.shape)}; use the model that it was made for"
                )
            parameter.copy_(tensor)
    return module


def _check_names(
    path: Path, parameters: Mapping[str, torch.nn.Parameter], trained: Mapping[str, torch.Tensor]
) -> None:
    """Check that the parameters of an adapter are exactly the trained parameters of a model.

    Raises
    ------
    ModelError
        If a parameter is in only one of the two.
    """
    unmatched = [name for name in trained if name not in parameters]
    for name, parameter in parameters.items():
        if parameter.requires_grad and name not in trained:
            unmatched.append(name)
    if unmatched:
        raise ModelError(
            f"the adapter in {path} does not fit the model: only one of the two has the trained "
            f"parameter {shown(unmatched[0])}; use the model that the adapter was made for"
        )


def _read_adapter(path: Path) -> tuple[int, float, tuple[str, ...], dict[str, torch.Tensor]]:
    """Read an adapter from a folder in peft's format.

    Returns
    -------
    tuple
        Rank, scale α, names of the target modules, and tensors by name.

    Raises
    ------
    ModelError
        If files are missing or damaged, or if the adapter is of another kind than plain LoRA.
    """
    from safetensors.torch import load_file

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
                f"the adapter in {path} has {key} = {shown(config[key])}, expected {values[0]!r}: "
                "only plain LoRA can be loaded"
            )
    if not isinstance(targets, list):  # a regular expression
        raise ModelError(
            f"the adapter in {path} should list its target_modules, got {shown(targets)}"
        )
    return rank, alpha, tuple(targets), tensors
