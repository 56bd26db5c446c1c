"""StoCFL (Zeng et al. 2023), step by step, in NumPy's float64 and plain loops, in the order of the authors' code.

Only the local training is the library's, with the library's random draws. The choices are those of
``algorithms/stocfl.py``: means of models have the weights |D_i|, and who has no cluster yet is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd
from tests.reference.ditto import personal_steps
from tests.reference.fedgroup import cosine, drawn


@dataclass
class AfterRound:
    """The clusters and their models, and the global model."""

    clusters: list[list[int]]
    theta: list[Vector]
    omega: Vector


def stochastic_cfl(
    omega: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    tau: float,
    mu: float,
    anchor_epochs: int,
    seed: int,
    rounds: int,
    fraction: float = 1.0,
) -> list[AfterRound]:
    clients = {client.id: client for client in federation.clients}
    n = {i: len(client.train) for i, client in clients.items()}
    anchor, psi = omega, {}
    C: list[list[int]] = []  # clusters, oldest first
    theta: list[Vector | None] = []  # None: it has not trained

    def mean(models: dict[int, Vector]) -> Vector:
        return sum(n[i] * model for i, model in models.items()) / sum(n[i] for i in models)

    history = []
    for t in range(1, rounds + 1):
        S_t = drawn(clients, max(1, round(fraction * len(clients))), "cohort", seed, t)
        for i in S_t:  # distribution representation of those that have none
            if i not in psi:
                to_observe = replace(spec, epochs=anchor_epochs)
                psi[i] = (
                    sgd(anchor, clients[i], federation, module, to_observe, seed, t, "anchor")
                    - anchor
                )
                C.append([i])
                theta.append(None)
        sampled = [k for k in range(len(C)) if set(C[k]) & set(S_t)]
        Psi = {k: np.mean([psi[i] for i in C[k] if i in S_t], axis=0) for k in sampled}
        alike = {(a, b): cosine(Psi[a], Psi[b]) for a in sampled for b in sampled if a < b}
        now = {k: k for k in sampled}  # in which cluster each is by now
        for a, b in sorted(alike, key=alike.__getitem__, reverse=True):
            k, j = now[a], now[b]
            if alike[a, b] < tau or k == j:
                continue
            if (theta[k] is None, -len(C[k]), k) > (theta[j] is None, -len(C[j]), j):
                k, j = j, k
            C[k], C[j] = C[k] + C[j], []
            now = {each: k if place == j else place for each, place in now.items()}
        theta = [theta[k] for k in range(len(C)) if C[k]]
        C = [sorted(members) for members in C if members]
        for k in range(len(C)):
            if S_t_k := [i for i in S_t if i in C[k]]:
                start = omega if theta[k] is None else theta[k]
                trained = {
                    i: personal_steps(
                        start, omega, mu, clients[i], federation, module, spec, seed, t
                    )
                    for i in S_t_k
                }
                theta[k] = mean(trained)
        omega = mean({i: sgd(omega, clients[i], federation, module, spec, seed, t) for i in S_t})
        history.append(AfterRound([list(members) for members in C], list(theta), omega))
    return history
