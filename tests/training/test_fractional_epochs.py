"""Fractional epochs: the number of steps by a literal count, and every engine alike."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from fedclade import LocalTraining, simulate
from tests.flower.grids import federated, grid_of
from tests.tiny import federation_of, perceptron

SIZES = [20, 45, 31, 60]


@pytest.mark.parametrize("epochs", ["0.1", "0.25", "0.5", "0.7", "1", "1.5", "2", "2.3"])
@pytest.mark.parametrize("examples", [1, 9, 10, 11, 45, 100, 997])
def test_steps_are_the_share_of_batches_rounded_up(epochs: str, examples: int):
    local = LocalTraining(epochs=float(epochs), batch_size=10)
    batches = -(-examples // 10)
    steps = Fraction(epochs) * batches
    assert local.steps_with(examples) == max(1, -(-steps.numerator // steps.denominator))
    assert local.epochs_with(examples) == -(
        -Fraction(epochs).numerator // Fraction(epochs).denominator
    )


def test_whole_numbers_are_recorded_as_such():
    assert LocalTraining(epochs=2.0).epochs == 2
    assert isinstance(LocalTraining(epochs=2.0).epochs, int)
    assert LocalTraining(epochs=2.0) == LocalTraining(epochs=2)


def model_of(epochs: float, **settings: Any) -> torch.Tensor:
    local = LocalTraining(batch_size=10, lr=0.2, epochs=epochs)
    federation = federation_of([0, 1, 0, 1], SIZES)
    run = simulate("fedavg", perceptron, federation, rounds=3, local=local, **settings)
    steps = sum(local.steps_with(size) for size in SIZES)
    assert run.summary["steps"]["total"] == 3 * steps
    return run.tree.nodes[0].params


@pytest.mark.parametrize("epochs", [0.3, 1.5])
@pytest.mark.parametrize("engine", ["stacked", "vmap", "workers"])
def test_every_engine_equals_the_loop(epochs: float, engine: str):
    torch.testing.assert_close(model_of(epochs, engine=engine), model_of(epochs, engine="loop"))


def test_a_network_equals_a_simulation():
    local = LocalTraining(batch_size=10, lr=0.2, epochs=0.5)
    federation = federation_of([0, 1, 0, 1])
    grid = grid_of(federation, config={"min-part": 4})
    run = federated(grid, "fedavg", local=local, rounds=3)
    simulated = simulate("fedavg", perceptron, federation, rounds=3, local=local, engine="loop")
    expected = simulated.tree.nodes[0].params
    torch.testing.assert_close(run.tree.nodes[0].params, expected, rtol=1e-4, atol=1e-6)


def test_whole_and_fractional_epochs_begin_alike():
    """1.0 epochs of all clients are one epoch, whichever way the engine counts."""
    assert model_of(1.0, engine="stacked").equal(model_of(1, engine="stacked"))
    assert not model_of(0.5, engine="loop").allclose(model_of(1, engine="loop"))
