"""What an engine gets to do: the clients of a round, each with its data, its model and its own randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedclade.local import LocalSpec
from fedclade.params import Layout


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
    def anchor_row(self) -> int:
        """Which of the models the proximal term pulls it towards."""
        return self.row if self.anchor is None else self.anchor


class CannotTrainTogether(Exception):  # noqa: N818  (not an error of the user's)
    """An engine cannot train these clients together; says what is in the way. The loop can, from fresh draws."""


class Engine(Protocol):
    """A way to train the clients of a round. All engines give the same updates, up to rounding."""

    def train(
        self,
        module: nn.Module,
        layout: Layout,
        models: Tensor,
        jobs: Sequence[Job],
        spec: LocalSpec,
        lr: float,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train every client from its model.

        Parameters
        ----------
        module
            Any module of this layout, on the device of the models; its state may be overwritten.
        models
            ``[K, S]``.
        jobs
            n clients.
        spec, lr
            The local training, and the step size of this round.
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


def room(models: Tensor, jobs: Sequence[Job], into: Tensor | None) -> Tensor:
    """Return memory for the updates of the jobs, ``[n, S]``: what was given, or new."""
    return models.new_empty(len(jobs), models.shape[1]) if into is None else into
