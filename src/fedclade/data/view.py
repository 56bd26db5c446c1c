"""A view: how the clients of one true cluster see the examples of a pool."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import DataError, Indices, checked
from fedclade.data.pool import Pool

Pixels = NDArray[np.uint8]
"""Images, ``[n, C, H, W]``."""


class Transform(Protocol):
    """How images look: ``transform(images, labels, rows)`` returns uint8 images ``[n, C, H, W]``.

    ``images`` are the pool's, uint8 ``[n, C, H, W]``, ``labels`` theirs, and ``rows`` their places in the pool. What it
    returns of one image does not depend on the others, and has the same number of channels for all views of a shift.
    """

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images."""
        ...


@checked("label_map")  # which may be a plain list where a function of the user's returns it
@dataclass(frozen=True, eq=False)
class View:
    """How the clients of one cluster see the pool."""

    label_map: Tensor | None = None  # int64 [outputs]: where the pool has label y, they see label_map[y]
    quarter_turns: int = 0  # their images are turned by so many times 90°, counter-clockwise
    transform: Transform | None = None  # how their images look, before they are turned
    classes: tuple[int, ...] | None = None  # the only labels of the pool that they have, drawn again for the others

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What is the same for views that show the same."""
        labels = None if self.label_map is None else tuple(self.label_map.tolist())
        return labels, self.quarter_turns, self.transform, self.classes

    def chosen(self, indices: Indices, pool: Pool, draw: np.random.Generator) -> Indices:
        """Return which of some examples they have, as many: those of other classes are drawn again from these."""
        if self.classes is None or not len(indices):
            return indices
        kept = indices[np.isin(pool.y.numpy()[indices], self.classes)]
        if not len(kept):
            raise DataError(f"none of {len(indices)} examples of {pool.name} is of the classes {list(self.classes)}")
        return np.concatenate([kept, draw.choice(kept, len(indices) - len(kept))])


def require_images(pool: Pool, name: str) -> None:
    """Check that a shift can change how inputs look: a DataError unless they are images of whole bytes."""
    if pool.x.dtype != torch.uint8 or pool.x.dim() != 4:
        raise DataError(
            f"shift {name!r} needs images of whole bytes, uint8 [C, H, W], but inputs of {pool.name} are "
            f"{pool.x.dtype} {list(pool.input_shape)}"
        )


def turned(images: Pixels, degrees: float) -> Pixels:
    """Return images ``[n, C, H, W]`` turned counter-clockwise as PIL's ``Image.rotate`` does by default.

    By nearest neighbours, of the same size, black where there was nothing; in PIL's fixed-point numbers, so that every
    pixel is the same.
    """
    degrees %= 360
    height, width = images.shape[2:]
    if degrees == 0 or degrees == 180 or (degrees in (90, 270) and height == width):
        return np.ascontiguousarray(np.rot90(images, int(degrees) // 90, (2, 3)))
    angle = -math.radians(degrees)
    a, b = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x0 = a * -width / 2 + b * -height / 2 + width / 2
    y0 = -b * -width / 2 + a * -height / 2 + height / 2
    y, x = np.mgrid[:height, :width]
    from_x = (_fixed(x0 + a / 2 + b / 2) + _fixed(a) * x + _fixed(b) * y) >> 16
    from_y = (_fixed(y0 - b / 2 + a / 2) + _fixed(-b) * x + _fixed(a) * y) >> 16
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    found = np.zeros_like(images)
    found[:, :, inside] = images[:, :, from_y[inside], from_x[inside]]
    return found


def _fixed(value: float) -> int:
    return math.floor(value * 65536 + 0.5)
