"""Scores of clients that lack labels are scikit-learn's over the labels present, or there are none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics as sklearn
from torch import Tensor

from fedclade.core import ConfigError, TaskKind
from fedclade.tasks import metric
from fedclade.tasks.client_scores import _is_defined_for_labels
from fedclade.tasks.metrics import TORCHMETRICS

LABELS = 10
NAMED = {
    "auroc": torchmetrics.AUROC,
    "average_precision": torchmetrics.AveragePrecision,
    "f1": torchmetrics.F1Score,
    "precision": torchmetrics.Precision,
    "recall": torchmetrics.Recall,
    "specificity": torchmetrics.Specificity,
    "balanced_accuracy": torchmetrics.Accuracy,
    "cohen_kappa": torchmetrics.CohenKappa,
    "mcc": torchmetrics.MatthewsCorrCoef,
}


def two_of_ten(n: int = 60) -> tuple[Tensor, Tensor]:
    """Return logits for ten labels, and targets that are only 3 or 7; some predictions are neither."""
    draw = torch.Generator().manual_seed(0)
    targets = torch.tensor([3, 7]).repeat(n // 2)
    logits = torch.randn(n, LABELS, generator=draw)
    logits[torch.arange(n), targets] += 2.0
    return logits, targets


def specificity_of(label: int, targets: np.ndarray, predicted: np.ndarray) -> float:
    return float(sklearn.recall_score(targets != label, predicted != label))


def by_scikit_learn(name: str, logits: Tensor, targets: Tensor) -> float:
    """Return the mean over the labels present."""
    probability, y = logits.softmax(1).numpy(), targets.numpy()
    predicted, present = probability.argmax(1), np.unique(y)
    options = {"labels": present, "average": "macro", "zero_division": 0}
    ranks: dict[str, Callable[..., float]] = {
        "auroc": sklearn.roc_auc_score,
        "average_precision": sklearn.average_precision_score,
    }
    if name in ranks:
        return float(np.mean([ranks[name](y == label, probability[:, label]) for label in present]))
    if name == "specificity":
        return float(np.mean([specificity_of(label, y, predicted) for label in present]))
    if name == "balanced_accuracy":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # labels that are predicted, but not there
            return float(sklearn.balanced_accuracy_score(y, predicted))
    of: dict[str, Callable[[], float]] = {
        "f1": lambda: sklearn.f1_score(y, predicted, **options),
        "precision": lambda: sklearn.precision_score(y, predicted, **options),
        "recall": lambda: sklearn.recall_score(y, predicted, **options),
        "cohen_kappa": lambda: sklearn.cohen_kappa_score(y, predicted),
        "mcc": lambda: sklearn.matthews_corrcoef(y, predicted),
    }
    return float(of[name]())


def scored(name: object, kind: TaskKind, outputs: Tensor, targets: Tensor, count: int) -> float:
    whole = metric(name, kind, count).whole
    assert whole is not None
    return whole(outputs, targets)


def given(name: str, form: str) -> object:
    """Return a metric by its name, or as an object of torchmetrics that averages over labels."""
    if form == "name":
        return name
    options = {} if name in ("cohen_kappa", "mcc") else {"average": "macro"}
    return NAMED[name](task="multiclass", num_classes=LABELS, **options)


@pytest.mark.parametrize("form", ["name", "object"])
@pytest.mark.parametrize("name", NAMED)
def test_a_client_with_two_of_ten_labels_has_scikit_learns_mean_over_these_two(
    name: str, form: str
):
    logits, targets = two_of_ten()
    expected = by_scikit_learn(name, logits, targets)
    found = scored(given(name, form), "classification", logits, targets, LABELS)
    assert found == pytest.approx(expected, rel=1e-4)


def test_an_auroc_of_two_of_ten_labels_is_not_averaged_with_eight_zeros():
    logits, targets = two_of_ten()
    logits[torch.arange(len(targets)), targets] += 2.0
    assert scored("auroc", "classification", logits, targets, LABELS) > 0.98


def labels_alone(n: int = 6) -> tuple[Tensor, Tensor]:
    return 5 * torch.nn.functional.one_hot(torch.full((n,), 3), LABELS).float(), torch.full((n,), 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            (name, None)
            for name in ("auroc", "average_precision", "specificity", "cohen_kappa", "mcc")
        ),
        *((name, 1.0) for name in ("f1", "precision", "recall", "balanced_accuracy")),
    ],
)
@pytest.mark.parametrize("form", ["name", "object"])
def test_a_client_with_one_label_that_is_always_right(form: str, name: str, expected: float | None):
    found = scored(given(name, form), "classification", *labels_alone(), LABELS)
    assert math.isnan(found) if expected is None else found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("target", "name", "expected"),
    [
        *(
            (1, name, None)
            for name in ("auroc", "average_precision", "specificity", "mcc", "cohen_kappa")
        ),
        *((1, name, 1.0) for name in ("f1", "precision", "recall")),
        *(
            (0, name, None)
            for name in ("auroc", "average_precision", "f1", "precision", "recall", "mcc")
        ),
        *((0, name, None) for name in ("cohen_kappa",)),
        (0, "specificity", 1.0),
    ],
)
def test_a_binary_client_with_one_class_that_is_always_right(
    target: int, name: str, expected: float | None
):
    targets = torch.full((5,), float(target))
    outputs = torch.linspace(1, 2, 5)[:, None] * (2 * target - 1)
    for each in (name, NAMED[name](task="binary")):
        found = scored(each, "binary", outputs, targets, 1)
        assert math.isnan(found) if expected is None else found == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in TORCHMETRICS["multilabel"] if name != "mcc"])
@pytest.mark.parametrize("form", ["name", "object"])
def test_labels_without_examples_are_left_out_of_a_multilabel_mean(form: str, name: str):
    """Label 0 has both classes, label 1 no example, label 2 nothing else."""
    draw = torch.Generator().manual_seed(1)
    outputs = torch.randn(20, 3, generator=draw)
    targets = torch.stack([(outputs[:, 0] + torch.randn(20, generator=draw) > 0).float()] * 3, 1)
    targets[:, 1], targets[:, 2] = 0.0, 1.0
    present = {"specificity": [0, 1], "auroc": [0], "average_precision": [0]}.get(name, [0, 2])
    each = [scored(name, "binary", outputs[:, k : k + 1], targets[:, k], 1) for k in present]
    of = name if form == "name" else NAMED[name](task="multilabel", num_labels=3, average="macro")
    assert scored(of, "multilabel", outputs, targets, 3) == pytest.approx(
        sum(each) / len(each), rel=1e-5
    )


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("n", [4, 10])
def test_predictions_of_one_class_alone_have_an_mcc_of_0_as_in_scikit_learn(n: int, label: int):
    """torchmetrics gives 0.84 for one wrong prediction of ten."""
    targets = torch.tensor([1.0 - label, *[float(label)] * (n - 1)])
    outputs = torch.full((n, 1), 2.0 * label - 1)
    assert sklearn.matthews_corrcoef(targets.numpy(), np.full(n, label)) == 0
    assert scored("mcc", "binary", outputs, targets, 1) == 0
    logits = torch.cat([-outputs, outputs], 1)
    assert scored("mcc", "classification", logits, targets.long(), 2) == 0


REGRESSION = {
    "r2": lambda: torchmetrics.R2Score(),
    "explained_variance": lambda: torchmetrics.ExplainedVariance(),
    "spearman": lambda: torchmetrics.SpearmanCorrCoef(),
    "pearson": lambda: torchmetrics.PearsonCorrCoef(),
}


@pytest.mark.parametrize("name", REGRESSION)
def test_one_example_has_no_score(name: str):
    for each in (name, REGRESSION[name]()):
        assert math.isnan(scored(each, "regression", torch.ones(1, 1), torch.ones(1), 1))


@pytest.mark.parametrize("name", REGRESSION)
def test_constant_targets_have_no_score(name: str):
    outputs = torch.linspace(0, 1, 5)[:, None]
    assert math.isnan(scored(name, "regression", outputs, torch.full((5,), 0.1), 1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("r2", True), ("explained_variance", True), ("pearson", False), ("spearman", False)],
)
def test_constant_predictions_have_no_correlation_but_explain_nothing(name: str, expected: bool):
    found = scored(name, "regression", torch.full((5, 1), 0.1), torch.linspace(0, 1, 5), 1)
    assert math.isfinite(found) is expected
    if name == "explained_variance":
        assert found == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", REGRESSION)
def test_a_number_that_is_constant_is_left_out_of_the_mean_over_numbers(name: str):
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(8, 2, generator=draw)
    targets = outputs + 0.3 * torch.randn(8, 2, generator=draw)
    targets[:, 1] = 4.0
    alone = scored(name, "regression", outputs[:, :1], targets[:, 0], 1)
    assert scored(name, "regression", outputs, targets, 2) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(("scale", "shift"), [(1e-4, 0.0), (1.0, 2000.0)])
@pytest.mark.parametrize("name", ["r2", "explained_variance"])
def test_numbers_that_are_tiny_or_far_from_0_are_explained_as_others(
    name: str, scale: float, shift: float
):
    """Sums of squares below 1e-4 count as 0 in torchmetrics, and differences of large ones are lost."""
    draw = torch.Generator().manual_seed(0)
    targets = scale * torch.randn(20, generator=draw) + shift
    outputs = targets + 0.5 * scale * torch.randn(20, generator=draw)
    of = {"r2": sklearn.r2_score, "explained_variance": sklearn.explained_variance_score}[name]
    expected = of(targets.double().numpy(), outputs.double().numpy())
    assert scored(name, "regression", outputs[:, None], targets, 1) == pytest.approx(
        expected, rel=1e-3
    )


def test_no_example_has_no_score():
    assert math.isnan(scored("f1", "classification", torch.zeros(2, 3), torch.full((2,), -100), 3))


def test_objects_may_score_the_tokens_of_a_language_task():
    logits, targets = two_of_ten()
    made = torchmetrics.Accuracy(task="multiclass", num_classes=LABELS, average="macro")
    expected = scored(made, "classification", logits, targets, LABELS)
    ignored = torch.full((6, 1), -100)
    texts = torch.cat([targets.view(6, 10), ignored], 1)
    outputs = torch.cat([logits.view(6, 10, LABELS), torch.zeros(6, 1, LABELS)], 1)
    assert scored(made, "language", outputs, texts, LABELS) == pytest.approx(expected)


def test_nothing_is_warned_of_for_labels_that_are_absent(recwarn: pytest.WarningsRecorder):
    scored("auroc", "classification", *two_of_ten(), LABELS)
    assert [each for each in recwarn if "samples in targets" in str(each.message)] == []


@pytest.mark.parametrize(
    ("made", "kind", "count"),
    [
        (
            torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
            "classification",
            10,
        ),
        (torchmetrics.F1Score(task="binary"), "classification", 10),
        (torchmetrics.MeanSquaredError(num_outputs=3), "regression", 2),
    ],
)
def test_an_object_that_cannot_score_the_task_is_refused_at_once(
    made: torchmetrics.Metric, kind: TaskKind, count: int
):
    with pytest.raises(
        ConfigError,
        match=rf"the metric .* in task.metrics cannot score a {kind} task with {count} outputs: ",
    ):
        metric(made, kind, count)


def test_weighted_and_micro_means_of_objects_stay_theirs():
    logits, targets = two_of_ten()
    for average in ("weighted", "micro"):
        made = torchmetrics.F1Score(task="multiclass", num_classes=LABELS, average=average)
        expected = sklearn.f1_score(targets.numpy(), logits.argmax(1).numpy(), average=average)
        assert scored(made, "classification", logits, targets, LABELS) == pytest.approx(
            expected, rel=1e-5
        )


def test_a_label_that_a_metric_ignores_has_no_score_whichever_it_is():
    """Of labels 0 and 1, which both occur, the metric ignores one."""
    outputs = torch.zeros(4, 2)
    targets = torch.tensor([0, 0, 1, 1])
    for ignored in (0, 1):
        metric = torchmetrics.classification.MulticlassRecall(2, ignore_index=ignored)
        defined = _is_defined_for_labels("Recall", metric, outputs, targets)
        assert defined.tolist() == [ignored != 0, ignored != 1]
