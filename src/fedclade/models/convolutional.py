"""Models for images."""

from __future__ import annotations

from torch import nn

from fedclade.core import ModelError


def cnn(input_shape: tuple[int, ...], outputs: int, *, hidden: int = 512) -> nn.Module:
    """Return FL+HC's network: two 5×5 convolutions of 32 and 64 channels, each with a 2×2 max-pool, then a dense layer.

    582,026 parameters on MNIST.

    Raises
    ------
    ModelError
        If images are smaller than 16 pixels.
    """
    channels, height, width = _image(input_shape, smallest=16)
    left = (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * left, hidden), nn.ReLU(), nn.Linear(hidden, outputs)),
    )


def lenet(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return LeNet-5 with average pools, as FLUX and ANDA have it: 5×5 convolutions of 6 and 16 channels, three layers.

    61,706 parameters on MNIST, 62,006 with three channels, 83,126 on CIFAR-10.

    Raises
    ------
    ModelError
        If images are smaller than 12 pixels.
    """
    channels, height, width = _image(input_shape, smallest=12)
    left = ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * left, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs)),
    )


def cifar_cnn(input_shape: tuple[int, ...], outputs: int, *, width: int = 32) -> nn.Module:
    """Return a network of five layers: 3×3 convolutions of 1, 2 and 2 times ``width`` channels, then two dense layers.

    The CFL papers say "5-layer convolutional network" and no more; this one has 321,290 parameters on CIFAR-10.

    Raises
    ------
    ModelError
        If images are smaller than 8 pixels.
    """
    channels, rows, columns = _image(input_shape, smallest=8)
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (rows // 8) * (columns // 8), 8 * width), nn.ReLU()),
        nn.Linear(8 * width, outputs),
    )


def _image(input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ModelError(
            f"a convolutional model takes images [channels, height, width] of at least {smallest} pixels a side, "
            f"got input shape {input_shape}; use 'mlp' or 'mclr'"
        )
    channels, height, width = input_shape
    return channels, height, width
