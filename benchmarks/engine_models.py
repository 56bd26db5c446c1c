"""Models of the engine benchmark that fedclade has not built in: transformers and a residual network.

They are plain modules, as a user may write them. The transformers have the layers of BERT and GPT-2
in a small size, and the residual network is ResNet-18 for images of 32×32 pixels, with GroupNorm in
place of BatchNorm, as is usual in federated learning.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 1000
"""Number of tokens of the transformers."""

PLACES = 32
"""Number of tokens in an input of the transformers."""


class OwnMLP(nn.Module):
    """The model ``mlp`` as a user may write it, with its own ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(784, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the labels."""
        return self.output(functional.relu(self.hidden(x.flatten(1))))


class Transformer(nn.Module):
    """Small transformer over tokens: an encoder with a label, or a decoder of the next token.

    Parameters
    ----------
    outputs
        Number of labels; None for a decoder, whose outputs are logits of the next token at each
        place.
    """

    def __init__(self, outputs: int | None, *, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(PLACES, width)
        self.decodes = outputs is None
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=self.decodes,
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, outputs or WORDS)
        self.register_buffer("order", torch.arange(PLACES)[None], persistent=False)
        hidden = torch.ones(PLACES, PLACES, dtype=torch.bool).triu(1)
        self.register_buffer("later", hidden, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[n, outputs]``, or ``[n, places, tokens]`` for a decoder."""
        x = self.tokens(tokens) + self.places(self.order)
        x = self.norm(self.body(x, mask=self.later if self.decodes else None))
        return self.output(x if self.decodes else x.mean(1))


class Residual(nn.Module):
    """Block of two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(2, outputs),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.GroupNorm(2, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        return functional.relu(self.convolutions(x) + self.shortcut(x))


def resnet18(outputs: int = 10) -> nn.Module:
    """Build ResNet-18 with GroupNorm for images ``[3, 32, 32]``: 11 million parameters."""
    blocks: list[nn.Module] = []
    for inputs, width in pairwise((64, 64, 128, 256, 512)):
        blocks += [Residual(inputs, width), Residual(width, width)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.GroupNorm(2, 64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, outputs),
    )
