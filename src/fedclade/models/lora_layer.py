"""Dense layer with a low-rank adapter."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fedclade.models.lora import dense_sizes


class LoRALinear(nn.Module):
    """Dense layer with a low-rank adapter: the layer is frozen, and a low-rank pair is trained.

    The attributes ``base_layer``, ``lora_A`` and ``lora_B`` are named as in the package peft.
    """

    def __init__(self, base_layer: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        sizes = dense_sizes(base_layer)
        assert sizes is not None  # callers choose dense layers
        inputs, outputs = sizes
        weight = base_layer.get_parameter("weight")
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.base_layer = base_layer
        self.lora_A = nn.Linear(inputs, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, outputs, bias=False, **like)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the frozen layer plus the scaled output of the low-rank pair."""
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))
