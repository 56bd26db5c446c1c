"""Algorithm 1 of Ghosh et al. 2020 (IFCA), step by step, in NumPy's float64 and plain loops.

Only the stochastic gradient steps of LocalUpdate are the library's, with the library's random draws. Means have the
weights |D_i| of FedAvg, which the paper, whose machines hold equally much, does not need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core.params import Layout
from fedclade.data.federation import Federation
from tests.reference.cfl import Vector, sgd


@dataclass
class AfterRound:
    """The cluster identities estimated in a round, and the models that it led to."""

    identity: dict[int, int]
    theta: list[Vector]


def risk(
    theta: Vector, client: int, federation: Federation, module: nn.Module
) -> tuple[float, Vector]:
    """F_i(θ), the mean loss over the client's training data, and its gradient."""
    layout = Layout.of(module)
    layout.load(torch.from_numpy(theta.astype(np.float32)), module)
    module.eval()
    module.zero_grad()
    x, y = federation.examples(client, "train")
    loss = functional.cross_entropy(module(x), y)
    loss.backward()
    named = dict(module.named_parameters())
    gradient = np.zeros_like(theta)
    for slot in layout.parameters:
        gradient[slot.start : slot.stop] = named[slot.name].grad.flatten().numpy()
    return float(loss.detach()), gradient


def iterative_federated_clustering(
    theta_0: list[Vector],
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    option: str,
    seed: int,
    rounds: int,
) -> list[AfterRound]:
    k, theta = len(theta_0), list(theta_0)
    clients = {client.id: client for client in federation.clients}
    size = {i: len(client.train) for i, client in clients.items()}
    history = []
    for t in range(1, rounds + 1):
        identity, answer = {}, {}
        for i, client in clients.items():  # worker machines, in parallel
            losses = [risk(theta[j], i, federation, module)[0] for j in range(k)]
            identity[i] = min(range(k), key=lambda j: losses[j])  # cluster identity estimate
            mine = theta[identity[i]]
            if option == "gradients":  # option I
                answer[i] = risk(mine, i, federation, module)[1]
            else:  # option II
                answer[i] = sgd(mine, client, federation, module, spec, seed, t)
        new = list(theta)
        for j in range(k):  # center machine
            s_j = [i for i in clients if identity[i] == j]
            if option == "gradients":
                new[j] = theta[j] - spec.lr_at(t) / sum(size.values()) * sum(
                    (size[i] * answer[i] for i in s_j), np.zeros_like(theta[j])
                )
            elif s_j:
                new[j] = sum(size[i] * answer[i] for i in s_j) / sum(size[i] for i in s_j)
        theta = new
        history.append(AfterRound(identity, theta))
    return history
