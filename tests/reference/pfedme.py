"""Algorithm 1 of Dinh et al. 2020 (pFedMe), step by step, in torch's float64, without the library.

The R local rounds are the batches of the client's epochs, in the library's order. θ begins with w, and goes on from one
batch to the next. The mean has the weights |D_i|. ``scores_w`` serves w_i after its last step in place of θ_i. That is
what the released code scores: its list of personal parameters is that of the model, which ``train`` sets to w_i.
"""

from __future__ import annotations

import torch

from tests.reference.local_steps import gradient, orders, size


def pfedme(
    w, federation, module, spec, *, lam, K, personal_lr, beta, seed, cohorts, scores_w=False
):
    """Return w and every θ_i, or w_i, after every round; ``cohorts`` are the clients S_t of each."""
    w, theta, history = w.double(), {}, []
    for t, S_t in enumerate(cohorts, start=1):
        mean, total = torch.zeros_like(w), sum(size(federation, i) for i in S_t)
        for i in S_t:
            w_i = theta_i = w
            for (batch,) in orders(federation, i, spec, seed, t, 1):
                for _ in range(K):
                    g = gradient(theta_i, federation, i, module, batch)
                    theta_i = theta_i - personal_lr * (g + lam * (theta_i - w_i))
                w_i = w_i - spec.lr_at(t) * lam * (w_i - theta_i)
            theta[i] = w_i if scores_w else theta_i
            mean = mean + size(federation, i) / total * w_i
        w = (1 - beta) * w + beta * mean
        history.append((w, dict(theta)))
    return history
