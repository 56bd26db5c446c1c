"""Replies of clients, read one by one."""

from typing import Any

import pytest

from fedclade.core import UpdateError
from fedclade.flower import wire
from fedclade.flower.replies import read_scores
from fedclade.flower.wire import Content
from fedclade.tasks import LOSSES, FittedTask

METRICS = FittedTask().metrics


def content_of(**values: Any) -> Content:
    return Content.of(wire.record(values))


def test_scores_are_read_model_by_model():
    reply = content_of(scores=[0.25, 0.75], losses=[1.5, 0.5], examples=[8, 8])
    for known in (8, None):
        assert read_scores(reply, 2, METRICS, known) == [([0.25], 1.5, 8), ([0.75], 0.5, 8)]


@pytest.mark.parametrize(
    ("examples", "known", "message"),
    [
        ([9, 9], 8, r"scores of the models on \[9\] examples, expected 8"),
        ([8, 9], 8, r"scores of the models on \[8, 9\] examples, expected 8"),
        ([8, 9], None, r"scores of the models on \[8, 9\] examples, expected the same number"),
        ([8, 0], 8, "loss 0.5 on 0 examples, expected a loss of at most .* on at least 1 example"),
    ],
)
def test_scores_are_of_the_known_examples_and_of_the_same_for_all_models(
    examples: list[int], known: int | None, message: str
):
    reply = content_of(scores=[0.25, 0.75], losses=[1.5, 0.5], examples=examples)
    with pytest.raises(UpdateError, match=message):
        read_scores(reply, 2, METRICS, known)


@pytest.mark.parametrize(
    ("score", "loss"), [(1.5, 0.5), (-0.1, 0.5), (0.5, float("inf")), (float("nan"), 0.5)]
)
def test_scores_and_losses_are_in_their_ranges(score: float, loss: float):
    with pytest.raises(UpdateError, match=r"expected a number in|expected a loss of at most"):
        read_scores(content_of(scores=[score], losses=[loss], examples=[8]), 1, METRICS, 8)


@pytest.mark.parametrize("column", ["scores", "losses", "examples"])
def test_each_list_has_an_entry_for_every_model(column: str):
    values = {"scores": [0.5, 0.5], "losses": [0.5, 0.5], "examples": [8, 8]}
    with pytest.raises(
        UpdateError,
        match="should have three lists for 2 models, scores of 2 numbers, losses of 2 numbers",
    ):
        read_scores(content_of(**values | {column: values[column][:1]}), 2, METRICS, 8)


def test_a_loss_below_the_smallest_of_the_task_is_refused():
    reply = content_of(scores=[0.5], losses=[-3.0], examples=[8])
    assert read_scores(reply, 1, METRICS, 8)[0][1] == -3.0
    with pytest.raises(
        UpdateError, match=r"loss -3 on 8 examples, expected a loss .* at least 0, on at least 1"
    ):
        read_scores(reply, 1, METRICS, 8, smallest_loss=0.0)


def test_a_grid_refuses_a_negative_cross_entropy():
    assert FittedTask().has_nonnegative_loss
    assert not FittedTask(kind="regression", loss=LOSSES["poisson_nll"]).has_nonnegative_loss
    assert not FittedTask(loss=lambda outputs, targets: -outputs[:, 0]).has_nonnegative_loss
