"""The directions in which a client's data lies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedclade.core import DataError, SubspaceQuery, require
from fedclade.data import ClientData, Federation, Pool


def left_singular_vectors(pool: Pool, client: ClientData, n_vectors: int, per_label: int | None) -> Tensor:
    """Return the leading left singular vectors of the matrix of a client's training inputs, float32 ``[L, d, p]``.

    L is the number of labels, as the client sees them, if each one's inputs make a matrix of their own (``per_label``),
    or else 1.
    Inputs are taken as they are stored, not centred and not normalised as for a model: the first vector lies near
    their mean. Where there are fewer examples than vectors, the rest are zeros.
    """
    indices = torch.from_numpy(client.train)
    x = pool.x[indices].float()
    if client.quarter_turns:
        x = torch.rot90(x, client.quarter_turns, (-2, -1))
    rows, labels = x.flatten(1), client.labels(pool.y[indices])
    groups = [rows[labels == label] for label in range(per_label)] if per_label else [rows]
    vectors = torch.zeros(len(groups), rows.shape[1], n_vectors)
    for group, found in zip(groups, vectors, strict=True):
        if len(group):
            leading = torch.linalg.svd(group, full_matrices=False)[2][:n_vectors]  # right ones, as inputs are rows here
            found[:, : len(leading)] = leading.T
    return vectors


def subspaces(federation: Federation, query: SubspaceQuery) -> Tensor:
    """Return the left singular vectors of some clients' training inputs, ``[n, L, d, p]``.

    Raises
    ------
    DataError
        If the data is text.
    ConfigError
        If there are not as many directions as vectors, or it should be by labels that there are not.
    """
    pool = federation.pool
    if not pool.x.is_floating_point() and pool.x.dtype != torch.uint8:
        raise DataError(
            f"the inputs of {pool.name} are tokens of text, which span no subspaces; take images or features, or an "
            "algorithm that compares updates"
        )
    entries = math.prod(pool.input_shape)
    rule = f"at most {entries}, as an input of {pool.name} has no more entries"
    require(("algorithm.vectors", query.n_vectors, query.n_vectors <= entries, rule))
    labels = query.matrices(pool.schema) if query.per_label else None
    return torch.stack([left_singular_vectors(pool, federation.by_id[i], query.n_vectors, labels) for i in query.ids])
