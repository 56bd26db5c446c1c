"""DP-SGD by the loop: one client, one step, one example after another, as Abadi et al. 2016 write Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedclade.core import Layout, ModelError, rng
from fedclade.training.jobs import Job, Workload
from fedclade.training.optimizer import LocalOptimizer, get_state
from fedclade.training.private_steps import PrivateSteps, refuse_rules
from fedclade.training.steps import full, precision


def train_privately(work: Workload, private: PrivateSteps, updates: Tensor) -> Tensor:
    """Train every client, one after another; write updates ``[n, S]`` and return mean losses, float64 ``[n]``.

    A loss is the mean over the examples that were sampled and have a gradient, 0 if there was none.

    Raises
    ------
    ConfigError
        If clients do not take plain steps.
    ModelError
        If training changes a buffer, which has no noise.
    """
    refuse_rules(work)
    losses = torch.empty(len(work.jobs), dtype=torch.float64)
    for k, job in enumerate(work.jobs):
        losses[k] = _train(work, private, job, updates[k])
    return losses


def _train(work: Workload, private: PrivateSteps, job: Job, out: Tensor) -> float:
    module, layout, spec, model = work.module, work.layout, work.spec, work.models[job.row]
    layout.load(model, module)
    layout.set_training(module)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in work.fixed}
    parameters = list(trained.values())
    pulled_to = layout.unflatten(work.models[job.anchor_row]) if spec.mu else {}
    anchors = [pulled_to[name] for name in trained] if spec.mu else []
    rule = LocalOptimizer.of(spec, work.lr)
    optimizer = rule.for_one_client(parameters)
    if spec.keep_state:
        rule.set_state(optimizer, trained, job.state or {})
    draws, losses = private.draws(job, spec.batch_size), list[Tensor]()
    noise = torch.empty(layout.n_parameters)
    with rng.seeded_globally(job.generator.initial_seed(), model.device):
        for _ in range(spec.steps_with(job.size)):
            total = model.new_zeros(layout.n_parameters)
            for place in draws.sample().tolist():  # "compute gradient", "clip gradient"
                gradient, loss = _gradient(work, trained, job, place)
                factor = float(private.factors(gradient.square().sum()))
                if factor > 0:
                    total.add_(gradient, alpha=factor)
                    losses.append(loss)
            noisy = total / draws.expected + draws.noise(noise).to(total)  # "add noise"
            _hand(layout, trained, noisy)
            rule.adjust(parameters, anchors)
            optimizer.step()  # "descent"
    if spec.keep_state:
        work.states[job.client] = get_state(optimizer, trained)
    layout.difference(module, model, out)
    layout.check_unsent(module)
    check_buffers(module, layout, out)
    return float(torch.stack(losses).double().mean()) if losses else 0.0


def _gradient(work: Workload, trained: Mapping[str, nn.Parameter], job: Job, place: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of one example's loss ``[D]``, zeros where nothing is trained, and the loss."""
    one = slice(place, place + 1)
    with precision(work.spec, job.inputs.device):
        outputs = work.module(job.inputs[one])
    loss = work.task.mean_loss(full(outputs), job.targets[one])
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradient = work.models.new_zeros(work.layout.n_parameters)
    of_name = dict(zip(trained, found, strict=True))
    for slot in work.layout.parameters:
        if (mine := of_name.get(slot.name)) is not None:
            gradient[slot.start : slot.stop] = mine.flatten()
    return gradient, loss.detach()


def _hand(layout: Layout, trained: Mapping[str, nn.Parameter], gradient: Tensor) -> None:
    for slot in layout.parameters:
        if (parameter := trained.get(slot.name)) is not None:
            parameter.grad = gradient[slot.start : slot.stop].view(slot.shape).to(parameter, copy=True)


def check_buffers(module: nn.Module, layout: Layout, updates: Tensor) -> None:
    """Check that updates ``[..., S]`` leave buffers as they were; a ModelError if training has changed one."""
    for slot in layout.buffers:
        if bool((updates[..., slot.start : slot.stop] != 0).any()):
            raise ModelError(
                f"privacy.level = 'example': training changes buffer {slot.name!r} of {type(module).__name__}, on "
                "which no noise is put; take a model without it, such as one with GroupNorm"
            )
