"""Low-rank adapters (LoRA): pairs of small matrices that are trained in place of large dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fedclade.core import ConfigError, checked, fitting, matching, require, shown


@checked()
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685) of the dense layers of a model that else rests.

    A layer gives W₀·x + α/r · B·A·x (their eq. 3, and section 4.1 for α): W₀ rests, A ``[r, inputs]`` and B ``[outputs,
    r]`` are trained. The names are peft's, ``lora_A`` and ``lora_B``, and so is how they begin: A as a dense layer's
    weight, B as zeros.

    Parameters
    ----------
    targets
        Patterns over the names of dense layers, at least one. Only an ``nn.Linear`` takes an adapter: a convolution or
        an embedding is named in ``train``, or rests.
    rank, alpha
        r and α.
    train
        Patterns over the parameters of what is trained besides, such as a new head.
    kind
        ``lora``: there is no other.

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
            ("model.adapter.targets", self.targets, len(self.targets) > 0, "at least one pattern, such as 'fc*'"),
            ("model.adapter.rank", self.rank, self.rank >= 1, "at least 1"),
            ("model.adapter.alpha", self.alpha, self.alpha > 0, "greater than 0"),
        )

    def added_to(self, module: nn.Module) -> None:
        """Put adapters around the layers that are matched, and let all else rest but what is trained besides.

        What a layer's forward draws stays: dropout is on in training. A's entries are drawn from torch's generator.

        Raises
        ------
        ConfigError
            If a pattern matches nothing, or layers of another kind alone.
        """
        dense = [name for name, layer in module.named_modules() if name and type(layer) is nn.Linear]
        self._check_kinds(module, dense)
        names = matching(self.targets, dense, "model.adapter.targets", "dense layer")
        parameters = dict(module.named_parameters(remove_duplicate=False))
        trained = {id(parameters[name]) for name in matching(self.train, parameters, "model.adapter.train")}
        for parameter in parameters.values():
            parameter.requires_grad_(id(parameter) in trained)
        for name in names:
            parent, _, attribute = name.rpartition(".")
            place = module.get_submodule(parent)
            setattr(place, attribute, LoRALinear(module.get_submodule(name), self.rank, self.alpha))
            if isinstance(place, nn.TransformerEncoderLayer):
                place.activation_relu_or_gelu = 0  # no fast path: it reads the weights, and would miss the adapters

    def _check_kinds(self, module: nn.Module, dense: Sequence[str]) -> None:
        """Check that no target names only layers that are not dense: they would be left without adapters."""
        layers = {name: type(layer).__name__ for name, layer in module.named_modules() if [*layer.parameters(False)]}
        for target in self.targets:
            if not fitting(target, dense) and (others := fitting(target, layers)):
                raise ConfigError(
                    f"model.adapter.targets = {shown(target)} names {others[0]!r}, which is of type "
                    f"{layers[others[0]]}, and adapters go around nn.Linear alone; the model has "
                    f"{', '.join(map(repr, dense[:5])) or 'none'}{', ...' if len(dense) > 5 else ''}"
                )


class LoRALinear(nn.Module):
    """A dense layer that rests, and a low-rank pair beside it."""

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
        """Return what the layer gives, and what the pair adds."""
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))
