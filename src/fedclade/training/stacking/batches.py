"""The examples of all clients on the device, and the batches that each draws of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import add

import torch
from torch import Tensor

from fedclade.core import IGNORED
from fedclade.training.jobs import Job
from fedclade.training.stacking.buffer_pool import BufferPool
from fedclade.training.stacking.plan import Plan, Step

SPREAD = 8
"""Pieces of one tensor are copied if they are less than one part in so many of what they reach over."""


class Batches:
    """The batches of clients, the largest first, in the order of a plan. The pool holds the inputs of one step.

    Without ``reshuffle`` a client's examples are put in order once, and every epoch has the same batches.
    """

    def __init__(self, jobs: Sequence[Job], plan: Plan, pool: BufferPool, *, reshuffle: bool = True) -> None:
        self._plan = plan
        self._reshuffle = reshuffle
        self._first_orders: dict[int, Tensor] = {}
        self._jobs = jobs
        self._pool = pool
        self._inputs, first_inputs = joined([job.inputs for job in jobs])
        self._targets, first_targets = joined([job.targets for job in jobs])
        self._first_inputs = plan.of_examples(first_inputs)
        self._first_targets = self._first_inputs if first_targets == first_inputs else plan.of_examples(first_targets)
        weights = [job.weights for job in jobs if job.weights is not None]  # of all jobs, or of none
        self._weights, starts = joined(weights) if weights else (None, [])
        self._first_weights = plan.of_examples(starts) if weights else None
        self._are_labels = not self._targets.is_floating_point()
        self.all_count = not (self._are_labels and bool((self._targets == IGNORED).any()))

    def drawn(self) -> Iterator[tuple[Step, Tensor, Tensor, Tensor | None]]:
        """Draw the orders that the plan is for; yield each step, its inputs, targets and weights ``[k·B, ...]``."""
        drawn = torch.cat([*self._orders()])
        inputs = targets = self._plan.rows(drawn + self._first_inputs).to(self._inputs.device)
        if self._first_targets is not self._first_inputs:
            targets = self._plan.rows(drawn + self._first_targets).to(self._targets.device)
        rows = [step.rows for step in self._plan.steps]
        seen = self._targets.index_select(0, targets)
        batches = (self._plan.masked(seen, IGNORED) if self._are_labels else seen).split(rows)
        weights: Sequence[Tensor | None] = [None] * len(rows)
        if self._weights is not None and self._first_weights is not None:
            of_rows = self._plan.rows(drawn + self._first_weights).to(self._weights.device)
            weights = self._weights.index_select(0, of_rows).split(rows)
        room = self._pool.room(self._inputs, max(rows), *self._inputs.shape[1:])
        for step, x, y, w in zip(self._plan.steps, inputs.split(rows), batches, weights, strict=True):
            # Step by step, so that what is fetched is still in the cache when it is used.
            yield step, torch.index_select(self._inputs, 0, x, out=room[: step.rows]), y, w

    def _orders(self) -> Iterator[Tensor]:
        """Yield the order ``[n]`` of a client's examples in each epoch of the plan, one client after another."""
        for place, (job, epochs) in enumerate(zip(self._jobs, self._plan.epochs, strict=True)):
            for _ in range(epochs):
                yield self._order(place, job)

    def _order(self, place: int, job: Job) -> Tensor:
        """Draw the order of a client's examples in an epoch, or return the order of its first epoch."""
        if self._reshuffle:
            return torch.randperm(job.size, generator=job.generator)
        if place not in self._first_orders:
            self._first_orders[place] = torch.randperm(job.size, generator=job.generator)
        return self._first_orders[place]


def joined(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return one tensor with the rows of all, and at which of its rows each starts.

    Pieces of one tensor, as ``split`` gives, are not copied, unless they are few and far between: of a million clients
    side by side a cohort would bring along all that lies between.
    """
    one = tensors[0]
    lengths = [tensor.shape[0] for tensor in tensors]
    entries = prod(one.shape[1:])
    row = entries * one.itemsize
    whole = one.untyped_storage()
    addresses = [tensor.data_ptr() for tensor in tensors]
    begin, end = min(addresses), whole.data_ptr() + whole.nbytes()
    pieces = begin >= whole.data_ptr() and all(
        (address - begin) % row == 0 and address + length * row <= end and tensor.is_contiguous()
        for address, length, tensor in zip(addresses, lengths, tensors, strict=True)
    )
    starts = [(address - begin) // row for address in addresses] if pieces else []
    rows = max(map(add, starts, lengths), default=0)
    if not pieces or rows > SPREAD * sum(lengths):
        return torch.cat([*tensors]), [0, *accumulate(lengths[:-1])]
    offset = one.storage_offset() - starts[0] * entries
    return one.as_strided((rows, *one.shape[1:]), (entries, *one.stride()[1:]), offset), starts
