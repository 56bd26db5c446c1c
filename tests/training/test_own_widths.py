"""Losses and metrics of the user's own take outputs that have other widths than the targets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import (
    ConfigError,
    Federation,
    LocalTraining,
    Metric,
    ModelError,
    Task,
    federation,
    simulate,
)
from fedclade.runs import TRIVIAL
from fedclade.training import ENGINES

LEVELS = torch.tensor([0.1, 0.5, 0.9])
LOCAL = LocalTraining(epochs=2, batch_size=7, lr=0.1)


def numbers(client: int, n: int = 24) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(n, 4, generator=draw)
    return x, x[:, 0] + torch.randn(n, generator=draw)


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = targets[:, None] - outputs
    return torch.maximum(LEVELS * errors, (LEVELS - 1) * errors).mean(1)


def gaussian(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 1] + (targets - outputs[:, 0]) ** 2 / outputs[:, 1].exp())


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return targets[:, 1] * (outputs[:, 0] - targets[:, 0]) ** 2


def covered(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs[:, 0] <= targets) & (targets <= outputs[:, 2])).double()


def plain() -> Federation:
    return federation({f"c{k}": numbers(k) for k in range(3)})


def with_weights() -> Federation:
    data = {f"c{k}": numbers(k) for k in range(3)}
    return federation({k: (x, torch.stack([y, y.abs()], 1)) for k, (x, y) in data.items()})


CASES = {
    "quantiles": (
        plain(),
        3,
        Task(loss=pinball, metrics=["mean_loss", Metric("coverage", True, True, terms=covered)]),
    ),
    "gaussian": (plain(), 2, Task(loss=gaussian, metrics=["mean_loss"])),
    "weights": (with_weights(), 1, Task(loss=weighted, metrics=["mean_loss"])),
}


def run_of(case: str, engine: str = "loop", **options: Any) -> Any:
    data, outputs, task = CASES[case]
    torch.manual_seed(0)
    module = nn.Linear(4, outputs)
    return simulate(
        "fedavg", module, data, rounds=2, engine=engine, task=task, local=LOCAL, **options
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_every_engine_is_the_loop(case: str, engine: str):
    found, expected = run_of(case, engine), run_of(case)
    assert torch.allclose(found.tree.nodes[0].model, expected.tree.nodes[0].model, atol=1e-6)
    assert found.summary["mean_loss"]["mean"] == pytest.approx(
        expected.summary["mean_loss"]["mean"], rel=1e-5
    )


@pytest.mark.parametrize("case", CASES)
def test_the_mean_loss_is_that_of_the_test_examples(case: str):
    data, outputs, task = CASES[case]
    run = run_of(case)
    module = nn.Linear(4, outputs)
    weights, bias = run.tree.nodes[0].model.split([4 * outputs, outputs])
    module.weight.data, module.bias.data = weights.view(outputs, 4), bias
    losses = []
    for client in data.ids:
        x, y = data.examples(client, "test")
        assert callable(task.loss)
        losses.append(float(task.loss(module(x), y).mean().detach()))
    assert run.summary["mean_loss"]["mean"] == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_no_trivial_prediction_is_compared():
    gains = run_of("quantiles", references=False).gains
    assert gains is not None
    assert all(TRIVIAL not in client.scores for client in gains.clients)


def cox(risk: Tensor, survival: dict[str, Tensor]) -> Tensor:
    order = survival["time"].argsort(descending=True)
    risk, died = risk[order, 0], survival["event"][order]
    return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum().clamp(min=1)


def concordance(risk: Tensor, survival: dict[str, Tensor]) -> float:
    """Return Harrell's concordance index, by a loop over all pairs."""
    right = pairs = 0.0
    times, events = survival["time"].tolist(), survival["event"].tolist()
    for i, one in enumerate(times):
        for j, other in enumerate(times):
            if events[i] and one < other:
                pairs += 1
                right += float(risk[i, 0] > risk[j, 0]) + 0.5 * float(risk[i, 0] == risk[j, 0])
    return right / pairs if pairs else math.nan


def patients(client: int, n: int = 40) -> tuple[Tensor, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(n, 4, generator=draw)
    died = torch.rand(n, generator=draw) > 0.3
    return x, {"time": torch.exp(-x[:, 0]), "event": died}


@pytest.mark.parametrize("engine", ["loop", "workers", "vmap", "auto"])
def test_survival(engine: str):
    task = Task(
        loss=cox, loss_over="batch", metrics=[Metric("concordance", True, True, whole=concordance)]
    )
    data = federation({f"c{k}": patients(k) for k in range(3)})
    torch.manual_seed(0)
    run = simulate("fedavg", nn.Linear(4, 1), data, rounds=10, engine=engine, task=task)
    assert run.summary["concordance"]["mean"] > 0.9


def test_targets_of_several_columns_need_ones_own_loss_and_metrics():
    data = federation({f"c{k}": patients(k) for k in range(3)})
    for task in (Task(), Task(loss=cox, loss_over="batch"), Task(loss=cox, metrics=["mae"])):
        with pytest.raises(ConfigError) as caught:
            simulate("fedavg", nn.Linear(4, 1), data, rounds=1, task=task)
        assert (
            "the targets {time: float [], event: bool []} need a loss and metrics of your own"
            in (str(caught.value))
        )


def test_built_in_losses_and_metrics_still_need_their_widths():
    for task in (Task(), Task(loss=pinball)):
        with pytest.raises(ModelError, match=r"should return outputs of shape \(2, 1\)"):
            simulate("fedavg", nn.Linear(4, 3), plain(), rounds=1, task=task)


@pytest.mark.parametrize("engine", ENGINES)
def test_images_as_targets(engine: str):
    def pictures(client: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(20, 1, 5, 4, generator=torch.Generator().manual_seed(client))
        return x, torch.cat([2 * x, -x], 1)

    data = federation({f"c{k}": pictures(k) for k in range(3)})

    def run_of(engine: str) -> Any:
        torch.manual_seed(0)
        return simulate("fedavg", nn.Conv2d(1, 2, 1), data, rounds=2, engine=engine, local=LOCAL)

    found, expected = run_of(engine), run_of("loop")
    assert torch.allclose(found.tree.nodes[0].model, expected.tree.nodes[0].model, atol=1e-6)
    assert found.summary["mae"]["mean"] == pytest.approx(expected.summary["mae"]["mean"], rel=1e-5)
    with pytest.raises(ModelError, match=r"should return outputs of shape \(2, 2, 5, 4\)"):
        simulate("fedavg", nn.Conv2d(1, 1, 1), data, rounds=1)
