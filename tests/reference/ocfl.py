"""OCFL (Zuziak et al. 2024), step by step, in NumPy's float64 and plain loops, in the order of the authors' code.

Mean shift is written out, without scikit-learn. Only the stochastic gradient steps are the library's, with the
library's random draws. Means have the weights |D_i|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd
from tests.reference.fedgroup import cosine


@dataclass
class AfterRound:
    """The clusters, their models, and the temperature; None after the clustering."""

    clusters: list[list[int]]
    models: list[Vector]
    temperature: float | None


def mean_shift(points: Sequence[Vector]) -> list[int]:
    """Mean shift with a flat kernel; the bandwidth is the mean distance of the ⌊0.3 n⌋-th nearest point."""
    X = np.array(points)
    apart = np.linalg.norm(X[:, None] - X[None], axis=2)
    nearest = max(1, int(len(X) * 0.3))
    bandwidth = np.mean([np.sort(row)[nearest - 1] for row in apart])
    modes: dict[tuple[float, ...], int] = {}
    for start in X:
        mean = start
        for _ in range(300):
            near = X[np.linalg.norm(X - mean, axis=1) <= bandwidth]
            before, mean = mean, near.mean(axis=0)
            if np.linalg.norm(mean - before) <= 1e-3 * bandwidth:
                break
        modes[tuple(mean)] = len(near)
    centres: list[Vector] = []
    for mode in sorted(modes, key=lambda mode: (modes[mode], mode), reverse=True):
        if all(np.linalg.norm(np.array(mode) - centre) > bandwidth for centre in centres):
            centres.append(np.array(mode))
    return [int(np.argmin([np.linalg.norm(x - centre) for centre in centres])) for x in X]


def one_shot_clustering(
    theta: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    seed: int,
    rounds: int,
) -> list[AfterRound]:
    clients = {client.id: client for client in federation.clients}
    n = {i: len(client.train) for i, client in clients.items()}
    clusters, models = [sorted(clients)], [theta]
    last, shot, history = math.inf, False, []
    for t in range(1, rounds + 1):
        model_of = {i: models[k] for k, members in enumerate(clusters) for i in members}
        delta = {
            i: sgd(model_of[i], client, federation, module, spec, seed, t) - model_of[i]
            for i, client in clients.items()
        }
        temperature = None
        if not shot:
            Gamma = [
                [0.0 if i == j else 1 - cosine(delta[i], delta[j]) for j in clients]
                for i in clients
            ]
            squares = sum(entry**2 for row in Gamma for entry in row)
            temperature = math.sqrt(squares) / math.sqrt(len(clients) * (len(clients) - 1) * 2**2)
            if temperature > last:
                labels = dict(
                    zip(clients, mean_shift([np.array(row) for row in Gamma]), strict=True)
                )
                clusters = [[i for i in clients if labels[i] == k] for k in set(labels.values())]
                models, shot = [models[0]] * len(clusters), True
            last = temperature
        models = [
            model + sum(n[i] * delta[i] for i in members) / sum(n[i] for i in members)
            for model, members in zip(models, clusters, strict=True)
        ]
        history.append(AfterRound([list(members) for members in clusters], models, temperature))
    return history
