"""What DP-SGD draws and how it clips, the same in every engine (Abadi et al. 2016, Algorithm 1).

A step of a client with n examples samples each of them with probability q = B/n, clips the gradient of each to L2 norm
C, and takes (Σ clipped + σC·noise) / (q·n) for the gradient: momentum, decay, proximal terms and the optimizer are of
that. It takes as many steps as plain training would. Departs from Algorithm 1: the group of a lot is one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedclade.channel import ExamplePrivacy, sampling_rate, system_normal, system_uniform
from fedclade.core import BESIDE, ConfigError, Layout, Round, rng
from fedclade.data import Federation
from fedclade.tasks import FittedTask

if TYPE_CHECKING:
    from fedclade.training.jobs import Job, Workload


@dataclass(frozen=True)
class PrivateSteps:
    """That local training is DP-SGD, see :class:`~fedclade.channel.ExamplePrivacy`.

    A ``secret`` one draws from the operating system, as real clients have to: the server knows the seed of a run, and
    with it could tell who is in a sample, and take the noise off.
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
        self._size, self._secret = job.size, private.secret
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


def check_private(module: nn.Module, layout: Layout, federation: Federation, task: FittedTask) -> None:
    """Check that a module has a gradient for each example, and that its data stays; a ConfigError if not."""
    if task.over_batch:
        raise ConfigError(
            f"privacy.level = 'example': task.loss = {task.loss_name} is one over a whole batch (task.loss_over), so "
            "no example has a gradient of its own; set privacy.level = 'client', or choose a loss of each example"
        )
    if federation.stages:
        raise ConfigError(
            f"privacy.level = 'example': {federation} changes during a run, and what an example costs is counted of "
            "data that stays; leave data.drift out"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and name not in layout.resting:  # pyright: ignore[reportPrivateUsage]
            mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats  # pyright: ignore[reportPrivateUsage]
            if mixes:
                raise ConfigError(
                    f"privacy.level = 'example': layer {name!r} ({type(layer).__name__}) mixes the examples of a "
                    "batch, so none has a gradient of its own; take GroupNorm in its place"
                )


def refuse_rules(work: Workload) -> None:
    """Check that clients take plain steps of examples that all count alike; a ConfigError if they do not."""
    if work.rule is not None or any(job.weights is not None for job in work.jobs):
        what = "examples of different weights" if work.rule is None else f"local rule {work.rule.name}"
        raise ConfigError(
            f"privacy.level = 'example': {what} cannot be trained by DP-SGD; set privacy.level = 'client'"
        )
