"""Metrics of clients, each from a client's own outputs, never averaged over batches."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core import ArrayMapping, ConfigError, TaskKind, checked, shown, unknown
from fedclade.tasks.client_scores import HIGHER_IS_BETTER, client_score, family_of

# Scores of a run: those of its clients, and the agreement of its clusters with the true ones.

QUANTILES = (5, 10, 25, 50, 75, 90)
NUMBERS = ("mean", "std", "min", "max", *(f"p{q}" for q in QUANTILES), "worst10_mean")
COUNTS = ("clients", "without_score")
SPREAD = (*NUMBERS, *COUNTS)
"""Names of the results of :func:`spread`."""


def spread(values: Iterable[float | None], *, lower_is_better: bool = False) -> dict[str, Any]:
    """Return the distribution of a score over the clients that have one.

    Parameters
    ----------
    values
        The score of each client; NaN or None if the metric is undefined for its data.
    lower_is_better
        Whether the worst clients are those with the largest scores, as of perplexity.

    Returns
    -------
    dict
        ``mean``, ``std`` (ddof 0), ``min``, ``max``, percentiles ``p5`` to ``p90`` and
        ``worst10_mean``, the mean of the worst tenth, rounded up to whole clients; each None if no
        client has a score. Then how many ``clients`` have one, and how many are ``without_score``.
    """
    # NumPy converts None to NaN.
    given = np.asarray([*values], dtype=np.float64)
    ordered = np.sort(given[~np.isnan(given)])
    counts = {"clients": len(ordered), "without_score": len(given) - len(ordered)}
    if len(ordered) == 0:
        return {**dict.fromkeys(NUMBERS), **counts}
    tenth = math.ceil(len(ordered) / 10)
    worst = ordered[:tenth]
    if lower_is_better:
        worst = ordered[-tenth:]
    with np.errstate(invalid="ignore"):  # of scores that are infinite, as models have diverged
        numbers = [
            *(ordered.mean(), ordered.std(), ordered[0], ordered[-1]),
            *np.percentile(ordered, QUANTILES),
            worst.mean(),
        ]
    known = [None if math.isnan(number) else float(number) for number in numbers]
    return {**dict(zip(NUMBERS, known, strict=True)), **counts}


def mean_score(values: Iterable[float | None]) -> float | None:
    """Return the mean score of the clients that have one; None if none has."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return float(np.mean(known)) if known else None


def perplexity(loss: float) -> float:
    """Return the exponential of a cross-entropy in nats, limited to finite numbers."""
    return math.exp(min(loss, 700.0))


def cluster_scores(
    found: Mapping[int, int], truth: Mapping[int, int] | None
) -> dict[str, float | None]:
    """Return the adjusted Rand index and the normalized mutual information of clusters.

    ``found`` and ``truth`` have the cluster of each client by id. Without a truth both scores are
    None.
    """
    if truth is None:
        return {"ari": None, "nmi": None}
    if isinstance(truth, ArrayMapping):
        true_labels = truth.of([*found])
    else:
        true_labels = [truth[client] for client in found]
    true_bytes = np.array(true_labels, dtype=np.int64).tobytes()
    found_bytes = np.array([*found.values()], dtype=np.int64).tobytes()
    ari, nmi = _compute_agreement(true_bytes, found_bytes)
    return {"ari": ari, "nmi": nmi}


@lru_cache(maxsize=2)  # in most rounds clusters are those of the round before
def _compute_agreement(true_labels: bytes, found_labels: bytes) -> tuple[float, float]:
    # slow to import: only where used
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    labels = [np.frombuffer(each, dtype=np.int64) for each in (true_labels, found_labels)]
    return float(adjusted_rand_score(*labels)), float(normalized_mutual_info_score(*labels))


RIGHT = "assignment_accuracy"
"""What the share of newcomers is called, in files, that came to a leaf of their true cluster."""


def gap_closed(accuracy: float, fedavg: float, oracle: float) -> float | None:
    """Return the closed part of the gap between FedAvg and the oracle.

    It is (method − FedAvg) / (oracle − FedAvg): 0 is no better than one model for all, 1 as good as
    the oracle.

    None if the oracle is not better than FedAvg: then there is no gap to close.
    """
    return (accuracy - fedavg) / (oracle - fedavg) if oracle > fedavg else None


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the half width of its 95 % interval by Student's t.

    The half width is None for fewer than two values.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, half


@checked()
@dataclass(frozen=True)
class Metric:
    """A score of a model on a client's examples.

    It is either a mean of ``terms`` over the targets that count, or is computed from all outputs
    together (``whole``).

    Parameters
    ----------
    name
        Name in configs and of columns.
    higher_is_better
        Direction of the score.
    share
        Whether the score is in [0, 1], and is written in per cent.
    predict
        Function of outputs ``[B, ...]`` that returns the predictions for ``terms``; None: the
        outputs themselves.
    terms
        Function of predictions and targets ``[B, ...]`` that returns the term of each example,
        float64 ``[B]``; None: its loss.
    final
        Function of the mean, such as a root.
    whole
        Function of all outputs and targets ``[n, ...]`` of a client. NaN if the score is undefined
        for these targets: the client then has no score, and is left out of means.
    """

    name: str
    higher_is_better: bool
    share: bool = False
    predict: Callable[[Tensor], Tensor] | None = None
    terms: Callable[[Tensor, Tensor], Tensor] | None = None
    final: Callable[[float], float] | None = None
    whole: Callable[[Tensor, Tensor], float] | None = None

    @property
    def noted(self) -> dict[str, Any]:
        """Fields of the metric that files record."""
        return {"name": self.name, "higher_is_better": self.higher_is_better, "share": self.share}

    @property
    def worst(self) -> float:
        """Score of a model that gives NaN or infinite outputs."""
        if self.share:
            return 0.0 if self.higher_is_better else 1.0
        bound = math.inf
        if self.higher_is_better:
            bound = -math.inf
        return bound if self.final is None else self.final(bound)

    def reached(self, score: float, target: float) -> bool:
        """Whether a score is at least as good as a target."""
        if self.higher_is_better:
            return score >= target
        return score <= target


def read_metrics(summary: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics of a run by its summary, the main metric first.

    Runs of earlier versions have the metrics of their task.
    """
    if "metrics" in summary:
        return tuple(Metric(**each) for each in summary["metrics"])
    if "perplexity" in summary:
        return tuple(OWN["language"].values())
    return tuple(OWN["classification"].values())


def is_share(name: str) -> bool:
    """Return whether a metric of this name lies in [0, 1], whatever the task."""
    own = any(name in metrics and metrics[name].share for metrics in OWN.values())
    return own or (name in TORCHMETRICS["classification"] and name not in _SIGNED)


def metric(name: object, kind: TaskKind, outputs: int) -> Metric:
    """Return a metric by its name, or around an object of torchmetrics, for targets of a kind.

    Raises
    ------
    ConfigError
        If it is unknown, or does not fit the task.
    """
    if isinstance(name, Metric):
        return name
    if not isinstance(name, str):
        return _wrap_object(name, kind, outputs)
    check_metric(name, kind)
    if name in OWN[kind]:
        return OWN[kind][name]
    return _build_torchmetric(name, kind, outputs)


def check_metric(name: str, kind: TaskKind | None) -> None:
    """Check that a metric is known, and fits a kind if there is one; a ConfigError if not."""
    elsewhere = [each for each in OWN if name in OWN[each] or name in TORCHMETRICS[each]]
    if kind in elsewhere or (kind is None and elsewhere):
        return
    known = dict.fromkeys(
        name for each in OWN if kind in (each, None) for name in (*OWN[each], *TORCHMETRICS[each])
    )
    if elsewhere:
        raise ConfigError(
            f"task.metrics: {name!r} does not fit a {kind} task, it is for "
            f"{' and '.join(elsewhere)}; choose from {', '.join(sorted(known))}"
        )
    raise ConfigError(unknown("metric in [task]:", name, known))


def _label(outputs: Tensor) -> Tensor:
    return outputs.argmax(-1)


def _right(labels: Tensor, targets: Tensor) -> Tensor:
    return (labels == targets).view(len(targets), -1).sum(1, dtype=torch.float64)


def _right_side(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of an example's labels on whose side of 0 the logits are."""
    return (
        ((outputs.view(targets.shape) > 0) == (targets > 0.5))
        .view(len(targets), -1)
        .double()
        .mean(1)
    )


def _error(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: of(
        (outputs.view(targets.shape).double() - targets).view(len(targets), -1)
    ).mean(1)


OLD_METRIC = "accuracy"
"""What files are about that do not say it: those of earlier versions."""

_ACCURACY = Metric("accuracy", True, True, predict=_label, terms=_right)
_SIDE = Metric("accuracy", True, True, terms=_right_side)
OWN: Mapping[TaskKind, Mapping[str, Metric]] = {
    "classification": {"accuracy": _ACCURACY},
    "language": {
        "perplexity": Metric("perplexity", False, final=perplexity),
        "accuracy": _ACCURACY,
    },
    "binary": {"accuracy": _SIDE},
    "multilabel": {"accuracy": _SIDE},
    "regression": {
        "mae": Metric("mae", False, terms=_error(torch.abs)),
        "mse": Metric("mse", False, terms=_error(torch.square)),
        "rmse": Metric("rmse", False, terms=_error(torch.square), final=math.sqrt),
    },
}
"""Metrics that are means over targets, computed for all clients together.

They are equal to those of torchmetrics.
"""

_OF_LABELS = {
    "auroc": "AUROC",
    "average_precision": "AveragePrecision",
    "f1": "F1Score",
    "precision": "Precision",
    "recall": "Recall",
    "specificity": "Specificity",
    "cohen_kappa": "CohenKappa",
    "mcc": "MatthewsCorrCoef",
    "calibration_error": "CalibrationError",
}

_SIGNED = ("cohen_kappa", "mcc")
"""Those of them that may be negative."""

TORCHMETRICS: Mapping[TaskKind, Mapping[str, str]] = {
    "classification": {**_OF_LABELS, "balanced_accuracy": "Accuracy"},
    "language": {},
    "binary": _OF_LABELS,
    "multilabel": {
        name: of
        for name, of in _OF_LABELS.items()
        if name not in ("cohen_kappa", "calibration_error")
    },
    "regression": {
        "r2": "R2Score",
        "explained_variance": "ExplainedVariance",
        "mape": "MeanAbsolutePercentageError",
        "smape": "SymmetricMeanAbsolutePercentageError",
        "pearson": "PearsonCorrCoef",
        "spearman": "SpearmanCorrCoef",
    },
}
"""Classes of torchmetrics by the names of metrics; those of labels are means over labels."""


def _build_torchmetric(name: str, kind: TaskKind, outputs: int) -> Metric:
    """Return a metric of torchmetrics by our name for it."""
    package = importlib.import_module("torchmetrics")  # slow to import: only where it is used
    options: dict[str, Any] = {}
    if kind == "classification":
        options = {"task": "multiclass", "num_classes": outputs}
    elif kind == "multilabel":
        options = {"task": kind, "num_labels": outputs}
    elif kind != "regression":
        options = {"task": kind}
    elif outputs > 1 and name in ("pearson", "spearman"):
        options = {"num_outputs": outputs}
    has_average = name not in ("cohen_kappa", "mcc", "calibration_error")
    if kind in ("classification", "multilabel") and has_average:
        options["average"] = "macro"
    made = getattr(package, TORCHMETRICS[kind][name])(**options)
    # Classes that do not state their direction are better if higher.
    higher = made.higher_is_better is not False
    share = kind != "regression" and name not in _SIGNED
    return Metric(name, higher, share, whole=_score_clients(made, kind))


def _wrap_object(made: Any, kind: TaskKind, outputs: int) -> Metric:
    """Return a metric around an object of torchmetrics, or one that works alike.

    Raises
    ------
    ConfigError
        If it is no such object, or cannot score examples of every label.
    """
    higher = getattr(made, "higher_is_better", None)
    if higher is None and family_of(made) in HIGHER_IS_BETTER:
        higher = True
    if not hasattr(made, "update") or not hasattr(made, "compute") or not isinstance(higher, bool):
        raise ConfigError(
            "task.metrics should be names, or torchmetrics objects whose higher_is_better is true "
            f"or false, got {shown(made)}"
        )
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", getattr(made, "name", type(made).__name__)).lower()
    _check_object(made, name, kind, outputs)
    return Metric(name, higher, whole=_score_clients(made, kind))


def _score_clients(made: Any, kind: TaskKind) -> Callable[[Tensor, Tensor], float]:
    def whole(outputs: Tensor, targets: Tensor) -> float:
        return client_score(made, kind, outputs, targets)

    return whole


TRIAL = 64
"""Examples, at most, on which a metric that is an object is tried."""


def _check_object(made: Any, name: str, kind: TaskKind, outputs: int) -> None:
    """Check that an object scores examples with all labels, before it is relied on."""
    n = min(2 * max(2, outputs), TRIAL)
    labels = torch.arange(n)
    numbers = torch.rand(n, outputs, generator=torch.Generator().manual_seed(0)) + 0.5
    given = numbers
    if kind in ("classification", "language"):
        targets = labels % outputs
        if kind == "language":
            given = given[:, None]
            targets = targets[:, None]
    elif kind == "multilabel":
        targets = ((labels[:, None] + torch.arange(outputs)) % 2).float()
    elif kind == "binary":
        targets = (labels % 2).float()
    else:
        targets = numbers.flip(0)
        if outputs == 1:
            targets = targets[:, 0]
    try:
        client_score(made, kind, given, targets)
    except Exception as error:  # whatever an object of the user's raises
        raise ConfigError(
            f"task.metrics: {name} cannot score a {kind} task with {outputs} outputs: "
            f"{type(error).__name__}: {error}"
        ) from error
