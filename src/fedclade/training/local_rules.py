"""Local training by local rules: steps of k clients at once, on flat models ``[k, S]``.

Each rule of :mod:`fedclade.core.local` is implemented here once, given a function that returns
gradients at any model. The loop provides gradients of one client, by autograd; ``vmap`` provides
gradients of all clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from fedclade.core import (
    ControlVariates,
    Interpolation,
    LocalRule,
    MetaLearning,
    MoreauEnvelope,
    rng,
)
from fedclade.training.jobs import Job, Places, Workload, batches, by_length
from fedclade.training.optimizer import LocalOptimizer, clipping
from fedclade.training.store import SERVED

Gradients = Callable[[Tensor, Places, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Gradients at models ``[k, S]`` of the clients at some places, on their batches ``[k, B]``.

The results are gradients ``[k, D]``, losses ``[k]``, and a mask ``[D]`` of the entries on which the
losses depend. Buffers in the models are updated as the forward pass updates them.
"""

Named = dict[str, Tensor]
"""Tensors ``[k, ...]`` of k clients during their training; ``w`` is the model they were sent."""

R = TypeVar("R", bound=LocalRule)


@dataclass
class Step:
    """Training step of k clients. A local rule changes their tensors in place or replaces them."""

    now: Named
    optimizer: LocalOptimizer
    n_parameters: int  # D
    gradients: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    losses: Tensor | None = None  # at the first gradient of the step, [k]

    def gradient(self, model: Tensor, batch: int = 0) -> Tensor:
        """Return gradients ``[k, D]`` at models ``[k, S]``, on one of the step's batches.

        They are the gradients with which SGD takes its step: clipped, and with weight decay. The
        models' buffers are updated.
        """
        optimizer = self.optimizer
        gradient, losses, reached = self.gradients(model, batch)
        self.losses = losses if self.losses is None else self.losses
        if optimizer.clip_norm is not None:
            gradient = gradient * clipping([gradient], optimizer.clip_norm)[:, None]
        if optimizer.weight_decay:
            gradient = gradient + optimizer.weight_decay * self.parameters(model) * reached
        return gradient

    def parameters(self, model: Tensor) -> Tensor:
        """Return the parameters of models, as a writable view ``[k, D]``."""
        return model[:, : self.n_parameters]

    def buffers(self, model: Tensor) -> Tensor:
        """Return the buffers of models, as a writable view ``[k, S − D]``."""
        return model[:, self.n_parameters :]

    def move(self, name: str, gradient: Tensor) -> None:
        """Take a step of SGD with a gradient ``[k, D]``, from the models of a name."""
        if self.optimizer.momentum:
            velocity = self.now[f"velocity of {name}"]
            gradient = velocity.mul_(self.optimizer.momentum).add_(gradient)
        self.parameters(self.now[name]).sub_(gradient, alpha=self.optimizer.lr)


class RuleAtWork(ABC, Generic[R]):
    """Implementation of a local rule, for k clients at once."""

    moved: ClassVar[tuple[str, ...]] = ("w",)
    """Names of the models that take steps of SGD, each with momentum of its own."""

    def __init__(self, rule: R) -> None:
        self.rule = rule

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return the clients' tensors before the first step, except ``w``.

        ``kept`` has the state that each client has stored.
        """
        return {}

    @abstractmethod
    def step(self, now: Named, step: Step) -> None:
        """Take a step."""

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Return the tensors that clients store, after ``steps`` ``[k]`` steps each.

        The tensor named ``SERVED`` is the client's deployed model.
        """
        return {}


ALPHA_DECAY = 0.02
"""Weight of α²/2 in the loss by which the authors' code of APFL updates α."""


class Mixing(RuleAtWork[Interpolation]):
    """Rule of APFL, Algorithm 1: a shared model w and a client's own model v, mixed by α.

    w ← w − η∇f(w) and v ← v − η∇_v f(v̄), with v̄ = αv + (1−α)w. α is updated by eq. 10 and clipped
    to [0, 1].
    """

    moved = ("w", "v")

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return v and α; clients without v begin with w."""
        first = models.new_full((len(models),), self.rule.alpha)
        named = {"v": or_kept(models, kept, "v"), "alpha": or_kept(first, kept, "alpha")}
        if self._moves_alpha_once:
            named["is_first_step"] = models.new_ones(len(models))
        return named

    def step(self, now: Named, step: Step) -> None:
        """Take a step with the gradients at w and at v̄, both from before the step."""
        alpha = now["alpha"][:, None]
        mixed = _mixed(now)
        of_w = step.gradient(now["w"])
        of_mixed = step.gradient(mixed)
        apart = step.parameters(now["v"]) - step.parameters(now["w"])
        step.move("w", of_w)
        step.move("v", alpha * of_mixed)
        step.buffers(now["v"]).copy_(step.buffers(mixed))
        if self._moves_alpha_once:
            apart = step.parameters(now["v"]) - step.parameters(now["w"])
            slope = self._slope_of_code(now["alpha"], (of_mixed * apart).sum(1))
            now["alpha"] = (now["alpha"] - step.optimizer.lr * now["is_first_step"] * slope).clamp(
                0, 1
            )
            now["is_first_step"] = torch.zeros_like(now["is_first_step"])
        elif self.rule.adaptive:
            slope = (of_mixed * apart).sum(1)
            now["alpha"] = (now["alpha"] - step.optimizer.lr * slope).clamp(0, 1)

    @property
    def _moves_alpha_once(self) -> bool:
        """Whether α is updated after the first step of a round only."""
        return self.rule.adaptive and self.rule.alpha_step == "code"

    @staticmethod
    def _slope_of_code(alpha: Tensor, slope: Tensor) -> Tensor:
        """Return the slope ``[k]`` in the authors' code (``alpha_update``), given ⟨∇f(v̄), v − w⟩.

        The code has ⟨α ∇_v + (1 − α) ∇_w, v − w⟩ + 0.02 α with the gradients of the mixture's loss,
        ∇_v = α ∇f(v̄) and ∇_w = (1 − α) ∇f(v̄).
        """
        return (alpha**2 + (1 - alpha) ** 2) * slope + ALPHA_DECAY * alpha

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Store v and α; the deployed model is v̄."""
        return {"v": now["v"], "alpha": now["alpha"], SERVED: _mixed(now)}


def _mixed(now: Named) -> Tensor:
    alpha = now["alpha"][:, None]
    return alpha * now["v"] + (1 - alpha) * now["w"]


class Enveloping(RuleAtWork[MoreauEnvelope]):
    """Rule of pFedMe, Algorithm 1.

    θ ≈ argmin f(θ; D) + λ/2‖θ − w‖² by K steps, then w ← w − ηλ(w − θ).
    """

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return θ, which begins with w."""
        return {"theta": models.clone()}

    def step(self, now: Named, step: Step) -> None:
        """Continue θ from its value after the previous batch, then move w."""
        rule = self.rule
        w = step.parameters(now["w"])
        theta = step.parameters(now["theta"])
        for _ in range(rule.steps):
            gradient = step.gradient(now["theta"])
            theta.sub_(gradient + rule.lam * (theta - w), alpha=rule.lr)
        step.move("w", rule.lam * (w - theta))
        step.buffers(now["w"]).copy_(step.buffers(now["theta"]))

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Return the deployed model: θ, or the model w_i that the client sends."""
        return {SERVED: now["theta"] if self.rule.served == "theta" else now["w"].clone()}


class MetaSteps(RuleAtWork[MetaLearning]):
    """Rule of Per-FedAvg, Algorithm 1; its variant FO has no Hessian.

    w ← w − β(I − α∇²f(w; D″))∇f(w − α∇f(w; D); D′).
    """

    def step(self, now: Named, step: Step) -> None:
        """Take a step; D′ has the order of plain steps, D and D″ have other orders.

        Buffers are those of the passes on D and D′.
        """
        rule = self.rule
        w = now["w"]
        after = w.clone()
        step.parameters(after).sub_(step.gradient(w, 1), alpha=rule.alpha)
        step.buffers(after).copy_(step.buffers(w))
        gradient = step.gradient(after, 0)
        if rule.hessian:
            beside = [w.clone(), w.clone()]
            for point, sign in zip(beside, (1, -1), strict=True):
                step.parameters(point).add_(gradient, alpha=sign * rule.delta)
            above, below = (step.gradient(point, 2) for point in beside)
            gradient = gradient - rule.alpha * (above - below) / (2 * rule.delta)
        step.buffers(w).copy_(step.buffers(after))
        step.move("w", gradient)


class Controlled(RuleAtWork[ControlVariates]):
    """Rule of SCAFFOLD, Algorithm 1, with option II for the control variates.

    y ← y − η(g − c_i + c), and c_i ← c_i − c + (x − y)/(Sη) after S steps.
    """

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return the correction c − c_i; c_i begins with zeros.

        Entries for which the server has no c are NaN in the anchors, and get no correction.
        """
        return {
            "correction": (anchors - or_kept(torch.zeros_like(models), kept, "c")).nan_to_num(0.0)
        }

    def step(self, now: Named, step: Step) -> None:
        """Add the correction to the gradient."""
        step.move("w", step.gradient(now["w"]) + step.parameters(now["correction"]))

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Store c_i."""
        return {"c": (models - now["w"]) / (steps * optimizer.lr)[:, None] - now["correction"]}


AT_WORK: Mapping[type[LocalRule], type[RuleAtWork[Any]]] = {
    Interpolation: Mixing,
    MoreauEnvelope: Enveloping,
    MetaLearning: MetaSteps,
    ControlVariates: Controlled,
}


def train_by_rule(
    work: Workload, jobs: Sequence[Job], gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Train clients by the local rule of a workload, and store its states in ``work.states``.

    Parameters
    ----------
    work
        The workload.
    jobs
        Clients to train, those with the most steps first.
    gradients
        Returns gradients of these clients.

    Returns
    -------
    tuple
        Updates ``[k, S]``, and mean losses, float64 ``[k]``: NaN for clients whose state to be
        stored is not finite.
    """
    rule = cast("LocalRule", work.rule)
    spec = work.spec
    models = work.models
    at_work = AT_WORK[type(rule)](rule)
    optimizer = LocalOptimizer.of(spec, work.lr)
    n_parameters = work.layout.n_parameters
    start = models[[job.row for job in jobs]]
    now: Named = {"w": start.clone()}
    now |= at_work.begin(
        start, models[[job.anchor_row for job in jobs]], [job.state or {} for job in jobs]
    )
    if optimizer.momentum:
        now |= {
            f"velocity of {name}": start.new_zeros(len(jobs), n_parameters)
            for name in at_work.moved
        }
    plans = [_plan(job, work) for job in jobs]
    totals = torch.zeros(len(jobs), dtype=torch.float64, device=models.device)
    for number in range(len(plans[0])):
        for places, batch in by_length(plans, number):
            mine = {name: values[places] for name, values in now.items()}
            here = batch.to(models.device)
            views = dict(mine) if isinstance(places, slice) else {}

            def of_batch(
                model: Tensor, which: int, places: Places = places, here: Tensor = here
            ) -> Any:
                return gradients(model, places, here[:, which])

            step = Step(mine, optimizer, n_parameters, of_batch)
            at_work.step(mine, step)
            for name, values in mine.items():
                if values is not views.get(name):  # otherwise it was written in place
                    now[name][places] = values
            if step.losses is not None:
                totals[places] += step.losses.to(torch.float64) * here.shape[-1]
    steps = torch.tensor([len(plan) for plan in plans], dtype=start.dtype, device=start.device)
    kept = at_work.end(now, start, steps, optimizer)
    passed = torch.tensor([spec.passed(job.size) for job in jobs], dtype=torch.float64)
    losses = totals.cpu() / passed
    # A loss of NaN marks a client as diverged, so that ClientStore.keep_states skips its state.
    for tensor in kept.values():
        losses[~tensor.reshape(len(jobs), -1).isfinite().all(1).cpu()] = torch.nan
    work.states.update(
        {job.client: {name: t[k] for name, t in kept.items()} for k, job in enumerate(jobs)}
    )
    return now["w"] - start, losses


def or_kept(first: Tensor, kept: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Return a stored tensor of each client, or else its row of ``first``, copied, ``[k, ...]``."""
    return torch.stack(
        [mine[name].to(own) if name in mine else own for own, mine in zip(first, kept, strict=True)]
    )


def _plan(job: Job, work: Workload) -> list[Tensor]:
    """Return the batches of every step, ``[m, B]`` for m batches per step.

    The first of them is the batch of a plain step.
    """
    count = cast("LocalRule", work.rule).batches
    seed = job.generator.initial_seed()
    others = [rng.torch_generator(seed, "further batch", k) for k in range(1, count)]
    orders = [batches(job.size, work.spec, generator) for generator in (job.generator, *others)]
    return [torch.stack(each) for each in zip(*orders, strict=True)]
