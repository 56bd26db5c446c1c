"""Algorithm 1 of the FedBuff paper (Nguyen et al. 2022), event by event, in NumPy's float64.

Every client that begins trains at once, and its update is kept until the clock has come to when it arrives. Draws are
those of the library: who begins, how long training takes, and the batches, which belong to the step that the update is
in; so a client's update is made again whenever the server has taken a step in the meantime.

``by_staleness`` and ``momentum`` are FLSim's: its reducer divides by the sum of the weights
(``ReductionType.WEIGHTED_AVERAGE``), and its server takes the step by ``torch.optim.SGD``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.data.federation import Federation
from tests.reference.cfl import sgd


@dataclass
class Step:
    w: np.ndarray
    clients: list[int]
    staleness: list[int]
    seconds: float


def fedbuff(
    w: np.ndarray,
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    *,
    M_c: int,
    K: int,
    eta_g: float,
    seed: int,
    steps: int,
    half_normal: bool = True,
    by_staleness: bool = False,
    momentum: float = 0.0,
) -> list[Step]:
    """Return the model after every step of the server, who was in its buffer, and when it was."""
    history: list[Step] = []
    training: list[
        tuple[float, int, int, np.ndarray]
    ] = []  # arrives, client i, t when it began, w^t
    clock, t = 0.0, 0
    server_model = torch.nn.Parameter(torch.from_numpy(w.astype(np.float64)))
    server = torch.optim.SGD([server_model], lr=eta_g, momentum=momentum)
    while t < steps:  # line 1, repeat
        number, delta, k, buffer, staleness = t + 1, np.zeros_like(w), 0, [], []
        busy = {client for _, client, _, _ in training}
        idle = [client.id for client in federation.clients if client.id not in busy]
        order = list(rng.generator(seed, "begin", number, 0).permutation(idle))
        while k < K:
            while (
                order
                and len(training) < M_c
                and not any(arrives == clock for arrives, *_ in training)
            ):
                c = int(order.pop())  # line 2, sample available clients
                z = (
                    rng.generator(seed, "duration", number, c).standard_normal()
                    if half_normal
                    else 1.0
                )
                training.append((clock + abs(z), c, t, w))  # line 3, run the client
            training.sort(key=lambda each: each[:2])
            clock, i, began, w_i = training.pop(0)  # line 4, receive a client's update
            delta_i = sgd(w_i, federation.by_id[i], federation, module, spec, seed, number) - w_i
            # lines 5 and 6, with s(τ) of section 5
            delta = delta + delta_i / math.sqrt(1 + t - began)
            k, buffer, staleness = k + 1, [*buffer, i], [*staleness, t - began]  # line 7
        sum_of_weights = sum(1 / math.sqrt(1 + tau) for tau in staleness)
        mean = delta / sum_of_weights if by_staleness else delta / K  # line 10
        server_model.grad = torch.from_numpy(-mean)  # Δ is final − initial here
        server.step()  # line 11
        w = server_model.detach().numpy().copy()
        t = t + 1  # line 12
        history.append(Step(w, buffer, staleness, clock))
    return history
