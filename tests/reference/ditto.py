"""Algorithm 1 of Li et al. 2021 (Ditto), step by step; the personal steps in torch's float64, without the library.

UPDATE_GLOBAL is FedAvg's local training, with the library's SGD and random draws. The personal model takes the same
batches in the same order. AGGREGATE has the weights |D_i|.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.core.params import Layout
from fedclade.data.federation import ClientData, Federation
from tests.reference.cfl import Vector, sgd


def personal_steps(
    v: Vector,
    w: Vector,
    lam: float,
    client: ClientData,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    seed: int,
    t: int,
) -> Vector:
    """Run v ← v − η(∇F_k(v) + λ(v − w)) for every batch."""
    module = copy.deepcopy(module).double()
    layout = Layout.of(module)
    x, y = federation.examples(client.id, "train")
    draw = rng.torch_generator(seed, "train", t, client.key)
    v_k, w_t = torch.from_numpy(v), torch.from_numpy(w)
    for _ in range(spec.epochs):
        for batch in torch.randperm(len(x), generator=draw).split(spec.batch_size):
            at = v_k.clone().requires_grad_()
            loss = functional.cross_entropy(
                functional_call(module, layout.unflatten(at), (x[batch].double(),)), y[batch]
            )
            (gradient,) = torch.autograd.grad(loss, at)
            v_k = v_k - spec.lr_at(t) * (gradient + lam * (v_k - w_t))
    return v_k.numpy()


def ditto(
    w: Vector,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    lam: float,
    seed: int,
    cohorts: list,
) -> list[tuple[Vector, dict[int, Vector]]]:
    """Return w and all v_k after every round; ``cohorts`` are the devices S_t of each."""
    v = {client.id: w for client in federation.clients}
    by_id = {client.id: client for client in federation.clients}
    history = []
    for t, S_t in enumerate(cohorts, start=1):
        delta = {}
        for k in S_t:
            delta[k] = sgd(w, by_id[k], federation, module, spec, seed, t) - w
            v[k] = personal_steps(v[k], w, lam, by_id[k], federation, module, spec, seed, t)
        total = sum(len(by_id[k].train) for k in S_t)
        w = w + sum(len(by_id[k].train) / total * delta[k] for k in S_t)
        history.append((w, {k: np.array(v_k) for k, v_k in v.items()}))
    return history
