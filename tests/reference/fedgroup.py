"""Algorithms 2 to 4 of the FedGroup paper, line by line, in NumPy's float64 and plain loops.

Only the local training is the library's, with the library's random draws. Instead of running k-means++ it looks at
every partition and takes the one whose clusters are the tightest. The choices are those of ``algorithms/fedgroup.py``:

- Algorithm 4 line 7 adds w_0; its mean is plain, unless ``weighted`` asks for that of Algorithm 1.
- All clients join a group before round 1, unless ``sampled`` leaves it to the round that first samples them.
- Δw_t^(g) of eq. 10 is the group's latest update: all that its model has moved since its clients last began to train.
  With ``position`` it is w_t^(g) − w_t.
- With ``redrawn``, RAC assigns clients of the round anew in every round, but for those that pre-trained for the groups.
- With ``remaining``, a client that joins a group by eq. 10 trains for E − 1 epochs from where it pre-trained (end of
  section III); its update is from the global model on, which is its anchor, too.
- All entries of eq. 7 are divided by the norm of the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.data.federation import Federation
from tests.reference.cfl import sgd

Vector = np.ndarray


@dataclass
class AfterRound:
    """What Algorithm 2 knows at the end of a round: the groups, their models, and the global model."""

    groups: list[set[int]]
    models: list[Vector]
    w: Vector
    cm: list[Vector] | None = None  # g_j.cm (Algorithm 4, line 6), of round 1
    squares: list[float] | None = None  # Σ ‖M_i − g_j.cm‖² over each group
    discrepancy: float = 0.0  # eq. 4, from the groups' models


def fed_group(
    w_0: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    m: int,
    alpha: int,
    eta_g: float,
    mu: float = 0.0,
    seed: int,
    rounds: int,
    fraction: float = 1.0,
    rac: bool = False,
    rcc: bool = False,
    weighted: bool = False,
    sampled: bool = False,
    position: bool = False,
    redrawn: bool = False,
    remaining: bool = False,
) -> list[AfterRound]:
    clients = {client.id: client for client in federation.clients}
    n = {i: len(client.train) for i, client in clients.items()}

    def pre_train(i: int, w: Vector, t: int) -> Vector:  # Algorithm 3, lines 11 to 16
        one_epoch = replace(spec, epochs=1, mu=0.0)
        return sgd(w, clients[i], federation, module, one_epoch, seed, t, "pretrain") - w

    def local(i: int, w: Vector, t: int) -> Vector:  # where a client of a group ends
        return sgd(w, clients[i], federation, module, replace(spec, mu=mu), seed, t)

    def going_on(i: int, pre: Vector, w: Vector, t: int) -> Vector:  # where a newcomer ends
        if spec.epochs == 1:
            return w + pre
        shorter = replace(spec, mu=mu, epochs=spec.epochs - 1)
        return sgd(w + pre, clients[i], federation, module, shorter, seed, t, anchor=w)

    # Algorithms 3 and 4
    if rcc:  # m clients pre-train, and each is a group
        S = drawn(clients, m, "pretrain", seed, 1)
        delta_W = np.array([pre_train(i, w_0, 1) for i in S])
        g = [{i} for i in S]
        cm = squares = None
    else:
        S = drawn(clients, min(alpha * m, len(clients)), "pretrain", seed, 1)  # Algorithm 3, line 2
        delta_W = np.array([pre_train(i, w_0, 1) for i in S])  # lines 3 to 6
        V = np.linalg.svd(delta_W.T, full_matrices=False)[0][:, :3]  # line 7
        M = np.array([zeta(delta, V) for delta in delta_W])  # lines 8 and 9
        parts = tightest(M, m)
        g = [{S[row] for row in part} for part in parts]  # Algorithm 4, line 3
        cm = [np.mean([M[row] for row in part], axis=0) for part in parts]  # line 6
        squares = [
            sum(float(((M[row] - cm[j]) ** 2).sum()) for row in part)
            for j, part in enumerate(parts)
        ]
    W = []
    for j in range(m):  # line 5
        weight = {i: n[i] if weighted else 1 for i in g[j]}
        # line 7
        W.append(w_0 + sum(weight[i] / sum(weight.values()) * delta_W[S.index(i)] for i in g[j]))
    began = [w_0 for _ in range(m)]  # so that W[j] - began[j] is the update of line 8
    # Algorithm 2
    w, history = w_0, []
    for t in range(1, rounds + 1):  # line 3
        S_t = drawn(clients, max(1, round(fraction * len(clients))), "cohort", seed, t)  # line 4
        joining = S_t if sampled or t > 1 else sorted(clients)
        cold = [i for i in joining if not any(i in g_j for g_j in g) or (redrawn and i not in S)]
        pre_trained = {}
        at_random = (
            rng.generator(seed, "cold start", t).integers(m, size=len(cold)).tolist() if rac else []
        )
        for k, i in enumerate(cold):
            direction = [W[j] - (w if position else began[j]) for j in range(m)]
            if not rac:
                pre_trained[i] = pre_train(i, w, t)
            distances = (
                [(1 - cosine(direction[j], pre_trained[i])) / 2 for j in range(m)]
                if not rac
                else []
            )
            for g_j in g:
                g_j.discard(i)
            g[at_random[k] if rac else int(np.argmin(distances))].add(i)  # eq. 10
        began = [W[j] if set(S_t) & g[j] else began[j] for j in range(m)]
        ends, W_tilde = {}, []
        for j in range(m):  # lines 5 to 8
            S_t_j = set(S_t) & g[j]
            delta = {}
            for i in S_t_j:
                go_on = remaining and i in pre_trained
                start = w if go_on else W[j]
                ends[i] = going_on(i, pre_trained[i], w, t) if go_on else local(i, W[j], t)
                delta[i] = ends[i] - start  # Algorithm 1, line 14
            # line 8
            W_tilde.append(W[j] + sum(n[i] / sum(n[k] for k in S_t_j) * delta[i] for i in S_t_j))
        # lines 20 to 25
        W = [
            W_tilde[j]
            + eta_g
            * sum((W_tilde[k] / np.linalg.norm(W_tilde[k]) for k in range(m) if k != j), 0 * w)
            for j in range(m)
        ]
        w = sum(W) / m  # line 11
        # eq. 4
        apart = sum(
            float(np.linalg.norm(ends[i] - W[j])) for j in range(m) for i in set(S_t) & g[j]
        )
        history.append(AfterRound([set(g_j) for g_j in g], W, w, cm, squares, apart))
    return history


def zeta(delta: Vector, V: Vector) -> Vector:
    """Eqs. 7 and 8."""
    return (1 - np.array([cosine(delta, v) for v in V.T])) / 2


def tightest(M: Vector, m: int) -> list[list[int]]:
    """Return the partition of the rows into m clusters with the least sum of squares within clusters."""

    def squares(parts: Sequence[Sequence[int]]) -> float:
        return sum(float(((M[part] - M[part].mean(0)) ** 2).sum()) for part in map(list, parts))

    return min((parts for parts in partitions(len(M)) if len(parts) == m), key=squares)


def partitions(n: int) -> Iterator[list[list[int]]]:
    """Yield every partition of the numbers below n; parts in the order of their smallest number."""
    if n == 0:
        yield []
        return
    for parts in partitions(n - 1):
        for k in range(len(parts)):
            yield [[*part, n - 1] if j == k else part for j, part in enumerate(parts)]
        yield [*parts, [n - 1]]


def drawn(clients: dict[int, object], count: int, purpose: str, seed: int, t: int) -> list[int]:
    return sorted(
        rng.generator(seed, purpose, t).choice(sorted(clients), count, replace=False).tolist()
    )


def cosine(a: Vector, b: Vector) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
