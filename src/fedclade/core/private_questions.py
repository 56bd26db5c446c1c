"""Questions about updates that no server may see: sums of functions of them, and choices.

A client sketches its update and scales the sketch to length 1: that is its signature u ``[R]``,
which stays with it. The client replies with a function of u: a vector of at most length 1, of which
the server gets the sum over clients alone, or a choice.

Any two vectors that a client could send for one question have an inner product of at least 0, so
they lie at most √2 apart: the sensitivity of their sum if the data of one client are replaced.
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
"""Largest distance of two vectors that a client could send for one question about a sum."""


@dataclass(frozen=True, eq=False)
class Question(ABC):
    """A question about the signatures of clients in a round.

    Parameters
    ----------
    seed, dim
        Seed and size of the sketch, a count sketch to R = ``dim`` numbers: public, and the same for
        all clients.
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
        """Return the signatures u of updates ``[n, D]``: float64 ``[n, R]``; zeros for a zero update."""
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

        Vectors ``[n, m]`` of at most length 1, or choices ``[n]``.
        """


@dataclass(frozen=True, eq=False)
class Moments(Question):
    """Question for the second moments u uᵀ, of Frobenius norm 1.

    A reply is their upper triangle; entries off the diagonal are multiplied by √2.
    """

    about = "moments"

    def answered(self, signatures: Tensor) -> Tensor:
        """Return u uᵀ ``[n, R(R+1)/2]``."""
        rows, columns = torch.triu_indices(self.dim, self.dim, device=signatures.device)
        scale = torch.where(rows == columns, 1.0, SENSITIVITY).to(signatures)
        return signatures[:, rows] * signatures[:, columns] * scale


@dataclass(frozen=True, eq=False)
class Placed(Question):
    """Question about the directions v of signatures within a subspace.

    v is u projected on the subspace and scaled to length 1. ``basis [R, d]`` has orthonormal
    columns.
    """

    basis: Tensor

    def directions(self, signatures: Tensor) -> Tensor:
        """Return v ``[n, d]``."""
        return functional.normalize(signatures @ self.basis.to(signatures), dim=1)


@dataclass(frozen=True, eq=False)
class Cells(Placed):
    """Question for counts and sums of directions by cell.

    A reply has a cell for each of B points ``[B, d]``: 1 and v, divided by √2, in the cell of the
    nearest point, and zeros in all others.
    """

    about = "cells"

    points: Tensor

    def answered(self, signatures: Tensor) -> Tensor:
        """Return the cells ``[n, B (1 + d)]``."""
        v = self.directions(signatures)
        cell = (v @ self.points.to(v).T).argmax(1)
        content = torch.cat([torch.ones_like(v[:, :1]), v], dim=1) / SENSITIVITY
        cells = v.new_zeros(len(v), len(self.points), content.shape[1])
        cells[torch.arange(len(v)), cell] = content
        return cells.flatten(1)


@dataclass(frozen=True, eq=False)
class Choice(Placed):
    """Question for the centre, of k centres ``[k, d]``, with the largest inner product with v."""

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
