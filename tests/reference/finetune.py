"""FedAvg with fine-tuning, step by step: every round's average in NumPy's float64, SGD and its draws the library's.

After FedAvg (McMahan et al. 2017, Algorithm 1; each client's w − w_t in place of w) every client k, whether or not it
was in S_t, trains a copy of the global model on its own data.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd


def finetune(
    w: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    epochs: int,
    seed: int,
    cohorts: list,
) -> list[tuple[Vector, dict[int, Vector]]]:
    """Return w and all copies after every round; ``cohorts`` are the clients S_t of each."""
    by_id = {client.id: client for client in federation.clients}
    history = []
    for t, S_t in enumerate(cohorts, start=1):
        w_k = {k: sgd(w, by_id[k], federation, module, spec, seed, t) for k in S_t}
        m_t = sum(len(by_id[k].train) for k in S_t)
        w = w + sum(len(by_id[k].train) / m_t * (w_k[k] - w) for k in S_t)
        longer = replace(spec, epochs=epochs)
        copies = {
            k: sgd(w, by_id[k], federation, module, longer, seed, t, "finetune") for k in by_id
        }
        history.append((w, copies))
    return history
