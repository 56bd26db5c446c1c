"""What an engine gets to do: the clients of a round, each with its data, its model and its own randomness."""

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

# What every step of local training begins with: its batch, and the precision of its forward pass.

Places = slice | Tensor
"""Some of k clients: the first of them, or a list of indices."""


def batches(
    examples: int,
    spec: LocalTraining,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Yield the examples of each step of a client's local training, as indices ``[B]``.

    The order is drawn for every epoch, or with ``reshuffle = false`` for the first epoch alone.
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
    """Return what a forward pass has to be in, to be of the precision of local training."""
    return (
        nullcontext()
        if spec.precision == "float32"
        else torch.autocast(device.type, torch.bfloat16)
    )


def full(outputs: Tensor) -> Tensor:
    """Return outputs as the loss takes them: in float32 if they are less."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def by_length(plans: Sequence[Sequence[Tensor]], step: int) -> list[tuple[Places, Tensor]]:
    """Return the clients that take a step, and their batches ``[k, ..., B]``: one entry for each length of a batch.

    A plan has a client's batches ``[..., B]``, and those of the longest plans come first.
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


# What DP-SGD draws and how it clips, the same in every engine (Abadi et al. 2016, Algorithm 1).
#
# A step of a client with n examples samples each of them with probability q = B/n, clips the
# gradient of each to L2 norm C, and takes (Σ clipped + σC·noise) / (q·n) for the gradient:
# momentum, decay, proximal terms and the optimizer are of that. It takes as many steps as plain
# training would. Departs from Algorithm 1: the group of a lot is one batch.


@dataclass(frozen=True)
class PrivateSteps:
    """That local training is DP-SGD, see :class:`~fedclade.channel.ExamplePrivacy`.

    A ``secret`` one draws from the operating system, as real clients have to: the server knows the
    seed of a run, and with it could tell who is in a sample, and take the noise off.
    """

    clip_norm: float
    noise_multiplier: float
    secret: bool = False

    @classmethod
    def of(cls, privacy: ExamplePrivacy, secret: bool = False) -> PrivateSteps:
        """Return the steps of a privacy of examples."""
        return cls(privacy.clip_norm, privacy.noise_multiplier, secret)

    def as_trial(self) -> PrivateSteps:
        """Return the same without noise, which would hide what engines do differently, drawn by key."""
        return replace(self, noise_multiplier=0.0, secret=False)

    def draws(self, job: Job, batch_size: int) -> Draws:
        """Return what a client draws in its local training."""
        return Draws(self, job, batch_size)

    def factors(self, squares: Tensor) -> Tensor:
        """Return what clipping multiplies gradients with, given their squared norms; one that has no norm is left out.

        Gradients are scaled to at most C(1 + 2⁻²²), by what float32 rounds.
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
        """Examples in a sample on average, by which sums are divided."""
        self.scale = private.noise_multiplier * private.clip_norm / self.expected
        """Standard deviation of the noise in a step's gradient: σC / (q·n)."""
        seed = job.generator.initial_seed()
        self._samples = rng.torch_generator(seed, "dp-sgd samples")
        self._noise = rng.torch_generator(seed, "dp-sgd noise")

    def sample(self) -> Tensor:
        """Draw which examples a step is about, ascending; perhaps none."""
        if self._secret:
            drawn = torch.from_numpy(system_uniform(self._size))
        else:
            drawn = torch.rand(self._size, generator=self._samples, dtype=torch.float64)
        return (drawn < self.rate).nonzero().flatten()

    def noise(self, out: Tensor) -> Tensor:
        """Write the noise of a step's gradient to memory ``[D]`` in float32 on the CPU, in the order of the layout."""
        if self.scale == 0:
            return out.zero_()
        if self._secret:
            return out.copy_(system_normal(len(out))).mul_(self.scale)
        return torch.randn(len(out), generator=self._noise, out=out).mul_(self.scale)


def generator_of(this_round: Round, key: int, private: PrivateSteps | None) -> torch.Generator:
    """Return the generator of a client's local training in a round.

    Of DP-SGD it is that of one query alone: noise that is used twice protects once.
    """
    if private is not None:
        numbers = this_round.number, this_round.query, key
        return rng.torch_generator(this_round.seed, f"dp-sgd of {this_round.purpose}", *numbers)
    purpose = "train" if this_round.purpose == BESIDE else this_round.purpose
    return rng.torch_generator(this_round.seed, purpose, this_round.number, key)


def check_private(
    module: nn.Module, layout: Layout, federation: Federation, task: FittedTask
) -> None:
    """Check that a module has a gradient for each example, and that its data stays; a ConfigError if not."""
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
    """Check that clients take plain steps of examples that all count alike; a ConfigError if they do not."""
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
    """One client's local training in one round."""

    client: int  #: its id, for messages
    row: int  #: which of the models it starts from
    inputs: Tensor  #: its training examples ``[n, ...]``, as it sees them
    targets: Tensor
    generator: torch.Generator
    """Orders its batches: one ``torch.randperm(n, generator=...)`` at the start of each epoch, in every engine."""
    #: which of the models the proximal term pulls it towards; ``row`` by default
    anchor: int | None = None
    weights: Tensor | None = None
    """By which the loss of each training example is multiplied, ``[n]``; the mean still divides by their number."""
    state: Mapping[str, Tensor] | None = None
    """Of its optimizer or local rule, as an earlier round left it in :attr:`Workload.states`; None or empty if new."""

    def first(self, examples: int) -> Job:
        """Return the job with some of its examples: the first."""
        weights = None if self.weights is None else self.weights[:examples]
        return replace(
            self, inputs=self.inputs[:examples], targets=self.targets[:examples], weights=weights
        )

    @property
    def size(self) -> int:
        """How many training examples it has: n."""
        return self.inputs.shape[0]  # len() of a tensor takes four times as long

    @property
    def anchor_row(self) -> int:
        """Which of the models the proximal term pulls it towards."""
        return self.row if self.anchor is None else self.anchor


CLASSIFICATION = FittedTask()
"""One for all workloads that name none: worker processes are kept as long as it is the same task."""


@dataclass(frozen=True, eq=False)
class Workload:
    """The local training of n clients in one round."""

    #: any module of the layout, on the device of the models; its state may be overwritten
    module: nn.Module
    layout: Layout
    models: Tensor  #: what clients start from, ``[K, S]``
    jobs: Sequence[Job]
    spec: LocalTraining
    lr: float  #: the step size of this round
    task: FittedTask = CLASSIFICATION  #: the loss
    fixed: frozenset[str] = frozenset()  #: names of the parameters that stay as they are
    rule: LocalRule | None = None  #: what clients do in place of plain steps
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """Where engines leave the state of each client's optimizer if it is kept, or of its local rule, by the client's id.

    Tensors of an optimizer are named ``<parameter>.<what it is>``, such as ``0.weight.exp_avg``.
    """

    private: PrivateSteps | None = None  #: that steps are those of DP-SGD, or None for plain ones

    @property
    def batch_size(self) -> int:
        """Examples in the largest batch that there can be: not more than the largest client has."""
        return min(self.spec.batch_size, max(job.size for job in self.jobs))

    def room(self, out: Tensor | None) -> Tensor:
        """Return memory for the updates, ``[n, S]``: what was given, or new."""
        return self.models.new_empty(len(self.jobs), self.models.shape[1]) if out is None else out

    def cut(self, clients: int, examples: int) -> Workload:
        """Return a small copy: some clients, some examples of each, one epoch; the generators stay unused."""
        jobs = [job.first(examples) for job in self.jobs[:clients]]
        return replace(self, jobs=jobs, spec=self.spec.in_epochs(1)).redrawn()

    def weighted(self, weights: Mapping[int, Tensor]) -> Workload:
        """Return the workload with weights of the examples of all clients, ``[n]`` each, or of none."""
        return (
            replace(self, jobs=[replace(job, weights=weights[job.client]) for job in self.jobs])
            if weights
            else self
        )

    def redrawn(self, by: int = 0) -> Workload:
        """Return the workload with fresh generators: of the seeds that it began with, or of others."""
        seeds = [job.generator.initial_seed() + by for job in self.jobs]
        jobs = [
            replace(job, generator=torch.Generator().manual_seed(seed))
            for job, seed in zip(self.jobs, seeds, strict=True)
        ]
        return replace(self, jobs=jobs, states={})


class CannotTrainTogether(Exception):  # noqa: N818  (not an error of the user's)
    """An engine cannot train these clients together; names what prevents it. The loop can, with fresh generators."""


def refuse_half_precision(work: Workload) -> None:
    """Refuse parameters in half precision: engines that train clients together compute in the type of the vector.

    Raises
    ------
    CannotTrainTogether
        If there are such parameters.
    """
    if work.layout.is_rounded:
        dtype = str(work.layout.parameters[0].dtype).removeprefix("torch.")
        raise CannotTrainTogether(
            f"its parameters are {dtype}; only float32 and float64 can be trained together"
        )


class Engine(Protocol):
    """A way to train the clients of a round. All engines give the same updates, up to rounding."""

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model.

        Returns updates ``[n, S]`` in the order of the jobs, in ``out`` if given, and the mean
        training loss of each, float64 ``[n]``. Raises :class:`CannotTrainTogether`; the generators
        of the jobs may be spent then.
        """
        ...
