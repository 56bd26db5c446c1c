"""Models that write into their inputs, or compute in another type than that of the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedclade
from fedclade import ExamplePrivacy, LocalTraining, ModelError, Task
from fedclade.core import rng
from fedclade.data.federation import Federation
from fedclade.training import SimulatedClients
from fedclade.training.jobs import batches
from tests.flower.grids import federated, grid_of
from tests.tiny import FEATURES, LABELS, federation_of, linear, task_federation

LOCAL = LocalTraining(batch_size=8, lr=0.1)
ENGINES = ("loop", "stacked", "vmap", "workers")
HALF = torch.bfloat16


class InPlace(nn.Module):
    """Works in place on its inputs: when it trains, when it is evaluated, or both."""

    def __init__(self, when: str = "always") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.when = when
        self.output = nn.Linear(FEATURES, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        if self.when in ("always", "training" if self.training else "evaluation"):
            x.mul_(0.5)
        else:
            x = x * 0.5
        return self.output(x)


class Pure(InPlace):
    """The same, of copies."""

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x * 0.5)


def run_of(model: Any, federation: Federation | None = None, **settings: Any) -> fedclade.Run:
    settings = {"rounds": 3, "engine": "loop", "local": LOCAL, "algorithm": "fedavg", **settings}
    return fedclade.simulate(
        settings.pop("algorithm"), model, federation or federation_of([0, 1, 2]), **settings
    )


def check_same(one: fedclade.Run, other: fedclade.Run) -> None:
    torch.testing.assert_close(one.tree.nodes[0].params, other.tree.nodes[0].params)
    assert [row["accuracy"] for row in one.client_rows] == [
        row["accuracy"] for row in other.client_rows
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("when", ["always", "training", "evaluation"])
def test_a_forward_that_works_in_place_leaves_the_data_as_they_are(engine: str, when: str):
    federation = federation_of([0, 1, 2])
    before = federation.pool.x.clone()
    run = run_of(InPlace(when), federation, engine=engine)
    assert torch.equal(federation.pool.x, before)
    check_same(run, run_of(Pure(), engine=engine))


@pytest.mark.parametrize("method", ["cfl by gradients", "flux", "private", "scaffold"])
def test_so_do_other_passes_than_those_of_plain_training(method: str):
    algorithm, settings = method, {}
    if method == "cfl by gradients":
        algorithm = fedclade.CFL(similarity="gradients")
    elif method == "private":
        algorithm = "fedavg"
        settings = {"privacy": ExamplePrivacy(clip_norm=1.0, noise_multiplier=0.5)}
    check_same(*(run_of(model, algorithm=algorithm, **settings) for model in (InPlace(), Pure())))


def test_so_do_clients_of_a_network():
    federation = federation_of([0, 1, 0, 1])
    runs = [
        federated(grid_of(federation, make), "fedavg", make, rounds=3)
        for make in (_in_place, _pure)
    ]
    check_same(*runs)


def _in_place(seed: int) -> nn.Module:
    return InPlace()


def _pure(seed: int) -> nn.Module:
    return Pure()


def test_so_do_newcomers():
    everybody = federation_of([0, 1, 2, 0])
    some = replace(everybody, clients=everybody.clients[:3], true_clusters=None)
    late = replace(everybody, clients=everybody.clients[3:], true_clusters=None)
    tables = []
    for model in (InPlace(), Pure()):
        run = run_of(model, some)
        tables.append(fedclade.assign(run, late, model=model, engine="loop").rows)
    assert tables[0] == tables[1]


def test_an_augmentation_that_works_in_place_changes_no_data():
    federation = replace(federation_of([0, 1, 2]), augment=lambda x: x.mul_(0.5))
    privacy = ExamplePrivacy(clip_norm=1.0, noise_multiplier=0.0)
    before = federation.pool.x.clone()
    run_of(linear(), federation, privacy=privacy)
    assert torch.equal(federation.pool.x, before)


class SometimesInPlace(InPlace):
    """Cuts off large inputs, in place, only if there are any."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 and not self.training:
            x.clamp_(max=0.5)
        return self.output(x)


def test_a_forward_that_works_in_place_on_some_inputs_alone_ends_the_run():
    with pytest.raises(
        ModelError,
        match=r"forward method has overwritten the clients' data, which it did not do in a trial",
    ):
        run_of(SometimesInPlace())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_layer_is_cast_to_as_well(engine: str):
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, 2)
    whole, floats = (
        run_of(layer, table_of_whole_numbers(dtype), engine=engine)
        for dtype in (np.int64, np.float32)
    )
    check_same(whole, floats)


def test_only_a_model_that_works_in_place_gets_copies():
    for module, hooks in ((Pure(), 0), (InPlace(), 1)):
        clients = SimulatedClients(federation_of([0, 1]), module)
        assert len(clients.module._forward_pre_hooks) == hooks
        assert not module._forward_pre_hooks  # the user's own stays as it is
        assert (clients.module is module) == (hooks == 0)


def test_the_trial_leaves_the_model_as_it_is():
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(), nn.Linear(FEATURES, LABELS))
    state = torch.get_rng_state()
    SimulatedClients(federation_of([0, 1]), module)
    assert torch.equal(torch.get_rng_state(), state)
    assert int(module[0].num_batches_tracked) == 0
    assert module[0].running_mean.tolist() == [0] * FEATURES


def spoiling_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Takes the last label for the one before, and writes that into the targets."""
    return functional.cross_entropy(outputs, targets.clamp_(max=LABELS - 2), reduction="none")


def pure_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets.clamp(max=LABELS - 2), reduction="none")


@pytest.mark.parametrize("method", ["fedavg", "cfl by gradients", "private"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_loss_that_works_in_place_leaves_the_targets_as_they_are(method: str, engine: str):
    settings: dict[str, Any] = {"engine": engine, "algorithm": "fedavg"}
    if method == "private":
        settings["privacy"] = ExamplePrivacy(clip_norm=1.0, noise_multiplier=0.0)
    elif method != "fedavg":
        settings["algorithm"] = fedclade.CFL(similarity="gradients")
    federation = federation_of([0, 0, 0])
    before = federation.pool.y.clone()
    expected = run_of(linear(), federation_of([0, 0, 0]), task=Task(loss=pure_loss), **settings)
    check_same(run_of(linear(), federation, task=Task(loss=spoiling_loss), **settings), expected)
    assert torch.equal(federation.pool.y, before)


def table_of_whole_numbers(dtype: Any = np.int64) -> Federation:
    """Return clients of a table of whole numbers, as arrays have them."""
    draw = np.random.default_rng(0)
    clients = {}
    for name in ("north", "south", "west"):
        x = draw.integers(0, 9, (40, FEATURES))
        clients[name] = x.astype(dtype), (x.sum(1) > 4 * FEATURES).astype(np.int64)
    return fedclade.federation(clients)


def classifier(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_table_of_whole_numbers_is_cast_to_the_type_of_the_model(engine: str):
    whole = run_of(classifier(), table_of_whole_numbers(), engine=engine)
    check_same(whole, run_of(classifier(), table_of_whole_numbers(np.float32), engine=engine))


def test_so_is_one_of_a_built_in_model():
    whole, floats = (
        run_of("mlp", table_of_whole_numbers(dtype)) for dtype in (np.int32, np.float64)
    )
    check_same(whole, floats)


def test_private_clients_cast_as_well():
    privacy = ExamplePrivacy(clip_norm=1.0, noise_multiplier=0.0)
    for engine in ("loop", "stacked", "vmap"):
        whole, floats = (
            run_of(classifier(), table_of_whole_numbers(dtype), engine=engine, privacy=privacy)
            for dtype in (np.int64, np.float32)
        )
        check_same(whole, floats)


class Reader(nn.Module):
    def __init__(self, words: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(words, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens).mean(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_embedding_gets_whole_numbers(engine: str):
    clients = SimulatedClients(table_of_whole_numbers(), Reader(), engine=engine)
    assert not clients.module._forward_pre_hooks
    run_of(Reader(), table_of_whole_numbers(), engine=engine, rounds=1)


def test_an_embedding_that_is_too_small_is_named_by_its_own_error():
    with pytest.raises(
        ModelError, match=r"the model cannot take inputs of shape .*index out of range"
    ):
        run_of(Reader(words=2), table_of_whole_numbers())


def test_a_table_that_does_not_fit_is_named_by_its_size_and_not_its_type():
    with pytest.raises(ModelError, match="shapes cannot be multiplied"):
        run_of(nn.Linear(FEATURES + 1, 2), table_of_whole_numbers())


@pytest.mark.parametrize("dtype", [torch.float64, HALF])
def test_a_model_keeps_its_type_whatever_that_of_the_data(dtype: torch.dtype):
    run = run_of(classifier(dtype), table_of_whole_numbers(np.float32))
    state = run.layout.state_dict(run.tree.nodes[0].params)
    assert {value.dtype for value in state.values()} == {dtype}
    # The server's vector: means over clients are not rounded to the digits of bfloat16.
    assert run.tree.nodes[0].params.dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )


def trained_by_hand(
    dtype: torch.dtype, federation: Federation, spec: LocalTraining, rounds: int
) -> Tensor:
    """Return FedAvg's model, by plain torch in the type of the model and the mean in that of the server's vector."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    module = classifier(dtype)
    model = torch.cat([p.detach().flatten() for p in module.parameters()]).to(exact)
    for number in range(1, rounds + 1):
        moved, total = (
            torch.zeros_like(model),
            sum(len(client.train) for client in federation.clients),
        )
        for client in federation.clients:
            nn.utils.vector_to_parameters(model.to(dtype, copy=True), module.parameters())
            x, y = federation.examples(client.id, "train")
            draw = rng.torch_generator(0, "train", number, client.key)
            optimizer = torch.optim.SGD(module.parameters(), lr=spec.lr)
            for batch in batches(len(x), spec, draw):
                optimizer.zero_grad()
                outputs = module(x[batch].to(dtype))
                functional.cross_entropy(outputs.to(exact), y[batch]).backward()
                optimizer.step()
            after = torch.cat([p.detach().flatten() for p in module.parameters()]).to(exact)
            moved += (after - model) * (len(client.train) / total)
        model = model + moved
    return model


@pytest.mark.parametrize("dtype", [torch.float64, HALF])
def test_local_training_is_in_the_type_of_the_model(dtype: torch.dtype):
    federation = table_of_whole_numbers()
    run = run_of(classifier(dtype), federation, rounds=2)
    expected = trained_by_hand(dtype, federation, LOCAL, 2)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(run.tree.nodes[0].params, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_a_model_in_float64_alike(engine: str):
    run = run_of(classifier(torch.float64), table_of_whole_numbers(), engine=engine)
    loop = run_of(classifier(torch.float64), table_of_whole_numbers())
    torch.testing.assert_close(
        run.tree.nodes[0].params, loop.tree.nodes[0].params, rtol=1e-12, atol=1e-12
    )


def test_a_model_in_bfloat16_is_trained_by_the_loop_alone_or_in_workers():
    federation = table_of_whole_numbers()
    for engine in ("stacked", "vmap"):
        with pytest.raises(
            fedclade.ConfigError,
            match=r"the model's parameters are bfloat16, but engines that train clients",
        ):
            run_of(classifier(HALF), federation, engine=engine)
    loop, workers, auto = (
        run_of(classifier(HALF), federation, engine=engine)
        for engine in ("loop", "workers", "auto")
    )
    check_same(workers, loop)
    check_same(auto, loop)


@pytest.mark.parametrize("dtype", [torch.float64, HALF])
@pytest.mark.parametrize("task", ["regression", "binary", "multilabel"])
def test_other_tasks_take_models_of_any_type(dtype: torch.dtype, task: Any):
    federation = task_federation(task, [0, 1], outputs=2 if task == "multilabel" else 0)
    model = nn.Linear(FEATURES, 2 if task == "multilabel" else 1).to(dtype)
    run = run_of(model, federation, rounds=1)
    assert run.tree.nodes[0].params.isfinite().all()


def test_a_resumed_run_of_a_model_in_bfloat16_is_the_uninterrupted_one(tmp_path: Any):
    whole = run_of(classifier(HALF), table_of_whole_numbers(), rounds=3)
    stopped = iter([False, True])
    with pytest.raises(fedclade.RunInterrupted):
        run_of(
            classifier(HALF),
            table_of_whole_numbers(),
            folder=tmp_path / "run",
            stop=lambda: next(stopped),
        )
    resumed = run_of(classifier(HALF), table_of_whole_numbers(), folder=tmp_path / "run")
    assert torch.equal(resumed.tree.nodes[0].params, whole.tree.nodes[0].params)


@pytest.mark.parametrize("dtype", [torch.float64, HALF])
def test_clients_of_a_network_train_models_of_any_type(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
):
    def make(seed: int) -> nn.Module:
        return classifier(dtype)

    federation = table_of_whole_numbers()
    there = federated(grid_of(federation, make), "fedavg", make, rounds=2, local=LOCAL)
    assert ("updates are sent in float32" in caplog.text) == (dtype == torch.float64)
    here = run_of(make, federation, rounds=2)
    torch.testing.assert_close(
        there.tree.nodes[0].params, here.tree.nodes[0].params, rtol=1e-5, atol=1e-6
    )


def test_complex_parameters_are_refused():
    with pytest.raises(
        ModelError, match=r"parameters of Linear should be real numbers .*, got torch.complex64"
    ):
        run_of(nn.Linear(FEATURES, LABELS, dtype=torch.complex64))
