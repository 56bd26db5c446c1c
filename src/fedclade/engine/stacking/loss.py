"""The loss of a step of all clients, and what each client has lost over all its steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.data.federation import IGNORED
from fedclade.engine.stacking.plan import Plan, Step


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
        self._seen: list[Tensor] = []

    def gradient(self, step: Step, logits: Tensor, targets: Tensor) -> Tensor:
        """Take in a step's logits ``[k·B, ..., outputs]`` and targets ``[k·B, ...]``; return the logits' gradient."""
        rows, flat = logits.detach().flatten(0, -2), targets.flatten()
        scores = functional.log_softmax(rows, 1)
        nats = functional.nll_loss(scores, flat, ignore_index=IGNORED, reduction="none")
        gradient = scores.exp_()
        if self._all_count and step.own is None:
            each = len(flat) // step.rows
            weight = 1 / (step.width * each)
            self._seen.append(nats.view(step.rows, each).mean(1) if each > 1 else nats)
            at = flat
        else:
            counts = (flat != IGNORED).view(step.clients, -1)
            weights = counts / counts.sum(1, keepdim=True, dtype=nats.dtype)
            own = step.width if step.own is None else step.own.to(nats.device).unsqueeze(1)
            self._seen.append((nats.view_as(weights) * weights * own).view(step.rows, -1).sum(1))
            at, weight = flat.clamp(min=0), weights.view(-1, 1)
        gradient.scatter_add_(1, at.unsqueeze(1), gradient.new_full((1, 1), -1).expand(len(flat), 1))
        return gradient.mul_(weight).view_as(logits)

    def of_clients(self) -> Tensor:
        """Return the mean of each client over all steps so far, float64 ``[n]`` on the CPU."""
        epochs = torch.cat(self._seen).cpu().double().view(-1, len(self._plan.owners))
        return self._plan.means(epochs.mean(0))
