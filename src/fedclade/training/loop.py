"""The reference: one client after another, one batch after another, as the papers write it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade.core import Layout, LocalSpec, rng
from fedclade.data import IGNORED
from fedclade.training.jobs import Task
from fedclade.training.threads import Threads, using_threads


class LoopEngine:
    """One client after another; each step on as many threads as it has work for."""

    def __init__(self) -> None:
        self._threads = Threads()

    def train(self, task: Task, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :class:`~fedclade.training.jobs.Engine`."""
        module, models = task.module, task.models
        updates, losses = task.room(into), torch.empty(len(task.jobs), dtype=torch.float64)
        with using_threads(self._threads.of_step(module, task.jobs[0].inputs, task.batch_size)):
            for k, job in enumerate(task.jobs):
                start, anchor, examples = models[job.row], models[job.anchor_row], (job.inputs, job.targets)
                of_all = module, task.layout, start, examples, task.spec, task.lr
                _, losses[k] = train(*of_all, job.draw, anchor, updates[k])
        return updates, losses


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits ``[..., outputs]`` against targets ``[...]``, in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def train(
    module: nn.Module,
    layout: Layout,
    model: Tensor,
    examples: tuple[Tensor, Tensor],
    spec: LocalSpec,
    lr: float,
    draw: torch.Generator,
    anchor: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Run SGD_n(θ, D_i) − θ (CFL eq. 1) for one client.

    Parameters
    ----------
    module
        Any module of this layout; its state is overwritten.
    model
        θ, ``[S]``.
    examples
        The client's inputs and targets, ``[n, ...]``.
    spec, lr
        The local training, and the step size of this round.
    draw
        Orders the batches, and seeds dropout.
    anchor
        The model ``[S]`` that the proximal term pulls towards; θ if left out.
    into
        Memory ``[S]`` for the update; new if left out.

    Returns
    -------
    tuple
        The update ``[S]``, and the mean training loss over all steps.
    """
    layout.load(model, module)
    layout.set_training(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    anchors = layout.unflatten(model if anchor is None else anchor) if spec.mu else {}
    pulled = [(p, anchors[name]) for name, p in module.named_parameters() if anchors and p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    inputs, targets = examples
    losses: list[Tensor] = []
    with rng.seeded_globally(draw.initial_seed(), inputs.device):
        for _ in range(spec.epochs):
            order = torch.randperm(len(inputs), generator=draw).to(inputs.device)
            for batch in order.split(spec.batch_size):
                optimizer.zero_grad(set_to_none=True)
                loss = cross_entropy(module(inputs[batch]), targets[batch])
                loss.backward()
                for p, p_anchor in pulled:  # the gradient of μ/2·‖θ − θ_anchor‖²
                    if p.grad is not None:
                        p.grad.add_(p.detach() - p_anchor, alpha=spec.mu)
                if spec.clip_norm is not None:
                    nn.utils.clip_grad_norm_(trained, spec.clip_norm)
                optimizer.step()
                losses.append(loss.detach() * len(batch))
    mean_loss = float(torch.stack(losses).sum()) / (spec.epochs * len(inputs))
    return layout.difference(module, model, torch.empty_like(model) if into is None else into), mean_loss


def gradient(
    module: nn.Module, layout: Layout, model: Tensor, examples: tuple[Tensor, Tensor], chunk: int
) -> tuple[Tensor, float]:
    """Return −∇r_i(θ) over all examples of one client (CFL eq. 50) as an update ``[S]``, and the loss r_i(θ).

    The module is in evaluation mode: r_i is the risk of the model as it is served.
    """
    layout.load(model, module)
    module.eval()
    module.zero_grad(set_to_none=True)
    inputs, targets = examples
    total = 0.0
    counted = int((targets != IGNORED).sum())
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN's LSTM has no backward pass in evaluation mode
        for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            loss = cross_entropy(module(x), y, reduction="sum") / counted
            loss.backward()
            total += float(loss.detach())
    update = torch.zeros_like(model)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    for slot in layout.parameters:
        if (g := gradients[slot.name]) is not None:
            update[slot.start : slot.stop] = -g.flatten()
    return update, total
