"""Algorithm 1 of the FL+HC paper (Briggs, Fan, Andras 2020), line by line, in NumPy's float64 and plain loops.

Only the local SGD is the library's, with the library's random draws. Where the paper's pseudo-code needs care:

- Line 4 keeps counting rounds where lines 7 to 9 and 13 go on: n rounds, one that asks everybody, and then the others.
- Line 8 calls the result of CLIENTUPDATE, which returns w (line 33), Δw. It is "the difference between the global model
  and local model parameters" (section II).
- Line 24 sums over all K clients; those that were not in S_t sent nothing, and n is the number of examples of S_t.
- With ``keep`` the updates of lines 7 to 9 are those of a round: line 24 moves every cluster by them.
- ``centroid`` is "average linkage" as section I-C words it; ``average`` is UPGMA, the mean over all pairs.
- Line 19 is called with all clients (line 4) and with those of a cluster (line 14). With ``of_all`` its K is the number
  of all clients in both, and a cluster of fewer than m clients trains whole; else it is the procedure's argument.
- With ``parameters`` the vectors are those of section I-C, "the parameters of the local model".
- The hierarchical clustering algorithm (line 10) is the text of section I-C, with the linkages of its reference [7].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.data.federation import Federation
from tests.reference.cfl import sgd

Vector = np.ndarray
Cluster = frozenset[int]


@dataclass
class AfterRound:
    """Every client's model after a round, and the clusters."""

    clusters: set[Cluster]
    w: dict[int, Vector]


def fl_hc(
    w: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    n: int,
    alpha: float,
    metric: str,
    linkage: str,
    T: float,
    seed: int,
    rounds: int,
    parameters: bool = False,
    keep: bool = False,
    of_all: bool = True,
) -> list[AfterRound]:
    all_clients = K = [client.id for client in federation.clients]
    by_id = {client.id: client for client in federation.clients}
    size = {client.id: len(client.train) for client in federation.clients}
    history = []

    def client_update(k: int, w: Vector, t: int) -> Vector:  # lines 26 to 34
        return sgd(w, by_id[k], federation, module, spec, seed, t)

    def federated_learning(
        w: Vector, K: Sequence[int], t: int, draw: np.random.Generator
    ) -> Vector:  # line 18
        m = max(round(alpha * len(all_clients if of_all else K)), 1)  # line 19
        m = min(m, len(K))
        S_t = sorted(draw.choice(np.sort(K), m, replace=False).tolist())  # line 20
        w_k = {k: client_update(k, w, t) for k in S_t}  # lines 21 to 23
        examples = sum(size[k] for k in S_t)
        return sum(size[k] / examples * w_k[k] for k in S_t)  # line 24

    for t in range(1, n + 1):  # line 3
        w = federated_learning(w, K, t, rng.generator(seed, "cohort", t))  # lines 4 and 6
        history.append(AfterRound({frozenset(K)}, dict.fromkeys(K, w)))
    delta_w = {k: client_update(k, w, n + 1) - w for k in K}  # lines 7 to 9
    vectors = {k: w + delta for k, delta in delta_w.items()} if parameters else delta_w
    C = hierarchical_clustering(vectors, metric, linkage, T)  # line 10
    w_c = dict.fromkeys(C, w)  # lines 11 and 12
    if keep:
        for c in C:
            examples = sum(size[k] for k in c)
            w_c[c] = sum(size[k] / examples * (w + delta_w[k]) for k in c)  # line 24
    history.append(AfterRound(set(C), {k: w_c[c] for c in C for k in c}))
    for t in range(n + 2, rounds + 1):  # line 13
        draw = rng.generator(seed, "cohort", t)
        for c in sorted(C, key=lambda c: (-len(c), min(c))):
            w_c[c] = federated_learning(w_c[c], sorted(c), t, draw)  # line 14
        history.append(AfterRound(set(C), {k: w_c[c] for c in C for k in c}))
    return history


def hierarchical_clustering(
    vectors: dict[int, Vector], metric: str, linkage: str, T: float
) -> set[Cluster]:
    """Merge the two nearest clusters until the nearest two are further apart than T (section I-C)."""
    C = [frozenset([k]) for k in vectors]
    for a, b, height in merges(vectors, metric, linkage):
        if height > T:
            break
        C = [c for c in C if c not in (a, b)] + [a | b]
    return set(C)


def merges(
    vectors: dict[int, Vector], metric: str, linkage: str
) -> list[tuple[Cluster, Cluster, float]]:
    """Return the N - 1 merges, each of the two clusters that are nearest then, with their distance."""
    C = [frozenset([k]) for k in vectors]
    done = []
    while len(C) > 1:
        pairs = [(a, b) for i, a in enumerate(C) for b in C[i + 1 :]]
        apart = [between(a, b, vectors, metric, linkage) for a, b in pairs]
        nearest = int(np.argmin(apart))
        a, b = pairs[nearest]
        done.append((a, b, apart[nearest]))
        C = [c for c in C if c not in (a, b)] + [a | b]
    return done


METRICS: dict[str, Callable[[Vector, Vector], float]] = {
    "l1": lambda u, v: float(np.abs(u - v).sum()),
    "l2": lambda u, v: float(np.sqrt(((u - v) ** 2).sum())),
    "cosine": lambda u, v: float(1 - u @ v / np.sqrt((u @ u) * (v @ v))),
}


def between(a: Cluster, b: Cluster, vectors: dict[int, Vector], metric: str, linkage: str) -> float:
    """Return the distance of two clusters.

    Ward's is the growth of the sum of squares around the means, in the units of a distance: √(2·growth), which for two
    clusters of one client is the distance of these.
    """
    if linkage == "ward":
        return float(
            np.sqrt(2 * (scatter(a | b, vectors) - scatter(a, vectors) - scatter(b, vectors)))
        )
    if linkage == "centroid":
        mean_a, mean_b = (np.mean([vectors[k] for k in c], axis=0) for c in (a, b))
        return METRICS[metric](mean_a, mean_b)
    apart = [METRICS[metric](vectors[i], vectors[j]) for i in a for j in b]
    return {"single": min, "complete": max, "average": np.mean}[linkage](apart)


def scatter(c: Cluster, vectors: dict[int, Vector]) -> float:
    members = np.array([vectors[k] for k in c])
    return float(((members - members.mean(0)) ** 2).sum())
