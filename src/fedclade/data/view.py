"""Views: changes of labels and images that define how the clients of a cluster see examples.

The module also has the shifts that change the look of images, and the shift ``anda``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import DataError, Indices, checked, require, rng
from fedclade.data.pool import Pool

Pixels = NDArray[np.uint8]
"""Images as a uint8 array ``[n, C, H, W]``: images, channels, height, width."""


class Transform(Protocol):
    """Interface of a change of images by a view, such as blurring.

    ``transform(images, labels, rows)`` gets images of the pool, uint8 ``[n, C, H, W]``, with their
    labels and their rows in the pool, and returns uint8 images ``[n, C, H, W]``. The result for an
    image does not depend on the other images. All views of a shift return the same number of
    channels.
    """

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return changed images ``[n, C, H, W]``, given images, labels and rows of the pool."""
        ...


# The label map may be a plain list if a user's own function returns it.
@checked("label_map")
@dataclass(frozen=True, eq=False)
class View:
    """Change of labels and images by which the clients of one cluster see the examples of a pool.

    Parameters
    ----------
    label_map
        int64 ``[outputs]``: clients see label ``label_map[y]`` in place of ``y``. None if labels do
        not change.
    quarter_turns
        Number of rotations of the images by 90°, counter-clockwise.
    transform
        Change of the images before the rotation; None for no change.
    classes
        Labels that the clients have; None for all labels. Examples with other labels are replaced
        by draws from the client's examples with these labels.
    """

    label_map: torch.Tensor | None = None
    quarter_turns: int = 0
    transform: Transform | None = None
    classes: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Hashable key that is equal for equal views, by which clients are grouped."""
        if self.label_map is None:
            labels = None
        else:
            labels = tuple(self.label_map.tolist())
        return labels, self.quarter_turns, self.transform, self.classes

    def choose(self, indices: Indices, pool: Pool, draw: np.random.Generator) -> Indices:
        """Restrict a client's examples to the labels in ``classes``, without changing their number.

        Each example with another label is replaced by a draw, with replacement, from the client's
        examples with labels in ``classes``.
        """
        if self.classes is None or not len(indices):
            return indices
        kept = indices[np.isin(pool.y.numpy()[indices], self.classes)]
        if not len(kept):
            raise DataError(
                f"a client should have at least 1 example of the classes {list(self.classes)}, got "
                f"none among its {len(indices)} examples of {pool.name}; use more examples per "
                "client"
            )
        return np.concatenate([kept, draw.choice(kept, len(indices) - len(kept))])


def require_images(pool: Pool, name: str) -> None:
    """Check that inputs are uint8 images, as a shift that changes images needs."""
    if pool.x.dtype != torch.uint8 or pool.x.dim() != 4:
        raise DataError(
            f"shift {name!r} needs images of type uint8 and shape [C, H, W], but inputs of "
            f"{pool.name} are {pool.x.dtype} {list(pool.input_shape)}; choose another shift"
        )


def rotate_images(images: Pixels, degrees: float) -> Pixels:
    """Rotate images ``[n, C, H, W]`` counter-clockwise, exactly as PIL's ``Image.rotate``.

    As with PIL's default options, interpolation is by nearest neighbours, the size does not change,
    and uncovered pixels are black. Fixed-point numbers are used, so that every pixel equals PIL's.
    """
    degrees %= 360
    height, width = images.shape[2:]
    if degrees == 0 or degrees == 180 or (degrees in (90, 270) and height == width):
        return np.ascontiguousarray(np.rot90(images, int(degrees) // 90, (2, 3)))
    angle = -math.radians(degrees)
    a = round(math.cos(angle), 15)
    b = round(math.sin(angle), 15)
    x0 = a * -width / 2 + b * -height / 2 + width / 2
    y0 = -b * -width / 2 + a * -height / 2 + height / 2
    y, x = np.mgrid[:height, :width]
    from_x = (
        _to_fixed_point(x0 + a / 2 + b / 2) + _to_fixed_point(a) * x + _to_fixed_point(b) * y
    ) >> 16
    from_y = (
        _to_fixed_point(y0 - b / 2 + a / 2) + _to_fixed_point(-b) * x + _to_fixed_point(a) * y
    ) >> 16
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    found = np.zeros_like(images)
    found[:, :, inside] = images[:, :, from_y[inside], from_x[inside]]
    return found


def _to_fixed_point(value: float) -> int:
    return math.floor(value * 65536 + 0.5)


# Feature skews: shifts by which the images of each cluster look different.

CHANNELS = 3


@dataclass(frozen=True)
class Inverted:
    """Transform of images to negatives: black becomes white."""

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the negatives of images ``[n, C, H, W]``."""
        return 255 - images


@dataclass(frozen=True)
class Blurred:
    """Transform that blurs images by a Gaussian filter of ``sigma`` pixels."""

    sigma: float

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return blurred images ``[n, C, H, W]``."""
        from scipy.ndimage import gaussian_filter

        return cast(Pixels, gaussian_filter(images, (0, 0, self.sigma, self.sigma)))


@dataclass(frozen=True)
class Noisy:
    """Transform that adds Gaussian noise to images, which is fixed for each image.

    ``sigma`` is the standard deviation relative to the range of pixels, and ``seed`` the seed of
    the noise.
    """

    sigma: float
    seed: int

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return images ``[n, C, H, W]`` with noise, which depends on the rows of the pool."""
        shape = images.shape[1:]
        noise = [
            rng.generator(self.seed, "noise", row).standard_normal(shape, np.float32)
            for row in rows.tolist()
        ]
        return np.clip(np.rint(images + 255 * self.sigma * np.stack(noise)), 0, 255).astype(
            np.uint8
        )


@dataclass(frozen=True)
class Coloured:
    """Transform of images to three channels, one of which may be set to 255.

    ``channel`` is the channel to set (0, 1, 2 for red, green, blue); None if no channel is set.
    """

    channel: int | None

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return images ``[n, 3, H, W]``, with one channel set to 255 unless they remain grey."""
        found = np.broadcast_to(images, (len(images), CHANNELS, *images.shape[2:])).copy()
        if self.channel is not None:
            found[:, self.channel] = 255
        return found


@dataclass(frozen=True)
class Thick:
    """Transform that widens bright strokes by a number of pixels on each side.

    A negative number narrows the strokes.
    """

    pixels: int

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return images ``[n, C, H, W]`` with wider or narrower strokes."""
        from scipy.ndimage import grey_dilation, grey_erosion

        size = (1, 1, 2 * abs(self.pixels) + 1, 2 * abs(self.pixels) + 1)
        if self.pixels > 0:
            return cast(Pixels, grey_dilation(images, size))
        return cast(Pixels, grey_erosion(images, size))


def invert(pool: Pool, clusters: int, seed: int) -> list[View]:
    """Create views in which one of two clusters sees images as negatives."""
    return _build_views("invert", pool, clusters, most=2, transform=lambda _: Inverted())


def blur(pool: Pool, clusters: int, seed: int, *, strength: float = 1.0) -> list[View]:
    """Create views that blur the images of cluster j by a Gaussian filter of j·strength pixels."""
    _require_positive(strength)
    return _build_views(
        "blur", pool, clusters, most=clusters, transform=lambda j: Blurred(j * strength)
    )


def noise(pool: Pool, clusters: int, seed: int, *, strength: float = 0.1) -> list[View]:
    """Create views that add Gaussian noise to the images of cluster j.

    Its standard deviation is j·strength times the range of pixel values.
    """
    _require_positive(strength)
    return _build_views(
        "noise", pool, clusters, most=clusters, transform=lambda j: Noisy(j * strength, seed)
    )


def colour(pool: Pool, clusters: int, seed: int) -> list[View]:
    """Create views that show the images of clusters 0 to 3 in grey, red, green and blue.

    All images get three channels.
    """
    require_images(pool, "colour")
    rule = f"with images of 1 or {CHANNELS} channels"
    require(("shift", "colour", pool.input_shape[0] in (1, CHANNELS), rule))
    views = _build_views(
        "colour", pool, clusters, most=1 + CHANNELS, transform=lambda j: Coloured(j - 1)
    )
    return [View(transform=Coloured(None)), *views[1:]]


def thickness(pool: Pool, clusters: int, seed: int, *, strength: int = 1) -> list[View]:
    """Create views with unchanged, wider and narrower strokes, by ``strength`` pixels per side.

    Strokes are unchanged in cluster 0, wider in cluster 1 and narrower in cluster 2.
    """
    require(("strength", strength, strength >= 1, "at least 1"))

    def change_strokes(cluster: int) -> Thick:
        return Thick(strength if cluster == 1 else -strength)

    return _build_views("thickness", pool, clusters, most=3, transform=change_strokes)


def _build_views(
    name: str, pool: Pool, clusters: int, *, most: int, transform: Callable[[int], object]
) -> list[View]:
    """Create the view of each cluster from a function ``transform(j)`` of the cluster's number j.

    The view of cluster 0 changes nothing. ``most`` is the largest number of clusters of the shift.
    """
    require_images(pool, name)
    require(("clusters", clusters, clusters <= most, f"at most {most} with shift {name!r}"))
    return [View(), *(View(transform=transform(j)) for j in range(1, clusters))]  # pyright: ignore[reportArgumentType]


def _require_positive(strength: float) -> None:
    require(("strength", strength, strength > 0, "greater than 0"))


# Shifts with which FLUX (NeurIPS 2025) is evaluated, as generated by ANDA: four kinds, each at
# eight levels.
#
# The kinds are shifts of P(X), P(Y), P(Y|X) and P(X|Y). Setting and parameters are those of the
# authors' code (``public/generate_datasets.py`` and ``public/config.py`` of FLUX, ``split_fn.py``
# of ANDA). L is the level:
#
# - ``P(X)``: each client draws one of r angles i·360°/r, with r = 2, 3, 4, 5, 2, 3, 4, 5 at the
#   levels 1 to 8. From level 5 on it also draws one of three colours; below, all images are grey.
# - ``P(Y)``: five sets of 11 − L classes are drawn, and each client draws one of them. It has no
#   images of other classes: they are replaced by draws, with replacement, from its images of these
#   classes.
# - ``P(Y|X)``: L labels are drawn, and each client permutes these at random. Some labels do not
#   change; at level 1 no label changes.
# - ``P(X|Y)``: L classes are drawn, and each client rotates its images of each class by an angle of
#   its own: 0°, 90°, 180° or 270°. All images are grey.
#
# Images are rotated as PIL does it by default: nearest neighbour, of the same size, black where no
# pixel was. Grey images get three channels; in red, green or blue images the channel of that colour
# is full. Clients with the same draws are a cluster.
#
# Choices that the code leaves open, or departures from it: draws are keyed by seed, kind and level.
# Images of a client's classes are drawn again after validation and test data were set aside, so
# that no image is in two of these.

Kind = Literal["P(X)", "P(Y)", "P(Y|X)", "P(X|Y)"]

ANGLES = (2, 3, 4, 5, 2, 3, 4, 5)
"""Number of rotation angles from which a client draws, by level 1 to 8."""

COLOURS = (1, 1, 1, 1, 3, 3, 3, 3)

CLASS_SETS = 5
"""Number of sets of classes from which a client draws."""

LEVELS = 8


@dataclass(frozen=True)
class Turned:
    """Transform that rotates images by an angle that depends on the label, in three channels.

    Parameters
    ----------
    degrees
        Pairs of label and angle in degrees. Images of other labels are not rotated.
    channel
        Channel that is set to 255 (0, 1, 2 for red, green, blue); None for grey images.
    """

    degrees: tuple[tuple[int, float], ...]
    channel: int | None = None

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return rotated images ``[n, 3, H, W]``, given images ``[n, C, H, W]`` and labels."""
        found = images.copy()
        for label, degrees in self.degrees:
            mine = labels == label
            found[mine] = rotate_images(images[mine], degrees)
        found = np.broadcast_to(found, (len(found), 3, *found.shape[2:])).copy()
        if self.channel is not None:
            found[:, self.channel] = 255
        return found


def check_level(level: int) -> None:
    """Check that the level of the shift ``anda`` is in its range of 1 to 8."""
    require(("level", level, 1 <= level <= LEVELS, f"from 1 to {LEVELS}"))


def anda(
    pool: Pool, clients: int, seed: int, *, kind: Kind = "P(Y|X)", level: int = LEVELS
) -> list[View]:
    """Draw a view for each client by a shift of ANDA, the data generator in the paper of FLUX.

    Source: FLUX, NeurIPS 2025.

    Parameters
    ----------
    pool
        The examples of all clients.
    clients
        Number of clients.
    seed
        Seed of all draws.
    kind
        Distribution that differs between clients: ``P(X)`` of the inputs, ``P(Y)`` of the labels,
        ``P(Y|X)`` of the label of a given input, or ``P(X|Y)`` of the inputs with a given label.
    level
        Strength of the shift, from 1 to 8.
    """
    check_level(level)
    if pool.task != "classification":
        raise DataError(
            f"shift 'anda' needs labels, but the task of {pool.name} is {pool.task}; choose "
            "another shift"
        )
    if kind in ("P(X)", "P(X|Y)"):
        require_images(pool, "anda")
        if pool.input_shape[0] not in (1, 3):
            raise DataError(
                f"shift 'anda' needs images of 1 or 3 channels, but images of {pool.name} have "
                f"{pool.input_shape[0]}; choose another shift"
            )
    purpose = f"anda {kind}"
    draw = rng.generator(seed, purpose, level)
    affected = np.sort(draw.permutation(pool.outputs)[: min(level, pool.outputs)]).tolist()
    kept = max(1, pool.outputs + 1 - level)
    class_sets: list[tuple[int, ...]] = []
    for _ in range(CLASS_SETS):
        classes = np.sort(draw.permutation(pool.outputs)[:kept])
        class_sets.append(tuple(classes.tolist()))
    views: list[View] = []
    for client in range(clients):
        draw = rng.generator(seed, purpose, level, client + 1)
        if kind == "P(X)":
            views.append(_draw_rotation(draw, level, pool.outputs))
        elif kind == "P(Y)":
            views.append(View(classes=class_sets[int(draw.integers(CLASS_SETS))]))
        elif kind == "P(Y|X)":
            label_map = torch.arange(pool.outputs)
            label_map[affected] = torch.from_numpy(draw.permutation(affected))
            views.append(View(label_map=label_map))
        else:
            degrees = tuple((label, 90.0 * int(draw.integers(4))) for label in affected)
            views.append(View(transform=Turned(degrees)))
    return views


def _draw_rotation(draw: np.random.Generator, level: int, labels: int) -> View:
    """Draw a view with one rotation angle for all labels, and at levels 5 to 8 also a colour."""
    angles = ANGLES[level - 1]
    colours = COLOURS[level - 1]
    degrees = int(draw.integers(angles)) * 360 / angles
    channel = None
    if colours > 1:
        channel = int(draw.integers(colours))
    return View(transform=Turned(tuple((label, degrees) for label in range(labels)), channel))
