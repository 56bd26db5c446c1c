"""The toy problems of the CFL paper's figures 1 and 2, as federations of points in the plane.

The paper shows pictures and gives no numbers; what is drawn here shows the same two cases.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedclade.core import rng
from fedclade.data import (
    ClientData,
    Federation,
    Pool,
)

Points = NDArray[np.float32]
"""``[n, 2]``."""

SPREAD = 0.35
"""Standard deviation of a blob, whose centre is 1 from both axes."""

TRUE_WEIGHTS = ((3.0, 0.5), (-0.5, 2.0))
"""Of the two clients whose risks disagree."""


def federated_xor(clients: int, points: int, seed: int) -> Federation:
    """Return clients of two clusters that each hold two of XOR's four blobs: each is linear, both together are not.

    Parameters
    ----------
    clients
        In turn of the first and of the second cluster.
    points
        Of each client, for training and again as many for testing.
    seed
        Of the draws.
    """

    def draw(cluster: int, generator: np.random.Generator) -> tuple[Points, NDArray[np.int64]]:
        side = generator.integers(2, size=2 * points)  # of the vertical axis
        height = 1 if cluster == 0 else -1
        centres = np.stack([2 * side - 1, np.full(2 * points, height)], axis=1)
        return _blobs(centres, generator), np.where(height > 0, side, 1 - side)

    return _federation("xor", clients, points, seed, draw)


def opposed(clients: int, points: int, seed: int) -> Federation:
    """Return clients of two clusters that see the same two blobs, and call them by each other's names.

    Parameters
    ----------
    clients, points, seed
        As in :func:`federated_xor`.
    """

    def draw(cluster: int, generator: np.random.Generator) -> tuple[Points, NDArray[np.int64]]:
        side = generator.integers(2, size=2 * points)
        return _blobs(np.stack([2 * side - 1, 2 * side - 1], axis=1), generator), side if cluster == 0 else 1 - side

    return _federation("opposed", clients, points, seed, draw)


def two_risks(points: int, seed: int, *, congruent: bool) -> Federation:
    """Return two clients whose logistic risks can be minimised at once, or cannot.

    Congruent: each client's points lie on an axis of its own, so that it minds one weight only, and there is a model
    that suits both. Incongruent: the points are spread over the plane, and the labels come from different weights.

    Parameters
    ----------
    points, seed
        As in :func:`federated_xor`.
    congruent
        Which of the two.
    """

    def draw(client: int, generator: np.random.Generator) -> tuple[Points, NDArray[np.int64]]:
        x = generator.normal(size=(2 * points, 2)).astype(np.float32)
        weights = np.array(TRUE_WEIGHTS[0] if congruent else TRUE_WEIGHTS[client])
        if congruent:
            x[:, 1 - client] = 0
        chances = 1 / (1 + np.exp(-x @ weights))
        return x, (generator.random(2 * points) < chances).astype(np.int64)

    return _federation("two risks", 2, points, seed, draw)


class TwoWeights(nn.Module):
    """Logistic regression of two weights and no bias, so that its optimization path can be drawn.

    Parameters
    ----------
    start
        The initial weights.
    """

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[n, 2]`` of points ``[n, 2]``."""
        score = x @ self.weights
        return torch.stack([torch.zeros_like(score), score], dim=1)


def risk(federation: Federation, client: int, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a client's empirical risk in nats at weights ``[..., 2]`` of :class:`TwoWeights`, ``[...]``."""
    x, y = (tensor.numpy().astype(np.float64) for tensor in federation.examples(client, "train"))
    return np.logaddexp(0, -(2 * y - 1) * (weights @ x.T)).mean(-1)


def _blobs(centres: NDArray[np.int64], generator: np.random.Generator) -> Points:
    return (centres + SPREAD * generator.normal(size=centres.shape)).astype(np.float32)


def _federation(
    name: str,
    clients: int,
    points: int,
    seed: int,
    draw: Callable[[int, np.random.Generator], tuple[Points, NDArray[np.int64]]],
) -> Federation:
    drawn = [draw(client % 2, rng.generator(seed, name, client)) for client in range(clients)]
    places = np.arange(clients * 2 * points).reshape(clients, 2, points)
    members = [ClientData(i, f"client-{i}", i, places[i, 0], places[i, 1][:0], places[i, 1]) for i in range(clients)]
    x, y = np.concatenate([x for x, _ in drawn]), np.concatenate([y for _, y in drawn])
    train, test = places[:, 0].ravel(), places[:, 1].ravel()
    pool = Pool(name, torch.from_numpy(x), torch.from_numpy(y), y, train, test, outputs=2)
    return Federation(pool, tuple(members), {i: i % 2 for i in range(clients)}, name)
