"""The loss of a step of all clients, and what each client has lost over all its steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fedclade.data.federation import IGNORED
from fedclade.engine.stacking.plan import Plan, Step

log_softmax_backward: Callable[[Tensor, Tensor, int, torch.dtype], Tensor]
log_softmax_backward = torch._log_softmax_backward_data  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

REGISTER = 16
"""Numbers of single precision in the widest vector registers, those of AVX-512."""


class Losses:
    """Cross-entropy, summed over the clients' means, so that each client's gradient is its own.

    The gradient with respect to the logits, softmax less one at the target, is formed here: autograd's way to it takes
    longer, which shows in the step of a small model.

    Parameters
    ----------
    plan
        The steps of an epoch.
    all_count
        Whether no target is :data:`~fedclade.data.federation.IGNORED`, padding aside.
    """

    def __init__(self, plan: Plan, all_count: bool) -> None:
        self._plan = plan
        self._all_count = all_count
        self._seen: list[Tensor] = []  # log-likelihoods, of the rows of each step

    def of(self, step: Step, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a step has lost, for :meth:`note`, and the gradient of the logits.

        Parameters
        ----------
        step
            Which of the plan's.
        logits, targets
            ``[k·B, ..., outputs]`` and ``[k·B, ...]``.
        """
        rows, flat = logits.detach().flatten(0, -2), targets.flatten()
        each = flat.shape[0] // step.rows
        if self._all_count and step.own is None:
            likelihoods, gradient = _scored(rows, flat, 1 / (step.width * each))
            seen = likelihoods.view(step.rows, each).mean(1) if each > 1 else likelihoods
        else:
            counts = (flat != IGNORED).view(step.clients, -1)
            weights = counts / counts.sum(1, keepdim=True, dtype=rows.dtype)
            own = step.width if step.own is None else step.own.to(rows.device).unsqueeze(1)
            likelihoods, gradient = _scored(rows, flat.clamp(min=0), 1.0)
            seen = (likelihoods.view_as(weights) * weights * own).view(step.rows, -1).sum(1)
            gradient.mul_(weights.view(-1, 1))
        return seen, gradient.view_as(logits)

    def note(self, seen: Tensor) -> None:
        """Remember what the next step has lost."""
        self._seen.append(seen)

    def of_clients(self) -> Tensor:
        """Return the mean of each client over all steps noted, float64 ``[n]`` on the CPU."""
        return -self._plan.means(torch.cat(self._seen))


def _scored(rows: Tensor, targets: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each row's target, and the gradient of −weight times it: in the row, ``[R, O]``."""
    at = targets.unsqueeze(1)
    if rows.shape[1] >= REGISTER or rows.is_cuda:
        scores = rows.log_softmax(1)
        likelihoods = scores.gather(1, at).view(-1)
        return likelihoods, scores.exp_().scatter_(1, at, -1, reduce="add").mul_(weight)
    # On a CPU, log_softmax would go through such rows entry by entry.
    scores = rows.t().contiguous().log_softmax(0)
    likelihoods = scores.t().gather(1, at).view(-1)
    of_scores = _identity(rows.shape[1], -weight, rows.dtype).index_select(1, targets)
    return likelihoods, log_softmax_backward(of_scores, scores, 0, rows.dtype).t().contiguous()


@lru_cache(maxsize=16)
def _identity(size: int, factor: float, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype).mul_(factor)
