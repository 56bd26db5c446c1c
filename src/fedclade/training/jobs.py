"""What an engine gets to do: the clients of a round, each with its data, its model and its own randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fedclade.core import Layout, LocalSpec


@dataclass(frozen=True, eq=False)
class Job:
    """One client's local training in one round.

    Parameters
    ----------
    client
        Its id, for messages.
    row
        Which of the models it starts from.
    inputs, targets
        Its training examples, ``[n, ...]``, as it sees them.
    draw
        Orders its batches: one ``torch.randperm(n, generator=draw)`` at the start of each epoch, in every engine.
    anchor
        Which of the models the proximal term pulls it towards; the one it starts from if left out.
    """

    client: int
    row: int
    inputs: Tensor
    targets: Tensor
    draw: torch.Generator
    anchor: int | None = None

    @property
    def size(self) -> int:
        """How many training examples it has: n."""
        return self.inputs.shape[0]  # len() of a tensor takes four times as long

    @property
    def anchor_row(self) -> int:
        """Which of the models the proximal term pulls it towards."""
        return self.row if self.anchor is None else self.anchor


@dataclass(frozen=True, eq=False)
class Task:
    """The local training of n clients in one round.

    Parameters
    ----------
    module
        Any module of the layout, on the device of the models; its state may be overwritten.
    layout
        Of the module's tensors in a model.
    models
        What clients start from, ``[K, S]``.
    jobs
        n clients.
    spec, lr
        The local training, and the step size of this round.
    """

    module: nn.Module
    layout: Layout
    models: Tensor
    jobs: Sequence[Job]
    spec: LocalSpec
    lr: float

    @property
    def batch_size(self) -> int:
        """Examples in the largest batch that there can be: not more than the largest client has."""
        return min(self.spec.batch_size, max(job.size for job in self.jobs))

    def room(self, into: Tensor | None) -> Tensor:
        """Return memory for the updates, ``[n, S]``: what was given, or new."""
        return self.models.new_empty(len(self.jobs), self.models.shape[1]) if into is None else into

    def cut(self, clients: int, examples: int) -> Task:
        """Return a small copy: some clients, some examples of each, one epoch; the draws of this one stay unused."""
        jobs = [
            replace(job, inputs=job.inputs[:examples], targets=job.targets[:examples]) for job in self.jobs[:clients]
        ]
        return replace(self, jobs=jobs, spec=replace(self.spec, epochs=1)).redrawn()

    def redrawn(self, by: int = 0) -> Task:
        """Return the task with fresh draws: those that it began with, or others."""
        draws = [torch.Generator().manual_seed(job.draw.initial_seed() + by) for job in self.jobs]
        return replace(self, jobs=[replace(job, draw=draw) for job, draw in zip(self.jobs, draws, strict=True)])


class CannotTrainTogether(Exception):  # noqa: N818  (not an error of the user's)
    """An engine cannot train these clients together; says what is in the way. The loop can, from fresh draws."""


class Engine(Protocol):
    """A way to train the clients of a round. All engines give the same updates, up to rounding."""

    def train(self, task: Task, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model.

        Parameters
        ----------
        task
            Clients, models, data.
        into
            Memory ``[n, S]`` for the updates; new if left out.

        Returns
        -------
        tuple
            Updates ``[n, S]`` in the order of the jobs, and the mean training loss of each, float64 ``[n]``.

        Raises
        ------
        CannotTrainTogether
            If the engine cannot train these clients together; the generators of the jobs may be spent then.
        """
        ...
