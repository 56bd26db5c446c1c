"""Metrics are those of torchmetrics."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from fedclade.core import ConfigError, TaskKind
from fedclade.tasks import Metric, metric
from fedclade.tasks.metrics import OWN, TORCHMETRICS

N, OUTPUTS = 40, {"classification": 3, "binary": 1, "multilabel": 4, "regression": 1}


@functools.cache
def examples(kind: TaskKind, outputs: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(outputs)
    given = torch.randn(N, outputs, generator=draw)
    if kind == "classification":
        return given, torch.randint(outputs, (N,), generator=draw)
    noisy = given + 0.7 * torch.randn(N, outputs, generator=draw)
    if kind == "regression":
        return given, noisy if outputs > 1 else noisy[:, 0]
    return given, (noisy > 0).float() if kind == "multilabel" else (noisy[:, 0] > 0).float()


def number(of: Metric, given: Tensor, targets: Tensor) -> float:
    """Return what a client with these examples gets."""
    if of.whole is not None:
        return of.whole(given, targets)
    assert of.terms is not None
    mean = float(of.terms(given if of.predict is None else of.predict(given), targets).mean())
    return mean if of.final is None else of.final(mean)


def by_hand(name: str, kind: TaskKind, outputs: int, given: Tensor, targets: Tensor) -> float:
    """Return the number by torchmetrics' functions of a kind."""
    f, many = torchmetrics.functional, {"average": "macro"}
    if kind == "regression":
        of: dict[str, Any] = {
            **{"mae": f.mean_absolute_error, "mse": f.mean_squared_error, "r2": f.r2_score},
            "rmse": functools.partial(f.mean_squared_error, squared=False),
            **{
                "explained_variance": f.explained_variance,
                "mape": f.mean_absolute_percentage_error,
            },
            **{"smape": f.symmetric_mean_absolute_percentage_error},
            **{"pearson": f.pearson_corrcoef, "spearman": f.spearman_corrcoef},
        }
        return float(of[name](given.view(targets.shape), targets).mean())
    if kind == "classification":
        given, options = given.softmax(1), {"num_classes": outputs, **many}
    else:
        given, targets = given.view(targets.shape).sigmoid(), targets.long()
        options = {"num_labels": outputs, **many} if kind == "multilabel" else {}
    if name in ("cohen_kappa", "mcc", "calibration_error"):
        options.pop("average", None)
    if name == "accuracy" and kind == "classification":
        options["average"] = "micro"
    prefix = "multiclass" if kind == "classification" else kind
    ours = {"f1": "f1_score", "mcc": "matthews_corrcoef", "balanced_accuracy": "accuracy"}
    module = torchmetrics.functional.classification
    return float(getattr(module, f"{prefix}_{ours.get(name, name)}")(given, targets, **options))


ALL = [(kind, name) for kind in OUTPUTS for name in (*OWN[kind], *TORCHMETRICS[kind])]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_metric_is_that_of_torchmetrics(kind: TaskKind, name: str):
    outputs = OUTPUTS[kind]
    given, targets = examples(kind, outputs)
    expected = by_hand(name, kind, outputs, given, targets)
    assert math.isfinite(expected)
    assert number(metric(name, kind, outputs), given, targets) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [*OWN["regression"], *TORCHMETRICS["regression"]])
def test_of_several_numbers_it_is_the_mean_over_them(name: str):
    """Squares have their root taken at the end, as one root."""
    given, targets = examples("regression", 3)
    each = [by_hand(name, "regression", 1, given[:, k], targets[:, k]) for k in range(3)]
    mean = math.sqrt(sum(x * x for x in each) / 3) if name == "rmse" else sum(each) / 3
    if name in ("mape", "smape"):  # a mean over all numbers
        mean = by_hand(name, "regression", 3, given, targets)
    assert number(metric(name, "regression", 3), given, targets) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_directions_are_torchmetrics(kind: TaskKind):
    for name in (*OWN[kind], *TORCHMETRICS[kind]):
        lower = name in ("mae", "mse", "rmse", "mape", "smape", "calibration_error")
        assert metric(name, kind, 3).higher_is_better is not lower, name


def test_shares_lie_between_0_and_1():
    assert metric("auroc", "binary", 1).share
    assert not metric("mcc", "binary", 1).share  # from -1
    assert not metric("r2", "regression", 1).share
    assert metric("accuracy", "multilabel", 3).share


def test_an_object_of_torchmetrics_may_be_given():
    given, targets = examples("regression", 1)
    found = metric(torchmetrics.MeanSquaredError(squared=False), "regression", 1)
    assert (found.name, found.higher_is_better) == ("mean_squared_error", False)
    rmse = number(metric("rmse", "regression", 1), given, targets)
    for _ in range(2):  # clients do not add up in it
        assert number(found, given, targets) == pytest.approx(rmse, rel=1e-5)


def test_labels_that_are_left_out_do_not_count():
    given, targets = examples("classification", 3)
    some = targets.clone()
    some[10:] = -100
    found = metric("f1", "classification", 3)
    assert number(found, given, some) == pytest.approx(number(found, given[:10], targets[:10]))


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        (
            "acuracy",
            "classification",
            "unknown metric in [task]: 'acuracy'; did you mean 'accuracy'?",
        ),
        (
            "auroc",
            "regression",
            "'auroc' does not fit a regression task, only tasks of kind classification and binary and",
        ),
        (
            "mae",
            "binary",
            "in task.metrics, 'mae' does not fit a binary task, only tasks of kind regression; choose from accu",
        ),
        ("f1", "language", "'f1' does not fit a language task"),
        (
            3,
            "binary",
            "task.metrics should be names, or torchmetrics objects whose higher_is_better is true or fal",
        ),
    ],
)
def test_a_metric_that_is_not_one_is_refused(name: object, kind: TaskKind, told: str):
    with pytest.raises(ConfigError) as caught:
        metric(name, kind, 3)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
