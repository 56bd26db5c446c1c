"""A task is a value: what it is for which data, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import ConfigError, FedcladeError, Task
from fedclade.core import DataSpec
from fedclade.tasks import LOSSES, TASKS, FittedTask, build_task

SPEC = DataSpec("tiny", (6,), 3)
OF = {
    "classification": SPEC,
    "binary": replace(SPEC, outputs=1, task="binary"),
    "multilabel": replace(SPEC, task="multilabel"),
    "regression": replace(SPEC, outputs=1, task="regression"),
    "language": replace(SPEC, task="language", vocabulary_size=3),
}


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.view(targets.shape) - targets) ** 2


@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("classification", "classification: cross_entropy; accuracy"),
        ("binary", "binary: bce; accuracy"),
        ("multilabel", "multilabel: bce; accuracy"),
        ("regression", "regression: mse; mae"),
        ("language", "language: cross_entropy; perplexity, accuracy"),
    ],
)
def test_data_has_a_task_of_its_own(kind: str, described: str):
    assert Task().of(OF[kind]).described == TASKS[kind].of(OF[kind]).described == described


def test_only_cross_entropy_without_weights_is_known_by_heart():
    assert Task().of(SPEC).is_plain
    assert FittedTask().is_plain
    assert not Task(class_weights=[1, 2, 3]).of(SPEC).is_plain
    assert not Task().of(OF["regression"]).is_plain


@pytest.mark.parametrize("loss", ["tests.tasks.test_task:squared", squared])
def test_a_loss_of_ones_own(loss: object):
    task = Task("regression", loss=loss).of(OF["regression"])  # pyright: ignore[reportArgumentType]
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert task.losses(outputs, targets).tolist() == [1, 4]
    assert float(task.mean_loss(outputs, targets)) == 2.5
    assert task.described == "regression: tests.tasks.test_task:squared; mae"


def test_a_loss_may_be_an_object():
    task = Task("regression", loss=nn.MSELoss(reduction="none"))
    assert task.described["loss"] == "torch.nn.modules.loss:MSELoss"
    fitted = task.of(OF["regression"])
    assert fitted.losses(torch.tensor([1.0, 3.0]), torch.zeros(2)).tolist() == [1, 9]


def test_a_loss_should_be_of_each_example():
    task = Task("regression", loss=nn.MSELoss()).of(OF["regression"])
    with pytest.raises(
        ConfigError, match=r"should return one number for each of 2 examples, got shape \(\)"
    ):
        task.losses(torch.zeros(2), torch.zeros(2))


def test_class_weights_multiply_an_examples_loss():
    """By hand: the batch's mean divides by examples, not by weights."""
    task = Task(class_weights=[1, 2, 0]).of(SPEC)
    logits, labels = torch.zeros(3, 3), torch.tensor([0, 1, 2])
    log3 = torch.tensor(3.0).log()
    torch.testing.assert_close(task.losses(logits, labels), log3 * torch.tensor([1.0, 2.0, 0.0]))
    torch.testing.assert_close(task.mean_loss(logits, labels), log3)


def test_balanced_weights_are_by_the_counts_of_all_clients():
    """8 examples of 2 labels, 6 and 2: 8 / (2 · 6) and 8 / (2 · 2); they weigh 1 in the mean.

    A label that is not counted weighs as the rarest: newcomers may have some, or clients that did not tell.
    """
    task = Task(class_weights="balanced").of(SPEC, torch.tensor([6, 0, 2]))
    assert task.weights is not None
    torch.testing.assert_close(task.weights, torch.tensor([8 / 12, 2.0, 2.0]))
    assert float(task.weights @ torch.tensor([6.0, 0.0, 2.0])) == pytest.approx(8)
    assert task.described == Task(class_weights="balanced").of(SPEC).described


def test_a_task_of_balanced_weights_has_no_losses_before_labels_are_counted():
    with pytest.raises(
        ConfigError, match="'balanced' needs the number of examples of each label, which is unknown"
    ):
        Task(class_weights="balanced").of(SPEC).mean_loss(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("task", "kind", "told"),
    [
        (Task(loss="mee"), "regression", "unknown loss in [task]: 'mee'; did you mean"),
        (
            Task(loss="huber"),
            "binary",
            "task.loss = 'huber' does not fit a binary task; choose from bce",
        ),
        (
            Task(loss="math:pi"),
            "regression",
            "task.loss = 'math:pi' should name a function of outputs and targets",
        ),
        (
            Task("binary"),
            "regression",
            "task = 'binary' does not fit the data (tiny), whose targets are of kind 'reg",
        ),
        (
            Task(metrics=["mae", "mae"]),
            "regression",
            "task.metrics should be metrics with different names",
        ),
        (
            Task(class_weights=[1, 2]),
            "classification",
            "task.class_weights should be 3 numbers of at least 0, one for",
        ),
        (
            Task(class_weights=[1, -2]),
            "binary",
            "task.class_weights should be 2 numbers of at least 0",
        ),
        (
            Task(class_weights=[1]),
            "regression",
            "task.class_weights are only for classification and binary tasks, not for",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(task: Task, kind: str, told: str):
    with pytest.raises(ConfigError) as caught:
        task.of(OF[kind])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"metrics": 1},
            "task.metrics should be a list of names or torchmetrics objects, got 1; give a single metric",
        ),
        (
            {"metrics": "f1"},
            "task.metrics should be a list of names or torchmetrics objects, got 'f1'; give a single metric",
        ),
        (
            {"metrics": None},
            "task.metrics should be a list of names or torchmetrics objects, got None",
        ),
        ({"kind": 3}, "unknown kind of task: '3'"),
        ({"kind": "regresion"}, "unknown kind of task: 'regresion'; did you mean 'regression'?"),
        ({"loss": 3}, "task.loss should be a name or a function of outputs and targets, got 3"),
        (
            {"class_weights": 3},
            "task.class_weights should be 'balanced' or a list of numbers, got 3",
        ),
        (
            {"class_weights": ["a"]},
            "task.class_weights should be 'balanced' or a list of numbers, got ['a']",
        ),
        ({"loss_over": "bach"}, "unknown value of task.loss_over: 'bach'; did you mean 'batch'?"),
    ],
)
def test_an_argument_of_another_type_is_one_line(arguments: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        Task(**arguments)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", [(1, 2, 3), torch.tensor([1.0, 2.0, 3.0])])
def test_class_weights_may_be_a_tuple_or_a_tensor(weights: Any):
    fitted = Task(class_weights=weights).of(SPEC)
    assert fitted.weights is not None
    assert fitted.weights.tolist() == [1, 2, 3]


def test_a_loss_over_the_batch_is_part_of_what_describes_a_task():
    task = build_task("regression", "tests.tasks.test_task:squared", loss_over="batch")
    assert task.loss_over == "batch"
    assert task.described["loss_over"] == "batch"
    assert (
        task.of(OF["regression"]).described
        == "regression: tests.tasks.test_task:squared over the batch; mae"
    )
    assert "loss_over" not in Task().described


def test_a_loss_over_the_batch_is_its_mean_and_has_no_loss_of_each_example():
    task = Task("regression", loss=squared, loss_over="batch").of(OF["regression"])
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert float(task.mean_loss(outputs, targets)) == 2.5
    assert float(task.total_loss(outputs, targets)) == 5
    with pytest.raises(
        ConfigError,
        match=r"this method needs the loss of each example, .* the loss .*squared returns one number",
    ):
        task.losses(outputs, targets)
    with pytest.raises(
        ConfigError,
        match="choose another method, or a loss that returns one number for each example",
    ):
        task.mean_loss(outputs, targets, torch.ones(2))


def test_a_task_is_built_from_a_section():
    task = build_task("regression", "huber", ["rmse", "r2"])
    assert task.described == {
        **{"name": "regression", "loss": "huber", "metrics": ["rmse", "r2"]},
        "class_weights": None,
    }
    assert build_task(task) == task
    assert build_task() == Task()
    assert build_task("tests.tasks.test_task:made").loss is squared


def made() -> Task:
    return Task("regression", loss=squared)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "regresion"}, "did you mean 'regression'?"),
        ({"loss": "meh"}, "unknown loss in [task]: 'meh'"),
        (
            {"name": "binary", "loss": "mae"},
            "task.loss = 'mae' does not fit a binary task; choose from bce",
        ),
        (
            {"name": "binary", "metrics": ["mae"]},
            "in task.metrics, 'mae' does not fit a binary task, only tasks of kind regression",
        ),
        ({"metrics": ["aurok"]}, "unknown metric in [task]: 'aurok'; did you mean 'auroc'?"),
        (
            {"class_weights": [1, -1]},
            "task.class_weights should be numbers of at least 0, one for each label, got [1, ",
        ),
        (
            {"class_weights": "even"},
            "task.class_weights should be 'balanced' or a list of numbers, got 'even'",
        ),
        (
            {"name": "math:pi"},
            "task 'math:pi' should be a fedclade.Task, or a function that returns one, got 3.14",
        ),
    ],
)
def test_a_section_that_is_wrong(section: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        build_task(**section)
    assert told in str(caught.value)


def test_every_loss_fits_some_task():
    for name in LOSSES:
        assert any(_fits(name, kind) for kind in OF), name


def _fits(name: str, kind: str) -> bool:
    try:
        Task(loss=name).of(OF[kind])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": 3}, "name of build_task should be"),
        ({"class_weights": 0}, "class_weights of build_task should be"),
        ({"name": "os:system"}, "task 'os:system' failed: TypeError"),
    ],
)
def test_a_task_of_wrong_arguments_is_refused(given, told):
    with pytest.raises(FedcladeError) as caught:
        build_task(**given)
    assert told in str(caught.value)
