"""Augmentation of training batches, in every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import ModelError, federation, simulate
from fedclade.training.data import augmented, is_augmented, remove_augmentation

ENGINES = ("loop", "stacked", "workers", "vmap")


def seen_in_training(x: Tensor) -> Tensor:
    return x + 1


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def trained(augment: Any, engine: str = "loop", seed: int = 0, offset: float = 0.0) -> Any:
    draw = torch.Generator().manual_seed(0)
    parts = {}
    for name in "abc":
        x = torch.randn(12, 3, generator=draw) + offset
        parts[name] = ((x, torch.arange(12) % 2), (x - offset, torch.arange(12) % 2))
    data = federation(parts, augment=augment)
    return simulate("fedavg", "mlp", data, rounds=2, engine=engine, seed=seed)


def model_of(run: Any) -> Tensor:
    return run.tree.nodes[0].params


@pytest.mark.parametrize("engine", ENGINES)
def test_training_sees_what_the_function_returns_and_evaluation_does_not(engine: str) -> None:
    by_function = trained(seen_in_training, engine)
    by_hand = trained(None, engine, offset=1.0)  # whose test data is as it was
    torch.testing.assert_close(model_of(by_function), model_of(by_hand))
    assert by_function.summary["accuracy"] == pytest.approx(by_hand.summary["accuracy"])
    assert not torch.allclose(model_of(by_function), model_of(trained(None, engine)))


@pytest.mark.parametrize("engine", ["loop", "stacked", "auto"])
def test_what_it_draws_depends_on_the_seed(engine: str) -> None:
    once, again, other = (model_of(trained(noisy, engine, seed)) for seed in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_the_users_own_module_is_left_as_it_is() -> None:
    module = nn.Linear(3, 2)
    changed = augmented(module, seen_in_training)
    assert (is_augmented(module), is_augmented(changed)) == (False, True)
    remove_augmentation(changed)
    assert not is_augmented(changed)
    assert augmented(module, None) is module


def test_a_function_that_changes_the_number_of_examples_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match="should return a tensor of as many inputs as it receives, 12, got \\[3, 3\\]",
    ):
        trained(lambda x: x[:3])
