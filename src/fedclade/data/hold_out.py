"""Hold-out of test and validation examples from clients' own data.

A hold-out may be random or take the last examples in an order. It may take the same share of each
*stratum* (the examples of one label), and keep each *group* of examples (such as the rows of one
patient) together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.core import DataError, Indices, rng
from fedclade.data.partition import set_aside

HoldOutRule = Literal["random", "last"]
"""Examples that are held out: random ones, or the last ones in an order such as time."""

Stratify = Literal["auto", "none", "labels"]
"""Strata from each of which a random hold-out takes the same share.

``auto`` is ``labels`` for tables whose target is a label, and ``none`` for other data.
"""


@dataclass(frozen=True, eq=False)
class HoldOut:
    """Rule by which a client holds out examples, and the columns that the rule uses.

    Parameters
    ----------
    rule
        Examples that are held out: ``random`` examples, or the ``last`` examples in the order.
    order
        Value by which examples are ordered, such as a time, ``[N]``; None for the order of the
        rows. N is the number of examples of all clients.
    groups
        Number of the group of each example, int64 ``[N]``; a group is never divided. None if each
        example is a group of its own.
    labels
        Number of the stratum of each example, int64 ``[N]``; None without strata.
    group_name
        Name of the column with the groups, for messages.
    """

    rule: HoldOutRule = "random"
    order: NDArray[np.float64] | None = None
    groups: Indices | None = None
    labels: Indices | None = None
    group_name: str = field(default="groups")

    def set_aside(
        self, indices: Indices, fraction: float, purpose: str, *, seed: int, client: int, name: str
    ) -> tuple[Indices, Indices]:
        """Split a client's examples into remaining examples and a held-out fraction.

        At least one example (or one group) is held out unless the fraction is 0, and of two or more
        examples at least one remains.

        Parameters
        ----------
        indices
            Indices of the client's examples, int64 ``[n]``.
        fraction
            Fraction of the examples to hold out, in [0, 1).
        purpose
            ``test`` or ``validation``, a key of the random draw.
        seed, client
            Further keys of the random draw.
        name
            Name of the client, for messages.

        Returns
        -------
        tuple
            Indices of the remaining examples, and indices of the held-out examples.

        Raises
        ------
        DataError
            If all examples belong to a single group.
        """
        if self.rule == "random" and self.groups is None and self.labels is None:
            return set_aside(indices, fraction, purpose, seed=seed, client=client)
        if not fraction:
            return indices, indices[:0]
        if self.rule == "last":
            ordered = self._sort_by_order(indices)
        else:
            ordered = rng.generator(seed, purpose, client).permutation(indices)[::-1]
        # Examples are taken from the end of the order.
        if self.groups is not None:
            count = _count_held(len(indices), fraction)
            is_held = self._take_groups(ordered, count, purpose=purpose, name=name)
        elif self.rule == "random" and self.labels is not None:
            is_held = _take_strata(self.labels[ordered], fraction)
        else:
            is_held = np.arange(len(ordered)) >= len(ordered) - _count_held(len(ordered), fraction)
        return ordered[~is_held], ordered[is_held]

    def _sort_by_order(self, indices: Indices) -> Indices:
        """Sort examples by ``order``; examples of equal order remain in the order of the rows."""
        rows = np.sort(indices)
        if self.order is None:
            return rows
        return rows[np.argsort(self.order[rows], kind="stable")]

    def _take_groups(
        self, ordered: Indices, count: int, *, purpose: str, name: str
    ) -> NDArray[np.bool_]:
        """Return a mask of the examples to hold out, in whole groups.

        Groups are taken in the order of their last examples, the latest first. The number of groups
        is chosen so that the number of held-out examples is as close as possible to ``count``.
        """
        assert self.groups is not None
        groups = self.groups[ordered]
        # Reversed, so that the first occurrence is the last in the order.
        names, last, sizes = np.unique(groups[::-1], return_index=True, return_counts=True)
        if len(names) < 2:
            raise DataError(
                f"client {name!r} should have rows of at least 2 groups of {self.group_name!r}, so "
                f"that a group can be held out as {purpose} data, got 1 group; unset 'groups', or "
                "leave the client out"
            )
        latest_first = np.argsort(last, kind="stable")
        possible = sizes[latest_first[:-1]].cumsum()
        taken = 1 + int(np.abs(possible - count).argmin())
        return np.isin(groups, names[latest_first[:taken]])


def _count_held(total: int, fraction: float) -> int:
    """Return the number of examples to hold out: at least 1, and fewer than all if possible."""
    return max(1, min(round(fraction * total), total - 1))


def _take_strata(labels: Indices, fraction: float) -> NDArray[np.bool_]:
    """Return a mask of the examples to hold out, with the same share of each label.

    The number of examples of each label is rounded by largest remainders, so that the total is the
    same as without strata.
    """
    values, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    total = _count_held(len(labels), fraction)
    quotas = counts * (total / len(labels))
    held = np.floor(quotas).astype(np.int64)
    remainders = np.argsort(held - quotas, kind="stable")
    held[remainders[: total - int(held.sum())]] += 1
    is_held = np.zeros(len(labels), dtype=np.bool_)
    for stratum in range(len(values)):
        rows = np.flatnonzero(places == stratum)
        is_held[rows[len(rows) - held[stratum] :]] = True
    return is_held


def number_values(values: NDArray[Any]) -> Indices:
    """Replace each value by its position among the sorted distinct values, int64 ``[N]``."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64).reshape(-1)
