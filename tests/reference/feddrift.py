"""FedDrift and FedDrift-Eager (Jothimurugesan et al. 2023), step by step, in NumPy's float64 and plain loops.

Only the stochastic gradient steps are the library's, with the library's random draws. Clients compute accuracies on all
of their data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.core.params import Layout
from fedclade.data.federation import Federation
from fedclade.training.jobs import Job, Workload
from fedclade.training.loop import LoopEngine
from tests.reference.cfl import Vector


@dataclass
class Server:
    """The models, what each is trained on, and what is known of the clients."""

    models: list[Vector]
    owned: list[set[tuple[int, int]]]  # of each model: pairs of client and time step
    accuracy: dict[int, float] = field(default_factory=dict)
    # of a client: its model, when it ends
    isolated: dict[int, tuple[int, int]] = field(default_factory=dict)
    now: dict[int, int] = field(default_factory=dict)  # of each client, its model


def accuracy(
    model: Vector, client: int, step: int, steps: list[Federation], module: nn.Module
) -> tuple[int, int]:
    """How many of a client's new examples in a time step a model gets right, and how many there are."""
    Layout.of(module).load(torch.from_numpy(model.astype(np.float32)), module)
    module.eval()
    x, y = steps[step].examples(client, "train")
    return int((module(x).argmax(1) == y).sum()), len(y)


def move(
    server: Server,
    t: int,
    steps: list[Federation],
    module: nn.Module,
    d: float,
    W: int,
    eager: bool,
) -> None:
    """The start of time step t > 0: drift detection at the clients, then hierarchical clustering."""
    for c in [c for c, (_, end) in server.isolated.items() if end == t]:
        del server.isolated[c]
    hidden = {m for m, _ in server.isolated.values()}
    in_use = [m for m in range(len(server.models)) if server.owned[m] and m not in hidden]
    drifted = []
    for c in steps[t].ids:
        if c in server.isolated:
            continue
        rates = {m: np.divide(*accuracy(server.models[m], c, t, steps, module)) for m in in_use}
        best = max(in_use, key=lambda m: rates[m])  # of equals the first
        server.now[c] = best
        if server.accuracy[c] - rates[best] > d:
            drifted.append(c)
        server.accuracy[c] = rates[best]
    for place, c in enumerate(drifted):
        if not eager or place == 0:
            server.models.append(server.models[server.now[c]].copy())
            server.owned.append(set())
        server.now[c] = len(server.models) - 1
        if not eager:
            server.isolated[c] = server.now[c], t + W
    for c, m in server.now.items():
        server.owned[m].add((c, t))
    if eager:
        return
    A = {}
    for i in in_use:
        for j in in_use:
            found = [
                accuracy(server.models[i], c, s, steps, module) for c, s in sorted(server.owned[j])
            ]
            A[i, j] = sum(right for right, _ in found) / sum(n for _, n in found)
    apart = {(i, j): max(A[i, i] - A[i, j], A[j, j] - A[j, i], 0) for i in in_use for j in in_use}
    groups = [[m] for m in in_use]
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        height = {(a, b): max(apart[i, j] for i in groups[a] for j in groups[b]) for a, b in pairs}
        a, b = min(pairs, key=lambda pair: height[pair])
        if height[a, b] > d:
            break
        groups[a] += groups.pop(b)
    for first, *others in map(sorted, groups):
        counts = {m: len(server.owned[m]) for m in (first, *others)}
        server.models[first] = sum(n * server.models[m] for m, n in counts.items()) / sum(
            counts.values()
        )
        for m in others:
            server.owned[first] |= server.owned[m]
            server.owned[m] = set()
            server.now = {c: first if its == m else its for c, its in server.now.items()}


def train(
    server: Server,
    number: int,
    steps: list[Federation],
    module: nn.Module,
    spec: LocalTraining,
    seed: int,
) -> None:
    """One communication round: every model that some client has now, on all data that was ever assigned to it."""
    layout, new = Layout.of(module), list(server.models)
    for m in sorted(set(server.now.values())):
        total, moved = 0, np.zeros_like(server.models[m])
        for c in sorted({c for c, _ in server.owned[m]}):
            held = [
                steps[s].examples(c, "train")
                for s in sorted(s for owner, s in server.owned[m] if owner == c)
            ]
            x, y = (torch.cat(column) for column in zip(*held, strict=True))
            generator = rng.torch_generator(seed, "train", number, steps[0].keys[c])
            start = torch.from_numpy(server.models[m].astype(np.float32))[None]
            job = Job(c, 0, x, y, generator)
            delta, _ = LoopEngine().train(
                Workload(module, layout, start, [job], spec, spec.lr_at(number))
            )
            moved, total = moved + len(y) * delta[0].double().numpy(), total + len(y)
        new[m] = server.models[m] + moved / total
    server.models = new


def feddrift(
    theta: Vector,
    steps: list[Federation],
    module: nn.Module,
    spec: LocalTraining,
    *,
    d: float,
    W: int = 1,
    rounds: int,
    seed: int,
    together: bool = False,
    eager: bool = False,
) -> list[Server]:
    """Run the algorithm for so many rounds in each time step; return the server at the end of each."""
    clients = steps[0].ids
    server = Server([theta.copy() for _ in (clients[:1] if together else clients)], [])
    server.now = {c: 0 if together else place for place, c in enumerate(clients)}
    server.owned = [
        {(c, 0) for c in clients if server.now[c] == m} for m in range(len(server.models))
    ]
    server.accuracy = {c: np.divide(*accuracy(theta, c, 0, steps, module)) for c in clients}
    history = []
    for t in range(len(steps)):
        if t:
            move(server, t, steps, module, d, W, eager)
        for k in range(rounds):
            train(server, 1 + t * rounds + k, steps, module, spec, seed)
        history.append(
            Server(list(server.models), [set(each) for each in server.owned], now=dict(server.now))
        )
    return history
