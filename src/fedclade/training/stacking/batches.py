"""Plan of the training steps of all clients, and the batches of examples of each step.

A step trains several clients at once; in a batch, each client has the same number of rows, some of
which may be padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import add

import numpy as np
import torch
from torch import Tensor

from fedclade.core import IGNORED, count_batches
from fedclade.training.jobs import Job
from fedclade.training.stacking.stacked_parameter import BufferPool

# The clients and examples of each step of local training.


@dataclass(frozen=True, eq=False)
class Step:
    """Training step of the clients ``start`` to ``stop``, with ``width`` rows for each client."""

    start: int
    stop: int
    width: int
    own: Tensor | None
    """Each client's number of rows without padding, int64 ``[k]``; None without any padding."""

    @property
    def kind(self) -> tuple[int, int, int]:
        """Key that is equal for steps with the same clients and the same number of rows."""
        return self.start, self.stop, self.width

    @property
    def clients(self) -> int:
        """Number k of clients that train in this step."""
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """Number of rows of all clients of the step together."""
        return self.clients * self.width


class Plan:
    """Training steps of several clients, for one epoch or for given numbers of steps.

    The clients are sorted, the largest first, so that the clients with steps left are always the
    first clients. A client's last batch, if it is smaller, is padded to the width of the other
    clients' batches with copies of one of the client's examples; these copies do not contribute to
    loss and gradient. If padding would change results (BatchNorm, dropout), smaller batches are
    separate steps instead: one step for each sequence of adjacent clients with batches of the same
    size.

    Attributes
    ----------
    steps
        The steps, which are the same in every epoch.
    edges
        Boundaries between clients. Clients between two adjacent edges train in the same steps.
    kinds
        Number of steps of each kind, see :attr:`Step.kind`.
    """

    @staticmethod
    @lru_cache(maxsize=16)
    def of(
        sizes: tuple[int, ...],
        batch_size: int,
        padding: bool,
        steps: tuple[int, ...] | None = None,
        smallest_batch: int = 1,
    ) -> Plan:
        """Return the plan for some clients, from a cache if it was made before.

        Parameters
        ----------
        sizes
            Number of examples of each client, in descending order.
        batch_size
            Number of examples in a full batch of one client.
        padding
            Whether smaller batches may be padded to the width of the other clients' batches.
        steps
            Number of steps of each client, in descending order; None for the steps of one epoch.
        smallest_batch
            Number of examples in the smallest batch. If fewer examples remain at the end of an
            epoch, they are added to the batch before.
        """
        return Plan(sizes, batch_size, padding, steps, smallest_batch)

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        padding: bool,
        steps: tuple[int, ...] | None = None,
        smallest_batch: int = 1,
    ) -> None:
        counts = np.asarray(sizes)
        batches = [count_batches(size, batch_size, smallest_batch) for size in sizes]
        of_epoch = np.array(batches, dtype=counts.dtype)
        taken = of_epoch
        if steps is not None:
            taken = np.array(steps, dtype=counts.dtype)
        self.epochs = -(-taken // of_epoch)
        """Number of times that each client's examples are shuffled, int ``[n]``."""
        drawn = counts * self.epochs
        self._client = torch.from_numpy(np.arange(len(counts)).repeat(drawn))
        begins = drawn.cumsum() - drawn
        planned: list[Step] = []
        places: list[np.ndarray] = []
        real: list[np.ndarray] = []
        owners: list[np.ndarray] = []
        for number in range(int(taken.max(initial=0))):
            train = int((taken > number).sum())
            epoch, batch = np.divmod(number, of_epoch[:train])
            rest = counts[:train] - batch * batch_size
            left = np.where(batch == of_epoch[:train] - 1, rest, batch_size)
            edges = [0, train]
            if not padding:
                edges[1:1] = (np.flatnonzero(np.diff(left)) + 1).tolist()
            for start, stop in pairwise(edges):
                here = slice(start, stop)
                rows = left[start:stop]
                width = int(rows.max())
                first = begins[here] + epoch[here] * counts[here] + batch[here] * batch_size
                first = first[:, None]
                column = np.arange(width)[None]
                is_real = column < rows[:, None]
                own: Tensor | None = None
                if rows.min() < width:
                    own = torch.from_numpy(rows)
                planned.append(Step(start, stop, width, own))
                places.append(np.where(is_real, first + column, first).ravel())
                real.append(is_real.ravel())
                owners.append(np.arange(start, stop).repeat(width))
        self.steps: tuple[Step, ...] = tuple(planned)
        self.edges = sorted({edge for step in planned for edge in (step.start, step.stop)})
        self.kinds = Counter(step.kind for step in planned)
        self._places = torch.from_numpy(np.concatenate(places))
        self._owners = np.concatenate(owners)
        is_padding = ~np.concatenate(real)
        self._padding = torch.from_numpy(is_padding)
        self._padded = bool(is_padding.any())
        self._passed = np.bincount(self._owners[~is_padding], minlength=len(counts))

    def of_examples(self, of_clients: Sequence[int]) -> Tensor:
        """Repeat each client's number in ``of_clients`` for each example that the client draws.

        A client draws each of its examples once in every planned epoch. The results of all clients
        are concatenated.
        """
        return torch.tensor(of_clients).index_select(0, self._client)

    def rows(self, examples: Tensor) -> Tensor:
        """Return the example in each row of the plan's steps.

        ``examples`` has the examples of all clients in all planned epochs, in the shuffled order
        and concatenated.
        """
        return examples.index_select(0, self._places)

    def means(self, losses: Tensor) -> Tensor:
        """Return the mean loss of each of n clients over its examples, float64 ``[n]``.

        ``losses`` has the losses of the rows of all steps, in all epochs.
        """
        epochs = losses.cpu().double().numpy().reshape(-1, len(self._owners))
        sums = np.bincount(self._owners, epochs.sum(0), len(self._passed))
        return torch.from_numpy(sums / (len(epochs) * self._passed))

    def masked(self, targets: Tensor, ignored: int) -> Tensor:
        """Return the targets of all rows, with the value ``ignored`` in rows of padding."""
        if not self._padded:
            return targets
        mask = self._padding.to(targets.device).view(-1, *(1,) * (targets.dim() - 1))
        return targets.masked_fill(mask, ignored)


SPREAD = 8
"""Largest range of memory for which pieces of a tensor are viewed instead of copied.

It is a multiple of the total size of the pieces.
"""


class Batches:
    """Batches of the clients of a plan, the largest clients first.

    Parameters
    ----------
    jobs
        The clients, with their examples.
    plan
        The steps.
    pool
        Memory for the inputs of one step.
    reshuffle
        Whether examples are shuffled in each epoch. Otherwise every epoch has the same batches.
    """

    def __init__(
        self, jobs: Sequence[Job], plan: Plan, pool: BufferPool, *, reshuffle: bool = True
    ) -> None:
        self._plan = plan
        self._reshuffle = reshuffle
        self._first_orders: dict[int, Tensor] = {}
        self._jobs = jobs
        self._pool = pool
        self._inputs, first_inputs = joined([job.inputs for job in jobs])
        self._targets, first_targets = joined([job.targets for job in jobs])
        self._first_inputs = plan.of_examples(first_inputs)
        self._first_targets = self._first_inputs
        if first_targets != first_inputs:
            self._first_targets = plan.of_examples(first_targets)
        self._weights: Tensor | None = None
        self._first_weights: Tensor | None = None
        # Either all jobs have weights of examples, or no job has.
        if weights := [job.weights for job in jobs if job.weights is not None]:
            self._weights, first_weights = joined(weights)
            self._first_weights = plan.of_examples(first_weights)
        self._are_labels = not self._targets.is_floating_point()
        self.all_count = not (self._are_labels and bool((self._targets == IGNORED).any()))

    def drawn(self) -> Iterator[tuple[Step, Tensor, Tensor, Tensor | None]]:
        """Shuffle each client's examples, and yield the batches of each step.

        Yields
        ------
        tuple
            The step; the inputs and the targets of its k clients, with B rows each, ``[k·B, ...]``;
            and the weights of these rows, or None if all weights are 1.
        """
        drawn = torch.cat([*self._orders()])
        inputs = targets = self._plan.rows(drawn + self._first_inputs).to(self._inputs.device)
        if self._first_targets is not self._first_inputs:
            targets = self._plan.rows(drawn + self._first_targets).to(self._targets.device)
        rows = [step.rows for step in self._plan.steps]
        seen = self._targets.index_select(0, targets)
        if self._are_labels:
            seen = self._plan.masked(seen, IGNORED)
        weights: Sequence[Tensor | None] = [None] * len(rows)
        if self._weights is not None and self._first_weights is not None:
            of_rows = self._plan.rows(drawn + self._first_weights).to(self._weights.device)
            weights = self._weights.index_select(0, of_rows).split(rows)
        room = self._pool.room(self._inputs, max(rows), *self._inputs.shape[1:])
        for step, x, y, w in zip(
            self._plan.steps, inputs.split(rows), seen.split(rows), weights, strict=True
        ):
            # Inputs are copied step by step, so that they are still in the cache when they are
            # used.
            yield step, torch.index_select(self._inputs, 0, x, out=room[: step.rows]), y, w

    def _orders(self) -> Iterator[Tensor]:
        """Yield the order ``[n]`` of a client's n examples in an epoch, for all clients in turn.

        All planned epochs of a client come directly after each other.
        """
        for place, (job, epochs) in enumerate(zip(self._jobs, self._plan.epochs, strict=True)):
            for _ in range(epochs):
                yield self._order(place, job)

    def _order(self, place: int, job: Job) -> Tensor:
        """Shuffle a client's examples, or return the order of the first epoch if it is reused."""
        if self._reshuffle:
            return torch.randperm(job.size, generator=job.generator)
        if place not in self._first_orders:
            self._first_orders[place] = torch.randperm(job.size, generator=job.generator)
        return self._first_orders[place]


def joined(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Concatenate tensors, and return the row at which each of them starts.

    If the tensors are pieces of one tensor, such as the results of ``split``, the result is a view
    of that tensor. Pieces are copied only if they are few and far apart: with the data of a million
    clients in one tensor, a view of a few clients would include the rows of all clients between
    them.
    """
    one = tensors[0]
    lengths = [tensor.shape[0] for tensor in tensors]
    entries = prod(one.shape[1:])
    row = entries * one.itemsize
    whole = one.untyped_storage()
    addresses = [tensor.data_ptr() for tensor in tensors]
    begin = min(addresses)
    end = whole.data_ptr() + whole.nbytes()
    pieces = begin >= whole.data_ptr() and all(
        (address - begin) % row == 0 and address + length * row <= end and tensor.is_contiguous()
        for address, length, tensor in zip(addresses, lengths, tensors, strict=True)
    )
    if pieces:
        starts = [(address - begin) // row for address in addresses]
        rows = max(map(add, starts, lengths))
        if rows <= SPREAD * sum(lengths):
            offset = one.storage_offset() - starts[0] * entries
            shape = (rows, *one.shape[1:])
            return one.as_strided(shape, (entries, *one.stride()[1:]), offset), starts
    return torch.cat([*tensors]), [0, *accumulate(lengths[:-1])]
