"""FlexCFL (Duan et al. 2021), step by step, in NumPy's float64 and plain loops; data may change between rounds.

Only the local training is the library's, with the library's random draws. Instead of running k-means it takes the
tightest partition. The choices are those of ``algorithms/flexcfl.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import wasserstein_distance
from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd
from tests.reference.fedgroup import cosine, drawn, tightest, zeta


@dataclass
class AfterRound:
    """The groups, their models, who has shifted, and the global model."""

    groups: list[set[int]]
    models: list[Vector]
    shifted: set[int]
    w: Vector


def flex_cfl(
    w_0: Vector,
    federation_of: Callable[[int], Federation],
    module: nn.Module,
    spec: LocalTraining,
    *,
    m: int,
    alpha: int,
    eta_g: float,
    steps: int,
    seed: int,
    rounds: int,
    labels: int,
    fraction: float = 1.0,
) -> list[AfterRound]:
    ids = sorted(federation_of(1).ids)

    def counts(i: int, t: int) -> Vector:
        return np.bincount(federation_of(t).examples(i, "train")[1].numpy(), minlength=labels)

    def trained(i: int, w: Vector, t: int) -> Vector:
        federation = federation_of(t)
        return sgd(w, federation.by_id[i], federation, module, spec, seed, t)

    def pre_trained(i: int, t: int) -> Vector:
        few, federation = replace(spec, epochs=None, steps=steps), federation_of(t)
        return sgd(w_0, federation.by_id[i], federation, module, few, seed, t, "pretrain") - w_0

    label_count = {i: counts(i, 1) for i in ids}
    S = drawn(dict.fromkeys(ids), min(alpha * m, len(ids)), "pretrain", seed, 1)  # group cold start
    delta_W = np.array([pre_trained(i, 1) for i in S])
    V = np.linalg.svd(delta_W.T, full_matrices=False)[0][:, :m]
    M = np.array([zeta(delta, V) for delta in delta_W])
    g = [{S[row] for row in part} for part in tightest(M, m)]
    opt_updates = [np.mean([delta_W[S.index(i)] for i in g_j], axis=0) for g_j in g]
    W = [w_0 + update for update in opt_updates]

    def cold_start(i: int, t: int) -> None:
        update = pre_trained(i, t)
        g[int(np.argmin([(1 - cosine(update, opt)) / 2 for opt in opt_updates]))].add(i)

    history = []
    for t in range(1, rounds + 1):
        shifted = set()
        for i in ids:
            emd = wasserstein_distance(counts(i, t), label_count[i])
            if emd > 0.2 * sum(label_count[i]) / labels:
                label_count[i] = counts(i, t)
                if any(i in g_j for g_j in g):
                    shifted.add(i)
        for i in shifted:
            for g_j in g:
                g_j.discard(i)
            cold_start(i, t)
        S_t = drawn(dict.fromkeys(ids), max(1, round(fraction * len(ids))), "cohort", seed, t)
        for i in S_t:
            if not any(i in g_j for g_j in g):
                cold_start(i, t)
        for j in range(m):
            if mine := [i for i in S_t if i in g[j]]:
                n = {i: len(federation_of(t).by_id[i].train) for i in mine}
                W[j] = sum(n[i] / sum(n.values()) * trained(i, W[j], t) for i in mine)
        scale, there = [np.linalg.norm(w_j) for w_j in W], [j for j in range(m) if g[j]]
        weights = [[1.0 if k == j else eta_g / scale[k] for k in range(m)] for j in range(m)]
        # eq. 4
        after = {
            j: sum(weights[j][k] * W[k] for k in there) / sum(weights[j][k] for k in there)
            for j in there
        }
        W = [after.get(j, W[j]) for j in range(m)]
        history.append(
            AfterRound([set(g_j) for g_j in g], list(W), shifted, sum(after.values()) / len(there))
        )
    return history
