"""Scores of one client by torchmetrics objects, and the cases in which a score is undefined.

A client's test data may lack labels, or vary too little for a score. A mean over labels is then
computed over the labels that the client has, as scikit-learn does when it is given these labels. A
score that cannot be computed is NaN, and the client has no score. torchmetrics itself counts absent
labels as 0, or raises an error.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedclade.core import IGNORED, TaskKind

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["both", "positives", "negatives", "varying targets", "varying"]
"""Kind of data that a score needs to be defined.

It needs positive or negative examples of a label (or both), or targets (and outputs) that vary.
"""

NEEDS: Mapping[str, Need] = {
    **dict.fromkeys(("AUROC", "AveragePrecision", "LogAUC", "EER"), "both"),
    **dict.fromkeys(("F1Score", "FBetaScore", "Precision", "Recall", "JaccardIndex"), "positives"),
    **dict.fromkeys(("Specificity", "NegativePredictiveValue"), "negatives"),
    **dict.fromkeys(
        ("R2Score", "ExplainedVariance", "ConcordanceCorrCoef", "RelativeSquaredError"),
        "varying targets",
    ),
    **dict.fromkeys(("PearsonCorrCoef", "SpearmanCorrCoef", "KendallRankCorrCoef"), "varying"),
}
"""Data that classes of torchmetrics need, by class name without prefix such as ``Binary``."""

HIGHER_IS_BETTER = (
    *("Specificity", "NegativePredictiveValue"),
    *("PearsonCorrCoef", "KendallRankCorrCoef"),
)
"""Classes of torchmetrics that do not state their direction."""

PREFIXES = ("Binary", "Multiclass", "Multilabel")

SHIFT_INVARIANT = ("R2Score", "ExplainedVariance", "RelativeSquaredError")
"""Scores that do not change if outputs and targets are shifted and scaled in the same way."""


def client_score(made: Any, kind: TaskKind, outputs: Tensor, targets: Tensor) -> float:
    """Compute the score of one client with a copy of a torchmetrics object.

    Parameters
    ----------
    made
        The torchmetrics object, or another object with methods ``update`` and ``compute``. The
        object itself is not changed.
    kind
        Kind of task.
    outputs, targets
        All outputs of the model ``[n, ...]`` for the client's examples, and their targets.

    Returns
    -------
    float
        The mean over the labels (in a regression: over the targets) for which the score is defined;
        NaN if it is defined for none of them.
    """
    family = family_of(made)
    if not bool(outputs.isfinite().all()):
        return math.nan
    outputs, targets = _as_predictions(kind, outputs, targets)
    if len(targets) == 0:
        return math.nan
    defined = _is_defined(family, kind, made, outputs, targets)
    if not bool(defined.any()):
        return math.nan
    if family in SHIFT_INVARIANT:
        outputs, targets = _standardize_each(outputs, targets)
    calculator = copy.deepcopy(made)
    _average_later(calculator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of labels that are absent
        calculator.update(outputs, targets)
        if (
            family == "MatthewsCorrCoef"
            and (known := _constant_mcc(calculator.confmat)) is not None
        ):
            return known
        values = torch.as_tensor(calculator.compute()).detach().double().cpu()
    if values.numel() == defined.numel():
        values = values.flatten()[defined.flatten()]
    values = values[values.isfinite()]
    if not values.numel():
        return math.nan
    return float(values.mean())


def family_of(made: object) -> str:
    """Return the name of the class of a metric object, without prefix such as ``Binary``.

    If the class is derived from a class in :data:`NEEDS`, the result is the name of that class.
    """
    names = [re.sub(f"^({'|'.join(PREFIXES)})", "", each.__name__) for each in type(made).__mro__]
    return next((name for name in names if name in NEEDS), names[0])


def _as_predictions(kind: TaskKind, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and targets in the form that torchmetrics needs.

    Predictions are probabilities, or the outputs themselves in a regression. Targets that are
    ignored are removed.
    """
    if kind in ("binary", "multilabel"):
        return outputs.reshape(targets.shape).sigmoid(), targets.long()
    if kind == "regression":
        if outputs.numel() != targets.numel():  # a loss and a metric of the user's own
            return outputs, targets
        return outputs.reshape(targets.shape), targets
    outputs = outputs.flatten(0, -2)
    targets = targets.flatten()
    counts = targets != IGNORED
    return outputs[counts].softmax(-1), targets[counts]


def _is_defined(family: str, kind: TaskKind, made: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether a client's score is defined, for each label ``[C]`` or target ``[D]``.

    Parameters
    ----------
    family
        Class name of the metric without prefix, see :func:`family_of`.
    kind
        Kind of task.
    made
        The metric object.
    outputs, targets
        Predictions and targets of the client.
    """
    if kind == "regression":
        return _is_defined_for_numbers(family, outputs, targets)
    if kind in ("classification", "language", "segmentation"):
        return _is_defined_for_labels(family, made, outputs, targets)
    if getattr(made, "average", None) == "micro":  # all labels count as one
        targets = targets.flatten()
    columns = targets.reshape(len(targets), -1)
    positives = (columns == 1).any(0).cpu()
    negatives = (columns == 0).any(0).cpu()
    if family == "MatthewsCorrCoef":  # of all labels together
        return torch.tensor([bool(positives.any() and negatives.any())])
    need = NEEDS.get(family)
    if need == "both":
        return positives & negatives
    if need == "positives":
        return positives
    if need == "negatives":
        return negatives
    return torch.ones_like(positives)


def _is_defined_for_numbers(family: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether a client's score is defined for each of D targets of a regression, ``[D]``."""
    need = NEEDS.get(family)
    defined = torch.ones(targets[0].numel(), dtype=torch.bool)
    if need in ("varying targets", "varying"):
        defined &= _varies(targets)
    if need == "varying":
        defined &= _varies(outputs)
    return defined


def _is_defined_for_labels(family: str, made: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether a client's score is defined for each label of a classification, ``[C]``."""
    counts = torch.bincount(targets, minlength=outputs.shape[-1])
    ignored = getattr(made, "ignore_index", None)
    if isinstance(ignored, int) and 0 <= ignored < len(counts):
        counts[ignored] = 0
    defined = counts > 0
    if NEEDS.get(family) in ("both", "negatives"):
        defined &= counts < counts.sum()
    return defined.cpu()


def _varies(values: Tensor) -> Tensor:
    """Return whether each of D columns has at least two different numbers, ``[D]``."""
    columns = values.reshape(len(values), -1)
    return (columns.amax(0) > columns.amin(0)).cpu()


def _standardize_each(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Standardize outputs and targets by the mean and standard deviation of the targets.

    This changes no score in :data:`SHIFT_INVARIANT`. Without it, the scores of numbers that are
    tiny, or far from 0, would be wrong, since torchmetrics adds up squares in float32 and treats
    sums below 1e-4 as 0.
    """
    exact = targets.double()
    mean = exact.mean(0)
    deviation = exact.std(0, correction=0)
    scale = deviation.where(deviation > 0, 1.0)
    return ((outputs.double() - mean) / scale).float(), ((exact - mean) / scale).float()


def _average_later(calculator: Any) -> None:
    """Make a metric object return the score of each label or target in place of their mean.

    :func:`client_score` then takes the mean over those labels or targets for which the client's
    score is defined.
    """
    if getattr(calculator, "average", None) == "macro":
        calculator.average = "none"
    if getattr(calculator, "multioutput", None) == "uniform_average":
        calculator.multioutput = "raw_values"


def _constant_mcc(confusion: Tensor) -> float | None:
    """Return Matthews' correlation coefficient if all targets or all predictions are the same.

    torchmetrics does not handle these cases as scikit-learn does: it returns a number that is not a
    correlation.

    Parameters
    ----------
    confusion
        Confusion matrix of C classes ``[C, C]``, a row for each true class; or a confusion matrix
        for each of L labels, ``[L, 2, 2]``, which are added up.

    Returns
    -------
    float or None
        NaN (undefined) if all targets have one class; 0 if all predictions have one class, but the
        targets have several. None if neither holds: the coefficient must then be computed.
    """
    together = confusion
    if confusion.dim() == 3:
        together = confusion.sum(0)
    if int((together.sum(1) > 0).sum()) < 2:
        return math.nan
    return 0.0 if int((together.sum(0) > 0).sum()) < 2 else None
