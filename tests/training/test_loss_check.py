"""A loss of the user's own gets outputs in the targets' shape, and its examples do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import ConfigError, LocalTraining, Metric, Task, simulate
from fedclade.channel import ExamplePrivacy
from fedclade.core import Round
from fedclade.training import SimulatedClients
from fedclade.training.jobs import PrivateSteps
from tests.tiny import FEATURES, federation_of, linear, task_federation

TRUTH, SIZES = [0, 0, 0, 0], [24, 7, 1, 13]
ENGINES = ["loop", "vmap", "stacked", "workers"]


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, outputs)


def trained(
    loss: object, engine: str = "loop", kind: str = "regression", outputs: int = 0, **task: Any
) -> Tensor:
    """Return the updates of four clients, which have 7 examples among the two that each is tried on."""
    federation = task_federation(kind, TRUTH, SIZES, outputs)  # pyright: ignore[reportArgumentType]
    fitted = Task(loss=loss, **task).of(federation.pool.schema)  # pyright: ignore[reportArgumentType]
    clients = SimulatedClients(federation, network(outputs or 1), engine=engine, task=fitted)
    models = torch.zeros(1, clients.layout.size)
    spec = LocalTraining(epochs=2, batch_size=5, lr=0.1)
    return clients.train([0, 1, 2, 3], models, [0] * 4, Round(1, spec)).required_deltas


def mean_over_the_last(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean(-1)


def elementwise(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.l1_loss(outputs.squeeze(-1), targets, reduction="none")


def first_column(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [mean_over_the_last, elementwise, squeezed, first_column])
def test_a_loss_of_ones_own_is_not_broadcast_over_the_batch(
    loss: Callable[..., Tensor], engine: str
):
    torch.testing.assert_close(trained(loss, engine), trained("mae"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [mean_over_the_last, elementwise])
def test_the_error_of_a_run_with_it_is_that_of_the_named_loss(loss: Callable[..., Tensor]):
    federation = task_federation("regression", TRUTH)
    local = LocalTraining(epochs=3, batch_size=8, lr=0.1)
    found = [
        simulate(
            "fedavg", network(), federation, rounds=6, local=local, engine="loop", task=task
        ).summary["mae"]
        for task in (Task("regression", loss=loss), Task("regression", loss="mae"))
    ]
    assert found[0]["mean"] == pytest.approx(found[1]["mean"], rel=1e-4)
    assert found[0]["mean"] < 0.5


def test_a_binary_loss_of_ones_own_is_not_broadcast():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    torch.testing.assert_close(trained(loss, kind="binary"), trained("bce", kind="binary"))


def test_several_outputs_stay_as_they_are():
    loss = trained(mean_over_the_last, outputs=3)
    torch.testing.assert_close(loss, trained("mae", outputs=3))


def test_a_metric_of_ones_own_is_not_broadcast():
    federation = task_federation("regression", TRUTH, SIZES)
    own = [
        Metric(
            "by_terms", False, terms=lambda outputs, targets: (outputs - targets).abs().double()
        ),
        Metric(
            "by_all", False, whole=lambda outputs, targets: float((outputs - targets).abs().mean())
        ),
    ]
    task = Task(metrics=["mae", *own]).of(federation.pool.schema)
    clients = SimulatedClients(federation, network(), task=task)
    mae, by_terms, by_all = clients.evaluate(
        clients.ids, 0.3 * torch.ones(1, clients.layout.size), [0] * 4, "test"
    ).scores.T
    torch.testing.assert_close(by_terms, mae)
    torch.testing.assert_close(by_all, mae)


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets - (outputs - targets).mean()).square().flatten()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten() * len(targets)


@pytest.mark.parametrize("loss", [centred, summed])
def test_a_loss_whose_examples_depend_on_each_other_is_refused(loss: Callable[..., Tensor]):
    told = rf"task.loss = tests.training.test_loss_check:{loss.__name__}: the loss of an example should not depend .*"
    with pytest.raises(
        ConfigError, match=told + r"in a batch of 4 and .* in a batch of 7; .*loss_over='batch'"
    ):
        trained(loss)


def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    partners = (torch.arange(len(targets)) ^ 1).clamp(max=len(targets) - 1)
    return (outputs - targets).square() * (outputs - targets)[partners].abs()


def test_pairs_that_halves_do_not_tear_apart_are_found_by_single_examples():
    federation = task_federation("regression", TRUTH)
    task = Task(loss=of_pairs).of(federation.pool.schema)
    with pytest.raises(
        ConfigError, match=r"should not depend .* in a batch of 1 and .* in a batch of 8; "
    ):
        SimulatedClients(federation, network(), task=task)


def test_a_contrastive_loss_of_labels_is_refused():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scores = outputs @ outputs.t()
        return functional.cross_entropy(scores, torch.arange(len(outputs)), reduction="none")

    with pytest.raises(ConfigError, match="should not depend on the other examples of its batch"):
        SimulatedClients(
            federation_of(TRUTH),
            linear(),
            task=Task(loss=loss).of(federation_of(TRUTH).pool.schema),
        )


def test_a_loss_that_broadcasts_in_any_shape_is_refused_with_its_shape():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(-1, 1) - targets.reshape(1, -1)

    with pytest.raises(ConfigError, match=r"one number for each of 7 examples, got shape \(7, 7\)"):
        trained(loss)


def test_a_loss_that_fails_is_named_before_round_1():
    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("weights")

    with pytest.raises(
        ConfigError,
        match=r"failing fails on outputs of shape \(7, 1\) and targets .* KeyError: 'weights'",
    ):
        trained(failing)


def test_a_loss_that_draws_at_random_is_not_taken_for_one():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs() * torch.rand(len(targets))

    assert trained(loss).isfinite().all()


def cox(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the negative partial log-likelihood (Cox 1972): times of those who are censored are negative."""
    order = targets.abs().argsort(descending=True)
    risk, event = outputs[order], (targets[order] > 0).to(outputs)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def cox_by_hand(outputs: Tensor, targets: Tensor) -> float:
    total, events = 0.0, 0
    for k in range(len(targets)):
        if targets[k] > 0:
            at_risk = targets.abs() >= targets[k].abs()
            total -= float(outputs[k] - outputs[at_risk].logsumexp(0))
            events += 1
    return total / max(1, events)


@pytest.mark.parametrize("engine", ["vmap", "workers", "auto"])
def test_a_loss_over_the_batch_trains_alike_in_every_engine_that_can(engine: str):
    expected = trained(cox, loss_over="batch")
    torch.testing.assert_close(
        trained(cox, engine, loss_over="batch"), expected, rtol=1e-4, atol=1e-6
    )
    assert expected.abs().max() > 0


def test_a_loss_over_the_batch_is_refused_unless_it_is_declared():
    with pytest.raises(
        ConfigError,
        match=r"one number for each of 7 .* got shape \(\); declare Task\(loss_over='batch'\)",
    ):
        trained(cox)


def test_a_loss_over_the_batch_cannot_be_stacked():
    with pytest.raises(
        ConfigError,
        match=r"engine 'stacked' cannot train this model: the loss .*cox is defined over the whole b",
    ):
        trained(cox, "stacked", loss_over="batch")


def test_a_step_of_a_loss_over_the_batch_is_that_of_its_gradient():
    federation = task_federation("regression", TRUTH, SIZES)
    task = Task(loss=cox, loss_over="batch").of(federation.pool.schema)
    clients, module = SimulatedClients(federation, network(), engine="loop", task=task), network()
    start = clients.layout.flatten(module)
    x, y = federation.examples(0, "train")
    loss = cox(module(x)[:, 0], y)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    spec = LocalTraining(epochs=1, batch_size=len(x), lr=0.1)
    one_step = clients.train([0], start[None], [0], Round(1, spec))
    torch.testing.assert_close(one_step.required_deltas[0], -0.1 * gradient, rtol=1e-4, atol=1e-6)
    whole = clients.gradients([0], start[None], [0], Round(1, spec))
    torch.testing.assert_close(whole.required_deltas[0], -gradient, rtol=1e-4, atol=1e-6)
    assert float(whole.losses[0]) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("at_a_time", [2**22, 64])
def test_a_loss_over_the_batch_is_evaluated_on_all_of_a_clients_examples(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fedclade.training.evaluation.ENTRIES_AT_A_TIME_ON_CPU", at_a_time)
    federation = task_federation("regression", TRUTH, SIZES)
    task = Task(loss=cox, loss_over="batch").of(federation.pool.schema)
    clients, module = SimulatedClients(federation, network(), task=task), network()
    model = clients.layout.flatten(module)
    found = clients.evaluate(clients.ids, model[None], [0] * 4, "test")
    for k, client in enumerate(federation.ids):
        x, y = federation.examples(client, "test")
        with torch.no_grad():
            assert float(found.losses[k]) == pytest.approx(
                cox_by_hand(module(x)[:, 0], y), rel=1e-4
            )


def test_dp_sgd_refuses_a_loss_over_the_batch():
    federation = task_federation("regression", TRUTH, SIZES)
    task = Task(loss=cox, loss_over="batch").of(federation.pool.schema)
    private = PrivateSteps.of(ExamplePrivacy(clip_norm=1.0, noise_multiplier=1.0))
    with pytest.raises(
        ConfigError, match=r"privacy.level = 'example' needs .*cox is a loss over a whole batch"
    ):
        SimulatedClients(federation, network(), task=task, private=private)


def test_methods_that_weigh_examples_refuse_a_loss_over_the_batch():
    federation = task_federation("regression", TRUTH)
    task = Task(loss=cox, loss_over="batch")
    with pytest.raises(
        ConfigError,
        match=r"this method needs the loss of each example, .* the loss .*cox returns one number",
    ):
        simulate("fedem", lambda seed: nn.Linear(FEATURES, 1), federation, rounds=1, task=task)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            Task(loss="mse", loss_over="batch"),
            "task.loss_over = 'batch' is only for losses of your own, but mse is a built-in loss",
        ),
        (
            Task(loss_over="batch"),
            "task.loss_over = 'batch' is only for losses of your own, but cross_entropy is a built-in loss",
        ),
        (
            Task(loss=cox, loss_over="batch", class_weights=[1, 2, 3, 4]),
            "task.class_weights multiply the loss of each example, but with task.loss_over = 'batch'",
        ),
    ],
)
def test_what_does_not_go_with_a_loss_over_the_batch(task: Task, told: str):
    data = task_federation("regression", TRUTH) if task.loss == "mse" else federation_of(TRUTH)
    with pytest.raises(ConfigError, match=told):
        task.of(data.pool.schema)


def test_a_loss_over_the_batch_should_give_one_number():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, None] - targets[None]).square()

    with pytest.raises(
        ConfigError, match=r"should return one number for a batch, or one for each of 7 .*\(7, 7\)"
    ):
        trained(loss, loss_over="batch")


def test_the_error_of_a_private_client_quotes_no_losses(caplog: pytest.LogCaptureFixture):
    federation = task_federation("regression", TRUTH, SIZES, 0)
    fitted = Task(loss=lambda o, y: (o - y.mean()).abs().flatten()).of(federation.pool.schema)
    with pytest.raises(ConfigError) as caught:
        SimulatedClients(federation, network(), engine="loop", task=fitted, always_replies=True)
    assert str(caught.value).endswith(
        "or gives losses that depend on the other examples of a batch; see the log of the client for details"
    )
    assert "in a batch of" in caplog.text
