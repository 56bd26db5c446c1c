"""Algorithm 1 of Marfoq et al. 2021 (FedEM), step by step, in torch's float64 and plain loops, without the library.

With ``by_label`` it is FedRC (Guo et al. 2024, official code), whose E-step divides by how common a label is. Only the
orders of the batches are the library's.
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
    """The models, the weights of each client's mixture, and P̂."""

    theta: list[Vector]
    pi: dict[int, Vector]
    rates: Vector | None


class Client:
    """Its data S_t, in double precision, and the local solver."""

    def __init__(self, number: int, key: int, federation: Federation, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).double()
        self.layout, self.key = Layout.of(self.module), key
        x, self.y = federation.examples(number, "train")
        self.x = x.double()

    def loss(self, theta: torch.Tensor, j: int) -> torch.Tensor:
        """ℓ(h_θ(x_j), y_j)."""
        outputs = functional_call(self.module, self.layout.unflatten(theta), (self.x[j : j + 1],))
        return functional.cross_entropy(outputs, self.y[j : j + 1])

    def solve(self, theta: Vector, q: Vector, spec: LocalTraining, seed: int, k: int) -> Vector:
        """LocalSolver(m, θ_m, q, S_t): SGD on Σ_j q_j ℓ_j over a batch, divided by its size."""
        draw = rng.torch_generator(seed, "train", k, self.key)
        at = torch.from_numpy(theta)
        for _ in range(spec.epochs):
            for batch in torch.randperm(len(self.x), generator=draw).split(spec.batch_size):
                at = at.clone().requires_grad_()
                weighted = sum(float(q[j]) * self.loss(at, j) for j in batch.tolist()) / len(batch)
                (gradient,) = torch.autograd.grad(weighted, at)
                at = (at - spec.lr_at(k) * gradient).detach()
        return at.numpy()


def responsibilities(
    client: Client, pi: Vector, theta: list[Vector], rates: Vector | None
) -> Vector:
    """E-step: q_j(m), [n, M], normalised over m."""
    M, n = len(theta), len(client.x)
    q = np.zeros((n, M))
    for j in range(n):
        for m in range(M):
            likelihood = np.exp(-float(client.loss(torch.from_numpy(theta[m]), j)))
            q[j, m] = pi[m] * likelihood / (1.0 if rates is None else rates[m, int(client.y[j])])
        q[j] /= q[j].sum()
    return q


def mixtures(
    theta: list[Vector],
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    seed: int,
    cohorts: list,
    by_label: bool = False,
) -> list[AfterRound]:
    """Return what there is after every round; ``cohorts`` are the clients of each."""
    M, labels = len(theta), federation.pool.outputs
    clients = {c.id: Client(c.id, c.key, federation, module) for c in federation.clients}
    pi = {i: np.full(M, 1 / M) for i in clients}
    rates, history = None, []
    for k, cohort in enumerate(cohorts, start=1):  # iterations
        local, tables = {}, np.zeros((M, labels))
        for i in cohort:  # clients, in parallel
            q = responsibilities(clients[i], pi[i], theta, rates)
            pi[i] = q.mean(0)  # M-step
            local[i] = [clients[i].solve(theta[m], q[:, m], spec, seed, k) for m in range(M)]
            for j, label in enumerate(clients[i].y.tolist()):
                tables[:, label] += q[j]
        n = sum(len(clients[i].x) for i in cohort)
        # server
        theta = [sum(len(clients[i].x) / n * local[i][m] for i in cohort) for m in range(M)]
        if by_label:
            tables = np.maximum(tables, 1e-8)
            rates = tables / tables.sum(1, keepdims=True)
        history.append(AfterRound(theta, {i: each.copy() for i, each in pi.items()}, rates))
    return history


def predicted(client: Client, x: torch.Tensor, pi: Vector, theta: list[Vector]) -> Vector:
    """Σ_m π_m softmax(h_θm(x)), [n, labels]."""
    probabilities = 0.0
    for m, model in enumerate(theta):
        outputs = functional_call(
            client.module, client.layout.unflatten(torch.from_numpy(model)), (x.double(),)
        )
        probabilities = probabilities + pi[m] * outputs.softmax(1).detach().numpy()
    return probabilities
