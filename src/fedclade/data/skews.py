"""Feature skews: shifts by which the images of each cluster look different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import scipy

from fedclade.core import Indices, require, rng
from fedclade.data.pool import Pool
from fedclade.data.view import Pixels, View, require_images

CHANNELS = 3


@dataclass(frozen=True)
class Inverted:
    """Negatives: black is white."""

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images."""
        return 255 - images


@dataclass(frozen=True)
class Blurred:
    """Images under a Gaussian filter, of a standard deviation in pixels."""

    sigma: float

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images."""
        return cast(Pixels, scipy.ndimage.gaussian_filter(images, (0, 0, self.sigma, self.sigma)))


@dataclass(frozen=True)
class Noisy:
    """Images with Gaussian noise of a standard deviation in [0, 1] of the range, which each keeps."""

    sigma: float
    seed: int

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images."""
        shape = images.shape[1:]
        noise = [rng.generator(self.seed, "noise", row).standard_normal(shape, np.float32) for row in rows.tolist()]
        return np.clip(np.rint(images + 255 * self.sigma * np.stack(noise)), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Coloured:
    """Images in three channels: grey ones as they are, or with one channel full."""

    channel: int | None

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images ``[n, 3, H, W]``."""
        found = np.broadcast_to(images, (len(images), CHANNELS, *images.shape[2:])).copy()
        if self.channel is not None:
            found[:, self.channel] = 255
        return found


@dataclass(frozen=True)
class Thick:
    """Bright strokes wider by so many pixels on each side, or narrower if it is negative."""

    pixels: int

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images."""
        size = (1, 1, 2 * abs(self.pixels) + 1, 2 * abs(self.pixels) + 1)
        change = scipy.ndimage.grey_dilation if self.pixels > 0 else scipy.ndimage.grey_erosion
        return cast(Pixels, change(images, size))


def invert(pool: Pool, clusters: int, seed: int) -> list[View]:
    """Show images as negatives to one of two clusters."""
    return _views("invert", pool, clusters, 2, lambda _: Inverted())


def blur(pool: Pool, clusters: int, seed: int, *, strength: float = 1.0) -> list[View]:
    """Blur the images of cluster j by a Gaussian filter of j·strength pixels."""
    _require_positive(strength)
    return _views("blur", pool, clusters, clusters, lambda j: Blurred(j * strength))


def noise(pool: Pool, clusters: int, seed: int, *, strength: float = 0.1) -> list[View]:
    """Add noise to the images of cluster j, of a standard deviation of j·strength of the range."""
    _require_positive(strength)
    return _views("noise", pool, clusters, clusters, lambda j: Noisy(j * strength, seed))


def colour(pool: Pool, clusters: int, seed: int) -> list[View]:
    """Show images in grey, red, green or blue, in three channels."""
    require_images(pool, "colour")
    rule = f"with images of 1 or {CHANNELS} channels"
    require(("shift", "colour", pool.input_shape[0] in (1, CHANNELS), rule))
    views = _views("colour", pool, clusters, 1 + CHANNELS, lambda j: Coloured(j - 1))
    return [View(transform=Coloured(None)), *views[1:]]


def thickness(pool: Pool, clusters: int, seed: int, *, strength: int = 1) -> list[View]:
    """Leave strokes as they are, widen them, and make them narrower, by so many pixels on each side."""
    require(("strength", strength, strength >= 1, "at least 1"))
    return _views("thickness", pool, clusters, 3, lambda j: Thick(strength if j == 1 else -strength))


def _views(name: str, pool: Pool, clusters: int, most: int, transform: Callable[[int], object]) -> list[View]:
    """Return the view of each cluster; that of the first is plain."""
    require_images(pool, name)
    require(("clusters", clusters, clusters <= most, f"at most {most} with shift {name!r}"))
    return [View(), *(View(transform=transform(j)) for j in range(1, clusters))]  # pyright: ignore[reportArgumentType]


def _require_positive(strength: float) -> None:
    require(("strength", strength, strength > 0, "greater than 0"))
