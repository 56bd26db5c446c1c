"""Algorithm 5 of the CFL paper, line by line, in NumPy's float64 and plain loops.

Only SGD_n itself is the library's, with the library's random draws. Its choices are those of ``algorithms/cfl.py``:

- Line 13 has the weights of eq. 2, unless ``weighted`` is false.
- After a split (line 19) the children have no Δθ_c of their own yet; line 7 of the next round takes their parent's.
- ε₁ may be "auto": a tenth of the largest ‖Δθ_c‖ that the cluster or one of its ancestors has seen.
- With ``stop`` it ends as Algorithms 2 and 3 do: when eq. 32 holds for every cluster, and none is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.core.params import Layout
from fedclade.data.federation import ClientData, Federation
from fedclade.tasks import FittedTask
from fedclade.training import loop
from tests.reference.bipartition import alpha_cross_max, bipartition

Vector = np.ndarray


@dataclass
class AfterRound:
    """What Algorithm 5 knows at the end of a round; the models are those that the next round starts from."""

    clusters: set[frozenset[int]]
    theta: dict[int, Vector]
    mean_norms: dict[frozenset[int], float]
    max_norms: dict[frozenset[int], float]


def sgd(
    theta: Vector,
    client: ClientData,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    seed: int,
    number: int,
    purpose: str = "train",
    anchor: Vector | None = None,
) -> Vector:
    """SGD_n(θ, D_i): the parameters after local training."""
    pull = None if anchor is None else torch.from_numpy(anchor.astype(np.float32))
    model = torch.from_numpy(theta.astype(np.float32))
    examples = federation.examples(client.id, "train")
    draw = rng.torch_generator(seed, purpose, number, client.key)
    delta, _ = loop.train(
        module,
        Layout.of(module),
        model,
        examples,
        spec,
        spec.lr_at(number),
        FittedTask(),
        draw,
        pull,
    )
    return theta + delta.numpy().astype(np.float64)


def clustered_federated_learning(
    theta_0: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    eps1: float | str,
    eps2: float,
    gamma_max: float,
    seed: int,
    rounds: int,
    weighted: bool = True,
    stop: bool = False,
    P: Callable[[Vector], Vector] = lambda v: v,
    P_inverse: Callable[[Vector], Vector] = lambda v: v,
) -> list[AfterRound]:
    clients = {client.id: client for client in federation.clients}
    size = {i: len(client.train) for i, client in clients.items()}
    C = {frozenset(clients)}  # line 3
    theta = dict.fromkeys(clients, theta_0)
    delta_of_cluster = {c: np.zeros_like(theta_0) for c in C}
    peak = dict.fromkeys(C, 0.0)
    history = []
    for number in range(1, rounds + 1):  # line 4
        delta = {}
        for i in clients:  # line 5
            mine = next(c for c in C if i in c)
            theta[i] = theta[i] + P_inverse(delta_of_cluster[mine])  # line 7
            # line 8
            delta[i] = P(
                sgd(theta[i], clients[i], federation, module, spec, seed, number) - theta[i]
            )
        C_tmp, mean_norms, max_norms, stationary = set(C), {}, {}, set()  # line 11
        for c in C:  # line 12
            weight = {i: size[i] if weighted else 1 for i in c}
            D_c = sum(weight.values())
            delta_of_cluster[c] = sum(weight[i] / D_c * delta[i] for i in c)  # line 13
            mean_norms[c] = float(np.linalg.norm(delta_of_cluster[c]))
            max_norms[c] = max(float(np.linalg.norm(delta[i])) for i in c)
            peak[c] = max(peak[c], mean_norms[c])
            threshold = peak[c] / 10 if eps1 == "auto" else eps1
            if mean_norms[c] < threshold:  # Algorithm 2, line 8
                stationary.add(c)
            if len(c) > 1 and mean_norms[c] < threshold and max_norms[c] > eps2:  # line 14
                members = sorted(c)
                # line 15
                alpha = np.array([[_cosine(delta[i], delta[j]) for j in members] for i in members])
                c1, c2 = bipartition(alpha)  # line 16
                cross = alpha_cross_max(alpha, c1, c2)  # line 17
                if gamma_max < np.sqrt((1 - cross) / 2):  # line 18
                    parts = [frozenset(members[k] for k in part) for part in (c1, c2)]
                    C_tmp = (C_tmp - {c}) | set(parts)  # line 19
                    for part in parts:
                        delta_of_cluster[part], peak[part] = delta_of_cluster[c], peak[c]
        ended = stop and stationary == C == C_tmp  # Algorithm 3, lines 6 and 9
        C = C_tmp  # line 23
        moved = {
            i: theta[i] + P_inverse(delta_of_cluster[next(c for c in C if i in c)]) for i in clients
        }
        history.append(AfterRound(C, moved, mean_norms, max_norms))
        if ended:
            break
    return history


def _cosine(a: Vector, b: Vector) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
