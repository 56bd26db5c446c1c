"""The directions in which a client's data lies."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.data import ClientData, Pool


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
