"""What an engine gets to do: the clients of a round, each with its data, its model and its own randomness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedclade.core import Layout, LocalRule, LocalTraining
from fedclade.tasks import FittedTask
from fedclade.training.private_steps import PrivateSteps


@dataclass(frozen=True, eq=False)
class Job:
    """One client's local training in one round."""

    client: int  #: its id, for messages
    row: int  #: which of the models it starts from
    inputs: Tensor  #: its training examples ``[n, ...]``, as it sees them
    targets: Tensor
    generator: torch.Generator
    """Orders its batches: one ``torch.randperm(n, generator=...)`` at the start of each epoch, in every engine."""
    anchor: int | None = None  #: which of the models the proximal term pulls it towards; ``row`` by default
    weights: Tensor | None = None
    """By which the loss of each training example is multiplied, ``[n]``; the mean still divides by their number."""
    state: Mapping[str, Tensor] | None = None
    """Of its optimizer or local rule, as an earlier round left it in :attr:`Workload.states`; None or empty if new."""

    def first(self, examples: int) -> Job:
        """Return the job with some of its examples: the first."""
        weights = None if self.weights is None else self.weights[:examples]
        return replace(self, inputs=self.inputs[:examples], targets=self.targets[:examples], weights=weights)

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

    module: nn.Module  #: any module of the layout, on the device of the models; its state may be overwritten
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
        return replace(self, jobs=[replace(job, weights=weights[job.client]) for job in self.jobs]) if weights else self

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
        raise CannotTrainTogether(f"its parameters are {dtype}; only float32 and float64 can be trained together")


class Engine(Protocol):
    """A way to train the clients of a round. All engines give the same updates, up to rounding."""

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model.

        Returns updates ``[n, S]`` in the order of the jobs, in ``out`` if given, and the mean training loss of each,
        float64 ``[n]``. Raises :class:`CannotTrainTogether`; the generators of the jobs may be spent then.
        """
        ...
