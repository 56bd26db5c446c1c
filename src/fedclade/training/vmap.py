"""All clients at once by ``torch.func.vmap``: for modules whose layers the stacked engine does not know.

The module is called as a function of its parameters, differentiated, and mapped over clients; SGD is done by hand on
the stacked parameters ``[n, ...]``. Batches of one length make one call, so that no example is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedclade.core import Layout, LocalSpec
from fedclade.training.clip import clipping, per_client
from fedclade.training.jobs import CannotTrainTogether, Job, Task
from fedclade.training.loop import cross_entropy

Named = dict[str, Tensor]
Places = slice | Tensor
"""Some of the stacked clients: the first k, or a list of indices."""


class CannotMapError(CannotTrainTogether):
    """The module cannot be mapped over clients; says what in it is in the way."""


class VmapEngine:
    """All clients of a call at once, by ``torch.func``.

    It refuses what has a state or draws in the forward pass: BatchNorm, dropout, and the like.
    """

    def train(self, task: Task, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`.

        Raises
        ------
        CannotMapError
            If the module cannot be mapped over clients.
        """
        module, layout, models, jobs, spec = task.module, task.layout, task.models, task.jobs, task.spec
        refuse_what_cannot_be_mapped(module, layout)
        plans = [batches_of(job, spec) for job in jobs]
        order = sorted(range(len(jobs)), key=lambda k: -len(plans[k]))  # those who train longest come first
        ordered, plans = [jobs[k] for k in order], [plans[k] for k in order]
        start = models[torch.tensor([job.row for job in ordered], device=models.device)]
        anchors = models[torch.tensor([job.anchor_row for job in ordered], device=models.device)] if spec.mu else start
        clients = _Stacked(
            module, layout, start, anchors, spec, task.lr, _reached(module, layout, start[0], ordered[0])
        )
        layout.set_training(module)
        examples = _Examples.of(ordered)
        totals = torch.zeros(len(jobs), dtype=torch.float64, device=models.device)
        for step in range(len(plans[0])):
            for places, batch in _by_length(plans, step):
                inputs, targets = examples.drawn(places, batch)
                totals[places] += clients.step(places, inputs, targets).to(torch.float64) * batch.shape[1]
        updates = task.room(into)
        updates[torch.tensor(order)] = clients.models - start
        seen = torch.tensor([spec.epochs * job.size for job in ordered], dtype=torch.float64)
        losses = torch.empty(len(jobs), dtype=torch.float64)
        losses[torch.tensor(order)] = totals.cpu() / seen
        return updates, losses


def refuse_what_cannot_be_mapped(module: nn.Module, layout: Layout) -> None:
    """Look for layers that change their buffers in training, which those that rest do not.

    Raises
    ------
    CannotMapError
        If there is one; names it.
    """
    for name, layer in module.named_modules():
        changes = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats  # pyright: ignore[reportPrivateUsage]
        if changes and name not in layout.resting:
            raise CannotMapError(f"layer {name!r} ({type(layer).__name__}) changes its buffers in training")


def batches_of(job: Job, spec: LocalSpec) -> list[Tensor]:
    """Return the indices of every batch of every epoch, drawn as the loop draws them."""
    orders = [torch.randperm(job.size, generator=job.draw) for _ in range(spec.epochs)]
    return [batch for order in orders for batch in order.split(spec.batch_size)]


def _by_length(plans: Sequence[Sequence[Tensor]], step: int) -> list[tuple[Places, Tensor]]:
    """Return the clients that take a step, and their batches ``[k, B]``: one entry for each length of a batch."""
    active = [plan[step] for plan in plans if step < len(plan)]
    groups: dict[int, list[int]] = defaultdict(list)
    for k, batch in enumerate(active):
        groups[len(batch)].append(k)
    if len(groups) == 1:
        return [(slice(0, len(active)), torch.stack(active))]
    return [(torch.tensor(group), torch.stack([active[k] for k in group])) for group in groups.values()]


@dataclass(frozen=True)
class _Examples:
    """The examples of all clients behind each other, ``[N, ...]``, and where each client's begin, ``[n, 1]``."""

    inputs: Tensor
    targets: Tensor
    starts: Tensor

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> _Examples:
        sizes = torch.tensor([job.size for job in jobs])
        starts = (sizes.cumsum(0) - sizes)[:, None]
        return cls(torch.cat([job.inputs for job in jobs]), torch.cat([job.targets for job in jobs]), starts)

    def drawn(self, places: Places, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets ``[k, B, ...]`` of the clients' batches ``[k, B]``."""
        indices = (self.starts[places] + batch).to(self.inputs.device)
        return self.inputs[indices], self.targets[indices]


class _Stacked:
    """The models of n clients, tensor by tensor ``[n, ...]``, and SGD on all of them.

    Parameters
    ----------
    start
        The models that the clients received, ``[n, S]``.
    anchors
        The models that the proximal term pulls them towards, ``[n, S]``.
    reached
        Names of the parameters that the loss depends on: the others stay, and do not decay.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        start: Tensor,
        anchors: Tensor,
        spec: LocalSpec,
        lr: float,
        reached: set[str],
    ) -> None:
        self.models = start.clone()
        self._module, self._spec, self._lr, self._reached = module, spec, lr, reached
        tensors = layout.unflatten(self.models)
        trained = [slot.name for slot in layout.parameters]
        self._anchors = layout.unflatten(anchors)
        self._trained = {name: tensors[name] for name in trained}  # views: what is written here is in the models
        self._others = {slot.name: tensors[slot.name] for slot in layout.buffers}
        self._velocity: Named = {}

        def loss(trained: Named, others: Named, inputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(functional_call(module, {**trained, **others}, (inputs,)), targets)

        self._gradients = cast("Callable[..., tuple[Named, Tensor]]", vmap(grad_and_value(loss)))

    def step(self, places: Places, inputs: Tensor, targets: Tensor) -> Tensor:
        """Let some clients take a step on their batches ``[k, B, ...]``; return their losses before it, ``[k]``."""
        trained = {name: p[places] for name, p in self._trained.items()}
        others = {name: b[places] for name, b in self._others.items()}
        kind = type(self._module).__name__
        before = [buffer._version for buffer in (*self._module.buffers(), *others.values())]
        try:
            gradients, losses = self._gradients(trained, others, inputs, targets)
        except (RuntimeError, NotImplementedError) as error:
            raise CannotMapError(f"{kind} cannot be mapped over clients: {_first_line(error)}") from error
        if before != [buffer._version for buffer in (*self._module.buffers(), *others.values())]:
            raise CannotMapError(f"{kind} changes its buffers in training")
        gradients = {name: gradients[name] for name in self._reached}
        if mu := self._spec.mu:
            gradients = {name: g + mu * (trained[name] - self._anchors[name][places]) for name, g in gradients.items()}
        if self._spec.clip_norm is not None:
            scales = clipping(gradients.values(), self._spec.clip_norm)
            gradients = {name: g * per_client(scales, g) for name, g in gradients.items()}
        for name, gradient in gradients.items():
            self._descend(name, places, gradient, trained[name])
        return losses

    def _descend(self, name: str, places: Places, gradient: Tensor, now: Tensor) -> None:
        """Do what ``torch.optim.SGD`` does."""
        spec = self._spec
        if spec.weight_decay:
            gradient = gradient + spec.weight_decay * now
        if spec.momentum:
            velocity = self._velocity.setdefault(name, torch.zeros_like(self._trained[name]))
            gradient = spec.momentum * velocity[places] + gradient
            velocity[places] = gradient
        self._trained[name][places] = now - self._lr * gradient


def _reached(module: nn.Module, layout: Layout, model: Tensor, job: Job) -> set[str]:
    """Return the names of the parameters that the loss depends on."""
    layout.load(model, module)
    module.eval()  # draws nothing
    module.zero_grad(set_to_none=True)
    with torch.backends.cudnn.flags(enabled=False):
        cross_entropy(module(job.inputs[:2]), job.targets[:2]).backward()
    reached = {name for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return reached


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
