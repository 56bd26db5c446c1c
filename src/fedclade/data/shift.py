"""Shifts: different views of the examples of a pool, which define the true clusters.

A *view* changes labels or images, such as by a label map or a rotation. Clients with the same view
form a true cluster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from fedclade import catalogue
from fedclade.core import DataError, call_own, check_arguments, function_named, require, rng, shown
from fedclade.data.arrays import as_indices, check_range
from fedclade.data.pool import Pool
from fedclade.data.view import (
    View,
    anda,
    blur,
    check_level,
    colour,
    invert,
    noise,
    require_images,
    thickness,
)


@dataclass(frozen=True)
class Shift:
    """Definition of a shift: the function that creates the views, and facts about it.

    Parameters
    ----------
    views
        Function ``views(pool, clusters, seed, **arguments)`` that returns a :class:`View` for each
        cluster.
    description
        Line for ``fedclade ls shifts``.
    of_clients
        Whether the function returns a view for each client: ``views(pool, clients, seed, ...)``.
        Clients with equal views form a cluster, and the user cannot choose ``clusters``.
    check
        Function that checks the range of some options before data is loaded. The names of its
        parameters are the names of these options. None if no option is checked.
    """

    views: Callable[..., list[View]]
    description: str
    of_clients: bool = False
    check: Callable[..., None] | None = None


def shift_views(
    pool: Pool, name: str, *, clients: int, clusters: int = 1, seed: int = 0, **arguments: Any
) -> tuple[list[View], tuple[int, ...]]:
    """Create the views of a shift, given by its name, and assign clients to them.

    If the shift draws a view for each client, clients with equal views form a cluster. Otherwise
    client ``i`` belongs to cluster ``i mod clusters``, so that clusters differ in size by at most
    one client.

    Parameters
    ----------
    pool
        The examples of all clients.
    name
        Name of a shift, as for :func:`find_shift`.
    clients, clusters
        Number of clients and of clusters.
    seed
        Seed of all draws.
    **arguments
        Options of the shift.

    Returns
    -------
    tuple
        The view of each cluster, and the cluster of each client.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, or a value is out of range.
    DataError
        If the shift cannot be applied to the pool, or the user's own shift returns an invalid
        result.
    """
    shift = find_shift(name)
    check_arguments(f"shift {name!r}", shift.views, arguments)
    if shift.of_clients:
        require(
            (
                "clusters",
                clusters,
                clusters == 1,
                f"left out with shift {name!r}, which draws the clusters",
            )
        )
        each = shift.views(pool, clients, seed, **arguments)
        numbers: dict[tuple[Hashable, ...], int] = {}
        distinct: list[View] = []
        for view in each:
            if view.key not in numbers:
                numbers[view.key] = len(distinct)
                distinct.append(view)
        return distinct, tuple(numbers[view.key] for view in each)
    require(
        (
            "clusters",
            clusters,
            1 <= clusters <= clients,
            f"from 1 to the number of clients ({clients})",
        )
    )
    if name in SHIFTS:
        views = shift.views(pool, clusters, seed, **arguments)
    else:
        views = call_own(f"shift {name!r}", shift.views, pool, clusters, seed, **arguments)
        views = _check_views(views, pool, clusters, name)
    return views, tuple(client % clusters for client in range(clients))


def _leave_unchanged(_pool: Pool, clusters: int, _seed: int) -> list[View]:
    return [View()] * clusters


def _label_swap(pool: Pool, clusters: int, seed: int) -> list[View]:
    """Create views that swap two labels in each cluster.

    The clusters swap different pairs of labels: first disjoint pairs, then overlapping pairs. This
    is the division into clusters in the experiments of Sattler et al. 2019, section VI-A.
    """
    labels = _count_labels(pool, "label_swap")
    _require_enough(math.comb(labels, 2), clusters, f"pairs of {labels} labels", "label_swap")
    draw = rng.generator(seed, "label_swap")
    order = draw.permutation(labels)
    disjoint = [
        tuple(sorted(pair))
        for pair in zip(order[0::2].tolist(), order[1::2].tolist(), strict=False)
    ]
    others = [pair for pair in itertools.combinations(range(labels), 2) if pair not in disjoint]
    pairs = disjoint + [others[i] for i in draw.permutation(len(others))]
    views: list[View] = []
    for one, other in pairs[:clusters]:
        label_map = torch.arange(labels)
        label_map[[one, other]] = label_map[[other, one]]
        views.append(View(label_map=label_map))
    return views


def _label_permutation(pool: Pool, clusters: int, seed: int) -> list[View]:
    """Create views that permute all labels differently in each cluster.

    This is the division into clusters in the experiments of Sattler et al. 2019, eqs. 52 and 53.
    """
    labels = _count_labels(pool, "label_permutation")
    _require_enough(
        math.factorial(labels), clusters, f"permutations of {labels} labels", "label_permutation"
    )
    draw = rng.generator(seed, "label_permutation")
    maps: dict[
        tuple[int, ...], None
    ] = {}  # A dict preserves the order of the draws, and stores each permutation once.
    while len(maps) < clusters:
        maps[tuple(draw.permutation(labels).tolist())] = None
    return [View(label_map=torch.tensor(label_map)) for label_map in maps]


def _rotation(pool: Pool, clusters: int, _seed: int) -> list[View]:
    """Create views that rotate the images of cluster ``j`` by ``j`` times 90°.

    Source: IFCA, Ghosh et al. 2020.
    """
    _require_square_images(pool, "rotation")
    if pool.y.dim() > 2:
        raise DataError(
            f"shift 'rotation' rotates inputs only, but the targets of {pool.name} are images or "
            "masks, which would have to be rotated as well; choose another shift"
        )
    rule = "at most 4 with shift 'rotation', which turns by 0°, 90°, 180° and 270°"
    require(("clusters", clusters, clusters <= 4, rule))
    return [View(quarter_turns=turns) for turns in range(clusters)]


def _count_labels(pool: Pool, name: str) -> int:
    if pool.task == "language":
        raise DataError(
            f"shift {name!r} needs labels, but {pool.name} is language data (next-word "
            "prediction); choose another shift, or shift = 'none'"
        )
    rule = (
        f"'none' or 'rotation' for {pool.name}: the targets of a {pool.task} task are not "
        "labels that can be exchanged"
    )
    require(("shift", name, pool.task == "classification", rule))
    return pool.outputs


def _require_square_images(pool: Pool, name: str) -> None:
    shape = pool.input_shape
    if len(shape) != 3 or shape[1] != shape[2]:
        raise DataError(
            f"shift {name!r} needs square images [C, H, H], but inputs of {pool.name} have the "
            f"shape {list(shape)}; choose another shift"
        )


def _require_enough(there: int, clusters: int, things: str, name: str) -> None:
    rule = f"at most {there} with shift {name!r}, which is the number of {things}"
    require(("clusters", clusters, clusters <= there, rule))


SHIFTS: Mapping[str, Shift] = MappingProxyType(
    {
        "none": Shift(_leave_unchanged, catalogue.SHIFTS["none"]),
        "label_swap": Shift(_label_swap, catalogue.SHIFTS["label_swap"]),
        "label_permutation": Shift(_label_permutation, catalogue.SHIFTS["label_permutation"]),
        "rotation": Shift(_rotation, catalogue.SHIFTS["rotation"]),
        "invert": Shift(invert, catalogue.SHIFTS["invert"]),
        "blur": Shift(blur, catalogue.SHIFTS["blur"]),
        "noise": Shift(noise, catalogue.SHIFTS["noise"]),
        "colour": Shift(colour, catalogue.SHIFTS["colour"]),
        "thickness": Shift(thickness, catalogue.SHIFTS["thickness"]),
        "anda": Shift(anda, catalogue.SHIFTS["anda"], of_clients=True, check=check_level),
    }
)


def find_shift(name: object) -> Shift:
    """Find the definition of a shift by its name.

    The name is in :data:`SHIFTS`, is registered by an installed package, or has the form
    ``module:function``. A user's own shift is a function ``views(pool, clusters, seed, *, ...)``
    that returns a :class:`View` for each cluster. Its keyword-only parameters are options in
    ``[data]``.

    Raises
    ------
    ConfigError
        If the name is unknown, cannot be imported, or does not name a shift.
    """
    return function_named(
        "shifts",
        name,
        builtin=SHIFTS,
        wrapper=Shift,
        returns="a View for each cluster",
        takes=("pool", "clusters", "seed"),
    )


def _check_views(views: Any, pool: Pool, clusters: int, name: str) -> list[View]:
    """Check that a user's own shift returned a valid view for each cluster."""
    if (
        not isinstance(views, list | tuple)
        or len(views) != clusters
        or not all(isinstance(v, View) for v in views)
    ):
        raise DataError(
            f"shift {name!r} should return a View for each of {clusters} clusters, got "
            f"{shown(views)}"
        )
    return [_check_view(view, pool, name) for view in views]


def _check_view(view: View, pool: Pool, name: str) -> View:
    if view.quarter_turns:
        _require_square_images(pool, name)
    if view.transform is not None:
        require_images(pool, name)
    if view.label_map is None:
        return view
    labels = _count_labels(pool, name)
    what = f"the label_map by shift {name!r}"
    label_map = as_indices(view.label_map, what)
    if len(label_map) != labels:
        raise DataError(
            f"{what} should have an entry for each of the {labels} labels, got {len(label_map)}"
        )
    check_range(label_map, labels, what)
    return replace(view, label_map=torch.from_numpy(label_map))
