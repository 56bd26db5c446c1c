"""Longer updates of parts of a client's data, where the loss of the part says that they are no worse."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.training.jobs import Job, Workload
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
        judged = _spread(job)
        with using_threads(threads_of_step(work.module, judged.inputs, judged.size)):
            if _loss(work, start + longer, judged, chunk) < _loss(work, start + update, judged, chunk):
                update.copy_(longer)


def _spread(job: Job) -> Job:
    """Return a job with some examples from all over its own, which may be in the order of their labels."""
    step = -(-job.size // JUDGED)
    return Job(job.client, job.row, job.inputs[::step], job.targets[::step], job.generator)


def _loss(work: Workload, model: Tensor, job: Job, chunk: int) -> float:
    work.layout.load(model, work.module)
    work.module.eval()
    with torch.no_grad():
        batches = zip(job.inputs.split(chunk), job.targets.split(chunk), strict=True)
        return sum(float(work.task.total_loss(work.module(x), y)) for x, y in batches)
