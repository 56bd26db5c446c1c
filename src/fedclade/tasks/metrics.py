"""Metrics of models on a client's data, and statistics of scores over clients and clusters.

A score is the value of a metric for one client. It is computed from all outputs for the client's
examples, never averaged over batches.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import ConfigError, Structure, TaskKind, checked, numbers_of, shown, unknown
from fedclade.tasks.client_scores import HIGHER_IS_BETTER, client_score, family_of

# Scores of a run: the distribution over its clients, and the agreement of its clusters with the
# true clusters.

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
        Whether the clients with the largest scores are the worst, such as for perplexity.

    Returns
    -------
    dict
        ``mean``, ``std`` (ddof 0), ``min``, ``max``, percentiles ``p5`` to ``p90`` and
        ``worst10_mean``, the mean of the worst tenth, rounded up to whole clients. All of these are
        None if no client has a score. Also the number of ``clients`` with a score, and the number
        of clients ``without_score``.
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
    """Return the mean score over the clients that have a score; None if no client has a score."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    return float(np.mean(known))


def perplexity(loss: float) -> float:
    """Return the exponential of a cross-entropy in nats, limited to finite numbers."""
    return math.exp(min(loss, 700.0))


def cluster_scores(
    found: Mapping[int, int], truth: Mapping[int, int] | None
) -> dict[str, float | None]:
    """Return the agreement of found clusters with the true clusters of clients.

    Parameters
    ----------
    found
        Found cluster of each client, by client id.
    truth
        True cluster of each client, by client id; None if unknown.

    Returns
    -------
    dict
        ``ari``, the adjusted Rand index, and ``nmi``, the normalized mutual information; both are
        None if the true clusters are unknown.
    """
    if truth is None:
        return {"ari": None, "nmi": None}
    ari, nmi = PairCounts.of(numbers_of(truth, found), numbers_of(found, found)).scores
    return {"ari": ari, "nmi": nmi}


LARGEST_TABLE = 2**20
"""Largest number of pairs of clusters that are counted in a table; more pairs are sorted."""

COUNTED_AT_A_TIME = 2**20
"""Number of clients that are counted at once, which bounds the memory."""


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Numbers of clients with each pair of a true and a found cluster that occurs.

    Pairs are in the order of the true cluster, then of the found cluster.

    Parameters
    ----------
    true_labels, found_labels
        True and found cluster of each of m pairs, ``[m]``.
    counts
        Number of clients with each pair, at least 1, ``[m]``.
    """

    true_labels: NDArray[np.int64]
    found_labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, true_labels: NDArray[np.int64], found_labels: NDArray[np.int64]) -> PairCounts:
        """Count the pairs of clusters, given the true and the found cluster of n clients."""
        width = int(found_labels.max(initial=0)) + 1
        size = (int(true_labels.max(initial=0)) + 1) * width
        lowest = min(true_labels.min(initial=0), found_labels.min(initial=0))
        if lowest < 0 or size > LARGEST_TABLE:
            true, true_places = np.unique(true_labels, return_inverse=True)
            found, found_places = np.unique(found_labels, return_inverse=True)
            pairs, counts = np.unique(true_places * len(found) + found_places, return_counts=True)
            return cls(true[pairs // max(1, len(found))], found[pairs % max(1, len(found))], counts)
        table = np.zeros(size, dtype=np.int64)
        for start in range(0, len(true_labels), COUNTED_AT_A_TIME):
            part = slice(start, start + COUNTED_AT_A_TIME)
            pairs = true_labels[part] * width + found_labels[part]
            table += np.bincount(pairs, minlength=size)
        pairs = np.flatnonzero(table)
        return cls(pairs // width, pairs % width, table[pairs])

    def select(self, found: Collection[int]) -> PairCounts:
        """Return the counts of the clients in some found clusters, without all other clients."""
        there = np.isin(self.found_labels, list(found))
        return PairCounts(self.true_labels[there], self.found_labels[there], self.counts[there])

    @property
    def scores(self) -> tuple[float, float]:
        """The adjusted Rand index and the normalized mutual information of the clusterings.

        The formulas are those of ``adjusted_rand_score`` and ``normalized_mutual_info_score`` of
        scikit-learn. Its import takes longer than a short run, and it sorts the labels of all
        clients.
        """
        true = np.unique(self.true_labels, return_inverse=True)[1]
        found = np.unique(self.found_labels, return_inverse=True)[1]
        of_true = _sum_by(true, self.counts)
        of_found = _sum_by(found, self.counts)
        ari = _adjusted_rand(self.counts, of_true, of_found)
        if len(of_true) == len(of_found) <= 1:
            return ari, 1.0
        if len(of_true) == 1 or len(of_found) == 1:
            return ari, 0.0
        clients = int(self.counts.sum())
        shares = self.counts / clients
        log_clients = math.log(clients)
        of_product = -np.log(of_true[true] * of_found[found]) + log_clients + log_clients
        terms = shares * (np.log(self.counts) - log_clients) + shares * of_product
        terms = np.where(np.abs(terms) < np.finfo(np.float64).eps, 0.0, terms)
        information = float(np.clip(terms.sum(), 0.0, None))
        if information == 0:
            return ari, 0.0
        return ari, information / float(np.mean([_entropy(of_true), _entropy(of_found)]))


def _sum_by(groups: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the counts of each group, given the number of the group of each count."""
    sums = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    np.add.at(sums, groups, counts)
    return sums


def _adjusted_rand(
    counts: NDArray[np.int64], of_true: NDArray[np.int64], of_found: NDArray[np.int64]
) -> float:
    """Return the adjusted Rand index, given numbers of clients in pairs of clusters, and sums."""
    clients = int(counts.sum())
    squares = int((counts**2).sum())
    # Pairs of clients: together in both clusterings, in only one of them, or in neither.
    both = squares - clients
    only_true = int((of_true**2).sum()) - squares
    only_found = int((of_found**2).sum()) - squares
    neither = clients**2 - only_true - only_found - squares
    if only_true == 0 and only_found == 0:
        return 1.0
    above = 2.0 * (both * neither - only_true * only_found)
    return above / (
        (both + only_true) * (only_true + neither) + (both + only_found) * (only_found + neither)
    )


def _entropy(sizes: NDArray[np.int64]) -> float:
    """Return the entropy in nats of the cluster of a random client, given the clusters' sizes."""
    clients = int(sizes.sum())
    return float(-np.sum((sizes / clients) * (np.log(sizes) - math.log(clients))))


RIGHT = "assignment_accuracy"
"""Name in files of the share of newcomers that were assigned to a leaf of their true cluster."""


def gap_closed(accuracy: float, fedavg: float, oracle: float) -> float | None:
    """Return the part of the gap between FedAvg and the oracle that a method closes.

    It is (method − FedAvg) / (oracle − FedAvg): 0 means no better than one model for all clients
    (FedAvg), and 1 as good as training with the true clusters (oracle). The result is None if the
    oracle is not better than FedAvg, since there is no gap to close.

    Parameters
    ----------
    accuracy, fedavg, oracle
        Scores of the method, of FedAvg and of the oracle.
    """
    if oracle > fedavg:
        return (accuracy - fedavg) / (oracle - fedavg)
    return None


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


# Types of a metric's functions. As protocols, they can be looked up without an import of torch.


class Predict(Protocol):
    """Function of the outputs ``[B, ...]`` of a batch that returns predictions."""

    def __call__(self, outputs: torch.Tensor, /) -> torch.Tensor:
        """Return the predictions."""
        ...


class Terms(Protocol):
    """Function of predictions and targets ``[B, ...]`` that returns a term for each example."""

    def __call__(self, predictions: torch.Tensor, targets: Any, /) -> torch.Tensor:
        """Return the terms, float64 ``[B]``."""
        ...


class WholeScore(Protocol):
    """Function of all outputs and targets ``[n, ...]`` of a client that returns the score."""

    def __call__(self, outputs: torch.Tensor, targets: Any, /) -> float:
        """Return the score."""
        ...


@checked()
@dataclass(frozen=True)
class Metric:
    """Metric that scores a model on a client's examples.

    A score is either a mean of ``terms`` over all targets that are not ignored, or is computed from
    all outputs together (``whole``).

    Parameters
    ----------
    name
        Name of the metric in configs and of its columns in files.
    higher_is_better
        Whether a higher score is better.
    share
        Whether the score is in [0, 1] and displayed in per cent.
    predict
        Function of outputs ``[B, ...]`` that returns the predictions for ``terms``; None: the
        outputs themselves.
    terms
        Function of predictions and targets ``[B, ...]`` that returns the term of each example,
        float64 ``[B]``; None: the term is the loss of the example.
    final
        Function that converts the mean to the score, such as a square root; None: the score is the
        mean.
    whole
        Function of all outputs and targets ``[n, ...]`` of a client that returns the score. It
        returns NaN if the score is undefined for these targets: the client then has no score, and
        is left out of means.
    """

    name: str
    higher_is_better: bool
    share: bool = False
    predict: Predict | None = None
    terms: Terms | None = None
    final: Callable[[float], float] | None = None
    whole: WholeScore | None = None

    @property
    def noted(self) -> dict[str, Any]:
        """Fields of the metric that are written to files, by name."""
        return {"name": self.name, "higher_is_better": self.higher_is_better, "share": self.share}

    @property
    def worst(self) -> float:
        """Worst possible score, which a model with NaN or infinite outputs receives."""
        if self.share:
            return 0.0 if self.higher_is_better else 1.0
        bound = math.inf
        if self.higher_is_better:
            bound = -math.inf
        if self.final is None:
            return bound
        return self.final(bound)

    def with_targets(self, structure: Structure) -> Metric:
        """Return a metric whose functions get targets as a dict or tuple of tensors.

        ``structure`` states how rows of numbers, as which targets are stored, are divided.
        """
        return replace(
            self,
            terms=None if self.terms is None else partial(_with_tensors, self.terms, structure),
            whole=None if self.whole is None else partial(_with_tensors, self.whole, structure),
        )

    def reached(self, score: float, target: float) -> bool:
        """Return whether a score is at least as good as a target score."""
        if self.higher_is_better:
            return score >= target
        return score <= target


def _with_tensors(
    function: Callable[[torch.Tensor, Any], Any],
    structure: Structure,
    outputs: torch.Tensor,
    targets: torch.Tensor,
) -> Any:
    """Call a user's function with targets as a dict or tuple of tensors."""
    return function(outputs, structure.unpack(targets))


def read_metrics(summary: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics of a run from the run's summary, the main metric first.

    Summaries that were written by earlier versions contain no metrics; the result is then the
    default metrics of the run's task.
    """
    if "metrics" in summary:
        return tuple(Metric(**each) for each in summary["metrics"])
    if "perplexity" in summary:
        return tuple(OWN["language"].values())
    return tuple(OWN["classification"].values())


def is_share(name: str) -> bool:
    """Return whether the scores of a named metric are in [0, 1] for every kind of task."""
    own = any(name in metrics and metrics[name].share for metrics in OWN.values())
    of_labels = {**TORCHMETRICS["classification"], **TORCHMETRICS["segmentation"]}
    return own or (name in of_labels and name not in _SIGNED)


def metric(name: object, kind: TaskKind, outputs: int, *, is_tried: bool = True) -> Metric:
    """Return a metric by its name, or wrap an object of torchmetrics.

    Parameters
    ----------
    name
        Name of the metric, an object of torchmetrics, or a :class:`Metric`, which is returned
        unchanged.
    kind
        Kind of task.
    outputs
        Number of outputs of the model.
    is_tried
        Whether an object is tried on random outputs in the shape of the targets.

    Raises
    ------
    ConfigError
        If the metric is unknown, or does not fit the kind of task.
    """
    if isinstance(name, Metric):
        return name
    if not isinstance(name, str):
        return _wrap_object(name, kind, outputs, is_tried=is_tried)
    if name == MEAN_LOSS:
        return _LOSS
    check_metric(name, kind)
    if name in OWN[kind]:
        return OWN[kind][name]
    return _build_torchmetric(name, kind, outputs)


def check_metric(name: str, kind: TaskKind | None) -> None:
    """Raise a ConfigError if a metric is unknown or, given a kind of task, does not fit it."""
    if name == MEAN_LOSS:
        return
    elsewhere = [each for each in OWN if name in OWN[each] or name in TORCHMETRICS[each]]
    if kind in elsewhere or (kind is None and elsewhere):
        return
    known = dict.fromkeys(
        name for each in OWN if kind in (each, None) for name in (*OWN[each], *TORCHMETRICS[each])
    )
    known[MEAN_LOSS] = None
    if elsewhere:
        raise ConfigError(
            f"in task.metrics, {name!r} does not fit a {kind} task, only tasks of kind "
            f"{' and '.join(elsewhere)}; choose from {', '.join(sorted(known))}"
        )
    raise ConfigError(unknown("metric in [task]:", name, known))


def _predict_labels(outputs: torch.Tensor) -> torch.Tensor:
    """Return the label with the largest logit."""
    return outputs.argmax(-1)


def _count_right(labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the number of correct labels of each example."""
    return (labels == targets).view(len(targets), -1).sum(1, dtype=torch.float64)


def _right_side(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of each example's labels that its logits predict correctly.

    A positive logit predicts the label 1, any other logit the label 0.
    """
    return (
        ((outputs.view(targets.shape) > 0) == (targets > 0.5))
        .view(len(targets), -1)
        .double()
        .mean(1)
    )


def _average_error(
    of: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that computes the mean of ``of(output - target)`` for each example.

    The mean is over the outputs of the example.
    """
    return lambda outputs, targets: of(
        (outputs.view(targets.shape).double() - targets).view(len(targets), -1)
    ).mean(1)


OLD_METRIC = "accuracy"
"""Metric of files that do not name one, since an earlier version wrote them."""

MEAN_LOSS = "mean_loss"
"""Name of the metric that is the mean loss of a client's examples, for every kind of task."""

_LOSS = Metric(MEAN_LOSS, False)
_ACCURACY = Metric("accuracy", True, True, predict=_predict_labels, terms=_count_right)
_SIDE = Metric("accuracy", True, True, terms=_right_side)
OWN: Mapping[TaskKind, Mapping[str, Metric]] = {
    "classification": {"accuracy": _ACCURACY},
    "language": {
        "perplexity": Metric("perplexity", False, final=perplexity),
        "accuracy": _ACCURACY,
    },
    "segmentation": {"accuracy": _ACCURACY},
    "binary": {"accuracy": _SIDE},
    "multilabel": {"accuracy": _SIDE},
    "regression": {
        "mae": Metric("mae", False, terms=_average_error(lambda error: error.abs())),
        "mse": Metric("mse", False, terms=_average_error(lambda error: error.square())),
        "rmse": Metric(
            "rmse", False, terms=_average_error(lambda error: error.square()), final=math.sqrt
        ),
    },
}
"""Metrics that are means over targets, computed for all clients together.

The scores are equal to those of torchmetrics.
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
"""Metrics of labels that may be negative."""

TORCHMETRICS: Mapping[TaskKind, Mapping[str, str]] = {
    "classification": {**_OF_LABELS, "balanced_accuracy": "Accuracy"},
    "language": {},
    "segmentation": {"iou": "JaccardIndex", "dice": "F1Score", "balanced_accuracy": "Accuracy"},
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
"""Classes of torchmetrics by the names of metrics, for each kind of task.

Metrics of labels are means over the labels.
"""


def _build_torchmetric(name: str, kind: TaskKind, outputs: int) -> Metric:
    """Return a metric that is computed by torchmetrics, by its name in fedclade."""
    package = importlib.import_module("torchmetrics")  # slow to import: only where it is used
    options: dict[str, Any] = {}
    if kind in ("classification", "segmentation"):
        options = {"task": "multiclass", "num_classes": outputs}
    elif kind == "multilabel":
        options = {"task": kind, "num_labels": outputs}
    elif kind != "regression":
        options = {"task": kind}
    elif outputs > 1 and name in ("pearson", "spearman"):
        options = {"num_outputs": outputs}
    has_average = name not in ("cohen_kappa", "mcc", "calibration_error")
    if kind in ("classification", "segmentation", "multilabel") and has_average:
        options["average"] = "macro"
    made = getattr(package, TORCHMETRICS[kind][name])(**options)
    # Classes that do not state their direction are better if higher.
    higher = made.higher_is_better is not False
    share = kind != "regression" and name not in _SIGNED
    return Metric(name, higher, share, whole=_score_clients(made, kind))


def _wrap_object(made: Any, kind: TaskKind, outputs: int, *, is_tried: bool) -> Metric:
    """Wrap an object of torchmetrics, or an object with the same methods, as a metric.

    Raises
    ------
    ConfigError
        If the object lacks the methods ``update`` and ``compute``, if its ``higher_is_better`` is
        neither true nor false, or if the object cannot score random examples of this kind of task.
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
    if is_tried:
        _check_object(made, name, kind, outputs)
    return Metric(name, higher, whole=_score_clients(made, kind))


def _score_clients(made: Any, kind: TaskKind) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Return a function that scores one client's outputs and targets by a torchmetrics object."""

    def whole(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return client_score(made, kind, outputs, targets)

    return whole


TRIAL = 64
"""Largest number of examples on which a metric object is tested."""


def _check_object(made: Any, name: str, kind: TaskKind, outputs: int) -> None:
    """Test on random examples whether a metric object can score this kind of task.

    Parameters
    ----------
    made, name
        The metric object, and the name of the metric in error messages.
    kind
        Kind of task.
    outputs
        Number of outputs of the model.

    Raises
    ------
    ConfigError
        If the object raises an exception.
    """
    n = min(2 * max(2, outputs), TRIAL)
    labels = torch.arange(n)
    numbers = torch.rand(n, outputs, generator=torch.Generator().manual_seed(0)) + 0.5
    given = numbers
    if kind in ("classification", "language", "segmentation"):
        targets = labels % outputs
        if kind != "classification":
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
            f"the metric {name} in task.metrics cannot score a {kind} task with {outputs} outputs: "
            f"{type(error).__name__}: {error}; choose a metric for such a task"
        ) from error
