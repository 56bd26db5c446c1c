"""Outputs of the models that are compared on a client's test rows, and of a trivial predictor.

The functions are separate from the measurement of gains (:mod:`fedclade.runs.gains`) since a client
of a network needs only them: its process then starts without the modules that read whole runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedclade.core import IGNORED, TaskKind
from fedclade.runs.store.gains import TRIVIAL
from fedclade.tasks import FittedTask, TargetScale

ROWS_AT_A_TIME = 1024
"""Largest number of rows in one forward pass."""

SIGMOID_ROWS = 67
"""Number of equal rows on which sigmoids are compared.

It covers several SIMD vectors of any width, and a remainder that is computed by scalar code.
"""


@torch.inference_mode()
def predict_in_parts(module: nn.Module, inputs: Tensor, device: torch.device) -> Tensor:
    """Return the outputs ``[n, ...]`` of a model on the CPU, computed in batches of rows.

    Parameters
    ----------
    module
        The model in evaluation mode, on the device.
    inputs
        Inputs ``[n, ...]``, on any device.
    device
        Device of the forward passes.
    """
    parts = [module(part.to(device)) for part in inputs.split(ROWS_AT_A_TIME)]
    return torch.cat(parts).cpu()


def predict_trivially(
    kind: TaskKind, seen: Tensor, targets: Tensor, outputs: int, *, scale: TargetScale | None = None
) -> Tensor:
    """Return outputs of a model that ignores its inputs, as a baseline for trained models.

    The outputs are the frequencies of the labels in the training data, or the mean of the training
    targets.

    Parameters
    ----------
    kind
        Kind of the task.
    seen
        The client's m training targets ``[m, ...]``.
    targets
        Targets ``[n, ...]`` of the n rows to predict, of which only the shape is used.
    outputs
        Number of outputs of a model.
    scale
        Scale by which a regression standardizes targets; None if it does not.

    Returns
    -------
    Tensor
        For each of the n rows, the logits of the labels' frequencies; for a regression, the mean
        target, standardized as the outputs of a trained model are.
    """
    if kind == "regression":
        mean = seen.mean(0)
        if scale is not None:
            mean = scale.standardize(mean)
        return mean.expand(targets.shape)
    if kind in ("binary", "multilabel"):
        share = seen.double().mean(0)
        # Bounded, so that a label that never or always occurs has a finite logit.
        bound = 0.5 / (len(seen) + 1)
        logits = share.clamp(bound, 1 - bound).logit().float()
        return _with_tied_probabilities(logits).expand(targets.shape)
    counts = torch.bincount(seen[seen != IGNORED].flatten(), minlength=outputs)
    logits = (counts + 0.5).log() - math.log(float(counts.sum()) + 0.5 * outputs)
    return logits.expand(*targets.shape, outputs)


def without_unfit_baseline(task: FittedTask, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the trivial predictor if its outputs are not of the kind of a model's outputs.

    The mean target is no output of a model that predicts something else than a target, such as
    quantiles or a risk, for a loss and metrics of the user's own.

    Parameters
    ----------
    task
        The task.
    outputs
        Outputs ``[n, ...]`` for n rows by the model's name.
    """
    sizes = {name: each.numel() for name, each in outputs.items()}
    if task.target_structure is None and len(set(sizes.values())) == 1:
        return outputs
    return {name: each for name, each in outputs.items() if name != TRIVIAL}


def _with_tied_probabilities(logits: Tensor) -> Tensor:
    """Adjust the last bits of logits so that their sigmoids are equal in all rows.

    A constant prediction must have equal probabilities in all rows; otherwise a metric that ranks
    the rows, such as the AUC, would find differences between them. PyTorch computes most rows with
    vectorized code and the last rows with scalar code, and the two can give sigmoids that differ in
    the last bit. Logits for which this happens are moved towards 0, one bit at a time.
    """
    for _ in range(100):
        rows = logits.expand(SIGMOID_ROWS, *logits.shape).sigmoid()
        is_tied = (rows == rows[0]).all(0)
        if bool(is_tied.all()):
            break
        logits = torch.where(is_tied, logits, torch.nextafter(logits, torch.zeros_like(logits)))
    return logits
