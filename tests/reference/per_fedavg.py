"""Algorithm 1 of Fallah et al. 2020 (Per-FedAvg, FO and HF), step by step, in torch's float64, without the library.

D′ are the batches of the client's epochs, D and D″ those of further orders, all of them the library's draws. The mean
has the weights |D_i|. Personal models take one step on the first batch of the library's draw for it.
"""

from __future__ import annotations

import torch

from fedclade.core import rng
from tests.reference.local_steps import gradient, orders, size


def per_fedavg(w, federation, module, spec, *, alpha, hessian, delta, seed, cohorts):
    """Return w, and the model of each client after its own step, after every round."""
    w, history = w.double(), []
    for t, A_t in enumerate(cohorts, start=1):
        beta, mean, total = (
            spec.lr_at(t),
            torch.zeros_like(w),
            sum(size(federation, i) for i in A_t),
        )
        for i in A_t:
            w_i = w
            for batches in orders(federation, i, spec, seed, t, 3 if hessian else 2):

                def grad(at, batch, i=i):
                    return gradient(at, federation, i, module, batch)

                after = w_i - alpha * grad(w_i, batches[1])
                g = grad(after, batches[0])
                if hessian:
                    above, below = (
                        grad(w_i + delta * g, batches[2]),
                        grad(w_i - delta * g, batches[2]),
                    )
                    g = g - alpha * (above - below) / (2 * delta)
                w_i = w_i - beta * g
            mean = mean + size(federation, i) / total * w_i
        w, own = mean, {}
        for client in federation.clients:
            draw = rng.torch_generator(seed, "finetune", t, client.key)
            first = torch.randperm(len(client.train), generator=draw)[: spec.batch_size]
            own[client.id] = w - alpha * gradient(w, federation, client.id, module, first)
        history.append((w, own))
    return history
