"""CLoVE (Bhatia et al. 2026), step by step, in NumPy's float64 and plain loops, in the order of the authors' code.

The best clusters and the best matching are found by trying all of them, without scikit-learn and SciPy. Only the
stochastic gradient steps are the library's, with the library's random draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd
from tests.reference.fedgroup import drawn
from tests.reference.ifca import risk


@dataclass
class AfterRound:
    """The model of each client, the models, and whether clustering has stopped."""

    model_of: dict[int, int]
    theta: list[Vector]
    stopped: bool


def partitions(n: int, K: int) -> Iterator[tuple[int, ...]]:
    """All ways to put n points in at most K clusters, each way once."""
    for labels in product(range(K), repeat=n):
        firsts = [labels.index(k) for k in sorted(set(labels))]
        if firsts == sorted(firsts) and sorted(set(labels)) == list(range(len(firsts))):
            yield labels


def best_clusters(L: Sequence[Vector], K: int) -> list[list[int]]:
    """The K clusters of points with the least sum of squared distances from their means."""
    points = np.array(L)

    def spread(labels: tuple[int, ...]) -> float:
        at = np.array(labels)
        return sum(
            float(((points[at == k] - points[at == k].mean(axis=0)) ** 2).sum())
            for k in set(labels)
        )

    best = min(partitions(len(points), K), key=spread)
    return [
        [place for place, k in enumerate(best) if k == cluster] for cluster in sorted(set(best))
    ]


def best_matching(
    clusters: Sequence[Sequence[int]], L: Sequence[Vector], K: int
) -> tuple[int, ...]:
    """For each cluster its model: the assignment with the least sum of the members' losses."""

    def cost(models: tuple[int, ...]) -> float:
        return sum(L[i][j] for members, j in zip(clusters, models, strict=True) for i in members)

    return min(permutations(range(K), len(clusters)), key=cost)


def clustering_of_loss_vectors(
    theta_0: Sequence[Vector],
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    seed: int,
    rounds: int,
    stable_rounds: int = 3,
    square_root: bool = False,
    fraction: float = 1.0,
) -> list[AfterRound]:
    clients = {client.id: client for client in federation.clients}
    n = {i: len(client.train) for i, client in clients.items()}
    theta, K = list(theta_0), len(theta_0)
    past: dict[int, list[int]] = {i: [] for i in clients}
    centroids: Mapping[int, Vector] = {}
    stopped, history = False, []

    def losses(i: int) -> Vector:
        found = np.array([risk(model, i, federation, module)[0] for model in theta])
        return np.sqrt(found) if square_root else found

    for t in range(1, rounds + 1):
        M_t = sorted(drawn(clients, max(1, round(fraction * len(clients))), "cohort", seed, t))
        last = {i: past[i][-stable_rounds:] for i in M_t}
        stopped = stopped or all(
            len(h) == stable_rounds and len(set(h)) == 1 for h in last.values()
        )
        if not stopped:
            L = [losses(i) for i in M_t]
            clusters = best_clusters(L, K)
            models = best_matching(clusters, L, K)
            centroids = {
                j: np.mean([L[place] for place in members], axis=0)
                for members, j in zip(clusters, models, strict=True)
            }
            for members, j in zip(clusters, models, strict=True):
                for place in members:
                    past[M_t[place]].append(j)
        for i in M_t:
            if not past[i]:
                L_i = losses(i)
                past[i].append(min(centroids, key=lambda j: np.linalg.norm(centroids[j] - L_i)))
        trained = {
            i: sgd(theta[past[i][-1]], clients[i], federation, module, spec, seed, t) for i in M_t
        }
        for j in range(K):
            if members := [i for i in M_t if past[i][-1] == j]:
                theta[j] = sum(n[i] * trained[i] for i in members) / sum(n[i] for i in members)
        now = {i: models[-1] for i, models in past.items() if models}
        history.append(AfterRound(now, list(theta), stopped))
    return history
