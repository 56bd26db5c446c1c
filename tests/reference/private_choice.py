"""Private choice without noise, step by step, in NumPy's float64 and plain loops.

Only the local training, the random draws and k-means, scikit-learn's, are the library's. Sums over clients are taken of
u uᵀ and of each cell as the header of ``algorithms/private_choice.py`` says them, not as vectors of a question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd


@dataclass
class AfterRound:
    """The clusters, and the model of each."""

    clusters: list[list[int]]
    models: list[Vector]


def private_choice(
    w: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    k: int,
    rounds_before: int,
    R: int,
    B: int,
    seed: int,
    rounds: int,
) -> list[AfterRound]:
    ids = sorted(federation.ids)
    n = {i: len(federation.by_id[i].train) for i in ids}
    clusters, models, history = [ids], [w], list[AfterRound]()
    for t in range(1, rounds + 1):
        if t == rounds_before + 1:
            w = models[0]
            u = {
                i: signature(
                    sgd(w, federation.by_id[i], federation, module, spec, seed, t) - w, R, seed
                )
                for i in ids
            }
            chosen = choices(u, k, B, seed, t)
            clusters = [[i for i in ids if chosen[i] == c] for c in range(k)]
            clusters.sort(key=lambda cluster: (-len(cluster), cluster))
            models = [w] * k
        else:
            new = list[Vector]()
            for cluster, model in zip(clusters, models, strict=True):
                trained = {
                    i: sgd(model, federation.by_id[i], federation, module, spec, seed, t)
                    for i in cluster
                }
                new.append(sum(n[i] * trained[i] for i in cluster) / sum(n[i] for i in cluster))
            models = new
        history.append(AfterRound(clusters, models))
    return history


def signature(update: Vector, R: int, seed: int) -> Vector:
    """u: the count sketch of an update, scaled to length 1."""
    draw = rng.torch_generator(seed, "private signature")
    bucket = torch.randint(R, (len(update),), generator=draw).tolist()
    heads = torch.randint(2, (len(update),), generator=draw).tolist()
    u = np.zeros(R)
    for j, entry in enumerate(update):
        u[bucket[j]] += entry if heads[j] else -entry
    return u / np.sqrt(sum(each**2 for each in u))


def choices(u: dict[int, Vector], k: int, B: int, seed: int, t: int) -> dict[int, int]:
    """Which centre each client takes."""
    moment = sum(np.outer(each, each) for each in u.values())
    basis = np.linalg.eigh(moment)[1][:, -k:]  # of the k largest eigenvalues
    v = {i: basis.T @ each / np.linalg.norm(basis.T @ each) for i, each in u.items()}
    points = [
        point / np.linalg.norm(point)
        for point in rng.generator(seed, "cells", t).standard_normal((B, k))
    ]
    count, total = [0] * B, [np.zeros(k) for _ in range(B)]
    for mine in v.values():
        cell = max(range(B), key=lambda b: points[b] @ mine)
        count[cell] += 1
        total[cell] = total[cell] + mine
    full = [b for b in range(B) if count[b]]
    assert len(full) >= k
    means = np.array([total[b] / np.linalg.norm(total[b]) for b in full])
    weights = [count[b] for b in full]
    centres = (
        KMeans(k, n_init=50, random_state=0).fit(means, sample_weight=weights).cluster_centers_
    )
    centres = [centre / np.linalg.norm(centre) for centre in centres]
    return {i: max(range(k), key=lambda c: centres[c] @ mine) for i, mine in v.items()}
