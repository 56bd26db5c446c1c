"""What the literal twins of methods with steps of their own share: a gradient in float64, and the library's draws."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from fedclade.core import rng
from fedclade.core.params import Layout


def size(federation, client: int) -> int:
    return len(federation.by_id[client].train)


def gradient(at: Tensor, federation, client: int, module, batch: Tensor) -> Tensor:
    """Return ∇f_i at a model in float64, on a batch of the client's training data."""
    module = copy.deepcopy(module).double()
    x, y = federation.examples(client, "train")
    at = at.clone().requires_grad_()
    loss = functional.cross_entropy(
        functional_call(module, Layout.of(module).unflatten(at), (x[batch].double(),)), y[batch]
    )
    return torch.autograd.grad(loss, at)[0]


def orders(
    federation, client: int, spec, seed: int, t: int, count: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches of every step in a round, of which each takes so many, from orders drawn independently."""
    main = rng.torch_generator(seed, "train", t, federation.by_id[client].key)
    others = [rng.torch_generator(main.initial_seed(), "further batch", k) for k in range(1, count)]
    for _ in range(spec.epochs):
        drawn = [
            torch.randperm(size(federation, client), generator=each) for each in (main, *others)
        ]
        yield from zip(*(each.split(spec.batch_size) for each in drawn), strict=True)
