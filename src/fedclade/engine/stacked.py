"""All clients of a round at once, folded into the batch dimension of one program."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedclade import rng
from fedclade.engine.jobs import Job, Task
from fedclade.engine.memory import clients_in_cache
from fedclade.engine.stacking.batches import Batches
from fedclade.engine.stacking.check import check
from fedclade.engine.stacking.fold import CannotStack, Fold
from fedclade.engine.stacking.leaf import Rule
from fedclade.engine.stacking.loss import Losses
from fedclade.engine.stacking.plan import Plan
from fedclade.local import LocalSpec
from fedclade.params import Layout

__all__ = ["CannotStack", "StackedEngine"]


class StackedEngine:
    """Trains all clients at once.

    The batches of k clients are folded into ``[k·B, ...]``, so that the module's own forward runs unchanged; layers
    that hold parameters are swapped, in a copy, for ones that hold those of all clients.
    """

    def __init__(self) -> None:
        self._folds: weakref.WeakKeyDictionary[nn.Module, Fold] = weakref.WeakKeyDictionary()

    def train(self, task: Task, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :meth:`fedclade.engine.jobs.Engine.train`.

        Raises
        ------
        CannotStack
            If the module cannot be folded, which is found before any job's generator is drawn from; or if training
            changes a buffer that clients share.
        """
        module, layout, models, jobs = task.module, task.layout, task.models, task.jobs
        fold = self._folds.get(module)
        if fold is None or fold.layout != layout:
            fold = Fold(module, layout)
            check(fold, module, layout, models, jobs)
            self._folds[module] = fold
        updates = task.room(into)
        losses = torch.empty(len(jobs), dtype=torch.float64)
        for places in _blocks(module, layout, jobs, models.device):
            block = [jobs[place] for place in places]
            rows = torch.tensor([job.row for job in block], device=models.device)
            fold.load(models, rows)
            losses[places] = _train(fold, models, block, task.spec, task.lr)
            fold.updates(models, rows, updates, places)
        return updates, losses


def _blocks(module: nn.Module, layout: Layout, jobs: Sequence[Job], device: torch.device) -> list[list[int]]:
    """Return the places of the clients that train at the same time: on a CPU as many as its cache holds.

    The largest clients come first, so that those who still train are always the first of their block.
    """
    largest_first = sorted(range(len(jobs)), key=lambda place: -len(jobs[place].inputs))
    n, at_once = len(jobs), len(jobs)
    if device.type == "cpu":
        at_once = clients_in_cache(module, layout, torch.get_num_threads())
    return [block.tolist() for block in np.array_split(largest_first, -(-n // at_once))]


def _train(fold: Fold, models: Tensor, jobs: Sequence[Job], spec: LocalSpec, lr: float) -> Tensor:
    """Train the loaded models in place; return the mean losses, float64 ``[n]``."""
    plan = Plan.of(tuple(len(job.inputs) for job in jobs), spec.batch_size, not fold.padding_shows)
    batches = Batches(jobs, plan)
    losses = Losses(plan, batches.all_count)
    anchors = torch.tensor([job.anchor_row for job in jobs], device=models.device)
    rule = Rule(lr, spec.momentum, spec.weight_decay, spec.mu, spec.clip_norm)
    fold.begin(rule, [job.draw.initial_seed() for job in jobs], models, anchors)
    # What is not stacked and draws, draws from all of the clients' keys.
    with rng.seeded_globally(sum(job.draw.initial_seed() for job in jobs) % 2**63, models.device):
        for _ in range(spec.epochs):
            for step, x, y in batches.epoch():
                fold.bind(step.start, step.stop)
                logits = fold.forward(x)
                fold.backward(logits, losses.gradient(step, logits, y))
                fold.step()
    return losses.of_clients()
