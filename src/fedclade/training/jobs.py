"""Workload of an engine: the clients of a round, with their data, models and random generators.

A job is the local training of one client. The module also has what all engines share: the batches
of local training, the sampling and noise of DP-SGD, and the interface of engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedclade.channel import ExamplePrivacy, sampling_rate, system_normal, system_uniform
from fedclade.core import (
    BESIDE,
    ClientTrainer,
    ConfigError,
    Layout,
    LocalRule,
    LocalTraining,
    Round,
    rng,
)
from fedclade.data import Federation
from fedclade.tasks import FittedTask

# The batches of local training, and the precision of its forward passes.

Places = slice | Tensor
"""Selection of k clients from a sequence: a slice of the first k, or a tensor of indices."""


def batches(
    examples: int,
    spec: LocalTraining,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Yield the examples of each step of a client's local training, as indices ``[B]``.

    The examples are shuffled in every epoch, or with ``reshuffle = false`` only in the first epoch.

    Parameters
    ----------
    examples
        Number of the client's training examples.
    spec
        Settings of local training.
    generator
        Generator that shuffles the examples, on the CPU.
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
    """Return the context manager in which forward passes have the precision of local training."""
    if spec.precision == "float32":
        return nullcontext()
    if device.type == "cpu" and not _can_compute_lstm_in_bfloat16():
        return _autocast_without_onednn()
    return torch.autocast(device.type, torch.bfloat16)


@cache
def _can_compute_lstm_in_bfloat16() -> bool:
    """Return whether oneDNN, the library of PyTorch for CPUs, computes LSTMs in bfloat16 here.

    On processors without AVX-512, PyTorch calls oneDNN nevertheless, which fails.
    """
    with torch.random.fork_rng(devices=[]):  # its initial parameters are random
        lstm = nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            lstm(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True


@contextmanager
def _autocast_without_onednn() -> Generator[None]:
    """Let PyTorch compute forward passes in bfloat16 by its own code instead of oneDNN's."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


def full(outputs: Tensor) -> Tensor:
    """Return outputs in a precision in which a loss can be computed: at least float32."""
    if outputs.dtype in (torch.bfloat16, torch.float16):
        return outputs.float()
    return outputs


def by_length(plans: Sequence[Sequence[Tensor]], step: int) -> list[tuple[Places, Tensor]]:
    """Group clients by the size of their batches in one step.

    Clients that have already taken all of their steps are left out.

    Parameters
    ----------
    plans
        Batches ``[..., B]`` of each client, in the order of its steps; the clients with the most
        steps come first.
    step
        Number of the step, from 0.

    Returns
    -------
    list
        For each batch size B: the k clients with batches of this size, and these batches, stacked,
        ``[k, ..., B]``.
    """
    active = [plan[step] for plan in plans if step < len(plan)]
    groups: dict[int, list[int]] = defaultdict(list)
    for k, batch in enumerate(active):
        groups[batch.shape[-1]].append(k)
    if len(groups) == 1:
        return [(slice(0, len(active)), torch.stack(active))]
    found: list[tuple[Places, Tensor]] = []
    for group in groups.values():
        batches_of_group = torch.stack([active[k] for k in group])
        found.append((torch.tensor(group), batches_of_group))
    return found


# Sampling, noise and clipping of DP-SGD, the same in every engine (Abadi et al. 2016, Algorithm 1).
#
# A step of a client with n examples and batch size B samples each example with probability q = B/n,
# clips the gradient of each sampled example to L2 norm C, and uses (Σ clipped + σC·noise) / (q·n)
# as the gradient. Momentum, weight decay, proximal terms and the optimizer are applied to that
# gradient. A client takes as many steps as in plain training. In contrast to the paper, a lot (the
# examples of a step) is one batch, not a group of several batches.


@dataclass(frozen=True)
class PrivateSteps:
    """Settings of DP-SGD as local training, with gradients that are clipped and noisy.

    The setting ``privacy.level = 'example'`` selects DP-SGD, see
    :class:`~fedclade.channel.ExamplePrivacy`.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of the gradient of an example; longer gradients are scaled to it.
    noise_multiplier
        Standard deviation σ of the noise, as a multiple of C.
    secret
        Whether samples and noise are drawn from the operating system's random numbers, as on real
        clients. The server knows the seed of a run, and with this seed it could find out which
        examples are in a sample, and remove the noise.
    """

    clip_norm: float
    noise_multiplier: float
    secret: bool = False

    @classmethod
    def of(cls, privacy: ExamplePrivacy, secret: bool = False) -> PrivateSteps:
        """Return the settings of DP-SGD for a configuration of example-level privacy."""
        return cls(privacy.clip_norm, privacy.noise_multiplier, secret)

    def as_trial(self) -> PrivateSteps:
        """Return settings with which the updates of different engines can be compared.

        No noise is added, since noise would hide differences between engines, and the samples are
        drawn from seeded generators, so that all engines draw the same samples.
        """
        return replace(self, noise_multiplier=0.0, secret=False)

    def draws(self, job: Job, batch_size: int) -> Draws:
        """Return the random samples and the random noise of a client's local training."""
        return Draws(self, job, batch_size)

    def factors(self, squares: Tensor) -> Tensor:
        """Return the factors that clip gradients to norm C, given the gradients' squared L2 norms.

        The factor of a gradient whose norm is not finite is 0. Because of rounding in float32, the
        norm of a clipped gradient is at most C(1 + 2⁻²²).
        """
        norms = squares.sqrt()
        return torch.where(norms.isfinite(), self.clip_norm / norms.clamp(min=self.clip_norm), 0.0)


class Draws:
    """Random samples and random noise of one client's DP-SGD, step by step."""

    def __init__(self, private: PrivateSteps, job: Job, batch_size: int) -> None:
        self._size = job.size
        self._secret = private.secret
        self.rate = sampling_rate(batch_size, job.size)
        self.expected = self.rate * job.size
        """Expected number q·n of examples in a sample, by which sums of gradients are divided."""
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
        """Write the noise for the gradient of a step to ``out``, float32 ``[D]`` on the CPU.

        D is the number of the model's parameters, which are in the order of the layout.
        """
        if self.scale == 0:
            return out.zero_()
        if self._secret:
            return out.copy_(system_normal(len(out))).mul_(self.scale)
        return torch.randn(len(out), generator=self._noise, out=out).mul_(self.scale)


def generator_of(this_round: Round, key: int, private: PrivateSteps | None) -> torch.Generator:
    """Return the random generator of a client's local training in a round.

    Parameters
    ----------
    this_round
        The round, with the run's seed and the purpose of the training.
    key
        Key of the client, by which clients get different random numbers.
    private
        Settings of DP-SGD; None for plain training. For DP-SGD, the generator also depends on the
        number of the query in the round: if the same noise were added to two replies, their
        difference would have no noise.
    """
    if private is not None:
        numbers = this_round.number, this_round.query, key
        return rng.torch_generator(this_round.seed, f"dp-sgd of {this_round.purpose}", *numbers)
    purpose = "train" if this_round.purpose == BESIDE else this_round.purpose
    return rng.torch_generator(this_round.seed, purpose, this_round.number, key)


def check_private(
    module: nn.Module, layout: Layout, federation: Federation, task: FittedTask
) -> None:
    """Check that a model, its loss and its data can be used with DP-SGD.

    Raises
    ------
    ConfigError
        If the loss is defined over a whole batch, the data changes during the run, or a layer mixes
        the examples of a batch.
    """
    if task.over_batch:
        raise ConfigError(
            "privacy.level = 'example' needs a separate gradient for each example, but task.loss = "
            f"{task.loss_name} is a loss over a whole batch (task.loss_over); set privacy.level = "
            "'client', or choose a loss that is defined for each example"
        )
    if federation.stages:
        raise ConfigError(
            "privacy.level = 'example' needs data that stays the same, since the privacy loss of an "
            f"example is not known for changing data, but {federation} changes during a run; remove "
            "data.drift"
        )
    for name, layer in mixing_layers(module):
        if name not in layout.resting:
            raise ConfigError(
                "privacy.level = 'example' needs a separate gradient for each example, but "
                f"layer {name!r} ({type(layer).__name__}) mixes the examples of a batch; use "
                "GroupNorm instead"
            )


def mixing_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each layer that mixes the examples of a training batch, and the layer.

    These are BatchNorm, and other norms that store running statistics.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._NormBase):  # pyright: ignore[reportPrivateUsage]
            continue
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats:  # pyright: ignore[reportPrivateUsage]
            yield name, layer


def refuse_rules(work: Workload) -> None:
    """Check that clients that train by DP-SGD take plain steps, with equal weights of examples.

    Raises
    ------
    ConfigError
        If the workload has a local rule or a user's own training code, or examples have weights.
    """
    needs_plain = work.rule is not None or work.trainer is not None
    if needs_plain or any(job.weights is not None for job in work.jobs):
        what = "examples with different weights"
        if work.rule is not None:
            what = f"local rule {work.rule.name}"
        elif work.trainer is not None:
            what = f"trainer {work.trainer.label}, whose steps have no noise"
        raise ConfigError(
            f"DP-SGD (privacy.level = 'example') does not support {what}; set privacy.level = "
            "'client'"
        )


@dataclass(frozen=True, eq=False)
class Job:
    """Local training of one client in one round."""

    client: int  #: the client's id, for messages
    row: int  #: row of the model from which training starts
    inputs: Tensor  #: inputs of the client's n training examples, ``[n, ...]``
    targets: Tensor  #: targets of these examples, ``[n, ...]``, mapped by the client's label map
    generator: torch.Generator
    """Generator that orders the examples, by one ``torch.randperm`` per epoch in every engine."""
    #: row of the model to which the proximal term pulls; None for the model in ``row``
    anchor: int | None = None
    weights: Tensor | None = None
    """Weights ``[n]`` of the training examples' losses; None if all weights are 1.

    The mean loss is the sum of the weighted losses, divided by n.
    """
    state: Mapping[str, Tensor] | None = None
    """State of the client's optimizer or local rule at the start; None or empty for a new state."""

    def first(self, examples: int) -> Job:
        """Return the job with only the first ``examples`` training examples."""
        return replace(
            self,
            inputs=self.inputs[:examples],
            targets=self.targets[:examples],
            weights=None if self.weights is None else self.weights[:examples],
        )

    @property
    def size(self) -> int:
        """Number n of the client's training examples."""
        return self.inputs.shape[0]  # len() of a tensor takes four times as long

    @property
    def anchor_row(self) -> int:
        """Row of the model to which the proximal term pulls the client's parameters."""
        return self.row if self.anchor is None else self.anchor


CLASSIFICATION = FittedTask()
"""Default task of workloads. Worker processes are reused as long as the task is the same object."""


@dataclass(frozen=True, eq=False)
class Workload:
    """Local training of n clients in one round, as the input of an engine."""

    #: any module of the layout, on the device of the models; its state may be overwritten
    module: nn.Module
    layout: Layout
    models: Tensor  #: K models as parameter vectors, from which clients start, ``[K, S]``
    jobs: Sequence[Job]
    spec: LocalTraining
    lr: float  #: the step size of this round
    task: FittedTask = CLASSIFICATION  #: the loss
    fixed: frozenset[str] = frozenset()  #: names of parameters that are not trained
    rule: LocalRule | None = None  #: local rule that replaces plain steps; None for plain steps
    #: a user's own code that replaces plain steps; None for plain steps
    trainer: ClientTrainer | None = None
    number: int = 1  #: number of the round, from 1
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])
    """States of the optimizer, local rule or own code after training, by client id.

    The engine writes them.

    An optimizer's states are written only if they are stored between rounds. Their tensors are
    named ``<parameter>.<entry>``, such as ``0.weight.exp_avg``.
    """

    private: PrivateSteps | None = None  #: settings of DP-SGD; None for plain steps
    #: steps that a user's own code has taken, by client id; the engine writes them
    taken: dict[int, int] = field(default_factory=dict[int, int])
    returns_memory: bool = False
    """Whether the engine ``loop`` returns the memory of large gradients to the system.

    The process then needs less memory at its peak. A process that trains many clients should not
    return it, since mapping the memory again takes time.
    """

    @property
    def batch_size(self) -> int:
        """Size of the largest batch of any client, at most the largest number of examples."""
        return min(self.spec.batch_size, max(job.size for job in self.jobs))

    def room(self, out: Tensor | None) -> Tensor:
        """Return memory for the n clients' updates, ``[n, S]``: ``out``, or new memory if None."""
        if out is not None:
            return out
        return self.models.new_empty(len(self.jobs), self.models.shape[1])

    def cut(self, clients: int, examples: int) -> Workload:
        """Return a smaller workload for trials: a few clients, a few examples of each, one epoch.

        The random generators are copies, so a trial does not change the state of the original
        generators.
        """
        jobs = [job.first(examples) for job in self.jobs[:clients]]
        return replace(self, jobs=jobs, spec=self.spec.in_epochs(1)).redrawn()

    def weighted(self, weights: Mapping[int, Tensor]) -> Workload:
        """Return the workload with weights of each client's examples, given by client id.

        A client with n examples has weights ``[n]``. If ``weights`` is empty, the workload is
        returned unchanged.
        """
        if not weights:
            return self
        jobs = [replace(job, weights=weights[job.client]) for job in self.jobs]
        return replace(self, jobs=jobs)

    def redrawn(self, by: int = 0) -> Workload:
        """Return the workload with new random generators; each seed is the old one plus ``by``.

        The new workload has no optimizer states from the training of the original workload.
        """
        seeds = [job.generator.initial_seed() + by for job in self.jobs]
        jobs = [
            replace(job, generator=torch.Generator().manual_seed(seed))
            for job, seed in zip(self.jobs, seeds, strict=True)
        ]
        return replace(self, jobs=jobs, states={})


class CannotTrainTogether(Exception):  # noqa: N818  (not an error of the user's)
    """Error of an engine that cannot train several clients together; the message gives the reason.

    The loop can train these clients, with new random generators.
    """


def refuse_own_code(work: Workload) -> None:
    """Raise an error if clients train by a user's own code, which trains one client at a time.

    Raises
    ------
    CannotTrainTogether
        If the workload has a trainer.
    """
    if work.trainer is not None:
        raise CannotTrainTogether(
            f"trainer {work.trainer.label} trains one client at a time (engines loop and workers "
            "support own trainers)"
        )


def refuse_half_precision(work: Workload) -> None:
    """Raise an error if the model has parameters in half precision.

    Engines that train clients together compute in the data type of the parameter vector, which has
    at least float32.

    Raises
    ------
    CannotTrainTogether
        If the layout has parameters in half precision.
    """
    if work.layout.is_rounded:
        dtype = str(work.layout.parameters[0].dtype).removeprefix("torch.")
        raise CannotTrainTogether(
            f"the model's parameters are {dtype}, but engines that train clients together support "
            "float32 and float64 only (engine loop supports half precision, too)"
        )


class Engine(Protocol):
    """Interface of engines, which train the clients of a round.

    All engines give the same updates, up to rounding.
    """

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client of a workload, each from its own model, and return the updates.

        Parameters
        ----------
        work
            The clients and their settings.
        out
            Memory for the updates, ``[n, S]``; None for new memory.

        Returns
        -------
        tuple
            Updates of the n clients in the order of the jobs, ``[n, S]``, and the mean training
            loss of each client, float64 ``[n]``.

        Raises
        ------
        CannotTrainTogether
            If the engine cannot train these clients together. The random generators of the jobs may
            have been used by then.
        """
        ...
