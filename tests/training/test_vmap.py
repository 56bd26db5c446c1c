"""torch.func.vmap over clients gives what the loop gives, or says what is in the way."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fedclade.models import build_model
from fedclade.training.loop import LoopEngine
from fedclade.training.vmap import CannotMapError, VmapEngine
from tests.training.worlds import (
    LABELS,
    SIZES,
    SPECS,
    TOKENS,
    Counts,
    Scaled,
    Tied,
    features,
    perceptron,
    task_of,
)


def assert_same(task_twice, tolerance):
    """Both engines from fresh draws: relative error of the updates, and the losses."""
    expected, losses = LoopEngine().train(task_twice())
    got, mean_losses = VmapEngine().train(task_twice())
    error = torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected)
    assert float(error) < tolerance
    torch.testing.assert_close(mean_losses, losses, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_loop_with_ragged_sizes_two_models_and_every_option(spec, dtype, tolerance):
    assert_same(
        lambda: task_of(perceptron().to(dtype), features(dtype=dtype), LABELS, SPECS[spec]),
        1e-6 if dtype == torch.float32 else tolerance,
    )


def test_equals_the_loop_where_another_model_is_the_anchor():
    def task():
        module = perceptron().double()
        return task_of(
            module,
            features(dtype=torch.float64),
            LABELS,
            SPECS["proximal"],
            anchors=(1, 1, 0, 0, 1),
        )

    assert_same(task, 1e-10)


@pytest.mark.parametrize(
    "module", [Tied, lambda: perceptron(nn.LayerNorm(8), Scaled(), nn.GroupNorm(2, 8))]
)
@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_loop_with_layers_it_does_not_know(module, spec):
    """Tied weights stay tied; a parameter that the loss does not reach does not decay."""
    torch.manual_seed(0)
    assert_same(lambda: task_of(module(), features(), LABELS, SPECS[spec]), 1e-5)


def test_an_embedding_is_trained():
    tokens = torch.randint(TOKENS, (sum(SIZES), 3), generator=torch.Generator().manual_seed(2))

    def task():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(TOKENS, 5), nn.Flatten(), nn.Linear(15, LABELS))
        return task_of(module, tokens, LABELS, SPECS["plain"])

    assert_same(task, 1e-5)


@pytest.mark.parametrize("name", ["mclr", "cnn", "cifar_cnn"])
def test_equals_the_loop_for_the_models_of_the_library(name):
    sizes = (5, 3)
    images = torch.randn(sum(sizes), 1, 16, 16, generator=torch.Generator().manual_seed(1))
    spec = SPECS["momentum"]

    def task():
        return task_of(
            build_model(name, input_shape=(1, 16, 16), outputs=LABELS), images, LABELS, spec, sizes
        )

    assert_same(task, 1e-4)


def test_batch_norm_is_refused_by_name():
    module = perceptron(nn.BatchNorm1d(8))
    text = re.escape("layer '1' (BatchNorm1d) changes its buffers in training")
    with pytest.raises(CannotMapError, match=text):
        VmapEngine().train(task_of(module, features(), LABELS, SPECS["plain"]))


def test_batch_norm_in_eval_changes_nothing_and_is_mapped():
    tasks = [
        task_of(perceptron(nn.BatchNorm1d(8).eval()), features(), LABELS, SPECS["momentum"])
        for _ in range(2)
    ]
    D = tasks[0].layout.n_parameters
    (expected, _), (got, _) = LoopEngine().train(tasks[0]), VmapEngine().train(tasks[1])
    torch.testing.assert_close(got[:, :D], expected[:, :D], rtol=1e-4, atol=1e-6)
    assert not got[:, D:].any()


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (
            nn.Dropout(0.5),
            "Sequential cannot be trained for several clients at once by torch.func.vmap: vmap: called random",
        ),
        (Counts(), "Sequential changes its buffers in training"),
    ],
)
def test_what_draws_or_keeps_a_state_is_refused(layer, told):
    with pytest.raises(CannotMapError, match=told):
        VmapEngine().train(task_of(perceptron(layer), features(), LABELS, SPECS["plain"]))
