"""Questions about updates that no server may see: sums of functions of updates, and choices.

A client sketches its update and scales the sketch to length 1. The result is its signature u
``[R]``, which never leaves the client. The client replies with a function of u: either a vector of
length at most 1, of which the server gets only the sum over all clients, or a choice.

Any two vectors that a client could send for one question have an inner product of at least 0, so
their distance is at most √2. This is the sensitivity of their sum if the data of one client are
replaced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core import rng

SENSITIVITY = math.sqrt(2.0)
"""Largest distance between two vectors that a client could send for a question about a sum."""


@dataclass(frozen=True, eq=False)
class Question(ABC):
    """Question about the signatures of clients in a round.

    Parameters
    ----------
    seed, dim
        Seed and size of the sketch, a count sketch with R = ``dim`` entries. Both are public, and
        the same for all clients.
    """

    about: ClassVar[str]
    # Whether the server gets the sum of the replies; otherwise each client's choice.
    sums: ClassVar[bool] = True

    seed: int
    dim: int

    @property
    def options(self) -> int:
        """Number of choices; 0 if the question is about a sum."""
        return 0

    def signatures(self, updates: Tensor) -> Tensor:
        """Return the signatures u of updates ``[n, D]``: float64 ``[n, R]``.

        The signature of a zero update is zero.
        """
        draw = rng.torch_generator(self.seed, "private signature")
        buckets = torch.randint(self.dim, (updates.shape[1],), generator=draw).to(updates.device)
        signs = 2.0 * torch.randint(2, (updates.shape[1],), generator=draw) - 1.0
        sketches = updates.new_zeros(len(updates), self.dim, dtype=torch.float64)
        for row, update in zip(sketches, updates, strict=True):
            row.index_add_(0, buckets, update.double() * signs.to(row))
        return functional.normalize(sketches, dim=1)

    @abstractmethod
    def answered(self, signatures: Tensor) -> Tensor:
        """Return the replies for signatures ``[n, R]``.

        They are vectors ``[n, m]`` of length at most 1, or choices ``[n]``.
        """


@dataclass(frozen=True, eq=False)
class Moments(Question):
    """Question about the second moments u uᵀ, which have Frobenius norm 1.

    A reply is their upper triangle, with the entries off the diagonal multiplied by √2.
    """

    about = "moments"

    def answered(self, signatures: Tensor) -> Tensor:
        """Return the upper triangles of u uᵀ, ``[n, R(R+1)/2]``."""
        rows, columns = torch.triu_indices(self.dim, self.dim, device=signatures.device)
        # Entries off the diagonal stand for two entries of u uᵀ, so √2 preserves its norm.
        scale = torch.where(rows == columns, 1.0, SENSITIVITY).to(signatures)
        return signatures[:, rows] * signatures[:, columns] * scale


@dataclass(frozen=True, eq=False)
class Placed(Question):
    """Question about the directions v of signatures within a subspace.

    v is the projection of u on the subspace, scaled to length 1. ``basis [R, d]`` has orthonormal
    columns.
    """

    basis: Tensor

    def directions(self, signatures: Tensor) -> Tensor:
        """Return the directions v ``[n, d]`` of signatures ``[n, R]``."""
        return functional.normalize(signatures @ self.basis.to(signatures), dim=1)


@dataclass(frozen=True, eq=False)
class Cells(Placed):
    """Question about the number and the sum of the directions in each cell.

    There is a cell around each of B points ``[B, d]``; a direction belongs to the cell of the
    nearest point. A reply has 1 + d entries for each cell: 1 and v, divided by √2, for its own
    cell, and zeros for all others.
    """

    about = "cells"

    points: Tensor

    def answered(self, signatures: Tensor) -> Tensor:
        """Return the replies ``[n, B (1 + d)]``."""
        v = self.directions(signatures)
        cell = (v @ self.points.to(v).T).argmax(1)
        # (1, v) has length √2, and a reply must have length at most 1.
        content = torch.cat([torch.ones_like(v[:, :1]), v], dim=1) / SENSITIVITY
        cells = v.new_zeros(len(v), len(self.points), content.shape[1])
        cells[torch.arange(len(v)), cell] = content
        return cells.flatten(1)


@dataclass(frozen=True, eq=False)
class Choice(Placed):
    """Question which of k centres ``[k, d]`` has the largest inner product with v."""

    about = "choice"
    sums = False

    centres: Tensor

    @property
    def options(self) -> int:
        """Number of centres, k."""
        return len(self.centres)

    def is_same(self, other: Choice) -> bool:
        """Return whether another question is about the same centres."""
        return torch.equal(self.basis, other.basis) and torch.equal(self.centres, other.centres)

    def answered(self, signatures: Tensor) -> Tensor:
        """Return the choices, int64 ``[n]``."""
        v = self.directions(signatures)
        return (v @ self.centres.to(v).T).argmax(1)
