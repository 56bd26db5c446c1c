"""Segmentation: a label of each pixel, in every engine, with losses and scores of plain formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import Federation, LocalTraining, ModelError, Task, federation, simulate
from fedclade.core import IGNORED, DataSpec
from fedclade.training import ENGINES

LABELS = 3
LOCAL = LocalTraining(epochs=2, batch_size=7, lr=0.3)


def pictures(client: int, n: int = 20) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client)
    x = torch.rand(n, 2, 6, 5, generator=draw)
    masks = (x[:, 0] > 0.5).long() + (x[:, 1] > 0.7).long()
    masks[torch.rand(masks.shape, generator=draw) < 0.1] = 255
    return x, masks


def data() -> Federation:
    return federation({f"c{k}": pictures(k) for k in range(4)}, "segmentation", ignored=255)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, LABELS, 1))


def run_of(engine: str = "loop", **options: Any) -> Any:
    return simulate("fedavg", network(), data(), rounds=3, engine=engine, local=LOCAL, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_the_loop(engine: str):
    found, expected = run_of(engine), run_of()
    assert torch.allclose(found.tree.nodes[0].model, expected.tree.nodes[0].model, atol=1e-6)
    for name in ("iou", "dice", "accuracy"):
        assert found.summary[name]["mean"] == pytest.approx(expected.summary[name]["mean"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_one_layer(engine: str):
    def model(engine: str) -> Tensor:
        torch.manual_seed(0)
        run = simulate("fedavg", nn.Conv2d(2, LABELS, 1), data(), rounds=2, engine=engine)
        return run.tree.nodes[0].model

    assert torch.allclose(model(engine), model("loop"), atol=1e-6)


def outputs_and_masks() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    outputs = torch.randn(5, LABELS, 4, 6, generator=draw)
    masks = torch.randint(LABELS, (5, 4, 6), generator=draw)
    masks[:, 0] = IGNORED
    return outputs, masks


def fitted(**options: Any) -> Any:
    return Task("segmentation", **options).of(DataSpec("d", (2, 4, 6), LABELS, "segmentation"))


def test_scores_are_those_of_the_formulas():
    outputs, masks = outputs_and_masks()
    predicted, true = outputs.argmax(1).numpy(), masks.numpy()
    counts = true != IGNORED
    iou, dice = [], []
    for label in range(LABELS):
        ours, theirs = predicted[counts] == label, true[counts] == label
        both, any_of_them = (ours & theirs).sum(), (ours | theirs).sum()
        iou.append(both / any_of_them)
        dice.append(2 * both / (ours.sum() + theirs.sum()))
    scores = {each.name: each for each in fitted().metrics}
    last = outputs.movedim(1, -1)
    assert scores["iou"].whole(last, masks) == pytest.approx(np.mean(iou), rel=1e-6)
    assert scores["dice"].whole(last, masks) == pytest.approx(np.mean(dice), rel=1e-6)
    assert list(scores) == ["iou", "dice", "accuracy"]
    assert all(each.share and each.higher_is_better for each in scores.values())


def test_labels_that_a_client_lacks_do_not_count():
    outputs, masks = outputs_and_masks()
    masks = masks.where(masks != 2, 0)
    last = outputs.movedim(1, -1).clone()
    last[..., 2] = -9.0  # and are not predicted
    scores = {each.name: each for each in fitted().metrics}
    two = outputs[:, :2].argmax(1).numpy()
    true = masks.numpy()
    counts = true != IGNORED
    iou = [
        ((two == k) & (true == k) & counts).sum() / (((two == k) | (true == k)) & counts).sum()
        for k in range(2)
    ]
    assert scores["iou"].whole(last, masks) == pytest.approx(np.mean(iou), rel=1e-6)


def test_the_loss_is_the_mean_over_pixels_that_count():
    outputs, masks = outputs_and_masks()
    expected = functional.cross_entropy(outputs, masks, ignore_index=IGNORED)
    last = outputs.movedim(1, -1)
    assert float(fitted().mean_loss(last, masks)) == pytest.approx(float(expected), rel=1e-6)


def test_a_loss_of_ones_own_gets_what_the_model_returns():
    shapes: list[tuple[int, ...]] = []

    def per_image(outputs: Tensor, masks: Tensor) -> Tensor:
        shapes.append(tuple(outputs.shape[1:]))
        return functional.cross_entropy(
            outputs, masks, ignore_index=IGNORED, reduction="none"
        ).mean((1, 2))

    found = run_of(task=Task(loss=per_image, metrics=["dice"]))
    assert set(shapes) == {(LABELS, 6, 5)}
    assert found.summary["dice"]["mean"] > 0


def test_a_model_with_too_few_channels():
    with pytest.raises(ModelError) as caught:
        simulate("fedavg", nn.Conv2d(2, 2, 1), data(), rounds=1)
    assert str(caught.value).startswith(
        "the model should return outputs of shape (2, 3, 6, 5) for 3 labels of custom, got "
        "(2, 2, 6, 5)"
    )
