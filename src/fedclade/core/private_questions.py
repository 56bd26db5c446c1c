"""Questions about model updates that stay on the clients (central differential privacy).

A sketch is a random linear projection of an update to R numbers. A client's signature u is the
sketch of its update, scaled to length 1. Neither the update nor the signature leaves the client.
The client replies to a question with a function of u: either a vector of length at most 1, of which
the server gets only the noisy sum over all clients, or a choice among several options.

Any two vectors that a client could reply to the same question have an inner product of at least 0,
so their distance is at most √2. This distance is the sensitivity of the sum if the data of one
client are replaced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedclade.core import rng

SENSITIVITY = math.sqrt(2.0)
"""Sensitivity of a sum: the largest distance between two possible replies of one client."""


@dataclass(frozen=True, eq=False)
class Question(ABC):
    """Base class of questions that the server asks about the updates of a round.

    Each client replies to a question from the signature of its update: a short vector that stands
    for the update, here a count sketch of it.

    Parameters
    ----------
    seed, dim
        Random seed of the sketch, and its number R of entries. Both are public, and the same for
        all clients.
    """

    about: ClassVar[str]
    # Whether the server gets the sum of the replies; otherwise each client's choice.
    sums: ClassVar[bool] = True

    seed: int
    dim: int

    @property
    def options(self) -> int:
        """Number of options that a client chooses from; 0 if the question is about a sum."""
        return 0

    def signatures(self, updates: torch.Tensor) -> torch.Tensor:
        """Return the signatures of n updates: their count sketches, scaled to length 1.

        The signature of a zero update is zero.

        Parameters
        ----------
        updates
            The updates ``[n, D]``: one row per client, one column per parameter.

        Returns
        -------
        Tensor
            The signatures, float64 ``[n, R]``.
        """
        draw = rng.torch_generator(self.seed, "private signature")
        buckets = torch.randint(self.dim, (updates.shape[1],), generator=draw).to(updates.device)
        signs = 2.0 * torch.randint(2, (updates.shape[1],), generator=draw) - 1.0
        sketches = updates.new_zeros(len(updates), self.dim, dtype=torch.float64)
        for row, update in zip(sketches, updates, strict=True):
            row.index_add_(0, buckets, update.double() * signs.to(row))
        return torch.nn.functional.normalize(sketches, dim=1)

    @abstractmethod
    def answered(self, signatures: torch.Tensor) -> torch.Tensor:
        """Return the replies of n clients to the question, given their signatures ``[n, R]``.

        The replies are vectors ``[n, m]`` of length at most 1 if the question is about a sum, and
        otherwise the indices ``[n]`` of the chosen options.
        """


@dataclass(frozen=True, eq=False)
class Moments(Question):
    """Question for the sum of the second-moment matrices u uᵀ of the clients' signatures u.

    A client replies with the upper triangle of its matrix. Entries off the diagonal are multiplied
    by √2, so that the reply has length 1, the Frobenius norm of the matrix.
    """

    about = "moments"

    def answered(self, signatures: torch.Tensor) -> torch.Tensor:
        """Return the scaled upper triangles of the n matrices u uᵀ, ``[n, R(R+1)/2]``.

        The signatures u are the rows of ``signatures [n, R]``.
        """
        rows, columns = torch.triu_indices(self.dim, self.dim, device=signatures.device)
        # Entries off the diagonal stand for two entries of u uᵀ, so √2 preserves its norm.
        scale = torch.where(rows == columns, 1.0, SENSITIVITY).to(signatures)
        return signatures[:, rows] * signatures[:, columns] * scale


@dataclass(frozen=True, eq=False)
class Placed(Question):
    """Base class of questions about the directions of signatures within a subspace.

    The direction v of a signature u is the projection of u on the subspace, scaled to length 1. The
    d orthonormal columns of ``basis [R, d]`` span the subspace.
    """

    basis: torch.Tensor

    def directions(self, signatures: torch.Tensor) -> torch.Tensor:
        """Return the directions ``[n, d]`` of n signatures ``[n, R]``, in the subspace's basis."""
        return torch.nn.functional.normalize(signatures @ self.basis.to(signatures), dim=1)


@dataclass(frozen=True, eq=False)
class Cells(Placed):
    """Question for the number of clients and the sum of their directions in each of B cells.

    Cells divide a subspace of d dimensions: the direction v of a client's signature belongs to the
    cell of the nearest of the B ``points [B, d]``. A reply has 1 + d entries for each cell. For the
    client's own cell, they are 1 and v, divided by √2; for all other cells, they are zeros.
    """

    about = "cells"

    points: torch.Tensor

    def answered(self, signatures: torch.Tensor) -> torch.Tensor:
        """Return the replies ``[n, B (1 + d)]`` of n clients, given their signatures ``[n, R]``."""
        v = self.directions(signatures)
        cell = (v @ self.points.to(v).T).argmax(1)
        # (1, v) has length √2, and a reply must have length at most 1.
        content = torch.cat([torch.ones_like(v[:, :1]), v], dim=1) / SENSITIVITY
        cells = v.new_zeros(len(v), len(self.points), content.shape[1])
        cells[torch.arange(len(v)), cell] = content
        return cells.flatten(1)


@dataclass(frozen=True, eq=False)
class Choice(Placed):
    """Question for the centre that is nearest to the direction of a client's signature.

    A client chooses the one of the k ``centres [k, d]`` that has the largest inner product with the
    direction v of its signature.
    """

    about = "choice"
    sums = False

    centres: torch.Tensor

    @property
    def options(self) -> int:
        """Number k of centres that a client chooses from."""
        return len(self.centres)

    def is_same(self, other: Choice) -> bool:
        """Return whether another question has the same centres in the same subspace."""
        return torch.equal(self.basis, other.basis) and torch.equal(self.centres, other.centres)

    def answered(self, signatures: torch.Tensor) -> torch.Tensor:
        """Return the index of each client's chosen centre, int64 ``[n]``.

        ``signatures [n, R]`` are the signatures of the n clients.
        """
        v = self.directions(signatures)
        return (v @ self.centres.to(v).T).argmax(1)
