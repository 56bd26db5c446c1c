from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import ConfigError, DataError, LocalTraining, ModelError
from fedclade.core import ClientWork, Layout, Nothing, Proximal, Round, Updates, rng
from fedclade.data.federation import ClientData, Federation
from fedclade.tasks import FittedTask
from fedclade.training import SimulatedClients, auto, loop
from fedclade.training import clients as clients_module
from fedclade.training.jobs import Engine
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.threads import choose_device
from fedclade.training.workers import cannot_fork
from tests.tiny import FEATURES, LABELS, VIEWS, federation_of, linear, perceptron, simulated

TRUTH, SIZES = [0, 1, 2], [12, 15, 9]


def two_models(params: torch.Tensor) -> torch.Tensor:
    return torch.stack([params, params + 0.1])


def test_every_client_trains_from_its_own_model_with_its_own_draws():
    """Eq. 1 for each client by itself: the key of its draws is seed, purpose, round and the client's own number."""
    federation = federation_of(TRUTH, SIZES)
    clients, params = simulated(federation, linear())
    spec = LocalTraining(epochs=2, batch_size=4, lr=0.2, lr_decay=0.5)
    models = two_models(params)
    updates = clients.train([2, 0], models, [1, 0], Round(3, spec, seed=9, purpose="again"))
    assert updates.ids == (2, 0)
    assert updates.sizes.tolist() == [9, 12]
    for row, (client, model) in enumerate([(2, models[1]), (0, models[0])]):
        draw = rng.torch_generator(9, "again", 3, client)
        delta, loss = loop.train(
            linear(),
            Layout.of(linear()),
            model,
            federation.examples(client, "train"),
            spec,
            0.2 * 0.5**2,
            FittedTask(),
            draw,
        )
        assert torch.equal(updates.deltas[row], delta)
        assert float(updates.losses[row]) == loss


def test_anchors_reach_every_client_in_every_block():
    """Ditto's v ← v − η (∇F(v) + λ (v − w)): each client is pulled to the row that is named for it."""
    federation = federation_of(TRUTH, SIZES)
    module = linear()
    clients = SimulatedClients(federation, module, engine="loop", memory=1)  # one at a time
    models = two_models(clients.layout.flatten(module))
    plain = LocalTraining(batch_size=4, lr=0.2)
    spec = replace(plain, mu=0.5)
    updates = clients.train(
        [2, 0, 1],
        models,
        [0, 0, 1],
        Round(1, plain, seed=9),
        ClientWork(steps=Proximal(0.5)),
        anchors=[1, 0, 0],
    )
    for i, (client, row, anchor) in enumerate([(2, 0, 1), (0, 0, 0), (1, 1, 0)]):
        examples, draw = (
            federation.examples(client, "train"),
            rng.torch_generator(9, "train", 1, client),
        )
        delta, _ = loop.train(
            linear(),
            Layout.of(linear()),
            models[row],
            examples,
            spec,
            0.2,
            FittedTask(),
            draw,
            anchor=models[anchor],
        )
        assert torch.equal(updates.deltas[i], delta)


class Blocks(LoopEngine):
    """The loop, which notes who trains at the same time."""

    name = "blocks"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def train(self, task, out=None):
        self.seen.append([job.client for job in task.jobs])
        return super().train(task, out)


def updates_within(memory: int | None, monkeypatch, engine: Engine) -> Updates:
    """Return the updates of five clients of different sizes within so much memory."""
    monkeypatch.setattr(clients_module, "build_engine", lambda *_: engine)
    module = perceptron()
    clients = SimulatedClients(
        federation_of([0, 1, 2, 0, 1], [12, 40, 9, 40, 15]), module, memory=memory
    )
    models = two_models(clients.layout.flatten(module))
    return clients.train(
        [4, 3, 2, 1, 0],
        models,
        [0, 1, 0, 1, 0],
        Round(2, LocalTraining(epochs=2, batch_size=4, lr=0.2)),
    )


def test_the_size_of_blocks_changes_nothing(monkeypatch):
    """To the last bit in the loop; clients of one size come together, and all of them when memory suffices."""
    engines = [Blocks() for _ in range(3)]
    whole, halves, one_by_one = (
        updates_within(memory, monkeypatch, engine)
        for memory, engine in zip((None, 7000, 1), engines, strict=True)
    )
    assert [engine.seen for engine in engines] == [
        [[4, 3, 2, 1, 0]],
        [[3, 1], [4, 0], [2]],
        [[3], [1], [4], [0], [2]],
    ]
    assert torch.equal(halves.deltas, whole.deltas)
    assert torch.equal(one_by_one.deltas, whole.deltas)
    assert torch.equal(one_by_one.losses, whole.losses)


def test_the_size_of_blocks_changes_nothing_but_rounding_where_clients_train_together(monkeypatch):
    whole, blocks = (
        updates_within(memory, monkeypatch, StackedEngine()) for memory in (None, 7000)
    )
    torch.testing.assert_close(blocks.deltas, whole.deltas, rtol=1e-5, atol=1e-6)


class Largest(nn.Module):
    """Notes how many examples came at once."""

    seen = 0

    def forward(self, x):
        Largest.seen = max(Largest.seen, len(x))
        return x


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap", "workers"])
def test_a_batch_size_above_every_clients_data_takes_no_more_than_all_the_data(engine, monkeypatch):
    """And gives what a batch of the largest client's size gives, to the last bit."""
    if engine == "workers" and cannot_fork(torch.device("cpu")):
        pytest.skip("processes are forked on Linux only")
    sizes = [12, 40, 9, 40, 15]
    monkeypatch.setattr(Largest, "seen", 0)
    # so that the work of a step is counted
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    whole, capped = (
        SimulatedClients(
            federation_of([0, 1, 2, 0, 1], sizes), nn.Sequential(Largest(), linear()), engine=engine
        ).train(
            *([4, 3, 2, 1, 0], Layout.of(linear()).flatten(linear())[None], [0] * 5),
            Round(2, LocalTraining(epochs=2, batch_size=batch_size, lr=0.2)),
        )
        for batch_size in (10**6, max(sizes))
    )
    assert max(sizes) <= Largest.seen <= len(sizes) * max(sizes), "padded at most"
    assert torch.equal(whole.deltas, capped.deltas)
    assert torch.equal(whole.losses, capped.losses)


class OnlyOne(LoopEngine):
    name = "only one"

    def train(self, task, out=None):
        if len(task.jobs) > 1:
            raise RuntimeError("too many at once")
        return super().train(task, out)


def test_an_engine_that_fails_on_several_clients_is_named(monkeypatch):
    text = re.escape(
        "round 2: engine 'only one' fails on 5 clients together, although each client can be trained alone: too many "
        "at once; use --engine loop, or a smaller --memory"
    )
    with pytest.raises(ModelError, match=text):
        updates_within(None, monkeypatch, OnlyOne())


class Scales(nn.Module):
    """Holds a buffer of its own, which all clients that train together share in the stacked engine."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(FEATURES))
        self.output = nn.Linear(FEATURES, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(x * self.scale)


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_clients_that_cannot_train_together_in_some_round_train_in_the_loop(
    engine, monkeypatch, caplog
):
    """To the bits of the loop, with the same draws; the log says so once, and later rounds are not held back by it."""
    monkeypatch.setattr(auto, "fastest", lambda engines, task: next(iter(engines)))
    federation, module = federation_of(TRUTH, SIZES), Scales()
    clients, params = simulated(federation, module, engine)
    by_loop, _ = simulated(federation, module)
    apart = torch.stack([params, params])
    apart[1, -FEATURES:] = 2.0  # the buffer of the second model

    def trained(these, models, number):
        spec = LocalTraining(epochs=2, batch_size=4, momentum=0.5)
        return these.train([0, 1, 2], models, [0, 1, 0], Round(number, spec)).deltas

    for number, models in enumerate(
        [two_models(params)[[0, 0]], apart, apart, params.repeat(2, 1)], start=1
    ):
        got, expected = trained(clients, models, number), trained(by_loop, models, number)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert models is not apart or torch.equal(got, expected)
    assert clients.engine == "stacked"
    (line,) = [
        record.message for record in caplog.records if record.name == "fedclade.training.clients"
    ]
    assert line == (
        "engine stacked cannot train some clients together: 'scale' (Scales) is a buffer that differs between the "
        "models, but the stacked engine stores it only once for all clients (engine loop can train these clients); "
        "these clients are trained by engine loop"
    )


def test_an_engine_that_cannot_train_the_model_says_so_itself():
    clients, params = simulated(federation_of(TRUTH, SIZES), TrainsBadly(), "vmap")
    with pytest.raises(ConfigError, match="engine 'vmap' cannot train this model: layer 'norm'"):
        clients.train([0], params[None], [0], Round(2, LocalTraining(batch_size=6)))


def test_gradients_are_each_clients_own():
    federation = federation_of(TRUTH, SIZES)
    clients, params = simulated(federation, linear())
    models = two_models(params)
    updates = clients.gradients([1, 2], models, [1, 0], Round(1, LocalTraining()))
    for row, (client, model) in enumerate([(1, models[1]), (2, models[0])]):
        examples = federation.examples(client, "train")
        expected, loss = loop.gradient(
            linear(), Layout.of(linear()), model, examples, FittedTask(), 100
        )
        torch.testing.assert_close(updates.deltas[row], expected)
        assert float(updates.losses[row]) == pytest.approx(loss)


def shared_inputs() -> Federation:
    """Four clients that are tested on the same examples, seen in two ways, and one with examples of its own."""
    federation = federation_of([0, 1, 0, 1, 2])
    shared = federation.clients[0].test
    clients = [dataclasses.replace(c, test=shared) for c in federation.clients[:4]]
    return dataclasses.replace(federation, clients=(*clients, federation.clients[4]))


def test_shared_evaluation_equals_that_of_each_client_alone():
    clients, params = simulated(shared_inputs(), perceptron())
    models, rows = two_models(params), [0, 0, 1, 1, 0]
    together = clients.evaluate(range(5), models, rows, "test")
    for client, row in enumerate(rows):
        alone = clients.evaluate([client], models, [row], "test")
        assert together.scores[:, 0][client] == alone.scores[:, 0][0]
        assert together.losses[client] == pytest.approx(float(alone.losses[0]))
    assert together.examples.tolist() == [20] * 5
    assert together.scores[:, 0][0] != together.scores[:, 0][1]


def test_evaluation_equals_accuracy_and_cross_entropy_by_hand():
    federation = federation_of(TRUTH)
    clients, params = simulated(federation, linear())
    evaluation = clients.evaluate([1], params[None], [0], "validation")
    data = federation.clients[1]
    x = federation.pool.x[torch.from_numpy(data.validation)]
    y = torch.tensor(VIEWS[1])[federation.pool.y[torch.from_numpy(data.validation)]]
    logits = x @ params[: FEATURES * LABELS].view(LABELS, FEATURES).T + params[FEATURES * LABELS :]
    assert float(evaluation.scores[:, 0][0]) == float((logits.argmax(1) == y).double().mean())
    assert float(evaluation.losses[0]) == pytest.approx(
        float(nn.functional.cross_entropy(logits, y)), rel=1e-5
    )
    assert evaluation.examples.tolist() == [10]


def test_clients_with_the_same_indices_but_other_turns_do_not_share_inputs():
    federation = federation_of([0, 0])
    images = torch.randn(
        len(federation.pool.x), 1, 2, 2, generator=torch.Generator().manual_seed(0)
    )
    pool = dataclasses.replace(federation.pool, x=images)
    shared = federation.clients[0].test
    turned = [dataclasses.replace(c, test=shared, quarter_turns=c.id) for c in federation.clients]
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, LABELS))
    clients, params = simulated(
        dataclasses.replace(federation, pool=pool, clients=tuple(turned)), module
    )
    together = clients.evaluate([0, 1], params[None], [0, 0], "test")
    assert together.losses[0] != together.losses[1]
    assert together.losses[1] == clients.evaluate([1], params[None], [0], "test").losses[0]


def test_a_split_without_examples_is_an_error_that_names_the_client():
    clients, params = simulated(federation_of(TRUTH, validation=0), linear())
    text = "client 1 has no validation examples; set data.validation_fraction above 0"
    with pytest.raises(DataError, match=text):
        clients.evaluate([1], params[None], [0], "validation")


def test_who_diverges_is_left_out():
    clients, params = simulated(federation_of(TRUTH, SIZES), linear())
    n = len(params)
    models = torch.stack([params, torch.full_like(params, 1e30)])
    updates = clients.train(
        [0, 1], models, [0, 1], Round(4, LocalTraining(lr=1e10, weight_decay=0.1))
    )
    assert updates.ids == (0,)
    assert updates.left_out == {1: f"{n} of {n} entries of the update are NaN or infinite"}


class TrainsBadly(nn.Module):
    """A model that cannot be trained on a batch of three examples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, LABELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) % 6 == 3:  # also of two clients together, with three each
            raise ValueError("three examples are a crowd")
        return self.output(self.norm(x))


@pytest.mark.parametrize("engine", ["loop", "stacked", "auto"])
def test_a_model_that_fails_in_training_names_client_and_round(engine):
    """The last batch of client 1 has three examples: 15 = 2·6 + 3."""
    clients, params = simulated(federation_of(TRUTH, SIZES), TrainsBadly(), engine)
    text = re.escape(
        "round 2: the model fails on the data of client 1 ('c1'): three examples are a crowd"
    )
    with pytest.raises(ModelError, match=text):
        clients.train([0, 1], params[None], [0, 0], Round(2, LocalTraining(batch_size=6)))


def test_a_model_with_too_few_outputs_is_refused():
    text = re.escape(
        "the model should return outputs of shape (2, 4) for 4 labels of tiny, got (2, 3)"
    )
    with pytest.raises(ModelError, match=text):
        SimulatedClients(federation_of(TRUTH), nn.Linear(FEATURES, 3))


def test_a_model_that_does_not_take_the_inputs_is_refused():
    text = re.escape(
        "the model cannot take inputs of shape (6,) (tiny): mat1 and mat2 shapes cannot be multiplied"
    )
    with pytest.raises(ModelError, match=text):
        SimulatedClients(federation_of(TRUTH), nn.Linear(5, LABELS))


class GivesAPair(nn.Linear):
    def forward(self, x):
        return x, x


def test_a_model_that_returns_several_tensors_needs_a_choice():
    text = re.escape(
        "the model GivesAPair returns the tensors 0, 1; state the one that is scored, such as "
        "Task(output=0) or task.output in a config"
    )
    with pytest.raises(ModelError, match=text):
        SimulatedClients(federation_of(TRUTH), GivesAPair(FEATURES, LABELS))


def test_a_language_model_gives_outputs_for_every_place():
    federation = federation_of([0])
    n = len(federation.pool.x)
    pool = dataclasses.replace(
        federation.pool,
        x=torch.zeros(n, 5, dtype=torch.int64),
        y=torch.zeros(n, 5, dtype=torch.int64),
        outputs=7,
        task="language",
    )
    language = dataclasses.replace(federation, pool=pool)
    good = nn.Embedding(7, 7)
    assert SimulatedClients(language, good).evaluate(
        [0], torch.zeros(1, 49), [0], "test"
    ).examples.tolist() == [20 * 5]
    with pytest.raises(
        ModelError,
        match=re.escape(
            "should return outputs of shape (2, 5, 7) for 7 labels of tiny, got (2, 5, 6)"
        ),
    ):
        SimulatedClients(language, nn.Embedding(7, 6))


def test_ids_and_sizes_are_the_federations():
    federation = federation_of(TRUTH, SIZES)
    clients, _ = simulated(federation, linear())
    assert clients.ids == (0, 1, 2)
    assert clients.sizes == {0: 12, 1: 15, 2: 9}


def test_a_federation_of_one_example_per_client_trains():
    federation = federation_of([0])
    one = np.array([0])
    federation = dataclasses.replace(federation, clients=(ClientData(0, "c0", 0, one, one, one),))
    clients, params = simulated(federation, linear())
    assert clients.train([0], params[None], [0], Round(1, LocalTraining())).deltas.abs().max() > 0


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match=r"device should be auto, cpu, cuda, or .*, got 'tpu'"):
        choose_device("tpu")


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match="device 'cuda' was requested, but torch finds no CUDA device; use --device cpu",
    ):
        choose_device("cuda")
    assert choose_device("auto") == "cpu"


def test_auto_takes_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(device) for device in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_one_gpu_of_several_is_named_by_its_number(monkeypatch):
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device("cuda:1") == "cuda:1"
    assert current == [1]
    with pytest.raises(
        ConfigError,
        match="device 'cuda:2' was requested, but this machine has the devices cpu, cuda:0, cuda:1;",
    ):
        choose_device("cuda:2")
    with pytest.raises(ConfigError, match="got 'cuda:one'"):
        choose_device("cuda:one")
    assert current == [1]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_an_optimizer_goes_on_where_it_was_in_the_round_before(engine):
    """Of full batches, three rounds of an epoch are one round of three."""
    spec = LocalTraining(batch_size=100, optimizer="adam", keep_state=True)
    federation = federation_of(TRUTH, SIZES)
    clients, params = (
        SimulatedClients(federation, linear(), engine=engine),
        Layout.of(linear()).flatten(linear()),
    )
    once = ClientWork(store=Nothing())
    expected = clients.train(
        TRUTH, params[None], [0, 0, 0], Round(1, spec.in_epochs(3)), once
    ).deltas

    models = params.repeat(3, 1)
    for number in (1, 2, 3):
        # Training that stores nothing leaves nothing; a repeated round begins as before.
        for work in (ClientWork(), once, ClientWork()):
            updates = clients.train(TRUTH, models, TRUTH, Round(number, spec), work)
        models = models + updates.deltas
    torch.testing.assert_close(models - params, expected)
    assert {name.partition("/")[0] for name in clients.store.latest(0)} == {"optimizer"}
    assert float(clients.store.latest(0)["optimizer/1.weight.step"]) == 3
    assert not torch.allclose(
        clients.train(TRUTH, params[None], [0, 0, 0], Round(4, spec)).deltas,
        clients.train(TRUTH, params[None], [0, 0, 0], Round(1, spec)).deltas,
    )


def test_the_optimizer_of_a_client_that_diverges_is_not_kept():
    spec = LocalTraining(batch_size=4, momentum=0.9, lr=1e30, keep_state=True)
    clients, params = simulated(federation_of(TRUTH, SIZES), linear())
    updates = clients.train([0, 1], params[None], [0, 0], Round(1, spec))
    assert set(updates.left_out) == {0, 1}
    assert clients.store.tensors() == {}
