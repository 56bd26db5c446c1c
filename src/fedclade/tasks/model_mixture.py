"""Mixture of models as one module of plain PyTorch, into which exported mixtures are loaded."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional


class ModelMixture(nn.Module):
    """Several models of one architecture that predict by the weighted mean of their predictions.

    The weights of the models are the buffer ``weights`` ``[count]``, which is loaded with the
    parameters of the models; until then, all weights are equal.

    Parameters
    ----------
    model
        Module of the common architecture, which is copied for each model.
    count
        Number of models.
    task
        Kind of task. ``classification`` or ``language``: outputs are logits of labels; their
        probabilities are averaged, and the mixture returns log-probabilities. ``binary`` or
        ``multilabel``: the probabilities of one logit for each label are averaged, and the mixture
        returns logits. ``regression``: outputs are averaged directly.
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
        """Combine the outputs of K models into the outputs of a mixture.

        Parameters
        ----------
        outputs, weights
            Outputs of the models and their weights, ``[K, ...]`` each.
        task
            Kind of task, which determines what is averaged; see the class.

        Returns
        -------
        torch.Tensor
            Outputs of the mixture, ``[...]``.
        """
        weights = weights.to(outputs)
        if task == "regression":
            return (weights * outputs).sum(0)
        logs = weights.log()
        if task in ("binary", "multilabel"):
            yes = torch.logsumexp(logs + functional.logsigmoid(outputs), 0)
            no = torch.logsumexp(logs + functional.logsigmoid(-outputs), 0)
            return yes - no
        return torch.logsumexp(logs + outputs.log_softmax(-1), 0)
