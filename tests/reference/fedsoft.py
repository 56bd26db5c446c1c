"""Algorithm 1 of Ruan and Joe-Wong 2022 (FedSoft), in NumPy's and torch's float64 and plain loops.

Only the random draws are the library's. Each of the K proximal terms is taken by itself, with weights u_ik whose sum is
1; the choices are those of ``algorithms/fedsoft.py``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.core.params import Layout
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector


@dataclass
class AfterRound:
    """The centres, the clients' models, and the importance weights."""

    c: list[Vector]
    w: dict[int, Vector]
    u: dict[int, Vector]


def fed_soft(
    initial: list[Vector],
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    lam: float,
    S: int,
    tau: int,
    seed: int,
    rounds: int,
) -> list[AfterRound]:
    module = copy.deepcopy(module).double()
    layout = Layout.of(module)
    clients = {client.id: client for client in federation.clients}
    data = {i: federation.examples(i, "train") for i in clients}
    n = {i: len(data[i][0]) for i in clients}
    *c, w_0 = initial
    K, w, u, history = len(c), dict.fromkeys(clients, w_0), {}, []

    def losses(at: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            functional_call(module, layout.unflatten(at), (x.double(),)), y, reduction="none"
        )

    def estimate(i: int) -> Vector:
        share = np.zeros(K)
        for x, y in zip(*data[i], strict=True):
            best = min(
                range(K), key=lambda k: float(losses(torch.from_numpy(c[k]), x[None], y[None]))
            )
            share[best] += 1 / n[i]
        share[share == 0] = 1e-4
        return share / sum(share)

    def local_update(i: int, t: int) -> Vector:
        x, y = data[i]
        draw, at = rng.torch_generator(seed, "train", t, clients[i].key), torch.from_numpy(w[i])
        for _ in range(spec.epochs):
            for batch in torch.randperm(n[i], generator=draw).split(spec.batch_size):
                leaf = at.clone().requires_grad_()
                loss = losses(leaf, x[batch], y[batch]).mean()
                for k in range(K):
                    loss = loss + lam / 2 * u[i][k] * ((leaf - torch.from_numpy(c[k])) ** 2).sum()
                at = at - spec.lr_at(t) * torch.autograd.grad(loss, leaf)[0]
        return at.numpy()

    for t in range(1, rounds + 1):
        if (t - 1) % tau == 0:
            u = {i: estimate(i) for i in clients}
        ids = sorted(clients)
        draw = rng.generator(seed, "selection", t)
        selected, share = [], []
        for k in range(K):
            v = np.array([u[i][k] * n[i] for i in ids])
            v = v / v.sum()
            if len(ids) <= S:
                selected.append(ids)
                share.append(dict(zip(ids, v, strict=True)))
            else:
                chosen = [ids[place] for place in draw.choice(len(ids), S, replace=False, p=v)]
                selected.append(chosen)
                share.append(dict.fromkeys(chosen, 1 / S))
        trained = {i: local_update(i, t) for i in ids if any(i in some for some in selected)}
        w = w | trained
        c = [sum(share[k][i] * w[i] for i in selected[k]) for k in range(K)]
        history.append(AfterRound(list(c), dict(w), {i: np.array(u[i]) for i in ids}))
    return history
