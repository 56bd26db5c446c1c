"""Longer updates of parts of a client's data, where the loss of the part says that they are no worse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedclade.training.jobs import Job, Workload
from fedclade.training.steps import full
from fedclade.training.threads import threads_of_step, using_threads

JUDGED = 256
"""Examples of a part, at most, whose loss decides."""


def stretch(work: Workload, moved: Tensor, times: float, chunk: int) -> None:
    """Multiply those updates ``[n, S]`` that lower the loss then, in place; the parameters alone, not the buffers.

    A part takes as many steps as all data would, but shorter ones, as its batches are smaller; so its update is
    shorter, too. Made as long as by steps of full length it may overshoot, which the loss on some of the part's own
    examples decides: so the update still depends on nothing but the part and the model that it starts from, and parts
    stay exchangeable. The loss is that of the model as it is served, ``chunk`` examples at a time.
    """
    parameters = slice(work.layout.n_parameters)
    for update, job in zip(moved, work.jobs, strict=True):
        start, longer = work.models[job.row], update.clone()
        longer[parameters] *= times
        batches = _drawn(job, chunk)
        with using_threads(threads_of_step(work.module, batches[0][0], len(batches[0][1]))):
            if _loss(work, start + longer, batches) < _loss(work, start + update, batches):
                update.copy_(longer)


def _drawn(job: Job, chunk: int) -> list[tuple[Tensor, Tensor]]:
    """Draw some of a job's examples, which may be in the order of their labels; its own draws order batches."""
    generator = torch.Generator().manual_seed(job.generator.initial_seed() + 1)
    places = torch.randperm(job.size, generator=generator)[:JUDGED].to(job.targets.device)
    return [(job.inputs[some], job.targets[some]) for some in places.split(chunk)]


def _loss(work: Workload, model: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    work.layout.load(model, work.module)
    work.module.eval()
    with torch.no_grad():
        return sum(float(work.task.total_loss(full(work.module(x)), y)) for x, y in batches)
