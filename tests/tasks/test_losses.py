"""Losses of each example are torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade.core import IGNORED
from fedclade.tasks import LOSSES, FittedTask, count_targets

OF_TORCH = {
    "bce": nn.BCEWithLogitsLoss,
    "mse": nn.MSELoss,
    "mae": nn.L1Loss,
    "huber": nn.HuberLoss,
    "smooth_l1": nn.SmoothL1Loss,
    "poisson_nll": nn.PoissonNLLLoss,
}


def drawn(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_every_loss_is_compared_here():
    assert set(OF_TORCH) == set(LOSSES) - {"cross_entropy"}


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize(("outputs", "targets"), [((7,), (7,)), ((7, 1), (7,)), ((7, 3), (7, 3))])
def test_a_loss_is_that_of_torch_for_each_example(
    name: str, outputs: tuple[int, ...], targets: tuple[int, ...]
):
    given, wanted = drawn(*outputs), (drawn(*targets) > 0).float()
    losses, of_torch = LOSSES[name](given, wanted), OF_TORCH[name]()
    expected = [
        of_torch(one.view(target.shape), target) for one, target in zip(given, wanted, strict=True)
    ]
    torch.testing.assert_close(losses, torch.stack(expected))
    torch.testing.assert_close(losses.mean(), of_torch(given.view(targets), wanted))


def test_cross_entropy_of_labels_is_torchs():
    logits, labels = drawn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    expected = nn.CrossEntropyLoss(reduction="none")(logits, labels)
    torch.testing.assert_close(LOSSES["cross_entropy"](logits, labels), expected)


def test_cross_entropy_of_a_text_is_the_mean_over_places_that_count():
    logits, tokens = drawn(3, 2, 4), torch.tensor([[1, 2], [3, IGNORED], [IGNORED, IGNORED]])
    each = nn.CrossEntropyLoss(reduction="none")(
        logits.view(-1, 4), tokens.clamp(min=0).view(-1)
    ).view(3, 2)
    losses = LOSSES["cross_entropy"](logits, tokens)
    torch.testing.assert_close(losses, torch.stack([each[0].mean(), each[1, 0], torch.tensor(0.0)]))
    assert count_targets(tokens).tolist() == [2, 1, 0]


def test_examples_of_numbers_count_once_whatever_their_outputs():
    assert count_targets(drawn(3, 5)).tolist() == [1, 1, 1]
    assert count_targets(torch.tensor([2, IGNORED])).tolist() == [1, 0]


def test_the_mean_of_a_batch_weighs_texts_by_their_places():
    """Cross-entropy is plain, and means of other losses weigh examples in the same way."""
    logits, tokens = drawn(2, 3, 4), torch.tensor([[1, 2, 3], [0, IGNORED, IGNORED]])
    by_heart = FittedTask("language").mean_loss(logits, tokens)
    same = FittedTask(
        "language", loss=lambda outputs, targets: LOSSES["cross_entropy"](outputs, targets)
    )
    assert not same.is_plain
    torch.testing.assert_close(same.mean_loss(logits, tokens), by_heart)
    torch.testing.assert_close(same.total_loss(logits, tokens), 4 * by_heart)
