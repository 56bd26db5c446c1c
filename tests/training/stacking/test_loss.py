"""The loss's gradient by hand is autograd's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedclade.core import IGNORED
from fedclade.tasks import FittedTask
from fedclade.training.stacking.batches import Plan
from fedclade.training.stacking.loss import REGISTER, Losses

BATCH = 4


def by_autograd(logits: Tensor, targets: Tensor, clients: int) -> tuple[Tensor, list[float]]:
    """Return the gradient of the sum of the clients' mean losses, and these."""
    logits = logits.clone().requires_grad_()
    losses = [
        FittedTask().mean_loss(x, y)
        for x, y in zip(logits.chunk(clients), targets.chunk(clients), strict=True)
    ]
    torch.stack(losses).sum().backward()
    assert logits.grad is not None
    return logits.grad, [float(loss.detach()) for loss in losses]


@pytest.mark.parametrize("places", [(), (3,)], ids=["classes", "words"])
@pytest.mark.parametrize("some_ignored", [False, True])
@pytest.mark.parametrize("outputs", [2, 10, REGISTER - 1, REGISTER, 3 * REGISTER])
def test_gradients_and_losses_are_autograd_s(
    outputs: int, some_ignored: bool, places: tuple[int, ...]
):
    draw = torch.Generator().manual_seed(outputs)
    clients = 3
    plan = Plan.of((BATCH,) * clients, BATCH, True)
    logits = 5 * torch.randn(clients * BATCH, *places, outputs, generator=draw, dtype=torch.float64)
    targets = torch.randint(outputs, (clients * BATCH, *places), generator=draw)
    if some_ignored:
        targets[1] = targets[BATCH + 1] = IGNORED
    losses = Losses(plan, FittedTask(), all_count=not some_ignored)
    (step,) = plan.steps
    expected, each = by_autograd(logits, targets, clients)
    for _ in range(2):  # epochs, which are alike
        seen, gradient = losses.of(step, logits, targets)
        torch.testing.assert_close(gradient, expected)
        losses.note(seen)
    # A step's mean is over what counts in it, and that is what the loop notes.
    assert losses.of_clients().tolist() == pytest.approx(each)


@pytest.mark.parametrize("outputs", [3, REGISTER])
def test_logits_may_lie_where_others_lay(outputs: int):
    draw = torch.Generator().manual_seed(0)
    memory = torch.empty(2 * BATCH, outputs)
    plan = Plan.of((3 * BATCH, BATCH), BATCH, True)
    losses = Losses(plan, FittedTask(), all_count=True)
    assert [step.rows for step in plan.steps] == [2 * BATCH, BATCH, BATCH]
    for step in plan.steps:
        logits = memory[: step.rows].normal_(generator=draw)
        targets = torch.randint(outputs, (step.rows,), generator=draw)
        _, gradient = losses.of(step, logits, targets)
        torch.testing.assert_close(gradient, by_autograd(logits, targets, step.clients)[0])


def test_a_row_of_great_logits_has_a_loss_without_overflow():
    plan = Plan.of((1,), 1, True)
    losses = Losses(plan, FittedTask(), all_count=True)
    (step,) = plan.steps
    seen, gradient = losses.of(step, torch.tensor([[2000.0, 0.0, -3000.0]]), torch.tensor([1]))
    losses.note(seen)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, -1.0, 0.0]]))
    assert losses.of_clients().tolist() == [2000.0]


def test_half_precision_has_losses_too():
    plan = Plan.of((2, 1), 2, True)
    losses = Losses(plan, FittedTask(), all_count=True)
    (step,) = plan.steps
    seen, gradient = losses.of(
        step, torch.zeros(4, 8, dtype=torch.bfloat16), torch.tensor([0, 1, 2, IGNORED])
    )
    losses.note(seen)
    assert gradient.dtype == torch.bfloat16
    assert losses.of_clients().tolist() == pytest.approx([math.log(8)] * 2, rel=0.01)
