"""The contract of a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import Pool

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
POOL = Pool(
    "six",
    torch.arange(6.0)[:, None],
    LABELS,
    LABELS.numpy(),
    np.arange(4),
    np.arange(4, 6),
    outputs=3,
)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"y": torch.zeros(5, dtype=torch.int64)},
            "should have the same length, got {'x': 6, 'y': 5, 'groups': 6}",
        ),
        ({"natural": np.array(["a"])}, "'groups': 6, 'natural': 1}"),
        (
            {"train": np.array([0, 6])},
            "the train indices of pool 'six' should lie in 0 .. 5, got values from 0 to 6",
        ),
        (
            {"test": np.array([-1, 3])},
            "the test indices of pool 'six' should lie in 0 .. 5, got values from -1 to 3",
        ),
        (
            {"outputs": 2},
            "labels of pool 'six' should be less than its number of outputs, 2, got 2",
        ),
        (
            {"y": torch.tensor([0, -100, -1, 0, -7, 2])},
            "labels of pool 'six' should be 0 or more, got -1",
        ),
        (
            {"y": torch.tensor([0, -100, 1, 0, -100, 2])},
            "all examples of pool 'six' should have a label, got 2 of 6 examples without a label "
            "(-100, which losses ignore); leave these examples out",
        ),
        (
            {"outputs": 10**9},
            "outputs of pool 'six' should be from 1 to 16,777,216, as a model has an output for each "
            "label, got 1,000,000,000; number the labels from 0 on",
        ),
    ],
)
def test_a_pool_that_does_not_fit_together_is_refused(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        replace(POOL, **changes)
    assert told in str(caught.value)


def test_an_unknown_task_is_refused():
    with pytest.raises(
        DataError, match=r"unknown task of pool 'six': 'ranking'.*known: binary, classification"
    ):
        replace(POOL, task="ranking")


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (POOL.x.double(), torch.float32),
        (POOL.x.half(), torch.float32),
        (POOL.x.clone().requires_grad_(), torch.float32),
        (POOL.x.bool(), torch.float32),
        (POOL.x.numpy().astype(np.float64), torch.float32),
        (POOL.x.numpy().astype(np.uint8), torch.uint8),
        (POOL.x.to(torch.int16), torch.int64),
        (POOL.x.tolist(), torch.float32),
    ],
)
def test_inputs_of_any_numbers_become_what_a_pool_keeps(x: Any, dtype: torch.dtype):
    pool = replace(POOL, x=x)
    assert (pool.x.dtype, pool.x.requires_grad) == (dtype, False)
    assert torch.equal(pool.x, torch.as_tensor(x).detach().to(dtype))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"y": torch.tensor([0, 1, 2, 0.5, 1, 2])},
            "targets of pool 'six' should be whole numbers from 0 on, got 0.5 in ",
        ),
        ({"y": [0, 1, 2, float("nan"), 1, 2]}, "got nan in example 3"),
        (
            {"y": POOL.y[:, None].expand(6, 2)},
            "targets of pool 'six' should be one label for each example, got shape [6, 2]",
        ),
        (
            {"y": POOL.y.to(torch.complex64)},
            "should be whole numbers from 0 on, got torch.complex64",
        ),
        (
            {"x": POOL.x.to(torch.complex64)},
            "inputs of pool 'six' should be real numbers, got torch.complex64",
        ),
        ({"x": ["a"] * 6}, "inputs of pool 'six' should be a tensor or an array, got list"),
        (
            {"train": np.array([0.5])},
            "train of pool 'six' should be an array [n] of whole numbers, got float64 [1]",
        ),
        (
            {"test": np.ones(6, dtype=bool)},
            "test of pool 'six' should be an array [n] of whole numbers, got bool",
        ),
        ({"std": 0.0}, "std of pool 'six' should be greater than 0, got 0.0"),
    ],
)
def test_arrays_that_cannot_be_a_pools_are_refused(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        replace(POOL, **changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"outputs": "x"}, "outputs of pool 'a' should be a whole number, got 'x'"),
        ({"outputs": None}, "outputs of pool 'a' should be a whole number, got None"),
        ({"name": 7}, "the name of a pool should be a string that can be encoded in UTF-8, got 7"),
        ({"mean": "x"}, "mean of pool 'a' should be a number, got 'x'"),
        ({"std": None}, "std of pool 'a' should be a number, got None"),
    ],
)
def test_a_pool_of_wrong_types_is_refused(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        replace(POOL, **{"name": "a", **changes})
    assert str(caught.value) == told


def test_images_reach_the_model_normalised_and_turned():
    x = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    one = np.arange(1)
    pool = Pool("one", x, torch.tensor([0]), one, one, one, 1, mean=0.5, std=0.2)
    upright = [[-2.5, -1.5], [-0.5, 2.5]]  # (x / 255 - ½) / 0.2
    assert pool.inputs(one).flatten().tolist() == pytest.approx([*upright[0], *upright[1]])
    assert pool.inputs(one, 1).flatten().tolist() == pytest.approx([-1.5, 2.5, -2.5, -0.5])
    assert pool.x.flatten().tolist() == [0, 51, 102, 255]


@pytest.mark.parametrize(
    ("task", "y", "kept", "outputs"),
    [
        ("binary", [True, False, True], [1.0, 0.0, 1.0], 1),
        ("binary", [[1], [0], [1]], [1.0, 0.0, 1.0], 1),
        ("multilabel", [[0, 1], [1, 1], [0, 0]], [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], 2),
        ("regression", np.array([1, 2, -3]), [1.0, 2.0, -3.0], 1),
        (
            "regression",
            np.array([[0.5, 1], [2, 3], [4, 5]]),
            [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]],
            2,
        ),
    ],
)
def test_targets_that_are_no_labels_become_float32(
    task: Any, y: Any, kept: list[Any], outputs: int
):
    pool = Pool.of_examples("three", torch.zeros(3, 1), y, np.arange(3), np.arange(0), task=task)
    assert (pool.y.dtype, pool.y.tolist(), pool.outputs) == (torch.float32, kept, outputs)
    assert pool.schema.task == task
    assert pool.groups.tolist() == ([1, 0, 1] if task == "binary" else [0, 0, 0])


@pytest.mark.parametrize(
    ("task", "y", "told"),
    [
        ("binary", [0, 1, 2], "should be 0 or 1, one for each example, got 2.0 in example 2"),
        ("binary", [[0, 1]] * 3, "should be 0 or 1, one for each example, got shape [3, 2]"),
        ("multilabel", [[0, 1], [1, 0.5], [0, 0]], "got 0.5 in example 1, column 1"),
        ("multilabel", [0, 1, 0], "should be 0 or 1, [N, L] for L labels, got shape [3]"),
        (
            "regression",
            [0.5, float("nan"), 1],
            "should be finite numbers, one or several for each example, got nan in ",
        ),
        ("regression", [[0.5, 1], [1, float("inf")], [1, 1]], "got inf in example 1, column 1"),
    ],
)
def test_targets_of_the_wrong_kind_for_the_task_are_refused(task: Any, y: Any, told: str):
    with pytest.raises(DataError) as caught:
        Pool(
            "three",
            torch.zeros(3, 1),
            y,
            np.zeros(3, int),
            np.arange(3),
            np.arange(0),
            1,
            task=task,
        )
    assert "targets of pool 'three' " in str(caught.value)
    assert told in str(caught.value)


def test_language_data_without_words_has_as_many_as_outputs():
    y = torch.tensor([[1, 5, -100]])
    pool = Pool.of_examples(
        "spoken", y.clamp(min=0), y, np.arange(1), np.arange(0), task="language"
    )
    assert (pool.outputs, pool.schema.vocabulary_size) == (6, 6)


def test_labels_that_are_not_numbered_from_0_on_are_refused_before_a_model_is_built():
    x, y = torch.zeros(4, 2), torch.tensor([0, 7, 10**9, 7])
    with pytest.raises(DataError) as caught:
        Pool.of_examples("codes", x, y, np.arange(4), np.arange(0))
    assert str(caught.value).startswith(
        "labels of pool 'codes' go up to 1,000,000,000, but only 3 different labels occur, and a "
        "model has an output for each number from 0 on; renumber the labels from 0, as "
        "numpy.unique(labels, return_inverse=True) does"
    )
    assert Pool.of_examples("codes", x, y % 1000, np.arange(4), np.arange(0)).outputs == 8
    assert (
        Pool.of_examples(
            "codes", x, y.clamp(max=99_999), np.arange(4), np.arange(0), outputs=10**5
        ).outputs
        == 10**5
    )


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (
            np.ma.masked_array(np.zeros((6, 2)), mask=np.eye(6, 2)),
            "2 of 12 values are masked, which means missing",
        ),
        (torch.zeros(6, 2, device="meta"), "the tensor is on the 'meta' device and has no values"),
        (
            torch.zeros(6, 2).to_sparse(),
            "the tensor is sparse (torch.sparse_coo); make it dense with tensor.to_dense",
        ),
        (
            torch.quantize_per_tensor(torch.zeros(6, 2), 0.1, 0, torch.qint8),
            "the tensor is quantized (torch.qint8)",
        ),
        (
            torch.nested.nested_tensor([torch.zeros(2)] * 6),
            "the tensor is nested; pad its parts to one shape",
        ),
    ],
    ids=["masked", "meta", "sparse", "quantized", "nested"],
)
def test_arrays_whose_values_cannot_be_read_are_refused_with_the_fix(x: Any, told: str):
    with pytest.raises(DataError) as caught:
        replace(POOL, x=x)
    assert str(caught.value).startswith("inputs of pool 'six' should be a plain array or tensor: ")
    assert told in str(caught.value)


def test_a_masked_array_without_masked_values_is_an_array():
    x = np.ma.masked_array(np.arange(12.0).reshape(6, 2), mask=False)
    assert torch.equal(replace(POOL, x=x).x, torch.arange(12.0).view(6, 2))


def test_masked_indices_are_refused():
    with pytest.raises(
        DataError, match=r"train of pool 'six' should be a plain array.*: 1 of 2 values are masked"
    ):
        replace(POOL, train=np.ma.masked_array([0, 1], mask=[False, True]))


def test_images_are_rotated_by_whole_quarter_turns():
    images = Pool.of_examples(
        "images", torch.eye(6).repeat(6, 1, 1, 1), POOL.y, POOL.train, POOL.test
    )
    (turned,) = images.inputs(np.array([1]), 1)
    assert torch.equal(turned[0], torch.eye(6).flip(0))
    with pytest.raises(DataError, match=r"cannot select inputs of pool 'images': rot90\(\)"):
        images.inputs(np.array([1]), "x")  # type: ignore[arg-type]


def test_inputs_that_are_no_images_are_not_rotated():
    """They were: an example became a column."""
    table = Pool.of_examples("table", torch.eye(6), POOL.y, POOL.train, POOL.test)
    assert torch.equal(table.inputs(np.array([1])), torch.eye(6)[1:2])
    with pytest.raises(DataError) as caught:
        table.inputs(np.array([0, 1]), 1)
    assert str(caught.value) == (
        "cannot rotate the inputs of pool 'table' by 1 times 90°, since an input of shape [6] is not "
        "an image; set quarter_turns = 0"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"indices": np.array(["a"])}, "cannot select inputs of pool 'six': can't convert"),
        (
            {"indices": np.array([6])},
            "indices should be an int64 array [n] of numbers below 6, and quarter_turns",
        ),
        (
            {"indices": np.array([0]), "quarter_turns": "x"},
            "cannot rotate the inputs of pool 'six' by x times 90°",
        ),
    ],
)
def test_inputs_that_a_pool_has_not_are_refused(given: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        POOL.inputs(**given)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"natural": {0: "a"}}, "natural of pool 'six' should be an array of names, got {0: 'a'}"),
        (
            {"x": torch.tensor(1.0)},
            "x of pool 'six' should have an entry for each example, got one number",
        ),
    ],
)
def test_a_pool_of_what_is_no_array_is_refused(changes: dict[str, Any], told: str):
    with pytest.raises(DataError) as caught:
        replace(POOL, **changes)
    assert str(caught.value) == told


def test_a_task_that_there_is_not_is_named():
    with pytest.raises(
        ConfigError, match=r"unknown task: 'regresion'; did you mean 'regression'\?"
    ):
        Pool.of_examples("six", POOL.x, POOL.y, POOL.train, POOL.test, task="regresion")


def test_a_scaling_that_there_is_not_is_named():
    with pytest.raises(
        ConfigError, match=r"unknown value of scaling: 'unti'; did you mean 'unit'\?"
    ):
        POOL.scaled("unti")
    with pytest.raises(
        ConfigError, match=r"how of scaled should be 'source' or 'unit' or 'pixel', got 3"
    ):
        POOL.scaled(3)


def test_groups_of_dependent_examples_are_one_number_for_each():
    options: dict[str, Any] = {"train": np.arange(4), "test": np.arange(0)}
    x, y = torch.zeros(4, 2), torch.arange(4) % 2
    made = Pool.of_examples("p", x, y, related=[3, 3, 1, 1], **options)
    assert made.related is not None
    assert made.related.dtype == np.int64
    with pytest.raises(
        DataError, match=r"arrays of pool 'p' should have the same length, .*'related': 3"
    ):
        Pool.of_examples("p", x, y, related=np.arange(3), **options)
    with pytest.raises(DataError, match="related of pool 'p'"):
        Pool.of_examples("p", x, y, related=np.array([0.5] * 4), **options)
