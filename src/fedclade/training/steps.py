"""What every step of local training begins with: its batch, and the precision of its forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fedclade.core import LocalTraining

Places = slice | Tensor
"""Some of k clients: the first of them, or a list of indices."""


def batches(
    examples: int, spec: LocalTraining, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Yield the examples of each step of a client's local training, as indices ``[B]``.

    The order is drawn for every epoch, or with ``reshuffle = false`` for the first epoch alone.
    """
    left, sizes = spec.steps_with(examples), spec.batch_sizes(examples)
    order: Tensor | None = None
    while left > 0:
        if order is None or spec.reshuffle:
            order = torch.randperm(examples, generator=generator).to(device)
        of_epoch = order.split(sizes)[:left]
        yield from of_epoch
        left -= len(of_epoch)


def precision(spec: LocalTraining, device: torch.device) -> AbstractContextManager[Any]:
    """Return what a forward pass has to be in, to be of the precision of local training."""
    return nullcontext() if spec.precision == "float32" else torch.autocast(device.type, torch.bfloat16)


def full(outputs: Tensor) -> Tensor:
    """Return outputs as the loss takes them: in float32 if they are less."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def by_length(plans: Sequence[Sequence[Tensor]], step: int) -> list[tuple[Places, Tensor]]:
    """Return the clients that take a step, and their batches ``[k, ..., B]``: one entry for each length of a batch.

    A plan has a client's batches ``[..., B]``, and those of the longest plans come first.
    """
    active = [plan[step] for plan in plans if step < len(plan)]
    groups: dict[int, list[int]] = defaultdict(list)
    for k, batch in enumerate(active):
        groups[batch.shape[-1]].append(k)
    if len(groups) == 1:
        return [(slice(0, len(active)), torch.stack(active))]
    return [(torch.tensor(group), torch.stack([active[k] for k in group])) for group in groups.values()]
