"""A model: a function that returns a ``nn.Module``.

It is given ``input_shape``, ``outputs``, ``task`` and ``vocabulary_size`` of the data, if it has parameters of these
names. All others are keys of ``[model]``.
"""

import math

from torch import nn


def bottleneck(input_shape: tuple[int, ...], outputs: int, *, width: int = 8) -> nn.Module:
    """Two layers with few units between them."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU(), nn.Linear(width, outputs)
    )
