"""Any task trains alike in every engine, and is scored for each client from its own outputs."""

from __future__ import annotations

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from fedclade import Federation, LocalTraining, Task, simulate
from fedclade.core import Layout, Round
from fedclade.data import StatisticsQuery, compute_statistics
from fedclade.runs import RunSettings, fitted_task
from fedclade.tasks import FittedTask
from fedclade.training import SimulatedClients, evaluation
from tests.tiny import FEATURES, federation_of, linear, task_federation

TRUTH, SIZES = [0, 1, 0, 1], [24, 7, 1, 13]


def cubed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.view(targets.shape) - targets).abs() ** 3


def network(outputs: int = 1, *, squeezed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    last = [nn.Flatten(0)] if squeezed else []
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs), *last)


CASES = {
    "binary": ("binary", 0, Task(metrics=["auroc", "f1"])),
    "binary, weighted": ("binary", 0, Task(class_weights=[1, 5])),
    "binary, balanced": ("binary", 0, Task(class_weights="balanced")),
    "multilabel": ("multilabel", 3, Task()),
    "regression": ("regression", 0, Task()),
    "of vectors": ("regression", 3, Task(loss="huber")),
    "own loss": ("regression", 0, Task(loss=cubed)),
    "labels, weighted": ("classification", 0, Task(class_weights=[1, 2, 0.5, 3])),
    "labels, balanced": ("classification", 0, Task(class_weights="balanced")),
}


def world(name: str, engine: str) -> tuple[SimulatedClients, Federation, FittedTask]:
    kind, outputs, task = CASES[name]
    if kind == "classification":
        federation, module = federation_of(TRUTH, SIZES), linear()
    else:
        federation, module = task_federation(kind, TRUTH, SIZES, outputs), network(outputs or 1)
    fitted = fitted_task(RunSettings(task=task), federation)
    return SimulatedClients(federation, module, engine=engine, task=fitted), federation, fitted


def models_of(clients: SimulatedClients) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return 0.5 * torch.randn(2, clients.layout.size, generator=draw)


@pytest.mark.parametrize("engine", ["stacked", "vmap", "workers"])
@pytest.mark.parametrize("name", CASES)
def test_every_engine_trains_a_task_as_the_loop_does(name: str, engine: str):
    spec = LocalTraining(epochs=2, batch_size=5, lr=0.1, momentum=0.5)
    found = []
    for each in ("loop", engine):
        clients, *_ = world(name, each)
        found.append(clients.train([0, 1, 2, 3], models_of(clients), [0, 1, 1, 0], Round(1, spec)))
    expected, updates = found
    torch.testing.assert_close(
        updates.required_deltas, expected.required_deltas, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(updates.losses, expected.losses, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_that_of_the_mean_loss_of_all_examples(name: str):
    clients, federation, task = world(name, "loop")
    models = models_of(clients)
    updates = clients.gradients([1], models[1:], [0], Round(1, LocalTraining(batch_size=4)))
    module = linear() if "labels" in name else network(CASES[name][1] or 1)
    clients.layout.load(models[1], module)
    x, y = federation.examples(1, "train")
    loss = task.losses(module(x), y).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(updates.required_deltas[0], -expected, rtol=1e-4, atol=1e-6)
    assert float(updates.losses[0]) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_outputs_of_one_number_may_lie_in_a_dimension_or_not():
    federation = task_federation("regression", TRUTH, SIZES)
    spec, updates = LocalTraining(batch_size=5), []
    for squeezed in (False, True):
        clients = SimulatedClients(
            federation, network(squeezed=squeezed), engine="loop", task=fitted(federation)
        )
        updates.append(
            clients.train(
                [0, 1, 2, 3], models_of(clients), [0, 1, 1, 0], Round(1, spec)
            ).required_deltas
        )
    torch.testing.assert_close(*updates)


def fitted(federation: Federation, **options: object):
    return Task(**options).of(federation.pool.schema)  # pyright: ignore[reportArgumentType]


def own_scores(federation: Federation, module: nn.Module, model: Tensor, of: object) -> list[float]:
    """Return what torchmetrics gives for each client's test data by itself."""
    Layout.of(module).load(model, module)
    with torch.no_grad():
        examples = [federation.examples(client, "test") for client in federation.ids]
        return [float(of(module(x).view(y.shape), y)) for x, y in examples]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("largest", "at_a_time"), [(2**22, 2**20), (64, 7)])
def test_scores_are_of_a_clients_outputs_together_however_passes_are_cut(
    largest: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
):
    """An AUROC averaged over batches would be another number."""
    monkeypatch.setattr(evaluation, "ENTRIES_AT_A_TIME_ON_CPU", largest)
    monkeypatch.setattr(evaluation, "EXAMPLES_AT_A_TIME", at_a_time)
    federation = task_federation("binary", TRUTH, SIZES)
    clients = SimulatedClients(
        federation, network(), engine="loop", task=fitted(federation, metrics=["auroc", "f1"])
    )
    model = models_of(clients)[0]
    got = clients.evaluate(clients.ids, model[None], [0] * 4, "test")
    functions = torchmetrics.functional.classification

    def auroc(outputs: Tensor, targets: Tensor) -> Tensor:
        return functions.binary_auroc(outputs.sigmoid(), targets.long())

    def f1(outputs: Tensor, targets: Tensor) -> Tensor:
        return functions.binary_f1_score(outputs.sigmoid(), targets.long())

    for column, of in enumerate((auroc, f1)):
        expected = own_scores(federation, network(), model, of)
        assert got.scores[:, column].tolist() == pytest.approx(expected, rel=1e-5)
    assert got.merit.tolist() == got.scores[:, 0].tolist()


def test_errors_of_numbers_are_scored_as_torchmetrics_does():
    federation = task_federation("regression", TRUTH, SIZES, 3)
    options = {"metrics": ["rmse", "mae", "r2"]}
    clients = SimulatedClients(
        federation, network(3), engine="loop", task=fitted(federation, **options)
    )
    model = models_of(clients)[0]
    got = clients.evaluate(clients.ids, model[None], [0] * 4, "test")
    f = torchmetrics.functional
    for column, of in enumerate(
        (lambda a, b: f.mean_squared_error(a, b).sqrt(), f.mean_absolute_error, f.r2_score)
    ):
        assert got.scores[:, column].tolist() == pytest.approx(
            own_scores(federation, network(3), model, of), rel=1e-4
        )
    assert got.losses.tolist() == pytest.approx(
        own_scores(federation, network(3), model, f.mean_squared_error), rel=1e-4
    )
    assert got.merit.tolist() == [-score for score in got.scores[:, 0].tolist()]  # less is better


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
@pytest.mark.parametrize("personal", [(), ("2.*",)])
def test_a_client_with_one_class_has_no_score_and_others_have_theirs(
    engine: str, personal: tuple[str, ...]
):
    federation = task_federation("binary", TRUTH, SIZES)
    federation.pool.y[federation.by_id[2].test] = 1.0
    task = fitted(federation, metrics=["auroc", "accuracy"])
    clients = SimulatedClients(federation, network(), engine=engine, task=task, personal=personal)
    models = 0.3 * torch.ones(1, clients.layout.size)
    found = clients.evaluate(clients.ids, models, [0] * 4, "test")
    assert found.ids == (0, 1, 2, 3)
    assert found.scores[:, 0].isnan().tolist() == [False, False, True, False]
    assert found.scores[:, 1].isfinite().all()
    assert found.losses.isfinite().all()


def test_a_mixture_of_models_leaves_the_same_client_without_a_score():
    federation = task_federation("binary", TRUTH, SIZES)
    federation.pool.y[federation.by_id[2].test] = 0.0
    clients = SimulatedClients(federation, network(), task=fitted(federation, metrics=["auroc"]))
    evaluator = clients._stages.now.evaluator
    scores = evaluator.evaluate_mixture(
        [0, 1, 2, 3], models_of(clients), torch.full((4, 2), 0.5), "test"
    ).scores
    assert scores[:, 0].isnan().tolist() == [False, False, True, False]


def test_a_metric_that_fails_for_a_client_ends_no_run(caplog: pytest.LogCaptureFixture):
    class Failing(torchmetrics.MeanAbsoluteError):
        def compute(self) -> Tensor:
            if int(self.total) == 20 and float(self.sum_abs_error) == 0:
                raise ValueError("too good")
            return super().compute()

    federation = task_federation("regression", TRUTH, SIZES)
    federation.pool.y[federation.by_id[1].test] = 0.0
    clients = SimulatedClients(federation, network(), task=fitted(federation, metrics=[Failing()]))
    for _ in range(2):
        found = clients.evaluate(clients.ids, torch.zeros(1, clients.layout.size), [0] * 4, "test")
        assert found.scores[:, 0].isnan().tolist() == [False, True, False, False]
    assert caplog.messages == [
        "client 1, and possibly other clients, get no score from metric failing, which raised ValueError: too good"
    ]


@pytest.mark.parametrize("name", ["mae", "rmse", "r2"])
def test_a_model_that_has_diverged_has_the_worst_score_and_is_not_left_out(name: str):
    federation = task_federation("regression", TRUTH, SIZES)
    clients = SimulatedClients(federation, network(), task=fitted(federation, metrics=[name]))
    models = torch.full((1, clients.layout.size), torch.nan)
    found = clients.evaluate(clients.ids, models, [0] * 4, "test")
    assert found.scores[:, 0].tolist() == [-torch.inf if name == "r2" else torch.inf] * 4


def test_balanced_weights_count_the_examples_of_all_clients_as_they_see_them():
    """Client 1 sees labels 0 and 1 the other way round."""
    federation = federation_of([0, 1], [24, 12])
    counts = torch.zeros(4)
    for client in federation.ids:
        counts += torch.bincount(federation.examples(client, "train")[1], minlength=4)
    found = compute_statistics(federation, StatisticsQuery(federation.ids, labels=4))
    assert torch.equal(found.labels, counts.long())
    assert found.count == 36


def test_a_run_of_a_task_names_its_metrics():
    federation = task_federation("regression", [0, 0, 1, 1])
    run = simulate(
        "fedavg", network(), federation, rounds=2, engine="loop", task="regression", target=0.5
    )
    assert [metric["name"] for metric in run.summary["metrics"]] == ["mae"]
    assert run.summary["target"]["mae"] == 0.5
    assert run.summary["mae"]["mean"] == pytest.approx(run.metric_rows[-1]["mae_mean"])
    assert run.client_rows[-1]["mae"] > 0
