"""The examples of all clients on the device, and the batches that each draws of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedclade.data.federation import IGNORED
from fedclade.engine.jobs import Job
from fedclade.engine.stacking.plan import Plan, Step


class Batches:
    """The batches of clients in the order of a plan.

    Parameters
    ----------
    jobs
        The clients, the largest first.
    plan
        The steps of an epoch.
    """

    def __init__(self, jobs: Sequence[Job], plan: Plan) -> None:
        self._plan = plan
        self._jobs = jobs
        sizes = torch.tensor([len(job.inputs) for job in jobs])
        self._inputs, starts = joined([job.inputs for job in jobs])
        self._first_inputs = starts.repeat_interleave(sizes)
        self._targets, starts = joined([job.targets for job in jobs])
        self._first_targets = starts.repeat_interleave(sizes)
        self.all_count = not bool((self._targets == IGNORED).any())

    def epoch(self) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Draw the orders of an epoch, and yield each step with its inputs and targets ``[k·B, ...]``."""
        drawn = torch.cat([torch.randperm(len(job.inputs), generator=job.draw) for job in self._jobs])
        inputs = self._plan.rows(drawn + self._first_inputs).to(self._inputs.device)
        targets = self._plan.rows(drawn + self._first_targets).to(self._targets.device)
        rows = [step.rows for step in self._plan.steps]
        batches = self._plan.masked(self._targets.index_select(0, targets), IGNORED).split(rows)
        for step, x, y in zip(self._plan.steps, inputs.split(rows), batches, strict=True):
            # Step by step, so that what is fetched is still in the cache when it is used.
            yield step, self._inputs.index_select(0, x), y


def joined(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return one tensor with the rows of all, and at which of its rows each starts.

    Pieces of one tensor, as ``split`` gives, are not copied.
    """
    one = tensors[0]
    row, storage = one[0].numel(), one.untyped_storage().data_ptr()
    offsets = [int(tensor.storage_offset()) for tensor in tensors]
    begin = min(offsets)
    pieces = all(
        (offset - begin) % row == 0 and tensor.untyped_storage().data_ptr() == storage and tensor.is_contiguous()
        for offset, tensor in zip(offsets, tensors, strict=True)
    )
    lengths = [tensor.shape[0] for tensor in tensors]
    if not pieces:
        ends = torch.tensor(lengths).cumsum(0)
        return torch.cat([*tensors]), ends - torch.tensor(lengths)
    starts = [(offset - begin) // row for offset in offsets]
    end = max(map(sum, zip(starts, lengths, strict=True)))
    return one.as_strided((end, *one.shape[1:]), one[:1].contiguous().stride(), begin), torch.tensor(starts)
