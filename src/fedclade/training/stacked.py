"""Engine that trains all clients of a round at once, in the batch dimension of one program."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import IGNORED, rng
from fedclade.training.jobs import Job, PrivateSteps, Workload, refuse_half_precision, refuse_rules
from fedclade.training.memory import clients_in_cache
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacking.batches import Batches, Plan, Step, joined
from fedclade.training.stacking.loss import Losses
from fedclade.training.stacking.replay import Replay, Run
from fedclade.training.stacking.stacked_module import CannotStack, StackedModule
from fedclade.training.stacking.stacked_parameter import BufferPool, ByExample
from fedclade.training.threads import WORTH_SHARING_STACKED, threads_of_step, using_threads
from fedclade.training.vmap import Samples

# DP-SGD of all clients in one program, with the forward and backward passes of the stacked engine.
#
# Gradients are gathered example by example (:mod:`~fedclade.training.stacking.stacked_parameter`),
# then clipped and summed before the optimizer uses them.


class PrivateBlock:
    """DP-SGD of clients that train at the same time, the largest first, whose models are loaded."""

    def __init__(
        self, stacked: StackedModule, work: Workload, private: PrivateSteps, pool: BufferPool
    ) -> None:
        self._stacked = stacked
        self._work = work
        self._private = private
        self._pool = pool
        self._by_example, self._noise = ByExample(), BufferPool()

    def train(self, jobs: Sequence[Job]) -> Tensor:
        """Train the clients in place; return mean losses over sampled examples, float64 ``[n]``."""
        work = self._work
        spec = self._work.spec
        stacked = self._stacked
        optimizer = LocalOptimizer.of(spec, work.lr)
        steps = [spec.steps_with(job.size) for job in jobs]
        edges = sorted(
            {0, len(jobs), *(k for k in range(1, len(jobs)) if steps[k] != steps[k - 1])}
        )
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
                x, y = (
                    (first[:active] + examples).flatten().to(inputs.device)
                    for first in (first_x, first_y)
                )
                rows = torch.index_select(
                    inputs, 0, x, out=self._pool.room(inputs, len(x), *inputs.shape[1:])
                )
                y = targets.index_select(0, y)
                of_rows, counted = self._step(losses, rows, y, counts.to(inputs.device), samples)
                totals[:active] += of_rows.where(counted, 0).double().sum(1).cpu()
                seen[:active] += counted.sum(1).cpu()
        return totals / seen.clamp(min=1)

    def _step(
        self, losses: Losses, x: Tensor, y: Tensor, counts: Tensor, samples: Samples
    ) -> tuple[Tensor, Tensor]:
        """Take a step on examples ``[k·B, ...]``, some of which are padding.

        Returns the losses ``[k, B]``, and a mask of those whose gradients count.
        """
        stacked = self._stacked
        (k, width) = counts.shape
        self._by_example.begin(width)
        logits = stacked.forward(x)
        # One client per example makes the gradient of each row that of its own loss.
        of_rows, gradient = losses.of(Step(0, k * width, 1, None), logits, y)
        stacked.backward(logits, gradient)
        draws = samples.draws[:k]
        expected = torch.tensor([mine.expected for mine in draws]).to(logits)
        with torch.no_grad():  # inputs of layers may be part of a graph
            factors = torch.where(counts, self._private.factors(self._by_example.squares()), 0.0)
            self._by_example.deliver(factors / expected[:, None])
        noise = self._noise.room(torch.empty(0), k, stacked.layout.n_parameters)
        for row, mine in zip(noise, draws, strict=True):
            mine.noise(row)
        stacked.add(noise.to(logits))
        stacked.step()
        return of_rows.view(k, width), factors > 0


__all__ = ["CannotStack", "StackedEngine"]


class StackedEngine:
    """Trains all clients at once.

    The batches of k clients are folded into ``[k·B, ...]``, so that the module's own forward runs
    unchanged. In a copy of the module, layers with parameters are replaced by layers that have the
    parameters of all clients.

    Parameters
    ----------
    replay
        Records steps and launches the recordings, on a GPU; None to run every step.
    """

    def __init__(self, replay: Replay | None = None) -> None:
        self._replay = replay
        self._stacked: weakref.WeakKeyDictionary[nn.Module, StackedModule] = (
            weakref.WeakKeyDictionary()
        )
        self._pool = BufferPool()

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :meth:`fedclade.training.jobs.Engine.train`.

        Raises
        ------
        CannotStack
            If the module or the optimizer cannot be stacked, which is detected before any generator
            of a job is used; or if training changes a buffer that clients share.
        """
        if work.private is not None:
            refuse_rules(work)
        if work.rule is not None:
            raise CannotStack(f"local rule {work.rule.name} takes no plain steps")
        if work.task.over_batch:
            raise CannotStack(f"the loss {work.task.loss_name} is one over the batch of one client")
        optimizer = LocalOptimizer.of(work.spec, work.lr)
        if not optimizer.is_element_wise:
            raise CannotStack(
                f"optimizer {work.spec.optimizer} is not known to work element by element"
            )
        if work.spec.precision != "float32":
            raise CannotStack(
                "stacked layers multiply in the type of their parameters, not in "
                f"{work.spec.precision}"
            )
        refuse_half_precision(work)
        module = work.module
        layout = work.layout
        models = work.models
        jobs = work.jobs
        stacked = self._stacked.get(module)
        if stacked is None or stacked.layout != layout:
            stacked = StackedModule(module, layout)
            self._stacked[module] = stacked
        updates = work.room(out)
        losses = np.empty(len(jobs))
        states: dict[int, dict[str, Tensor]] = {}
        blocks = _blocks(stacked, optimizer, jobs, models.device)
        together = work.batch_size, len(blocks[0]), WORTH_SHARING_STACKED
        with using_threads(threads_of_step(module, jobs[0].inputs, *together)):
            for places in blocks:
                block = [jobs[place] for place in places]
                rows = [job.row for job in block]
                stacked.load(models, rows)
                losses[places] = self._train(stacked, block, work)
                stacked.updates(models, rows, updates, places)
                if optimizer.keeps_state:
                    states |= zip((job.client for job in block), stacked.states(), strict=True)
        work.states.update(states)
        return updates, torch.from_numpy(losses)

    def _train(self, stacked: StackedModule, jobs: Sequence[Job], work: Workload) -> Tensor:
        """Train the loaded models in place; return the mean losses, float64 ``[n]``."""
        if work.private is not None:
            return PrivateBlock(stacked, work, work.private, self._pool).train(jobs)
        models = work.models
        spec = work.spec
        sizes = tuple(job.size for job in jobs)
        pads = not stacked.padding_shows
        plan = Plan.of(sizes, spec.batch_size, pads, spec.steps, spec.smallest_batch or 1)
        batches = Batches(jobs, plan, self._pool, reshuffle=spec.reshuffle)
        losses = Losses(plan, work.task, batches.all_count)
        optimizer = LocalOptimizer.of(spec, work.lr)
        seeds = [job.generator.initial_seed() for job in jobs]
        anchors = models[[job.anchor_row for job in jobs]] if spec.mu else None
        states = [job.state or {} for job in jobs] if optimizer.keeps_state else ()
        stacked.begin(optimizer, seeds, anchors, plan.edges, work.fixed, states)

        def step_by_step(step: Step, x: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
            stacked.bind(step.start, step.stop)
            logits = stacked.forward(x)
            of_rows, gradient = losses.of(step, logits, y, w)
            stacked.backward(logits, gradient)
            stacked.step()
            return of_rows

        run: Run = step_by_step
        # Torch's own optimizers count their steps on the CPU, which a recording would not repeat.
        if self._replay is not None and optimizer.is_plain:
            run = self._replay.of_round(
                run, stacked, plan, (optimizer, batches.all_count, work.fixed)
            )
        # Layers that draw but have no stacked form use a seed that depends on all clients' seeds.
        with rng.seeded_globally(sum(seeds) % 2**63, models.device), torch.enable_grad():
            for _ in range(spec.epochs or 1):
                # Recordings have no weights of examples, so such steps are run.
                for step, x, y, w in batches.drawn():
                    losses.note(run(step, x, y) if w is None else step_by_step(step, x, y, w))
        return losses.of_clients()


def _blocks(
    stacked: StackedModule, optimizer: LocalOptimizer, jobs: Sequence[Job], device: torch.device
) -> list[list[int]]:
    """Group the places of clients that train at the same time; on a CPU, as many as fit its cache.

    The largest clients come first, so that the clients that still train are always the first of
    their block. Among clients of one size, clients with equally advanced optimizers are adjacent.
    """
    apart = [
        optimizer.apart(job.state) if optimizer.keeps_state and job.state else () for job in jobs
    ]
    largest_first = sorted(range(len(jobs)), key=lambda place: (-jobs[place].size, apart[place]))
    n = len(jobs)
    at_once = len(jobs)
    if device.type == "cpu":
        # A step passes over parameters and gradients twice. It passes once over each state, and
        # once over the intermediate results of an optimizer that takes several kernels.
        once = 0 if optimizer.is_plain else len(optimizer.states) + (not optimizer.has_kernel)
        at_once = clients_in_cache(stacked.hot_bytes * (4 + once) // 4, torch.get_num_threads())
    count = -(-n // at_once)
    edges = [k * n // count for k in range(count + 1)]
    return [largest_first[start:stop] for start, stop in pairwise(edges)]
