"""Local training by local rules, for k clients at once on parameter vectors ``[k, S]``.

A local rule replaces the plain SGD steps of local training, as in APFL, pFedMe, Per-FedAvg and
SCAFFOLD. The rules' settings are in :mod:`fedclade.core.local`; this module implements each rule
once, given a function that returns gradients at any model. The loop provides gradients of one
client, by autograd; ``vmap`` provides gradients of all clients.
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
"""Function that returns gradients at models ``[k, S]``, given places and batches ``[k, B]``.

The k models belong to the clients at these places; S is the number of entries of a parameter
vector, of which the first D are parameters and the rest are buffers. The results are gradients
``[k, D]``, losses ``[k]``, and a mask ``[D]`` of the entries on which the losses depend. Buffers in
the models are changed as the forward pass changes them.
"""

Named = dict[str, Tensor]
"""Named tensors ``[k, ...]`` of k clients during training; ``w`` is the model that they send."""

R = TypeVar("R", bound=LocalRule)


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


class RuleAtWork(ABC, Generic[R]):
    """Implementation of a local rule's training steps, for k clients at once."""

    moved: ClassVar[tuple[str, ...]] = ("w",)
    """Names of the models that take SGD steps; each of them has its own momentum."""

    def __init__(self, rule: R) -> None:
        self.rule = rule

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return the tensors that the clients need for their training, except the model ``w``.

        Parameters
        ----------
        models
            Models that the server has sent to the k clients, ``[k, S]``.
        anchors
            Models to which the proximal term pulls, or other vectors of the server for each client,
            ``[k, S]``.
        kept
            Tensors that each client has stored in earlier rounds, by name.
        """
        return {}

    @abstractmethod
    def step(self, now: Named, step: Step) -> None:
        """Take one training step of k clients, whose named tensors are ``now``."""

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Return the tensors that clients store after training, by name.

        Parameters
        ----------
        now
            Tensors of the k clients after the last step.
        models
            Models that the server has sent, ``[k, S]``.
        steps
            Number of steps that each client has taken, ``[k]``.
        optimizer
            The local optimizer.

        Returns
        -------
        dict
            Tensors ``[k, ...]`` by name. The tensor named ``SERVED`` is each client's deployed
            model.
        """
        return {}


ALPHA_DECAY = 0.02
"""Weight of the penalty α²/2 in the loss by which the code of APFL's authors updates α."""


class Mixing(RuleAtWork[Interpolation]):
    """Steps of APFL (Algorithm 1), which mixes a shared model w and a client's own model v.

    w ← w − η∇f(w) and v ← v − η∇_v f(v̄), with the loss f, the step size η and the mixture
    v̄ = αv + (1−α)w; ∇_v is the gradient with respect to v. The weight α is updated by eq. 10 and
    clipped to [0, 1].
    """

    moved = ("w", "v")

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return each client's own model v and weight α.

        A client that has not stored v starts with v = w.
        """
        first = models.new_full((len(models),), self.rule.alpha)
        named = {"v": or_kept(models, kept, "v"), "alpha": or_kept(first, kept, "alpha")}
        if self._moves_alpha_once:
            named["is_first_step"] = models.new_ones(len(models))
        return named

    def step(self, now: Named, step: Step) -> None:
        """Update the shared model w, the own model v and the weight α.

        The step uses two gradients, at w and at the mixture v̄. Both are computed before w and v
        change.
        """
        alpha = now["alpha"][:, None]
        mixed = _mix_models(now)
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
        """Whether α is updated only after the first step of a round, as in the authors' code."""
        return self.rule.adaptive and self.rule.alpha_step == "code"

    @staticmethod
    def _slope_of_code(alpha: Tensor, slope: Tensor) -> Tensor:
        """Return the derivative ``[k]`` of the loss with respect to α, as in the authors' code.

        The code (function ``alpha_update``) computes ⟨α ∇_v + (1 − α) ∇_w, v − w⟩ + 0.02 α. Here
        ∇_v = α ∇f(v̄) and ∇_w = (1 − α) ∇f(v̄) are the gradients of the mixture's loss f(v̄) with
        respect to v and w. The argument ``slope`` is the exact derivative, ⟨∇f(v̄), v − w⟩.
        """
        return (alpha**2 + (1 - alpha) ** 2) * slope + ALPHA_DECAY * alpha

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Return the tensors to store: v, α, and the mixture v̄ as the deployed model."""
        return {"v": now["v"], "alpha": now["alpha"], SERVED: _mix_models(now)}


def _mix_models(now: Named) -> Tensor:
    """Return the mixtures v̄ = αv + (1−α)w of k clients, ``[k, S]`` (APFL)."""
    alpha = now["alpha"][:, None]
    return alpha * now["v"] + (1 - alpha) * now["w"]


class Enveloping(RuleAtWork[MoreauEnvelope]):
    """Steps of pFedMe (Algorithm 1), with a personal model θ near the client's local model w.

    In each training step, K gradient steps on a batch D minimize f(θ; D) + λ/2‖θ − w‖² over θ, with
    the loss f and the weight λ of the distance between the models. Then w ← w − ηλ(w − θ), with the
    step size η.
    """

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return each client's personal model θ, which starts from the received model w."""
        return {"theta": models.clone()}

    def step(self, now: Named, step: Step) -> None:
        """Update θ by K gradient steps on a batch, and then update w.

        The gradient steps start from the θ that results from the previous batch.
        """
        rule = self.rule
        w = step.parameters(now["w"])
        theta = step.parameters(now["theta"])
        for _ in range(rule.steps):
            gradient = step.gradient(now["theta"])
            theta.sub_(gradient + rule.lam * (theta - w), alpha=rule.lr)
        step.move("w", rule.lam * (w - theta))
        step.buffers(now["w"]).copy_(step.buffers(now["theta"]))

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Return the deployed model of each client.

        Depending on the rule's setting ``served``, it is the personal model θ or the model w that
        the client sends to the server.
        """
        if self.rule.served == "theta":
            return {SERVED: now["theta"]}
        return {SERVED: now["w"].clone()}


class MetaSteps(RuleAtWork[MetaLearning]):
    """Steps of Per-FedAvg (Algorithm 1).

    w ← w − β(I − α∇²f(w; D″))∇f(w − α∇f(w; D); D′), with the loss f, the step sizes α and β, the
    identity matrix I, and batches D, D′ and D″. The first-order variant (FO) leaves out the term
    with the Hessian ∇²f.
    """

    def step(self, now: Named, step: Step) -> None:
        """Take one meta-learning step with batches D, D′ and D″.

        D′ is the batch of a plain step; D and D″ are drawn by other generators. The product of
        Hessian and gradient is approximated by a difference of gradients at two points. The buffers
        after the step result from the forward passes on D and D′.
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
    """Steps of SCAFFOLD (Algorithm 1), with option II for the update of control variates.

    Client i starts from the received model x and takes S steps y ← y − η(g − c_i + c) with the
    gradient g at y and the step size η. Here c_i is the control variate of the client, and c is
    that of the server. After the steps, c_i ← c_i − c + (x − y)/(Sη).
    """

    def begin(self, models: Tensor, anchors: Tensor, kept: Sequence[Mapping[str, Tensor]]) -> Named:
        """Return the correction c − c_i of each client, where c is the server's control variate.

        The rows of ``anchors`` are c. Entries of c that the server does not have, such as personal
        parameters, are NaN; their correction is 0. A client that has not stored its control variate
        c_i starts with c_i = 0.
        """
        return {
            "correction": (anchors - or_kept(torch.zeros_like(models), kept, "c")).nan_to_num(0.0)
        }

    def step(self, now: Named, step: Step) -> None:
        """Take an SGD step of the model w with the gradient plus the correction c − c_i."""
        step.move("w", step.gradient(now["w"]) + step.parameters(now["correction"]))

    def end(self, now: Named, models: Tensor, steps: Tensor, optimizer: LocalOptimizer) -> Named:
        """Return the client's new control variate c_i, to be stored.

        c_i ← (x − y)/(Sη) − (c − c_i) after S steps from x to y with step size η (option II).
        """
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
    for k, job in enumerate(jobs):
        work.states[job.client] = {name: tensor[k] for name, tensor in kept.items()}
    return now["w"] - start, losses


def or_kept(first: Tensor, kept: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Return a tensor of each client, stacked, ``[k, ...]``: the stored tensor, or a default.

    The default of a client that has not stored a tensor ``name`` is its row of ``first``.
    """
    rows: list[Tensor] = []
    for row, tensors in zip(first, kept, strict=True):
        if name in tensors:
            row = tensors[name].to(row)
        rows.append(row)
    return torch.stack(rows)


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
