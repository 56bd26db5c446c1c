"""Losses of all clients in a training step, their gradients, and each client's mean loss."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core import IGNORED
from fedclade.tasks import FittedTask, count_targets
from fedclade.training.stacking.batches import Plan, Step

log_softmax_backward: Any = torch._log_softmax_backward_data  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

REGISTER = 16
"""Number of float32 values in the widest vector registers, those of AVX-512."""


class Losses:
    """Losses of a task for several clients at once, with the gradient of the outputs.

    The loss of a step is the sum of the clients' mean losses, so that the gradient of each client
    is that of its own mean loss. The gradient of the cross-entropy with respect to the logits
    (softmax minus one at the target) is computed without autograd, which would take longer for a
    small model.

    Parameters
    ----------
    plan
        The steps of the training.
    task
        The task, whose loss is computed.
    all_count
        Whether every target counts, except in padding: False if some targets of examples are
        :data:`~fedclade.core.IGNORED`.
    """

    def __init__(self, plan: Plan, task: FittedTask, all_count: bool) -> None:
        self._plan = plan
        self._task = task
        self._all_count = all_count
        self._noted: list[Tensor] = []  # losses of the rows of each step
        self._scoring: _ByRow | None = None

    def of(
        self, step: Step, logits: Tensor, targets: Tensor, of_examples: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of the rows of a step, ``[k·B]``, and the gradient of the outputs.

        The losses can be passed to :meth:`note`. The next step overwrites the gradient.

        Parameters
        ----------
        step
            The step, with k clients and B rows for each client.
        logits
            Outputs of the model, ``[k·B, ..., outputs]``.
        targets
            Targets, ``[k·B, ...]``.
        of_examples
            Weights of the examples, ``[k·B]``; None if all weigh 1.
        """
        if not self._task.is_plain:
            return self._of_any(step, logits, targets, of_examples)
        scoring = self._scoring
        if scoring is None or not scoring.holds(logits):
            if logits.shape[-1] >= REGISTER or logits.is_cuda:
                scoring = _ByRow(logits)
            else:
                scoring = _ByColumn(logits)
            self._scoring = scoring
        flat = targets.flatten()
        each = flat.shape[0] // step.rows
        if self._all_count and step.own is None:
            losses, gradient = scoring.of(flat, 1 / (step.width * each))
            of_rows = losses
            if each > 1:
                of_rows = losses.view(step.rows, each).mean(1)
            if of_examples is not None:
                of_rows = of_rows * of_examples
                gradient.mul_(of_examples.repeat_interleave(each).unsqueeze(1))
        else:
            counts = (flat != IGNORED).view(step.clients, -1)
            weights = counts / counts.sum(1, keepdim=True, dtype=logits.dtype)
            if of_examples is not None:
                weights = weights * of_examples.repeat_interleave(each).view_as(weights)
            own = step.width if step.own is None else step.own.to(logits.device).unsqueeze(1)
            losses, gradient = scoring.of(flat.clamp(min=0), 1.0)
            of_rows = (losses.view_as(weights) * weights * own).view(step.rows, -1).sum(1)
            gradient.mul_(weights.view(-1, 1))
        return of_rows, gradient.view_as(logits)

    def _of_any(
        self, step: Step, outputs: Tensor, targets: Tensor, of_examples: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses of a step and the gradient of the outputs for any loss, by autograd."""
        outputs = outputs.detach().requires_grad_()
        counts = count_targets(targets).view(step.clients, -1)
        if step.own is not None:
            counts = counts * (torch.arange(step.width) < step.own.unsqueeze(1)).to(counts.device)
        weights = counts / counts.sum(1, keepdim=True)
        if of_examples is not None:
            weights = weights * of_examples.view_as(weights)
        with torch.enable_grad():
            losses = self._task.losses(outputs, targets).view(step.clients, -1) * weights.to(
                outputs
            )
            (gradient,) = torch.autograd.grad(losses.sum(), outputs)
        own = step.width if step.own is None else step.own.to(outputs.device).unsqueeze(1)
        return (losses.detach() * own).flatten(), gradient

    def note(self, of_rows: Tensor) -> None:
        """Record the losses of a step, for the clients' mean losses."""
        self._noted.append(of_rows)

    def of_clients(self) -> Tensor:
        """Return the mean loss of each client over all recorded steps, float64 ``[n]`` on a CPU."""
        return self._plan.means(torch.cat(self._noted))


class _ByRow:
    """Cross-entropy of each row of logits, and its gradient, for logits in given memory."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits.detach()
        self._rows = self._logits.flatten(0, -2)

    def holds(self, logits: Tensor) -> bool:
        """Return whether logits are in the memory for which this object was created."""
        return logits.data_ptr() == self._logits.data_ptr() and logits.shape == self._logits.shape

    def of(self, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """Return the loss of each of R rows, ``[R]``, and the gradient of the logits.

        The gradient is that of ``weight`` times the sum of the losses.
        """
        scores = self._rows.log_softmax(1)
        losses = functional.nll_loss(scores, targets, reduction="none")
        return losses, scores.exp_().scatter_(1, targets.unsqueeze(1), -1, reduce="add").mul_(
            weight
        )


class _ByColumn(_ByRow):
    """Cross-entropy of rows with few outputs on a CPU, computed on transposed logits.

    On a CPU, torch's log_softmax processes rows with few outputs entry by entry, but columns of the
    transposed logits together. All memory is reused. A step of ``mclr`` is 1.1 times as fast
    (``benchmarks/gains.py --only column``).
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        self._columns = self._rows.t().contiguous()
        self._scores, self._of_scores, self._gradient = (
            torch.empty_like(self._columns) for _ in range(3)
        )
        self._turned = self._rows.t(), self._scores.t(), self._gradient.t()

    def of(self, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """Return the loss of each of R rows, ``[R]``, and the gradient of the logits.

        The gradient is that of ``weight`` times the sum of the losses.
        """
        columns = self._columns
        (logits, scores, gradient) = self._turned
        torch.log_softmax(columns.copy_(logits), 0, out=self._scores)
        losses = functional.nll_loss(scores, targets, reduction="none")
        torch.index_select(
            _identity(len(columns), -weight, columns.dtype), 1, targets, out=self._of_scores
        )
        log_softmax_backward(self._of_scores, self._scores, 0, columns.dtype, out=self._gradient)
        return losses, gradient


@lru_cache(maxsize=16)
def _identity(size: int, factor: float, dtype: torch.dtype) -> Tensor:
    """Return the identity matrix times a factor, from a cache."""
    return torch.eye(size, dtype=dtype).mul_(factor)
