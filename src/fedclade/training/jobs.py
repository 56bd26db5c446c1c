"""Workload of an engine: the clients of a round, with their data, models and generators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedclade.channel import ExamplePrivacy, sampling_rate, system_normal, system_uniform
from fedclade.core import BESIDE, ConfigError, Layout, LocalRule, LocalTraining, Round, rng
from fedclade.data import Federation
from fedclade.tasks import FittedTask

# The batches of local training, and the precision of its forward passes.

Places = slice | Tensor
"""Selection of k clients: a slice of the first of them, or a tensor of indices."""


def batches(
    examples: int,
    spec: LocalTraining,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Yield the examples of each step of a client's local training, as indices ``[B]``.

    The order is drawn for every epoch, or with ``reshuffle = false`` for the first epoch alone.

    Parameters
    ----------
    examples
        Number of the client's training examples.
    spec
        Settings of local training.
    generator
        Generator of the orders, on the CPU.
    device
        Device of the indices.
    """
    left = spec.steps_with(examples)
    sizes = spec.batch_sizes(examples)
    order: Tensor | None = None
    while left > 0:
        if order is None or spec.reshuffle:
            order = torch.randperm(examples, generator=generator).to(device)
        of_epoch = order.split(sizes)[:left]
        yield from of_epoch
        left -= len(of_epoch)


def precision(spec: LocalTraining, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass that has the precision of local training."""
    return (
        nullcontext()
        if spec.precision == "float32"
        else torch.autocast(device.type, torch.bfloat16)
    )


def full(outputs: Tensor) -> Tensor:
    """Return outputs in the precision of the loss: at least float32."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def by_length(plans: Sequence[Sequence[Tensor]], step: int) -> list[tuple[Places, Tensor]]:
    """Return the clients that take a step, and their batches ``[k, ..., B]``, by length of batch.

    A plan has the batches ``[..., B]`` of one client, and the longest plans come first. The result
    has one entry for each length B.
    """
    active = [plan[step] for plan in plans if step < len(plan)]
    groups: dict[int, list[int]] = defaultdict(list)
    for k, batch in enumerate(active):
        groups[batch.shape[-1]].append(k)
    if len(groups) == 1:
        return [(slice(0, len(active)), torch.stack(active))]
    return [
        (torch.tensor(group), torch.stack([active[k] for k in group])) for group in groups.values()
    ]


# Sampling, noise and clipping of DP-SGD, the same in every engine (Abadi et al. 2016, Algorithm 1).
#
# A step of a client with n examples samples each of them with probability q = B/n, clips the
# gradient of each to L2 norm C, and uses (Σ clipped + σC·noise) / (q·n) as the gradient. Momentum,
# decay, proximal terms and the optimizer are applied to that gradient. A client takes as many steps
# as in plain training. Departs from Algorithm 1: the group of a lot is one batch.


@dataclass(frozen=True)
class PrivateSteps:
    """Settings of DP-SGD as local training, see :class:`~fedclade.channel.ExamplePrivacy`.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of the gradient of an example.
    noise_multiplier
        Standard deviation σ of the noise, as a multiple of C.
    secret
        Whether samples and noise are drawn from the operating system, as on real clients. The
        server knows the seed of a run; with the seed it could find out which examples are in a
        sample, and remove the noise.
    """

    clip_norm: float
    noise_multiplier: float
    secret: bool = False

    @classmethod
    def of(cls, privacy: ExamplePrivacy, secret: bool = False) -> PrivateSteps:
        """Return the steps for a setting of example-level privacy."""
        return cls(privacy.clip_norm, privacy.noise_multiplier, secret)

    def as_trial(self) -> PrivateSteps:
        """Return the same settings without noise and with draws by key, for comparing engines.

        Noise would hide differences between engines.
        """
        return replace(self, noise_multiplier=0.0, secret=False)

    def draws(self, job: Job, batch_size: int) -> Draws:
        """Return the samples and the noise of a client's local training."""
        return Draws(self, job, batch_size)

    def factors(self, squares: Tensor) -> Tensor:
        """Return the factors by which clipping scales gradients with these squared norms.

        The factor of a gradient whose norm is not finite is 0. Gradients are scaled to at most C(1
        + 2⁻²²), because of rounding in float32.
        """
        norms = squares.sqrt()
        return torch.where(norms.isfinite(), self.clip_norm / norms.clamp(min=self.clip_norm), 0.0)


class Draws:
    """Samples and noise of one client, step by step."""

    def __init__(self, private: PrivateSteps, job: Job, batch_size: int) -> None:
        self._size = job.size
        self._secret = private.secret
        self.rate = sampling_rate(batch_size, job.size)
        self.expected = self.rate * job.size
        """Mean number of examples in a sample, by which sums of gradients are divided."""
        self.scale = private.noise_multiplier * private.clip_norm / self.expected
        """Standard deviation of the noise in a step's gradient: σC / (q·n)."""
        seed = job.generator.initial_seed()
        self._samples = rng.torch_generator(seed, "dp-sgd samples")
        self._noise = rng.torch_generator(seed, "dp-sgd noise")

    def sample(self) -> Tensor:
        """Draw the examples of a step, as ascending indices; the sample may be empty."""
        if self._secret:
            drawn = torch.from_numpy(system_uniform(self._size))
        else:
            drawn = torch.rand(self._size, generator=self._samples, dtype=torch.float64)
        return (drawn < self.rate).nonzero().flatten()

    def noise(self, out: Tensor) -> Tensor:
        """Write the noise of a step's gradient to ``out``, ``[D]`` in float32 on the CPU.

        Entries are in the order of the layout.
        """
        if self.scale == 0:
            return out.zero_()
        if self._secret:
            return out.copy_(system_normal(len(out))).mul_(self.scale)
        return torch.randn(len(out), generator=self._noise, out=out).mul_(self.scale)


def generator_of(this_round: Round, key: int, private: PrivateSteps | None) -> torch.Generator:
    """Return the generator of a client's local training in a round.

    The generator of DP-SGD also depends on the query: noise that is used twice protects only once.
    """
    if private is not None:
        numbers = this_round.number, this_round.query, key
        return rng.torch_generator(this_round.seed, f"dp-sgd of {this_round.purpose}", *numbers)
    purpose = "train" if this_round.purpose == BESIDE else this_round.purpose
    return rng.torch_generator(this_round.seed, purpose, this_round.number, key)


def check_private(
    module: nn.Module, layout: Layout, federation: Federation, task: FittedTask
) -> None:
    """Check that a module has a gradient for each example, and that the data does not change.

    Raises
    ------
    ConfigError
        If the loss is over a whole batch, the data changes during the run, or a layer mixes the
        examples of a batch.
    """
    if task.over_batch:
        raise ConfigError(
            f"privacy.level = 'example': task.loss = {task.loss_name} is one over a whole batch "
            "(task.loss_over), so no example has a gradient of its own; set privacy.level = "
            "'client', or choose a loss of each example"
        )
    if federation.stages:
        raise ConfigError(
            f"privacy.level = 'example': {federation} changes during a run, and what an example "
            "costs is counted of data that stays; leave data.drift out"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and name not in layout.resting:  # pyright: ignore[reportPrivateUsage]
            mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats  # pyright: ignore[reportPrivateUsage]
            if mixes:
                raise ConfigError(
                    f"privacy.level = 'example': layer {name!r} ({type(layer).__name__}) mixes the "
                    "examples of a batch, so none has a gradient of its own; take GroupNorm in "
                    "its place"
                )


def refuse_rules(work: Workload) -> None:
    """Check that clients take plain steps, of examples with equal weights.

    Raises
    ------
    ConfigError
        If the workload has a local rule, or examples have weights.
    """
    if work.rule is not None or any(job.weights is not None for job in work.jobs):
        what = (
            "examples of different weights" if work.rule is None else f"local rule {work.rule.name}"
        )
        raise ConfigError(
            f"privacy.level = 'example': {what} cannot be trained by DP-SGD; set privacy.level = "
            "'client'"
        )


@dataclass(frozen=True, eq=False)
class Job:
    """Local training of one client in one round."""

    client: int  #: the client's id, for messages
    row: int  #: row of the model from which training starts
    inputs: Tensor  #: inputs of the client's training examples, ``[n, ...]``
    targets: Tensor  #: their targets, ``[n, ...]``, mapped by the client's label map
    generator: torch.Generator
    """Orders the batches: one ``torch.randperm(n, generator=...)`` per epoch, in every engine."""
    #: row of the model to which the proximal term pulls; ``row`` by default
    anchor: int | None = None
    weights: Tensor | None = None
    """Factors ``[n]`` of the losses of training examples; the mean still divides by n."""
    state: Mapping[str, Tensor] | None = None
    """State of the optimizer or local rule from :attr:`Workload.states`; None or empty if new."""

    def first(self, examples: int) -> Job:
        """Return the job with only its first ``examples`` examples."""
        weights = None if self.weights is None else self.weights[:examples]
        return replace(
            self, inputs=self.inputs[:examples], targets=self.targets[:examples], weights=weights
        )

    @property
    def size(self) -> int:
        """Number of training examples: n."""
        return self.inputs.shape[0]  # len() of a tensor takes four times as long

    @property
    def anchor_row(self) -> int:
        """Row of the model to which the proximal term pulls."""
        return self.row if self.anchor is None else self.anchor


CLASSIFICATION = FittedTask()
"""Default task of workloads. Worker processes are kept as long as the task is the same object."""


@dataclass(frozen=True, eq=False)
class Workload:
    """Local training of n clients in one round."""

    #: any module of the layout, on the device of the models; its state may be overwritten
    module: nn.Module
    layout: Layout
    models: Tensor  #: models from which clients start, ``[K, S]``
    jobs: Sequence[Job]
    spec: LocalTraining
    lr: float  #: the step size of this round
    task: FittedTask = CLASSIFICATION  #: the loss
    fixed: frozenset[str] = frozenset()  #: names of parameters that are not trained
    rule: LocalRule | None = None  #: local rule that replaces plain steps; None for plain steps
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """States of optimizers, if they are kept, or of local rules, by client id; engines write them.

    Tensors of an optimizer are named ``<parameter>.<entry>``, such as ``0.weight.exp_avg``.
    """

    private: PrivateSteps | None = None  #: settings of DP-SGD; None for plain steps

    @property
    def batch_size(self) -> int:
        """Size of the largest batch: at most the number of examples of the largest client."""
        return min(self.spec.batch_size, max(job.size for job in self.jobs))

    def room(self, out: Tensor | None) -> Tensor:
        """Return memory for the updates, ``[n, S]``: ``out`` if given, otherwise new memory."""
        return self.models.new_empty(len(self.jobs), self.models.shape[1]) if out is None else out

    def cut(self, clients: int, examples: int) -> Workload:
        """Return a small workload for trials: a few clients, a few examples of each, one epoch.

        Its generators are copies, so the original ones stay unused.
        """
        jobs = [job.first(examples) for job in self.jobs[:clients]]
        return replace(self, jobs=jobs, spec=self.spec.in_epochs(1)).redrawn()

    def weighted(self, weights: Mapping[int, Tensor]) -> Workload:
        """Return the workload with weights ``[n]`` of every client's examples, by client id.

        Without any weights it is returned unchanged.
        """
        return (
            replace(self, jobs=[replace(job, weights=weights[job.client]) for job in self.jobs])
            if weights
            else self
        )

    def redrawn(self, by: int = 0) -> Workload:
        """Return the workload with fresh generators: the original seeds plus ``by``."""
        seeds = [job.generator.initial_seed() + by for job in self.jobs]
        jobs = [
            replace(job, generator=torch.Generator().manual_seed(seed))
            for job, seed in zip(self.jobs, seeds, strict=True)
        ]
        return replace(self, jobs=jobs, states={})


class CannotTrainTogether(Exception):  # noqa: N818  (not an error of the user's)
    """Error of an engine that cannot train these clients together; the message gives the reason.

    The loop can train them, with fresh generators.
    """


def refuse_half_precision(work: Workload) -> None:
    """Refuse parameters in half precision.

    Engines that train clients together compute in the type of the parameter vector.

    Raises
    ------
    CannotTrainTogether
        If the layout has such parameters.
    """
    if work.layout.is_rounded:
        dtype = str(work.layout.parameters[0].dtype).removeprefix("torch.")
        raise CannotTrainTogether(
            f"its parameters are {dtype}; only float32 and float64 can be trained together"
        )


class Engine(Protocol):
    """Way to train the clients of a round. All engines give the same updates, up to rounding."""

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model.

        Parameters
        ----------
        work
            The clients and their settings.
        out
            Memory for the updates, ``[n, S]``; None for new memory.

        Returns
        -------
        tuple
            Updates ``[n, S]`` in the order of the jobs, and the mean training loss of each client,
            float64 ``[n]``.

        Raises
        ------
        CannotTrainTogether
            If the engine cannot train these clients together. The generators of the jobs may have
            been used then.
        """
        ...
