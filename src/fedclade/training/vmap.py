"""All clients at once by ``torch.func.vmap``: for modules whose layers the stacked engine does not know.

The module is called as a function of its parameters, differentiated, and mapped over clients, whose parameters are
stacked ``[n, ...]``. Batches of one length make one call, so that no example is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedclade.core import Layout, LocalTraining
from fedclade.training.jobs import CannotTrainTogether, Job, Workload
from fedclade.training.loop import batches, full, precision
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacking.batches import joined

Named = dict[str, Tensor]
Places = slice | Tensor
"""Some of the stacked clients: the first k, or a list of indices."""


class CannotMapError(CannotTrainTogether):
    """The module cannot be mapped over clients; names what in it prevents that."""


class VmapEngine:
    """All clients of a call at once, by ``torch.func``.

    It refuses what has a state or draws in the forward pass: BatchNorm, dropout, and the like.
    """

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`.

        Raises
        ------
        CannotMapError
            If the module cannot be mapped over clients.
        """
        if work.fixed:
            raise CannotTrainTogether("some parameters stay as they are")
        module, layout, models, jobs, spec = work.module, work.layout, work.models, work.jobs, work.spec
        _refuse_what_cannot_be_mapped(module, layout)
        optimizer = LocalOptimizer.of(spec, work.lr)
        if not optimizer.is_plain:
            raise CannotMapError(f"optimizer {spec.optimizer} takes its steps in place; plain SGD can be mapped")
        plans = [_batches_of(job, spec) for job in jobs]
        order = sorted(range(len(jobs)), key=lambda k: -len(plans[k]))  # those who train longest come first
        ordered, plans = [jobs[k] for k in order], [plans[k] for k in order]
        start = models[torch.tensor([job.row for job in ordered], device=models.device)]
        anchors = models[torch.tensor([job.anchor_row for job in ordered], device=models.device)] if spec.mu else start
        reached = _reached(work, start[0], ordered[0])
        clients = _Stacked(work, start, anchors, optimizer, reached)
        layout.set_training(module)
        inputs, first_inputs = joined([job.inputs for job in ordered])
        targets, first_targets = joined([job.targets for job in ordered])
        first = torch.tensor(first_inputs)[:, None], torch.tensor(first_targets)[:, None]
        given = [job.weights for job in ordered if job.weights is not None]  # of all jobs, or of none
        weights, first_weights = joined(given) if given else (None, [])
        totals = torch.zeros(len(jobs), dtype=torch.float64, device=models.device)
        for step in range(len(plans[0])):
            for places, batch in _by_length(plans, step):
                x, y = ((each[places] + batch).to(inputs.device) for each in first)
                of_batch = () if weights is None else (weights[torch.tensor(first_weights)[:, None][places] + batch],)
                losses = clients.step(places, inputs[x], targets[y], *of_batch)
                totals[places] += losses.to(torch.float64) * batch.shape[1]
        updates = work.room(out)
        updates[torch.tensor(order)] = clients.models - start
        seen = torch.tensor([spec.passed(job.size) for job in ordered], dtype=torch.float64)
        losses = torch.empty(len(jobs), dtype=torch.float64)
        losses[torch.tensor(order)] = totals.cpu() / seen
        return updates, losses


def _refuse_what_cannot_be_mapped(module: nn.Module, layout: Layout) -> None:
    """Look for layers that change their buffers in training, which those that rest do not."""
    for name, layer in module.named_modules():
        changes = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats  # pyright: ignore[reportPrivateUsage]
        if changes and name not in layout.resting:
            raise CannotMapError(f"layer {name!r} ({type(layer).__name__}) changes its buffers in training")


def _batches_of(job: Job, spec: LocalTraining) -> list[Tensor]:
    """Return the indices of every batch of every epoch, drawn as the loop draws them."""
    return [*batches(job.size, spec, job.generator)]


def _by_length(plans: Sequence[Sequence[Tensor]], step: int) -> list[tuple[Places, Tensor]]:
    """Return the clients that take a step, and their batches ``[k, B]``: one entry for each length of a batch."""
    active = [plan[step] for plan in plans if step < len(plan)]
    groups: dict[int, list[int]] = defaultdict(list)
    for k, batch in enumerate(active):
        groups[len(batch)].append(k)
    if len(groups) == 1:
        return [(slice(0, len(active)), torch.stack(active))]
    return [(torch.tensor(group), torch.stack([active[k] for k in group])) for group in groups.values()]


class _Stacked:
    """The models of n clients, tensor by tensor ``[n, ...]``, and what they pull towards.

    ``reached`` names the parameters that the loss depends on: the others stay, and do not decay.
    """

    def __init__(self, work: Workload, start: Tensor, anchors: Tensor, sgd: LocalOptimizer, reached: set[str]) -> None:
        module, layout, task = work.module, work.layout, work.task
        self.models = start.clone()
        self._module, self._sgd, self._reached = module, sgd, reached
        tensors = layout.unflatten(self.models)
        self._anchors = layout.unflatten(anchors)
        self._trained = {slot.name: tensors[slot.name] for slot in layout.parameters}  # views of the models
        self._others = {slot.name: tensors[slot.name] for slot in layout.buffers}
        self._velocity = {name: torch.zeros_like(p) for name, p in self._trained.items()} if sgd.momentum else {}

        def loss(trained: Named, others: Named, inputs: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
            with precision(work.spec, inputs.device):
                outputs = functional_call(module, {**trained, **others}, (inputs,))
            return task.mean_loss(full(outputs), targets, *weights)

        self._gradients = cast("Callable[..., tuple[Named, Tensor]]", vmap(grad_and_value(loss)))

    def step(self, places: Places, inputs: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
        """Let some clients take a step on their batches ``[k, B, ...]``; return their losses before it, ``[k]``.

        Where examples have weights, those are ``[k, B]`` too.
        """
        sgd, trained = self._sgd, {name: p[places] for name, p in self._trained.items()}
        others = {name: b[places] for name, b in self._others.items()}
        kind = type(self._module).__name__
        before = [buffer._version for buffer in (*self._module.buffers(), *others.values())]
        try:
            gradients, losses = self._gradients(trained, others, inputs, targets, *weights)
        except (RuntimeError, NotImplementedError) as error:
            first_line = str(error).partition("\n")[0] or type(error).__name__
            raise CannotMapError(f"{kind} cannot be mapped over clients: {first_line}") from error
        if before != [buffer._version for buffer in (*self._module.buffers(), *others.values())]:
            raise CannotMapError(f"{kind} changes its buffers in training")
        gradients = {name: gradients[name] for name in self._reached}
        if mu := sgd.mu:
            gradients = {name: g + mu * (trained[name] - self._anchors[name][places]) for name, g in gradients.items()}
        scales = sgd.scales(gradients.values())
        for name, gradient in gradients.items():
            velocity = self._velocity[name][places] if sgd.momentum else None
            self._trained[name][places] = sgd.stepped(trained[name], gradient, velocity, scales)
            if velocity is not None:
                self._velocity[name][places] = velocity
        return losses


def _reached(work: Workload, model: Tensor, job: Job) -> set[str]:
    """Return the names of the parameters that the loss depends on."""
    module = work.module
    work.layout.load(model, module)
    module.eval()  # draws nothing
    module.zero_grad(set_to_none=True)
    with torch.backends.cudnn.flags(enabled=False):
        work.task.mean_loss(module(job.inputs[:2]), job.targets[:2]).backward()
    reached = {name for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return reached
