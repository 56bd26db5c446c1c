"""Engine that trains all clients of a round at once, as one batched program.

Stacking means: the batches of k clients are concatenated in dimension 0, and every layer with
parameters is replaced by a layer that applies each client's own parameters to the client's rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import IGNORED, rng
from fedclade.training.jobs import (
    Job,
    PrivateSteps,
    Workload,
    full,
    precision,
    refuse_half_precision,
    refuse_own_code,
    refuse_rules,
)
from fedclade.training.memory import clients_in_cache
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacking.batches import Batches, Plan, Step, joined
from fedclade.training.stacking.loss import Losses
from fedclade.training.stacking.replay import Replay, Run
from fedclade.training.stacking.stacked_module import CannotStack, StackedModule
from fedclade.training.stacking.stacked_parameter import BufferPool, ByExample
from fedclade.training.threads import (
    WORTH_SHARING_STACKED,
    allows_tf32,
    threads_of_step,
    using_threads,
)
from fedclade.training.vmap import Samples

# DP-SGD of all clients in one batched program, with the forward and backward passes of the stacked
# engine.
#
# The gradients of single examples are collected (``stacking/stacked_parameter.py``), then clipped
# and summed before the optimizer uses them.


class PrivateBlock:
    """DP-SGD of several clients at once, in the stacked engine.

    The clients' models have been loaded; the clients with the most examples come first.
    """

    def __init__(
        self, stacked: StackedModule, work: Workload, private: PrivateSteps, pool: BufferPool
    ) -> None:
        self._stacked = stacked
        self._work = work
        self._private = private
        self._pool = pool
        self._by_example = ByExample()
        self._noise = BufferPool()

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
        _begin(stacked, optimizer, jobs, work, edges=edges, by_example=self._by_example)
        inputs, first_inputs = joined([job.inputs for job in jobs])
        targets, first_targets = joined([job.targets for job in jobs])
        first_x = torch.tensor(first_inputs)[:, None]
        first_y = torch.tensor(first_targets)[:, None]
        samples = Samples(self._private, jobs, spec.batch_size)
        all_count = targets.is_floating_point() or not bool((targets == IGNORED).any())
        losses = Losses(Plan.of((1,), 1, True), work.task, all_count)
        totals, seen = torch.zeros(2, len(jobs), dtype=torch.float64)
        with rng.seeded_globally(_joint_seed(jobs), work.models.device), torch.enable_grad():
            for number in range(steps[0]):
                active = sum(count > number for count in steps)
                stacked.bind(0, active)
                examples, counts = samples.drawn(active)
                places_x = (first_x[:active] + examples).flatten().to(inputs.device)
                places_y = (first_y[:active] + examples).flatten().to(inputs.device)
                room = self._pool.room(inputs, len(places_x), *inputs.shape[1:])
                of_rows, counted = self._step(
                    losses,
                    x=torch.index_select(inputs, 0, places_x, out=room),
                    y=targets.index_select(0, places_y),
                    counts=counts.to(inputs.device),
                    samples=samples,
                )
                totals[:active] += of_rows.where(counted, 0).double().sum(1).cpu()
                seen[:active] += counted.sum(1).cpu()
        return totals / seen.clamp(min=1)

    def _step(
        self, losses: Losses, x: Tensor, y: Tensor, counts: Tensor, samples: Samples
    ) -> tuple[Tensor, Tensor]:
        """Take a step of DP-SGD of k clients on their samples, padded to B examples each.

        The inputs and targets of all samples are concatenated, ``[k·B, ...]``. Returns the losses
        of the examples, ``[k, B]``, and a mask of the examples whose gradients contribute to the
        step, ``[k, B]``.
        """
        stacked = self._stacked
        (k, width) = counts.shape
        self._by_example.begin(width)
        logits = stacked.forward(x)
        # Each example is passed as a client of its own, so that its loss is not divided by the size
        # of the batch.
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
    """Engine that trains all clients at once, as one batched program.

    The batches of k clients, with B examples each, are concatenated to ``[k·B, ...]``, so that the
    module's own forward method runs unchanged. In a copy of the module, layers with parameters are
    replaced by layers that have the parameters of all clients.

    Parameters
    ----------
    replay
        Records steps as CUDA graphs on a GPU, and launches the recordings; None to run every step
        without recordings.
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
            If the module or the optimizer cannot be stacked, which is detected before any random
            generator of a job is used; or if training changes a buffer that clients share.
        """
        if work.private is not None:
            refuse_rules(work)
        if work.rule is not None:
            raise CannotStack(
                f"local rule {work.rule.name} replaces plain optimizer steps, but the stacked engine "
                "supports plain steps only (engine loop supports local rules)"
            )
        refuse_own_code(work)
        if work.task.over_batch:
            raise CannotStack(
                f"the loss {work.task.loss_name} is defined over the whole batch of one client, but "
                "the stacked engine computes the loss of each example (engine loop supports both)"
            )
        optimizer = LocalOptimizer.of(work.spec, work.lr)
        if not optimizer.is_element_wise:
            raise CannotStack(
                f"optimizer {work.spec.optimizer} is not known to treat each entry of a parameter "
                "independently of the other entries, as the stacked engine requires (engine loop "
                "supports every optimizer)"
            )
        if work.private is not None and work.spec.precision != "float32":
            raise CannotStack(
                "the stacked engine computes the gradients of single examples, which DP-SGD needs, "
                f"in the data type of the parameters, not in {work.spec.precision} "
                "(local.precision), which engine loop supports"
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
        """Train the clients whose models are loaded; return their mean losses, float64 ``[n]``."""
        if work.private is not None:
            return PrivateBlock(stacked, work, work.private, self._pool).train(jobs)
        spec = work.spec
        sizes = tuple(job.size for job in jobs)
        pads = not stacked.padding_shows
        plan = Plan.of(
            sizes,
            spec.batch_size,
            padding=pads,
            steps=None if spec.has_whole_epochs else tuple(map(spec.steps_with, sizes)),
            smallest_batch=spec.smallest_batch or 1,
        )
        batches = Batches(jobs, plan, self._pool, reshuffle=spec.reshuffle)
        losses = Losses(plan, work.task, batches.all_count)
        optimizer = LocalOptimizer.of(spec, work.lr)
        # Torch's own optimizers count their steps on the CPU, which a recording would not repeat.
        replay = self._replay if optimizer.is_plain else None
        _begin(stacked, optimizer, jobs, work, edges=plan.edges, recorded=replay is not None)

        def step_by_step(step: Step, x: Tensor, y: Tensor, w: Tensor | None = None) -> Tensor:
            stacked.bind(step.start, step.stop)
            with precision(spec, x.device):
                logits = full(stacked.forward(x))
            of_rows, gradient = losses.of(step, logits, y, w)
            stacked.backward(logits, gradient)
            stacked.step()
            return of_rows

        run: Run = step_by_step
        if replay is not None:
            precisions = spec.precision, allows_tf32()
            kind = optimizer.kind_of_steps, batches.all_count, work.fixed, precisions
            run = replay.of_round(run, stacked, plan, kind)
        # Random layers without a stacked form use the global generator, whose seed therefore
        # depends on the seeds of all clients.
        with rng.seeded_globally(_joint_seed(jobs), work.models.device), torch.enable_grad():
            epochs = spec.epochs_with(sizes[0]) if spec.has_whole_epochs else 1
            for _ in range(epochs):
                for step, x, y, w in batches.drawn():
                    if w is None:
                        of_rows = run(step, x, y)
                    else:  # recordings have no weights of examples, so such steps are run
                        of_rows = step_by_step(step, x, y, w)
                    losses.note(of_rows)
        return losses.of_clients()


def _begin(
    stacked: StackedModule,
    optimizer: LocalOptimizer,
    jobs: Sequence[Job],
    work: Workload,
    *,
    edges: Sequence[int],
    by_example: ByExample | None = None,
    recorded: bool = False,
) -> None:
    """Start local training of the clients whose models are loaded.

    ``edges``, ``by_example`` and ``recorded`` are described in :meth:`StackedModule.begin`.
    """
    anchors: Tensor | None = None
    if work.spec.mu:
        anchors = work.models[[job.anchor_row for job in jobs]]
    states: Sequence[Mapping[str, Tensor]] = ()
    if optimizer.keeps_state:
        states = [job.state or {} for job in jobs]
    stacked.begin(
        optimizer,
        seeds=[job.generator.initial_seed() for job in jobs],
        anchors=anchors,
        edges=edges,
        fixed=work.fixed,
        states=states,
        by_example=by_example,
        recorded=recorded,
        rounded=work.spec.precision != "float32",
    )


def _joint_seed(jobs: Sequence[Job]) -> int:
    """Return a seed for random layers without a stacked form, from the seeds of all clients.

    Such layers draw random numbers for all clients at once from torch's global generator.
    """
    return sum(job.generator.initial_seed() for job in jobs) % 2**63


def _blocks(
    stacked: StackedModule, optimizer: LocalOptimizer, jobs: Sequence[Job], device: torch.device
) -> list[list[int]]:
    """Group clients into blocks of clients that train at the same time.

    On a CPU, a block has only as many clients as fit into the CPU's cache. For each block, the
    result has the positions of its clients in ``jobs``. Clients with the most examples come first,
    so that the clients with steps left are always the first clients of their block. Among clients
    with equally many examples, clients whose optimizers have taken equally many steps are adjacent.
    """

    def order(place: int) -> tuple[int, tuple[tuple[str, float], ...]]:
        job = jobs[place]
        progress: tuple[tuple[str, float], ...] = ()
        if optimizer.keeps_state and job.state:
            progress = optimizer.apart(job.state)
        return -job.size, progress

    largest_first = sorted(range(len(jobs)), key=order)
    n = len(jobs)
    at_once = len(jobs)
    if device.type == "cpu":
        # A step passes over parameters and gradients twice. It passes once over each state, and
        # once over the intermediate results of an optimizer that takes several kernels.
        once = 0
        if not optimizer.is_plain:
            once = len(optimizer.states) + (not optimizer.has_kernel)
        at_once = clients_in_cache(stacked.hot_bytes * (4 + once) // 4, torch.get_num_threads())
    count = -(-n // at_once)
    edges = [k * n // count for k in range(count + 1)]
    return [largest_first[start:stop] for start, stop in pairwise(edges)]
