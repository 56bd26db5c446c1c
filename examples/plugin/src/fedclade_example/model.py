"""A model: a function that returns an ``nn.Module``.

If the function has parameters named ``input_shape``, ``outputs``, ``task`` or ``vocabulary_size``,
fedclade passes these values of the data. All other parameters are keys of ``[model]``.
"""

import math

from torch import nn


def bottleneck(input_shape: tuple[int, ...], outputs: int, *, width: int = 8) -> nn.Module:
    """Return a perceptron with one small hidden layer of ``width`` units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU(), nn.Linear(width, outputs)
    )
