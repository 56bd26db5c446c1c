"""Local rules: update rules of federated methods that replace the plain SGD step in local training.

A rule is a dataclass whose fields are numbers, so that it can be sent with a query. Its methods are
the training steps, for k clients at once on parameter vectors ``[k, S]``, and the tensors that a
client stores. ``training/local_rules.py`` trains clients by a rule: the loop provides gradients of
one client, by autograd; ``vmap`` provides gradients of all clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from fedclade.core.arguments import check_arguments, checked
from fedclade.core.errors import ConfigError, require, unknown
from fedclade.core.local import LARGEST, LocalTraining
from fedclade.core.work import Steps

Named = dict[str, "torch.Tensor"]
"""Named tensors ``[k, ...]`` of k clients during training; ``w`` is the model that they send."""

Stored = Sequence[Mapping[str, "torch.Tensor"]]
"""Tensors that each of k clients has stored in earlier rounds, by name."""

SERVED = "served"
"""Name of the deployed model among the tensors that a client stores after training by a rule."""


class RuleStep(Protocol):
    """Interface of one training step of k clients, for :meth:`LocalRule.step`."""

    @property
    def lr(self) -> float:
        """Step size of the round."""
        ...

    def gradient(self, model: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """Return gradients ``[k, D]`` of k clients at models ``[k, S]``, on a batch of the step.

        The gradients are clipped and include weight decay, so that an SGD step can subtract them as
        they are. The forward pass may change the buffers in ``model``. A step of some local rules
        uses several batches; ``batch`` is the number of one of them, from 0.
        """
        ...

    def parameters(self, model: torch.Tensor) -> torch.Tensor:
        """Return the parameters of models ``[k, S]``, as a writable view ``[k, D]``."""
        ...

    def buffers(self, model: torch.Tensor) -> torch.Tensor:
        """Return the buffers of models ``[k, S]``, as a writable view ``[k, S − D]``."""
        ...

    def move(self, name: str, gradient: torch.Tensor) -> None:
        """Take an SGD step, with momentum, for one of the models that each client trains.

        ``name`` is the name of the model, such as ``w``, and ``gradient`` the gradients of the k
        clients, ``[k, D]``.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LocalRule(Steps, ABC):
    """Base class of update rules that replace the plain SGD step in local training.

    A rule outside of fedclade is a subclass with a method :meth:`step`. It trains k clients at
    once: each of its operations must treat the k rows of a tensor separately. :data:`RULES` lists
    the rules of fedclade.

    Attributes
    ----------
    name
        Name by which messages and errors refer to the rule; by default the name of the class.
    serves
        Whether the rule trains a personal model for each client, with which the client is
        evaluated. :meth:`end` then returns this model under the name :data:`SERVED`.
    moved
        Names of the models that take SGD steps; each of them has its own momentum.
    batches
        Number of mini-batches that a step uses, each from its own random order of the examples.
    vectors
        Number of vectors of the model's size that a client needs in memory in addition to its
        model.
    """

    name: ClassVar[str]
    serves: ClassVar[bool] = False
    moved: ClassVar[tuple[str, ...]] = ("w",)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @property
    def batches(self) -> int:
        """Number of mini-batches that one step of the rule uses."""
        return 1

    @property
    def gradients(self) -> int:
        """Number of gradients that one step of the rule computes."""
        return 1

    @property
    def vectors(self) -> int:
        """Number of vectors of the model's size that a client needs in addition to its model."""
        return 2

    def check_training(self, spec: LocalTraining) -> None:
        """Check that the settings of local training specify plain SGD.

        A local rule replaces the steps of plain SGD, so it cannot be combined with another
        optimizer, optimizer options, a stored optimizer state or a proximal term.

        Raises
        ------
        ConfigError
            If a setting differs from plain SGD; the message has a line for each such setting.
        """
        what = f"with the local rule {self.name!r}, which takes steps of SGD"
        require(
            ("local.optimizer", spec.optimizer, spec.optimizer == "sgd", f"'sgd' {what}"),
            ("local.options", dict(spec.options), not spec.options, f"empty {what}"),
            ("local.keep_state", spec.keep_state, not spec.keep_state, f"false {what}"),
            ("local.mu", spec.mu, spec.mu == 0, f"0 {what} without a proximal term"),
            ("local.trainer", spec.trainer, spec.trainer is None, f"left out {what}"),
        )

    def begin(self, models: torch.Tensor, anchors: torch.Tensor, kept: Stored) -> Named:
        """Return the tensors that the clients need for their training, except the model ``w``.

        By default, they need no others.

        Parameters
        ----------
        models
            Models that the server has sent to the k clients, ``[k, S]``.
        anchors
            Models to which the proximal term pulls, or other vectors of the server for each client,
            ``[k, S]``.
        kept
            Tensors that each client has stored in earlier rounds, by name; see :func:`or_kept`.
        """
        return {}

    @abstractmethod
    def step(self, now: Named, step: RuleStep) -> None:
        """Take one training step of k clients, whose named tensors are ``now``.

        The tensors are changed in place, or replaced.
        """

    def end(self, now: Named, models: torch.Tensor, steps: torch.Tensor, lr: float) -> Named:
        """Return the tensors that clients store after training, by name; by default none.

        Parameters
        ----------
        now
            Tensors of the k clients after the last step.
        models
            Models that the server has sent, ``[k, S]``.
        steps
            Number of steps that each client has taken, ``[k]``.
        lr
            Step size of the round.

        Returns
        -------
        dict
            Tensors ``[k, ...]`` by name. The tensor named :data:`SERVED` is each client's deployed
            model.
        """
        return {}

    def described(self) -> dict[str, Any]:
        """Return the rule's name and numbers as a dictionary that can be sent with a query.

        :func:`local_rule` is the inverse function.
        """
        return {"name": self.name, **asdict(self)}


def or_kept(first: torch.Tensor, kept: Stored, name: str) -> torch.Tensor:
    """Return a tensor of each client, stacked, ``[k, ...]``: the stored tensor, or a default.

    The default of a client that has not stored a tensor ``name`` is its row of ``first``.
    """
    rows: list[torch.Tensor] = []
    for row, tensors in zip(first, kept, strict=True):
        if name in tensors:
            row = tensors[name].to(row)
        rows.append(row)
    return torch.stack(rows)


ALPHA_DECAY = 0.02
"""Weight of the penalty α²/2 in the loss by which the code of APFL's authors updates α."""


@checked()
@dataclass(frozen=True, kw_only=True)
class Interpolation(LocalRule):
    """Local rule of APFL (Deng et al. 2020), which interpolates a personal and a shared model.

    It is the local step of the clients in the paper's Algorithm 1. A client trains the shared
    model w, and a personal model v by the gradient at the mixture v̄ = αv + (1−α)w:
    w ← w − η∇f(w) and v ← v − η∇_v f(v̄), with the loss f, the step size η, and the gradient ∇_v
    with respect to v. The weight α is updated by eq. 10 and clipped to [0, 1]. Clients are
    evaluated with the mixture.

    Parameters
    ----------
    alpha
        Initial weight α of the personal model, in [0, 1]. The weight is constant unless
        ``adaptive`` is set.
    adaptive
        Whether each client adapts its α by gradient descent.
    alpha_step
        ``paper``: α changes in every step, as in the paper. ``code``: α changes once per round, as
        in the authors' code.
    """

    name = "mixture"
    serves = True
    moved = ("w", "v")

    alpha: float
    adaptive: bool = False
    alpha_step: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require(
            ("algorithm.alpha", self.alpha, 0 <= self.alpha <= 1, "in [0, 1]"),
            (
                "algorithm.alpha_step",
                self.alpha_step,
                self.alpha_step in ("paper", "code"),
                "'paper' or 'code'",
            ),
        )

    @property
    def gradients(self) -> int:
        """Number of gradients per step: 2, at the shared model and at the mixture."""
        return 2

    @property
    def vectors(self) -> int:
        """Number of additional vectors of the model's size.

        They are the personal model and the mixture, the gradients, and the momentum.
        """
        return 6

    def begin(self, models: torch.Tensor, anchors: torch.Tensor, kept: Stored) -> Named:
        """Return each client's own model v and weight α.

        A client that has not stored v starts with v = w.
        """
        first = models.new_full((len(models),), self.alpha)
        named = {"v": or_kept(models, kept, "v"), "alpha": or_kept(first, kept, "alpha")}
        if self._moves_alpha_once:
            named["is_first_step"] = models.new_ones(len(models))
        return named

    def step(self, now: Named, step: RuleStep) -> None:
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
            now["alpha"] = (now["alpha"] - step.lr * now["is_first_step"] * slope).clamp(0, 1)
            now["is_first_step"] = torch.zeros_like(now["is_first_step"])
        elif self.adaptive:
            slope = (of_mixed * apart).sum(1)
            now["alpha"] = (now["alpha"] - step.lr * slope).clamp(0, 1)

    @property
    def _moves_alpha_once(self) -> bool:
        """Whether α is updated only after the first step of a round, as in the authors' code."""
        return self.adaptive and self.alpha_step == "code"

    @staticmethod
    def _slope_of_code(alpha: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """Return the derivative ``[k]`` of the loss with respect to α, as in the authors' code.

        The code (function ``alpha_update``) computes ⟨α ∇_v + (1 − α) ∇_w, v − w⟩ + 0.02 α. Here
        ∇_v = α ∇f(v̄) and ∇_w = (1 − α) ∇f(v̄) are the gradients of the mixture's loss f(v̄) with
        respect to v and w. The argument ``slope`` is the exact derivative, ⟨∇f(v̄), v − w⟩.
        """
        return (alpha**2 + (1 - alpha) ** 2) * slope + ALPHA_DECAY * alpha

    def end(self, now: Named, models: torch.Tensor, steps: torch.Tensor, lr: float) -> Named:
        """Return the tensors to store: v, α, and the mixture v̄ as the deployed model."""
        return {"v": now["v"], "alpha": now["alpha"], SERVED: _mix_models(now)}


def _mix_models(now: Named) -> torch.Tensor:
    """Return the mixtures v̄ = αv + (1−α)w of k clients, ``[k, S]`` (APFL)."""
    alpha = now["alpha"][:, None]
    return alpha * now["v"] + (1 - alpha) * now["w"]


@checked()
@dataclass(frozen=True, kw_only=True)
class MoreauEnvelope(LocalRule):
    """Local rule of pFedMe (Dinh et al. 2020), which minimizes the Moreau envelope of the loss.

    It is the local step of the clients in the paper's Algorithm 1. For each mini-batch, a client
    finds a personal model θ with a low loss near its local model w: K gradient steps on the batch D
    minimize f(θ; D) + λ/2‖θ − w‖² over θ. Then w ← w − ηλ(w − θ), with the step size η. Clients are
    evaluated with θ.

    Parameters
    ----------
    lam
        Weight λ of the penalty on the distance from θ to w.
    steps
        Number K of gradient steps by which θ is found on each mini-batch.
    lr
        Step size of the K steps.
    served
        Model with which clients are evaluated: ``theta`` for the personal model θ, or ``w`` for the
        local model at the end of a round, as in the authors' code.
    """

    name = "moreau_envelope"
    serves = True

    lam: float
    steps: int
    lr: float
    served: Literal["theta", "w"] = "theta"

    def __post_init__(self) -> None:
        require(
            (
                "algorithm.lam",
                self.lam,
                0 < self.lam <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            ),
            ("algorithm.steps", self.steps, self.steps >= 1, "at least 1"),
            (
                "algorithm.personal_lr",
                self.lr,
                0 < self.lr <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            ),
            ("algorithm.served", self.served, self.served in ("theta", "w"), "'theta' or 'w'"),
        )

    @property
    def gradients(self) -> int:
        """Number of gradients per step: one for each of the K inner steps that find θ."""
        return self.steps

    @property
    def vectors(self) -> int:
        """Number of additional vectors of the model's size: θ, its gradient, and the momentum."""
        return 4

    def begin(self, models: torch.Tensor, anchors: torch.Tensor, kept: Stored) -> Named:
        """Return each client's personal model θ, which starts from the received model w."""
        return {"theta": models.clone()}

    def step(self, now: Named, step: RuleStep) -> None:
        """Update θ by K gradient steps on a batch, and then update w.

        The gradient steps start from the θ that results from the previous batch.
        """
        w = step.parameters(now["w"])
        theta = step.parameters(now["theta"])
        for _ in range(self.steps):
            gradient = step.gradient(now["theta"])
            theta.sub_(gradient + self.lam * (theta - w), alpha=self.lr)
        step.move("w", self.lam * (w - theta))
        step.buffers(now["w"]).copy_(step.buffers(now["theta"]))

    def end(self, now: Named, models: torch.Tensor, steps: torch.Tensor, lr: float) -> Named:
        """Return the deployed model of each client.

        Depending on the rule's setting ``served``, it is the personal model θ or the model w that
        the client sends to the server.
        """
        if self.served == "theta":
            return {SERVED: now["theta"]}
        return {SERVED: now["w"].clone()}


@checked()
@dataclass(frozen=True, kw_only=True)
class MetaLearning(LocalRule):
    """Local rule of Per-FedAvg (Fallah et al. 2020), which applies meta-learning (MAML).

    It is the local step of the clients in the paper's Algorithm 1. A client minimizes the loss that
    its model w has after one gradient step of size α:
    w ← w − β(I − α∇²f(w; D″))∇f(w − α∇f(w; D); D′), with the loss f, the step sizes α and β, the
    identity matrix I, and batches D, D′ and D″. The first-order variant (FO) leaves out the term
    with the Hessian ∇²f.

    Parameters
    ----------
    alpha
        Size α of the inner gradient step.
    hessian
        Whether the product of the Hessian and the gradient is computed, by central differences
        (variant HF). If false, the product is left out (variant FO).
    delta
        Width δ of the central differences: the two points are w plus and minus δ times the
        gradient.
    """

    name = "meta_learning"

    alpha: float
    hessian: bool
    delta: float

    def __post_init__(self) -> None:
        require(
            (
                "algorithm.alpha",
                self.alpha,
                0 <= self.alpha <= LARGEST,
                f"at least 0 and at most {LARGEST:g}",
            ),
            (
                "algorithm.delta",
                self.delta,
                0 < self.delta <= LARGEST,
                f"greater than 0 and at most {LARGEST:g}",
            ),
        )

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is plain SGD, and without gradient clipping in variant HF.

        The difference of two clipped gradients does not approximate the product of the Hessian and
        a vector.
        """
        super().check_training(spec)
        holds = spec.clip_norm is None or not self.hessian
        require(("local.clip_norm", spec.clip_norm, holds, "left out with variant = 'HF'"))

    @property
    def batches(self) -> int:
        """Number of mini-batches per step: D and D′ of the paper, and D″ in variant HF."""
        return 3 if self.hessian else 2

    @property
    def gradients(self) -> int:
        """Number of gradients per step: 2 in variant FO, and 4 in variant HF.

        One gradient is computed at the model w, and one at the model after the inner step. In
        variant HF, the product of the Hessian and a vector is computed from the difference of two
        further gradients.
        """
        return 4 if self.hessian else 2

    @property
    def vectors(self) -> int:
        """Number of additional vectors of the model's size.

        They are the model after the inner step, two gradients, a point near w, and the momentum.
        """
        return 5

    def step(self, now: Named, step: RuleStep) -> None:
        """Take one meta-learning step with batches D, D′ and D″.

        D′ is the batch of a plain step; D and D″ are drawn by other generators. The product of
        Hessian and gradient is approximated by a difference of gradients at two points. The buffers
        after the step result from the forward passes on D and D′.
        """
        w = now["w"]
        after = w.clone()
        step.parameters(after).sub_(step.gradient(w, 1), alpha=self.alpha)
        step.buffers(after).copy_(step.buffers(w))
        gradient = step.gradient(after, 0)
        if self.hessian:
            beside = [w.clone(), w.clone()]
            for point, sign in zip(beside, (1, -1), strict=True):
                step.parameters(point).add_(gradient, alpha=sign * self.delta)
            above, below = (step.gradient(point, 2) for point in beside)
            gradient = gradient - self.alpha * (above - below) / (2 * self.delta)
        step.buffers(w).copy_(step.buffers(after))
        step.move("w", gradient)


@checked()
@dataclass(frozen=True, kw_only=True)
class ControlVariates(LocalRule):
    """Local rule of SCAFFOLD (Karimireddy et al. 2020), which corrects the drift of clients.

    It is the local step of the clients in the paper's Algorithm 1. A client i adds c − c_i to every
    gradient. The server's control variate c is sent to the client as its anchor; the client stores
    its own control variate c_i itself. From the received model x the client takes S steps
    y ← y − η(g − c_i + c) with the gradient g at y and the step size η. Then
    c_i ← c_i − c + (x − y)/(Sη) (option II).
    """

    name = "control_variates"

    @property
    def needs_anchor(self) -> bool:
        """Whether the client is sent an anchor: always true, the server's control variate c."""
        return True

    def check_training(self, spec: LocalTraining) -> None:
        """Check that local training is plain SGD without momentum.

        The rule computes the client's control variate from the sum of the client's steps, which
        is proportional to the sum of its gradients only without momentum.
        """
        super().check_training(spec)
        require(
            (
                "local.momentum",
                spec.momentum,
                not spec.momentum,
                f"0 with the local rule {self.name!r}",
            )
        )

    def begin(self, models: torch.Tensor, anchors: torch.Tensor, kept: Stored) -> Named:
        """Return the correction c − c_i of each client, where c is the server's control variate.

        The rows of ``anchors`` are c. Entries of c that the server does not have, such as personal
        parameters, are NaN; their correction is 0. A client that has not stored its control variate
        c_i starts with c_i = 0.
        """
        return {
            "correction": (anchors - or_kept(torch.zeros_like(models), kept, "c")).nan_to_num(0.0)
        }

    def step(self, now: Named, step: RuleStep) -> None:
        """Take an SGD step of the model w with the gradient plus the correction c − c_i."""
        step.move("w", step.gradient(now["w"]) + step.parameters(now["correction"]))

    def end(self, now: Named, models: torch.Tensor, steps: torch.Tensor, lr: float) -> Named:
        """Return the client's new control variate c_i, to be stored.

        c_i ← (x − y)/(Sη) − (c − c_i) after S steps from x to y with step size η (option II).
        """
        return {"c": (models - now["w"]) / (steps * lr)[:, None] - now["correction"]}


RULES: Mapping[str, type[LocalRule]] = {
    rule.name: rule for rule in (Interpolation, MoreauEnvelope, MetaLearning, ControlVariates)
}
"""All local rules by name."""


def local_rule(described: Mapping[str, Any]) -> LocalRule:
    """Build a local rule from its name and numbers, the result of :meth:`LocalRule.described`.

    Raises
    ------
    ConfigError
        If no rule has the name, or if a number is missing, unknown or out of range.
    """
    numbers = dict(described)
    if not isinstance(name := numbers.pop("name", None), str) or name not in RULES:
        raise ConfigError(unknown("local rule", name, RULES))
    kind = RULES[name]
    arguments = check_arguments(f"local rule {name!r}", kind, numbers)
    try:
        return kind(**arguments)
    except TypeError as error:  # a number is missing
        raise ConfigError(
            f"local rule {name!r} lacks a number: {error}; add the number to the rule's description"
        ) from error
