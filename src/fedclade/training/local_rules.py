"""Local training by local rules, for k clients at once on parameter vectors ``[k, S]``.

A local rule replaces the plain SGD steps of local training, as in APFL, pFedMe, Per-FedAvg and
SCAFFOLD. The rules are in :mod:`fedclade.core.local_rules`; this module trains clients by any rule,
given a function that returns gradients at any model. The loop provides gradients of one client, by
autograd; ``vmap`` provides gradients of all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedclade.core import LocalRule, Named, rng
from fedclade.training.jobs import Job, Places, Workload, batches, by_length
from fedclade.training.optimizer import LocalOptimizer, clipping

Gradients = Callable[[Tensor, Places, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Function that returns gradients at models ``[k, S]``, given places and batches ``[k, B]``.

The k models belong to the clients at these places; S is the number of entries of a parameter
vector, of which the first D are parameters and the rest are buffers. The results are gradients
``[k, D]``, losses ``[k]``, and a mask ``[D]`` of the entries on which the losses depend. Buffers in
the models are changed as the forward pass changes them.
"""


@dataclass
class Step:
    """One training step of k clients, given by the clients' tensors and the operations on them.

    The operations are gradients and SGD steps. A local rule changes the tensors in place, or
    replaces them.
    """

    now: Named
    optimizer: LocalOptimizer
    n_parameters: int  # D: number of parameters, without buffers
    gradients: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    losses: Tensor | None = None  # losses [k] at the first gradient of the step

    @property
    def lr(self) -> float:
        """Step size of the round."""
        return self.optimizer.lr

    def gradient(self, model: Tensor, batch: int = 0) -> Tensor:
        """Return gradients ``[k, D]`` of k clients at models ``[k, S]``, on a batch of the step.

        The gradients are clipped and include weight decay, so that an SGD step can subtract them as
        they are. The forward pass may change the buffers in ``model``. A step of some local rules
        uses several batches; ``batch`` is the number of one of them, from 0.
        """
        optimizer = self.optimizer
        gradient, losses, reached = self.gradients(model, batch)
        if self.losses is None:
            self.losses = losses
        if optimizer.clip_norm is not None:
            gradient = gradient * clipping([gradient], optimizer.clip_norm)[:, None]
        if optimizer.weight_decay:
            gradient = gradient + optimizer.weight_decay * self.parameters(model) * reached
        return gradient

    def parameters(self, model: Tensor) -> Tensor:
        """Return the parameters of models ``[k, S]``, as a writable view ``[k, D]``."""
        return model[:, : self.n_parameters]

    def buffers(self, model: Tensor) -> Tensor:
        """Return the buffers of models ``[k, S]``, as a writable view ``[k, S − D]``."""
        return model[:, self.n_parameters :]

    def move(self, name: str, gradient: Tensor) -> None:
        """Take an SGD step, with momentum, for one of the models that each client trains.

        ``name`` is the name of the model, such as ``w``, and ``gradient`` the gradients of the k
        clients, ``[k, D]``.
        """
        if self.optimizer.momentum:
            velocity = self.now[f"velocity of {name}"]
            gradient = velocity.mul_(self.optimizer.momentum).add_(gradient)
        self.parameters(self.now[name]).sub_(gradient, alpha=self.optimizer.lr)


def train_by_rule(
    work: Workload, jobs: Sequence[Job], gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Train clients by the local rule of a workload, and return their updates.

    The states that the clients should store are written to ``work.states``.

    Parameters
    ----------
    work
        The workload.
    jobs
        The k clients to train; the clients with the most steps come first.
    gradients
        Function that computes the gradients of these clients.

    Returns
    -------
    tuple
        Updates ``[k, S]``, and mean losses, float64 ``[k]``. The loss of a client is NaN if the
        state that it should store is not finite.
    """
    rule = cast("LocalRule", work.rule)
    spec = work.spec
    models = work.models
    optimizer = LocalOptimizer.of(spec, work.lr)
    n_parameters = work.layout.n_parameters
    start = models[[job.row for job in jobs]]
    now: Named = {"w": start.clone()}
    now |= rule.begin(
        start, models[[job.anchor_row for job in jobs]], [job.state or {} for job in jobs]
    )
    if optimizer.momentum:
        now |= {
            f"velocity of {name}": start.new_zeros(len(jobs), n_parameters) for name in rule.moved
        }
    plans = [_plan_batches(job, work) for job in jobs]
    totals = torch.zeros(len(jobs), dtype=torch.float64, device=models.device)
    for number in range(len(plans[0])):
        for places, batch in by_length(plans, number):
            mine = {name: values[places] for name, values in now.items()}
            here = batch.to(models.device)
            # If places is a slice, the tensors of a step are views of all clients' tensors, so that
            # changes in place need not be copied back.
            views: Named = {}
            if isinstance(places, slice):
                views = dict(mine)

            def of_batch(
                model: Tensor, which: int, places: Places = places, here: Tensor = here
            ) -> Any:
                return gradients(model, places, here[:, which])

            step = Step(mine, optimizer, n_parameters, of_batch)
            rule.step(mine, step)
            for name, values in mine.items():
                if values is not views.get(name):  # otherwise it was written in place
                    now[name][places] = values
            if step.losses is not None:
                totals[places] += step.losses.to(torch.float64) * here.shape[-1]
    steps = torch.tensor([len(plan) for plan in plans], dtype=start.dtype, device=start.device)
    kept = rule.end(now, start, steps, optimizer.lr)
    passed = torch.tensor([spec.passed(job.size) for job in jobs], dtype=torch.float64)
    losses = totals.cpu() / passed
    # A loss of NaN marks a client as diverged, so that ClientStore.keep_states skips its state.
    for tensor in kept.values():
        losses[~tensor.reshape(len(jobs), -1).isfinite().all(1).cpu()] = torch.nan
    for k, job in enumerate(jobs):
        work.states[job.client] = {name: tensor[k] for name, tensor in kept.items()}
    return now["w"] - start, losses


def _plan_batches(job: Job, work: Workload) -> list[Tensor]:
    """Return the batches of every step of a client, one tensor ``[m, B]`` per step.

    The local rule needs m batches of B examples in each step: 2 or 3 in Per-FedAvg, and 1 in other
    methods. The first of them has the same examples as the batch of plain SGD in this step.
    """
    count = cast("LocalRule", work.rule).batches
    seed = job.generator.initial_seed()
    others = [rng.torch_generator(seed, "further batch", k) for k in range(1, count)]
    orders = [batches(job.size, work.spec, generator) for generator in (job.generator, *others)]
    return [torch.stack(each) for each in zip(*orders, strict=True)]
