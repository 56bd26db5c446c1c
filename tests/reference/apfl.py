"""Algorithm 1 of Deng et al. 2020 (APFL), step by step, in torch's float64, without the library.

Every client of a round has τ local steps: its epochs over its own data. Batches are the library's draws; the mean has
the weights |D_i|. ``adaptive`` is eq. 10 in every step. ``code`` is how the authors' code moves α (FedTorch,
``alpha_update``): after the first step of a round alone, by the gradients of the mixture's loss.
"""

from __future__ import annotations

import torch

from tests.reference.local_steps import gradient, orders, size


def apfl(w, federation, module, spec, *, alpha, adaptive, seed, cohorts, code=False):
    """Return w, and every v̄_i and α_i, after every round; ``cohorts`` are the clients U of each."""
    w, v, mixed, alphas = w.double(), {}, {}, {}
    history = []
    for t, U in enumerate(cohorts, start=1):
        eta, w_of = spec.lr_at(t), {}
        for i in U:
            w_i, v_i, a_i = w, v.get(i, w), alphas.get(i, alpha)
            for step, (batch,) in enumerate(orders(federation, i, spec, seed, t, 1)):
                v_bar = a_i * v_i + (1 - a_i) * w_i
                g_w, g_mixed = (gradient(at, federation, i, module, batch) for at in (w_i, v_bar))
                slope = float(g_mixed @ (v_i - w_i))
                w_i, v_i = w_i - eta * g_w, v_i - eta * a_i * g_mixed
                if adaptive and code and step == 0:
                    a_i = alpha_update(
                        w_i, v_i, a_i, eta, v_grad=a_i * g_mixed, w_grad=(1 - a_i) * g_mixed
                    )
                elif adaptive and not code:
                    a_i = min(1.0, max(0.0, a_i - eta * slope))
            w_of[i], v[i], alphas[i], mixed[i] = w_i, v_i, a_i, a_i * v_i + (1 - a_i) * w_i
        total = sum(size(federation, i) for i in U)
        w = sum((size(federation, i) / total * w_of[i] for i in U), start=torch.zeros_like(w))
        history.append((w, dict(mixed), dict(alphas)))
    return history


def alpha_update(w_i, v_i, alpha, eta, *, v_grad, w_grad):
    """FedTorch's function of this name: α after a step along the gradients of both models, with its decay of 0.02."""
    dif = v_i - w_i
    grad = alpha * v_grad + (1 - alpha) * w_grad
    grad_alpha = float(dif @ grad) + 0.02 * alpha
    return min(1.0, max(0.0, alpha - eta * grad_alpha))
