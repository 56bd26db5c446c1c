"""Algorithm 1 of Karimireddy et al. 2020 (SCAFFOLD, option II), step by step, in torch's float64, without the library.

K are the batches of a client's epochs, in the library's order. Means have the weights |D_i|, that of the c_i over all N
clients; ``plain`` means, as in lines 16 and 17, have none. Clients send c_i⁺ − c_i, as the algorithm has it.
"""

from __future__ import annotations

import torch

from tests.reference.local_steps import gradient, orders, size


def scaffold(x, federation, module, spec, *, server_lr, seed, cohorts, plain=False):
    """Return x, c and every c_i after every round; ``cohorts`` are the clients S of each."""
    x, history = x.double(), []
    c = torch.zeros_like(x)
    c_of = {client.id: torch.zeros_like(x) for client in federation.clients}
    weight = {i: 1 if plain else size(federation, i) for i in c_of}
    of_all = sum(weight.values())
    for t, S in enumerate(cohorts, start=1):
        eta, of_S = spec.lr_at(t), sum(weight[i] for i in S)
        dx, dc = torch.zeros_like(x), torch.zeros_like(x)
        for i in S:
            y, K = x, 0
            for (batch,) in orders(federation, i, spec, seed, t, 1):
                y = y - eta * (gradient(y, federation, i, module, batch) - c_of[i] + c)
                K += 1
            plus = c_of[i] - c + (x - y) / (K * eta)
            dx = dx + weight[i] / of_S * (y - x)
            dc = dc + weight[i] / of_all * (plus - c_of[i])
            c_of[i] = plus
        x, c = x + server_lr * dx, c + dc
        history.append((x, c, dict(c_of)))
    return history
