"""Algorithm 1 of Xie et al. 2020 (FeSEM), step by step, in NumPy's float64 and plain loops.

Its loop is E-step, M-step, local update; here it begins with the local update, from a common model, so that there are
local models to begin the first E-step with. The first centres are those of Ward's method. Means have the weights |D_i|.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd


@dataclass
class AfterRound:
    """The centre of each client, and where the centres are."""

    r: dict[int, int]
    centres: list[Vector]


def wards_method(W: dict[int, Vector], K: int) -> list[list[int]]:
    """Merge the two clusters whose union has the smallest rise of the sum of squares, until K are left."""
    clusters = [[i] for i in W]

    def rise(a: list[int], b: list[int]) -> float:
        apart = np.mean([W[i] for i in a], axis=0) - np.mean([W[i] for i in b], axis=0)
        return len(a) * len(b) / (len(a) + len(b)) * float(apart @ apart)

    while len(clusters) > K:
        pairs = [(a, b) for n, a in enumerate(clusters) for b in clusters[n + 1 :]]
        a, b = min(pairs, key=lambda pair: rise(*pair))
        clusters = [c for c in clusters if c not in (a, b)] + [a + b]
    return clusters


def federated_sem(
    theta_0: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    K: int,
    seed: int,
    rounds: int,
) -> list[AfterRound]:
    clients = {client.id: client for client in federation.clients}
    size = {i: len(client.train) for i, client in clients.items()}

    def mean(W: dict[int, Vector], members: list[int]) -> Vector:
        return sum(size[i] * W[i] for i in members) / sum(size[i] for i in members)

    r, centres, history = {}, [theta_0] * K, []
    for t in range(1, rounds + 1):
        W = {}
        for i, client in clients.items():
            # Local_update
            W[i] = sgd(centres[r[i]] if r else theta_0, client, federation, module, spec, seed, t)
        if not r:
            centres = [mean(W, members) for members in wards_method(W, K)]
        for i in clients:  # E-step
            r[i] = int(np.argmin([np.linalg.norm(W[i] - centre) for centre in centres]))
        for k in range(K):  # M-step
            if members := [i for i in clients if r[i] == k]:
                centres[k] = mean(W, members)
        history.append(AfterRound(dict(r), list(centres)))
    return history
