"""Algorithm 2 of the CFL paper: federated learning, line by line, in NumPy's float64.

Its stopping rule (line 8) gives way to a number of rounds: FedAvg of the library has none.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedclade import LocalTraining
from fedclade.data.federation import Federation
from tests.reference.cfl import sgd


def federated_learning(
    theta: np.ndarray,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    seed: int,
    rounds: int,
) -> list[np.ndarray]:
    """Return θ after every round."""
    thetas = []
    c = federation.clients
    D_c = sum(len(client.train) for client in c)
    for number in range(1, rounds + 1):  # line 2
        delta = {}
        for client in c:  # line 3
            theta_i = theta  # line 4
            # line 5
            delta[client.id] = (
                sgd(theta_i, client, federation, module, spec, seed, number) - theta_i
            )
        theta = theta + sum(len(client.train) / D_c * delta[client.id] for client in c)  # line 7
        thetas.append(theta)
    return thetas


def as_numpy(vector: torch.Tensor) -> np.ndarray:
    return vector.numpy().astype(np.float64)
