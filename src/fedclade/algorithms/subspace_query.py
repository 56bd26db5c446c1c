"""Query of PACFL for the subspaces that the data of clients spans.

Clients need this module, and nothing else of :mod:`fedclade.algorithms.pacfl`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedclade.core import (
    ConfigError,
    DataError,
    DataSpec,
    LocalData,
    LocalStore,
    RowQuery,
    require,
    rng,
)

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-3
"""Largest rounding error of a product of two singular vectors, which are sent as float32."""


@dataclass(frozen=True, eq=False)
class SubspaceQuery(RowQuery):
    """Query for the main directions (singular vectors) of clients' training inputs.

    Each client decomposes the matrix of its inputs, one input in each column, and replies with the
    p left singular vectors of the largest singular values. The reply is ``[L, d, p]`` for inputs of
    d numbers, where L is the number of labels, or 1 if labels are not separated. Columns are unit
    vectors; they are zero if a client has too few examples for p vectors.

    Parameters
    ----------
    vectors
        Number p of singular vectors of each matrix.
    per_label
        Whether the inputs of each label form a separate matrix. Labels are numbered as in the
        client's data, even if another client uses the same number for another class.
    """

    kind = "subspaces"
    mechanism = "none"
    discloses = "subspaces"
    reveals = "subspaces of their data"
    needs_min_part = False

    vectors: int
    per_label: bool

    def shape(self, spec: DataSpec) -> tuple[int, int, int]:
        """Return the shape of a client's reply: the numbers of matrices, input entries and vectors.

        Raises
        ------
        ConfigError
            If each label is decomposed separately and examples have no label or several, or if an
            input has fewer entries than the number of vectors.
        """
        if self.per_label and spec.labels is None:
            raise ConfigError(
                f"PACFL cannot compare the data of each label separately in a {spec.task} task, "
                "since examples do not have exactly one label each; set algorithm.distance = "
                "'paper'"
            )
        entries = math.prod(spec.input_shape)
        at_most = f"at most {entries}, since an input of {spec.data} has no more entries"
        require(
            ("algorithm.vectors", self.vectors, self.vectors >= 1, "at least 1"),
            ("algorithm.vectors", self.vectors, self.vectors <= entries, at_most),
        )
        matrices = (spec.labels or 1) if self.per_label else 1
        return matrices, entries, self.vectors

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Compute, on the client, the singular vectors of its training inputs.

        Inputs are used as they are stored, neither centred nor normalised as for a model. The first
        singular vector is therefore close to the direction of their mean.

        Returns
        -------
        Tensor
            The vectors as columns, ``[L, d, p]``: p vectors of d entries for each of L labels, or
            for all data if L = 1.

        Raises
        ------
        DataError
            If inputs are text.
        """
        inputs = data.stored_inputs
        if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
            raise DataError(
                "PACFL compares clients by subspaces that their inputs span, but the inputs of "
                f"{data.spec.data} are tokens of text; use images or features, or an algorithm "
                "that compares updates"
            )
        rows = inputs.float().flatten(1)
        groups = [rows]
        if self.per_label:
            targets = data.targets
            groups = [rows[targets == label] for label in range(data.spec.labels or 0)]
        found = torch.zeros(self.shape(data.spec))
        for vectors, group in zip(found, groups, strict=True):
            if len(group):
                # Examples are rows here and columns in the paper: right singular vectors of this
                # matrix are left ones of the paper's.
                _, _, directions = torch.linalg.svd(group, full_matrices=False)
                leading = directions[: self.vectors]
                vectors[:, : len(leading)] = leading.T
        return found

    def is_valid(self, row: Tensor) -> bool:
        """Return whether a client's vectors are orthonormal, except for vectors that are zero.

        A client that sends longer vectors could obtain an angle of 0 to the vectors of all clients.
        """
        products = row.double().mT @ row.double()
        lengths = products.diagonal(dim1=-2, dim2=-1).round().clamp(0, 1)
        return bool(((products - torch.diag_embed(lengths)).abs() <= ROUNDING).all())

    def amounts(self, spec: DataSpec) -> Mapping[str, int]:
        """Return the amounts that a client's policy can limit: the number of vectors."""
        return {"max_vectors": self.vectors}

    def false_row(self, row: Tensor, key: int) -> Tensor:
        """Return the false reply of a simulated adversary: random orthonormal vectors."""
        draw = rng.torch_generator(0, "false subspaces", key)
        drawn = torch.randn(row.shape, generator=draw, dtype=torch.float64)
        return torch.linalg.qr(drawn).Q.to(row)
