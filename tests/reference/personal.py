"""FedPer, LG-FedAvg, FedBN and FedRep as their algorithms have it, with torch's own SGD and state dicts.

All are FedAvg of the tensors that are not personal. FedRep's clients train these after the others (Collins et al. 2021,
Algorithm 1, lines 7 to 11); with ``last_fit`` the last round is that of their code (``main_fedrep.py``, ``last``): all
fit their heads, and nothing else. Means have the weights |D_i|; the random draws are the library's.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.data.federation import ClientData, Federation

State = dict[str, Tensor]


def fit(
    net: nn.Module,
    names: Collection[str],
    client: ClientData,
    federation: Federation,
    spec: LocalTraining,
    epochs: int,
    draw: torch.Generator,
    t: int,
) -> None:
    """Train the parameters of some names; the others, and all buffers but theirs, are as before."""
    before = copy.deepcopy(net.state_dict())
    x, y = federation.examples(client.id, "train")
    parameters = [p for name, p in net.named_parameters() if name in names]
    sgd = torch.optim.SGD(parameters, spec.lr_at(t), spec.momentum, weight_decay=spec.weight_decay)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=draw).split(spec.batch_size):
            net.zero_grad()
            functional.cross_entropy(net(x[batch]), y[batch]).backward()
            sgd.step()
    net.load_state_dict(
        {name: t if name in names else before[name] for name, t in net.state_dict().items()}
    )


def federated(
    federation: Federation,
    module: nn.Module,
    spec: LocalTraining,
    personal: Collection[str],
    *,
    seed: int,
    rounds: int,
    head_epochs: int = 0,
    last_fit: bool = False,
) -> tuple[State, dict[int, State]]:
    """Return the shared tensors at the end, and each client's own; with ``head_epochs`` it is FedRep."""
    theta = copy.deepcopy(module.state_dict())
    shared = [name for name in theta if name not in personal]
    own = {client.id: {name: theta[name] for name in personal} for client in federation.clients}
    total = sum(len(client.train) for client in federation.clients)
    for t in range(1, rounds + 1):
        if last_fit and t == rounds:
            for client in federation.clients:
                net = copy.deepcopy(module).train()
                net.load_state_dict({**theta, **own[client.id]})
                draw = rng.torch_generator(seed, "train personal", t, client.key)
                fit(net, personal, client, federation, spec, max(10, head_epochs), draw, t)
                own[client.id] = {name: net.state_dict()[name].clone() for name in personal}
            break
        mean = {name: torch.zeros_like(theta[name], dtype=torch.float64) for name in shared}
        for client in federation.clients:
            net = copy.deepcopy(module).train()
            net.load_state_dict({**theta, **own[client.id]})
            if head_epochs:
                draw = rng.torch_generator(seed, "train personal", t, client.key)
                fit(net, personal, client, federation, spec, head_epochs, draw, t)
            draw = rng.torch_generator(seed, "train", t, client.key)
            fit(
                net,
                shared if head_epochs else [*theta],
                client,
                federation,
                spec,
                spec.epochs or 1,
                draw,
                t,
            )
            after = net.state_dict()
            own[client.id] = {name: after[name].clone() for name in personal}
            for name in shared:
                mean[name] += len(client.train) / total * after[name].double()
        theta = {**theta, **{name: value.to(theta[name].dtype) for name, value in mean.items()}}
    return {name: theta[name] for name in shared}, own
