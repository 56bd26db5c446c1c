"""The reference: one client after another, one batch after another, as the papers write it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedclade.core import Layout, LocalTraining, rng
from fedclade.tasks import FittedTask, counted
from fedclade.training.jobs import Job, Workload
from fedclade.training.local_rules import train_by_rule
from fedclade.training.optimizer import LocalOptimizer, get_state
from fedclade.training.private_loop import train_privately
from fedclade.training.private_steps import PrivateSteps
from fedclade.training.steps import Places, batches, full, precision
from fedclade.training.threads import threads_of_step, using_threads

LOGITS_AT_A_TIME = 2**24
"""How many logits a gradient over all examples holds at once: 64 MiB in float32."""


class LoopEngine:
    """One client after another; each step on as many threads as it has work for."""

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`."""
        if work.private is not None:
            return _privately(work, work.private, out)
        if work.rule is not None:
            return _by_rule(work, out)
        module, models = work.module, work.models
        updates, losses = work.room(out), torch.empty(len(work.jobs), dtype=torch.float64)
        states: dict[int, dict[str, Tensor]] = {}
        with using_threads(threads_of_step(module, work.jobs[0].inputs, work.batch_size)):
            for k, job in enumerate(work.jobs):
                start, anchor, examples = models[job.row], models[job.anchor_row], (job.inputs, job.targets)
                of_all = module, work.layout, start, examples, work.spec, work.lr, work.task
                state = dict(job.state or {}) if work.spec.keep_state else None
                _, losses[k] = train(*of_all, job.generator, anchor, updates[k], work.fixed, state, job.weights)
                if state is not None:
                    states[job.client] = state
        work.states.update(states)
        return updates, losses


def chunk(logits_each: int) -> int:
    """Return how many examples of so many logits a gradient over all of them takes at once."""
    return max(1, min(1024, LOGITS_AT_A_TIME // logits_each))


def train(
    module: nn.Module,
    layout: Layout,
    model: Tensor,
    examples: tuple[Tensor, Tensor],
    spec: LocalTraining,
    lr: float,
    task: FittedTask,
    generator: torch.Generator,
    anchor: Tensor | None = None,
    out: Tensor | None = None,
    fixed: frozenset[str] = frozenset(),
    state: dict[str, Tensor] | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Run SGD_n(θ, D_i) − θ (CFL eq. 1) for one client; return the update ``[S]`` and the mean training loss.

    In place of SGD there may be another optimizer. The module's state is overwritten. ``model`` is θ, ``[S]``, and
    ``anchor`` the model that the proximal term pulls towards, θ by default; ``examples`` are inputs and targets
    ``[n, ...]``. The generator orders the batches and seeds dropout. ``out`` is memory ``[S]`` for the update, and
    ``state`` that of the optimizer, which it begins with and leaves there. Parameters of ``fixed`` names stay as they
    are. ``weights [n]`` are those of the examples, see :class:`~fedclade.training.jobs.Job`.
    """
    layout.load(model, module)
    layout.set_training(module)
    held = [p for name, p in module.named_parameters() if name in fixed]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in fixed}
    parameters = list(trained.values())
    pulled_to = layout.unflatten(model if anchor is None else anchor) if spec.mu else {}
    anchors = [pulled_to[name] for name in trained] if spec.mu else []
    rule = LocalOptimizer.of(spec, lr)
    optimizer = rule.for_one_client(parameters)
    if state is not None:
        rule.set_state(optimizer, trained, state)
    inputs, targets = examples
    losses: list[Tensor] = []
    with rng.seeded_globally(generator.initial_seed(), inputs.device), without_gradients(held):
        for batch in batches(len(inputs), spec, generator, inputs.device):
            optimizer.zero_grad(set_to_none=True)
            with precision(spec, inputs.device):
                outputs = module(inputs[batch])
            of_batch = None if weights is None else weights[batch]
            loss = task.mean_loss(full(outputs), targets[batch], of_batch)
            loss.backward()
            rule.adjust(parameters, anchors)
            optimizer.step()
            losses.append(loss.detach() * len(batch))
    layout.check_unsent(module)
    if state is not None:
        state.clear()
        state.update(get_state(optimizer, trained))
    mean_loss = float(torch.stack(losses).sum()) / spec.passed(len(inputs))
    return layout.difference(module, model, torch.empty_like(model) if out is None else out), mean_loss


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Generator[None]:
    """Let parameters get no gradients meanwhile, so that whatever takes steps leaves them as they are."""
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def gradient(
    module: nn.Module, layout: Layout, model: Tensor, examples: tuple[Tensor, Tensor], task: FittedTask, chunk: int
) -> tuple[Tensor, float]:
    """Return −∇r_i(θ) over all examples of one client (CFL eq. 50) as an update ``[S]``, and the loss r_i(θ).

    The module is in evaluation mode: r_i is the risk of the model as it is served.
    """
    layout.load(model, module)
    module.eval()
    module.zero_grad(set_to_none=True)
    inputs, targets = examples
    total = 0.0
    of_all = int(counted(targets).sum())
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's LSTM has no backward pass in evaluation mode
        for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            loss = task.total_loss(full(module(x)), y) / of_all
            loss.backward()
            total += float(loss.detach())
    update = torch.zeros_like(model)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for slot in layout.parameters:
        if (g := gradients[slot.name]) is not None:
            update[slot.start : slot.stop] = -g.flatten()
    return update, total


def _privately(work: Workload, private: PrivateSteps, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Train by DP-SGD, one client after another."""
    updates = work.room(out)
    with using_threads(threads_of_step(work.module, work.jobs[0].inputs, 1)):
        return updates, train_privately(work, private, updates)


def _by_rule(work: Workload, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Train by a local rule, one client after another."""
    updates, losses, module = work.room(out), torch.empty(len(work.jobs), dtype=torch.float64), work.module
    with using_threads(threads_of_step(module, work.jobs[0].inputs, work.batch_size)):
        for k, job in enumerate(work.jobs):
            work.layout.set_training(module)
            with rng.seeded_globally(job.generator.initial_seed(), job.inputs.device):
                updates[k], losses[k] = train_by_rule(work, [job], _Gradients(work, job))
            work.layout.check_unsent(module)
    return updates, losses


class _Gradients:
    """Gradients of one client, whose buffers change as the module's do; see :class:`~.local_rules.Gradients`."""

    def __init__(self, work: Workload, job: Job) -> None:
        self._work, self._job, self._layout = work, job, work.layout
        self._parameters = dict(work.module.named_parameters())

    def __call__(self, models: Tensor, places: Places, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients ``[1, D]``, losses ``[1]``, and which entries the loss depends on, ``[D]``."""
        work, layout, module = self._work, self._layout, self._work.module
        layout.load(models[0], module)
        module.zero_grad(set_to_none=True)
        with precision(work.spec, models.device):
            outputs = module(self._job.inputs[batch[0]])
        loss = work.task.mean_loss(full(outputs), self._job.targets[batch[0]])
        loss.backward()
        gradients = models.new_zeros(1, layout.n_parameters)
        reached = torch.zeros(layout.n_parameters, dtype=torch.bool, device=models.device)
        for slot in layout.parameters:
            if (gradient := self._parameters[slot.name].grad) is not None:
                gradients[0, slot.start : slot.stop] = gradient.flatten()
                reached[slot.start : slot.stop] = True
        for slot in layout.buffers:
            models[0, slot.start : slot.stop] = module.get_buffer(slot.name).flatten().to(models)
        return gradients, loss.detach()[None], reached
