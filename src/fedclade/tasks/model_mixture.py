"""A mixture of models as one module of plain PyTorch, in which exported mixtures are loaded."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional


class ModelMixture(nn.Module):
    """Copies of a model that predict together, by the weighted mean of their predictions.

    Parameters
    ----------
    model
        A module of the architecture of all of them.
    count
        The number of models.
    task
        ``classification`` or ``language``: outputs are logits of labels, whose probabilities are
        averaged, and come out as log-probabilities. ``binary`` or ``multilabel``: the same of one
        logit for each label. ``regression``: outputs are averaged as they are.
    """

    weights: Tensor

    def __init__(self, model: nn.Module, count: int, task: str = "classification") -> None:
        super().__init__()
        self.models = nn.ModuleList(copy.deepcopy(model) for _ in range(count))
        self.register_buffer("weights", torch.full((count,), 1 / count, dtype=torch.float64))
        self.task = task

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the prediction of the mixture in the form of one model's outputs, ``[B, ...]``."""
        outputs = torch.stack([model(*inputs) for model in self.models])
        return self.combine(outputs, self.weights.view(-1, *(1,) * (outputs.dim() - 1)), self.task)

    @staticmethod
    def combine(outputs: Tensor, weights: Tensor, task: str) -> Tensor:
        """Return the outputs ``[...]`` of a mixture, given outputs and weights ``[K, ...]``."""
        weights = weights.to(outputs)
        if task == "regression":
            return (weights * outputs).sum(0)
        logs = weights.log()
        if task in ("binary", "multilabel"):
            yes = torch.logsumexp(logs + functional.logsigmoid(outputs), 0)
            no = torch.logsumexp(logs + functional.logsigmoid(-outputs), 0)
            return yes - no
        return torch.logsumexp(logs + outputs.log_softmax(-1), 0)
