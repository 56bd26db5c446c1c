"""The shifts at which FLUX (NeurIPS 2025) compares, as ANDA makes them: four kinds, each at eight levels.

The four are shifts of P(X), P(Y), P(Y|X) and P(X|Y); arena and parameters are those of the authors' code
(``public/generate_datasets.py`` and ``public/config.py`` of FLUX, ``split_fn.py`` of ANDA):

- ``P(X)``: each client draws one of r angles i·360°/r, r = 2, 3, 4, 5, 2, 3, 4, 5 at the levels 1 to 8, and from level
  5 on one of three colours; below all is grey.
- ``P(Y)``: five sets of 11 − L classes are drawn, and each client draws one of them. It has no images of other classes;
  as many are drawn again from those that it has, with replacement.
- ``P(Y|X)``: L labels are drawn, and each client permutes these at random. Some stay where they are; at level 1 all do.
- ``P(X|Y)``: L classes are drawn, and each client turns its images of each by an angle of its own, by 0°, 90°, 180° or
  270°; all is grey.

Images are turned as PIL does it by default: nearest neighbour, of the same size, black where there was nothing. Grey
images get three channels; red, green or blue ones have that channel full. Clients that drew the same are a cluster.

Left to choose, or other than there: draws are keyed by seed, kind and level; images of a client's classes are drawn
again after validation and test data were set aside, so that none is in two of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedclade.core import DataError, Indices, require, rng
from fedclade.data.pool import Pool
from fedclade.data.view import Pixels, View, require_images, turned

Kind = Literal["P(X)", "P(Y)", "P(Y|X)", "P(X|Y)"]

ANGLES = (2, 3, 4, 5, 2, 3, 4, 5)
"""By level, how many there are to draw from."""

COLOURS = (1, 1, 1, 1, 3, 3, 3, 3)

CLASS_SETS = 5
"""How many sets of classes there are to draw from."""

LEVELS = 8


@dataclass(frozen=True)
class Turned:
    """Images turned, those of each label by an angle in degrees, in three channels: grey, or one of them full."""

    degrees: tuple[tuple[int, float], ...]  # by label; others stay as they are
    channel: int | None = None  # which is full: red, green or blue

    def __call__(self, images: Pixels, labels: Indices, rows: Indices) -> Pixels:
        """Return the images ``[n, 3, H, W]``."""
        found = images.copy()
        for label, degrees in self.degrees:
            mine = labels == label
            found[mine] = turned(images[mine], degrees)
        found = np.broadcast_to(found, (len(found), 3, *found.shape[2:])).copy()
        if self.channel is not None:
            found[:, self.channel] = 255
        return found


def check_level(level: int) -> None:
    """Check that there is such a level."""
    require(("level", level, 1 <= level <= LEVELS, f"from 1 to {LEVELS}"))


def anda(pool: Pool, clients: int, seed: int, *, kind: Kind = "P(Y|X)", level: int = LEVELS) -> list[View]:
    """Draw how each client sees a pool.

    Parameters
    ----------
    pool, clients, seed
        As for all shifts.
    kind
        What differs between clients: ``P(X)``, ``P(Y)``, ``P(Y|X)`` or ``P(X|Y)``.
    level
        From 1 to 8: how strongly.
    """
    check_level(level)
    if pool.task != "classification":
        raise DataError(f"shift 'anda' needs labels, but {pool.name} is {pool.task} data")
    if kind in ("P(X)", "P(X|Y)"):
        require_images(pool, "anda")
        if pool.input_shape[0] not in (1, 3):
            raise DataError(f"shift 'anda' needs images of 1 or 3 channels, and {pool.name} has {pool.input_shape[0]}")
    purpose = f"anda {kind}"
    bank = rng.generator(seed, purpose, level)
    some = np.sort(bank.permutation(pool.outputs)[: min(level, pool.outputs)]).tolist()
    kept = max(1, pool.outputs + 1 - level)
    sets = [tuple(np.sort(bank.permutation(pool.outputs)[:kept]).tolist()) for _ in range(CLASS_SETS)]
    views: list[View] = []
    for client in range(clients):
        draw = rng.generator(seed, purpose, level, client + 1)
        if kind == "P(X)":
            angles, colours = ANGLES[level - 1], COLOURS[level - 1]
            degrees = int(draw.integers(angles)) * 360 / angles
            channel = int(draw.integers(colours)) if colours > 1 else None
            views.append(View(transform=Turned(tuple((label, degrees) for label in range(pool.outputs)), channel)))
        elif kind == "P(Y)":
            views.append(View(classes=sets[int(draw.integers(CLASS_SETS))]))
        elif kind == "P(Y|X)":
            label_map = torch.arange(pool.outputs)
            label_map[some] = torch.from_numpy(draw.permutation(some))
            views.append(View(label_map=label_map))
        else:
            views.append(View(transform=Turned(tuple((label, 90.0 * int(draw.integers(4))) for label in some))))
    return views
