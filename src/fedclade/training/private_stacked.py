"""DP-SGD of all clients in one program: a step's forward and backward pass is that of the stacked engine.

Its gradients are gathered example by example (:mod:`~fedclade.training.stacking.by_example`), clipped and summed before
the optimizer sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedclade.core import IGNORED, rng
from fedclade.training.jobs import Job, Workload
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.private_steps import PrivateSteps
from fedclade.training.private_vmap import Samples
from fedclade.training.stacking.batches import joined
from fedclade.training.stacking.buffer_pool import BufferPool
from fedclade.training.stacking.by_example import ByExample
from fedclade.training.stacking.loss import Losses
from fedclade.training.stacking.plan import Plan, Step
from fedclade.training.stacking.stacked_module import StackedModule


class PrivateBlock:
    """Clients that train at the same time, the largest first, whose models are loaded."""

    def __init__(self, stacked: StackedModule, work: Workload, private: PrivateSteps, pool: BufferPool) -> None:
        self._stacked, self._work, self._private, self._pool = stacked, work, private, pool
        self._by_example, self._noise = ByExample(), BufferPool()

    def train(self, jobs: Sequence[Job]) -> Tensor:
        """Train them in place; return the mean losses of the examples that were sampled, float64 ``[n]``."""
        work, spec, stacked = self._work, self._work.spec, self._stacked
        optimizer = LocalOptimizer.of(spec, work.lr)
        steps = [spec.steps_with(job.size) for job in jobs]
        edges = sorted({0, len(jobs), *(k for k in range(1, len(jobs)) if steps[k] != steps[k - 1])})
        seeds = [job.generator.initial_seed() for job in jobs]
        anchors = work.models[[job.anchor_row for job in jobs]] if spec.mu else None
        states = [job.state or {} for job in jobs] if optimizer.keeps_state else ()
        stacked.begin(optimizer, seeds, anchors, edges, work.fixed, states, self._by_example)
        inputs, first_inputs = joined([job.inputs for job in jobs])
        targets, first_targets = joined([job.targets for job in jobs])
        first_x, first_y = (torch.tensor(each)[:, None] for each in (first_inputs, first_targets))
        samples = Samples(self._private, jobs, spec.batch_size)
        all_count = targets.is_floating_point() or not bool((targets == IGNORED).any())
        losses = Losses(Plan.of((1,), 1, True), work.task, all_count)
        totals, seen = torch.zeros(2, len(jobs), dtype=torch.float64)
        with rng.seeded_globally(sum(seeds) % 2**63, work.models.device), torch.enable_grad():
            for number in range(steps[0]):
                active = sum(count > number for count in steps)
                stacked.bind(0, active)
                examples, counts = samples.drawn(active)
                x, y = ((first[:active] + examples).flatten().to(inputs.device) for first in (first_x, first_y))
                rows = torch.index_select(inputs, 0, x, out=self._pool.room(inputs, len(x), *inputs.shape[1:]))
                y = targets.index_select(0, y)
                of_rows, counted = self._step(losses, rows, y, counts.to(inputs.device), samples)
                totals[:active] += of_rows.where(counted, 0).double().sum(1).cpu()
                seen[:active] += counted.sum(1).cpu()
        return totals / seen.clamp(min=1)

    def _step(self, losses: Losses, x: Tensor, y: Tensor, counts: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Take a step on examples ``[k·B, ...]``, of which some are padding.

        Returns the losses ``[k, B]``, and which of them are of a gradient that counts.
        """
        stacked, (k, width) = self._stacked, counts.shape
        self._by_example.begin(width)
        logits = stacked.forward(x)
        of_rows, gradient = losses.of(Step(0, k * width, 1, None), logits, y)  # as if each example were a client
        stacked.backward(logits, gradient)
        draws = samples.draws[:k]
        expected = torch.tensor([mine.expected for mine in draws]).to(logits)
        with torch.no_grad():  # what layers were given may be part of a graph
            factors = torch.where(counts, self._private.factors(self._by_example.squares()), 0.0)
            self._by_example.deliver(factors / expected[:, None])
        noise = self._noise.room(torch.empty(0), k, stacked.layout.n_parameters)
        for row, mine in zip(noise, draws, strict=True):
            mine.noise(row)
        stacked.add(noise.to(logits))
        stacked.step()
        return of_rows.view(k, width), factors > 0
