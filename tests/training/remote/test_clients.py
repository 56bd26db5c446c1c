"""Clients on actors reply as those of one process do, whoever dies; here with actors that are no processes."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from fedclade import ConfigError, EngineError, LocalTraining, ModelError, Updates
from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.channel import CountSketch, Meter, Streaming, Traffic
from fedclade.channel.compose import client_side, received
from fedclade.core import (
    OWN,
    ClientWork,
    Em,
    FromStored,
    Layout,
    LocalModel,
    Mixture,
    NoReply,
    Proximal,
    Round,
)
from fedclade.data import StatisticsQuery
from fedclade.tasks import Task
from fedclade.training import SimulatedClients
from fedclade.training.remote import Actors, RayClients, Setup, here, taken_by
from fedclade.training.remote import actor as actor_module
from fedclade.training.remote import cluster as pool_module
from fedclade.training.remote.actor import Place, Shard, unpacked
from fedclade.training.remote.cluster import Room
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

cloudpickle = pytest.importorskip("ray.cloudpickle")

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_query_method.py"
TRUTH, SIZES = [0, 1, 2, 0, 1, 2, 0], [24, 40, 9, 33, 24, 24, 11]
FEDERATION = federation_of(TRUTH, SIZES)
SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.1)


class DiedError(Exception):
    pass


class TaskError(Exception):
    def __init__(self, cause):
        self.cause = cause


class Local:
    """An actor of a cluster that has none: it replies when it is asked, or dies."""

    def __init__(self, setup, place, fails):
        self.shard, self.fails, self.calls = Shard(setup, place, InProcess.pickler), fails, 0
        self.answer = self

    def remote(self, *arguments) -> Callable[[], Any]:
        self.calls += 1
        return lambda: self._reply(*arguments)

    def _reply(self, *arguments):
        if self.fails and self.fails.pop(0):
            raise DiedError("killed by a signal")
        try:
            return self.shard.answer(*arguments)
        except Exception as error:
            raise TaskError(error) from error


class InProcess:
    """What :class:`Cluster` is, in this process."""

    class exceptions:  # noqa: N801
        RayTaskError = TaskError

    deaths = (DiedError,)
    pickler = cloudpickle.CloudPickler

    def __init__(self, count: int, fails=(), room: int | None = None):
        self.room, self.fails, self.left = Room(count, 1, 0, count), list(fails), False
        self.place_for, self.actors = count if room is None else room, []
        self.ray = self

    def put(self, thing):
        return thing

    def wait(self, refs, **_):
        return [refs[0]], refs[1:]

    def get(self, ref):
        return ref()

    def started(self, setup):
        self.actors.append(Local(setup, Place("loop", "cpu", 1, self.room.count), self.fails))
        return self.actors[-1]

    def are_ready(self, actors, seconds):
        return True

    def has_room_for(self, count):
        return self.place_for >= count

    def end(self, actor): ...

    def leave(self):
        self.left = True


@pytest.fixture(autouse=True)
def _process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actor_module, "keep_freed_memory", lambda: None)
    logger = logging.getLogger("fedclade")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def on_actors(count: int, middleware=(), personal=(), module=None, **cluster):
    setup = Setup(
        FEDERATION, module or perceptron(), Task().of(FEDERATION.pool.schema), personal, middleware
    )
    clients = RayClients(setup)
    fake = InProcess(count, **cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "Cluster", lambda *_: fake)
        clients._pool.begun()
    return clients, fake


def in_process(personal=()) -> SimulatedClients:
    return SimulatedClients(FEDERATION, perceptron(), engine="loop", personal=personal)


def models(clients, count: int = 2):
    first = Layout.of(perceptron(), ()).flatten(perceptron())
    first = clients.layout.flatten(perceptron()) if clients.layout.personal else first
    return torch.stack([first + 0.1 * k for k in range(count)])


def assert_same(got: Updates, expected: Updates):
    assert got.ids == expected.ids
    assert got.left_out == expected.left_out
    for name in ("sizes", "losses", "norms", "deltas"):
        torch.testing.assert_close(
            getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-6
        )


ROUND = Round(1, SPEC, seed=3)
OF_ITS_OWN = ClientWork(start=FromStored(), store=LocalModel(), reply=NoReply())


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_all_queries_are_replied_to_in_the_order_asked(count):
    clients, plain = on_actors(count)[0], in_process()
    assert (clients.ids, clients.sizes, clients.layout) == (plain.ids, plain.sizes, plain.layout)
    ids, rows = [5, 0, 3, 1, 6], [1, 0, 1, 1, 0]
    for theirs in ("train", "gradients"):
        got = getattr(clients, theirs)(ids, models(clients), rows, ROUND)
        assert_same(got, getattr(plain, theirs)(ids, models(plain), rows, ROUND))
    pulled, anchors = ClientWork(steps=Proximal(0.5)), [2, 2, 0, 0, 1]
    anchored = clients.train(ids, models(clients, 3), rows, ROUND, pulled, anchors=anchors)
    expected = plain.train(ids, models(plain, 3), rows, ROUND, pulled, anchors=anchors)
    assert_same(anchored, expected)
    twice, rows = [6, 2, 6, 4, 2], [0, 1, 1, 0, 0]
    scores, expected = (
        each.evaluate(twice, models(each), rows, "test") for each in (clients, plain)
    )
    assert scores.ids == expected.ids
    torch.testing.assert_close(scores.scores, expected.scores)
    torch.testing.assert_close(scores.losses, expected.losses)
    torch.testing.assert_close(
        clients.ask(SubspaceQuery(ids, 2, True)), plain.ask(SubspaceQuery(ids, 2, True))
    )
    model = models(plain)[0]
    torch.testing.assert_close(
        clients.ask(DescriptorQuery(ids, model, 1)), plain.ask(DescriptorQuery(ids, model, 1))
    )
    query = StatisticsQuery(ids, labels=LABELS)
    assert torch.equal(clients.ask(query).labels, plain.ask(query).labels)


def test_what_clients_store_for_a_query_is_kept_as_in_one_process():
    clients, plain = on_actors(3)[0], in_process()
    for number in (1, 2):
        query = ShiftQuery([5, 0, 3], number, 0.2, by_label=True)
        assert torch.equal(clients.ask(query), plain.ask(query))
    assert {key: tensor.tolist() for key, tensor in clients.store.tensors().items()} == {
        key: tensor.tolist() for key, tensor in plain.store.tensors().items()
    }
    assert set(clients.store.latest(5)) == {"labels"}


def test_a_query_of_a_users_own_file_travels_to_the_actors():
    """Its class is in no module that an actor could import, so it travels itself."""
    own = runpy.run_path(str(EXAMPLE), run_name="example")["LabelHistogramQuery"]
    query = own([5, 0, 3, 1])
    assert torch.equal(on_actors(3)[0].ask(query), in_process().ask(query))


def test_a_mixture_is_trained_and_evaluated_as_in_one_process():
    clients, plain, asked = on_actors(3)[0], in_process(), Mixture(by_label=True)
    for number in (1, 2):
        this, ids = replace(ROUND, number=number), [5, 0, 3, 1, 6]
        got, expected = (
            each.train(ids, models(each, 3), [0] * 5, this, ClientWork(steps=Em(asked)))
            for each in (clients, plain)
        )
    assert_same(got, expected)
    assert torch.equal(got.components, expected.components)
    scores = [
        each.evaluate([2, 5, 0], models(each, 3), [0] * 3, "test", mixture=asked)
        for each in (clients, plain)
    ]
    torch.testing.assert_close(scores[0].losses, scores[1].losses)
    # 2 was scored and has not trained
    assert clients.kept.keys() == plain.kept.keys() == {5, 0, 3, 1, 6, 2}
    for client, kept in plain.kept.items():
        torch.testing.assert_close(clients.kept[client]["mixture"], kept["mixture"])


def test_actors_join_last_batches_of_one_example_too():
    """Client 6 has 11 examples, in batches of 10."""
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, LABELS))
    clients, plain = (
        on_actors(3, module=normed)[0],
        SimulatedClients(FEDERATION, normed, engine="loop"),
    )
    start = plain.layout.flatten(normed)[None]
    got, expected = (each.train([5, 0, 6], start, [0] * 3, ROUND) for each in (clients, plain))
    assert_same(got, expected)
    assert got.ids == (5, 0, 6)
    assert clients.smallest_batch == plain.smallest_batch == 2


def test_each_actor_holds_a_shard_and_is_called_once_for_a_query():
    clients, fake = on_actors(3)
    clients.train(clients.ids, models(clients), [0] * 7, ROUND)
    held = [set(actor.shard._clients.ids) for actor in fake.actors]
    assert set.union(*held) == set(clients.ids)
    assert sum(map(len, held)) == 7
    loads = [sum(SIZES[client] for client in some) for some in held]
    assert max(loads) < 1.2 * sum(SIZES) / 3
    assert [actor.calls for actor in fake.actors] == [1, 1, 1]
    assert clients.engine_taken == "ray, loop"


def test_who_moves_to_another_actor_replies_the_same():
    clients, plain = on_actors(2)[0], in_process()
    for number in (1, 2):
        later = replace(ROUND, number=number)
        got = clients.train(clients.ids, models(clients), [0] * 7, later)
        assert_same(got, plain.train(plain.ids, models(plain), [0] * 7, later))
        clients._place({client: 1 - home for client, home in clients._homes.items()})


def test_a_slower_actor_loses_clients():
    clients, fake = on_actors(2)
    clients.train(clients.ids, models(clients), [0] * 7, ROUND)
    before = len(clients._shards[0])
    clients._speeds.note(0, 10, 5.0)
    clients._speeds.note(1, 1000, 5.0)
    clients.train(clients.ids, models(clients), [0] * 7, replace(ROUND, number=2))
    assert len(clients._shards[0]) < before
    clients.train(clients.ids, models(clients), [0] * 7, replace(ROUND, number=3))
    assert set(fake.actors[0].shard._clients.ids) == clients._shards[0]


def test_sums_come_back_in_place_of_updates_and_the_bytes_are_counted_the_same():
    def middleware(meter):
        sketch = CountSketch(0, in_process().layout.n_parameters, 16)
        sizes = dict(enumerate(SIZES))
        return [*client_side(sketch=sketch), Traffic(meter), *received(sketch, Streaming(sizes, 2))]

    meters = [Meter(), Meter()]
    setup = Setup(
        FEDERATION,
        perceptron(),
        Task().of(FEDERATION.pool.schema),
        (),
        middleware(meters[0]),
        meters[0],
    )
    clients = RayClients(setup, meter=meters[1])
    fake = InProcess(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "Cluster", lambda *_: fake)
        clients._pool.begun()
    replies = []
    fake.get = lambda ref: replies.append(ref()) or replies[-1]
    ids, rows = [5, 0, 3, 1, 6], [1, 0, 1, 2, 0]
    got = clients.train(ids, models(clients, 3), rows, ROUND)
    plain = in_process().train(ids, models(clients, 3), rows, ROUND)
    assert got.deltas is None
    assert got.sums.group.tolist() == rows
    for row in range(3):
        mine = plain.select([client for client, its in zip(ids, rows, strict=True) if its == row])
        expected = mine.sizes.float() @ mine.deltas
        torch.testing.assert_close(got.sums.groups[row], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        got.sketches,
        CountSketch(0, plain.n_parameters, 16).apply(plain.signatures),
        rtol=1e-4,
        atol=1e-6,
    )
    size = models(clients)[0].nbytes
    assert (meters[1].bytes_up, meters[1].bytes_down) == (5 * size, 5 * size)
    assert all(unpacked(reply).answer.deltas is None for reply in replies)
    assert len(replies) == 3


@pytest.mark.parametrize("personal", [(), ("output.*",)])
def test_what_clients_keep_goes_with_them(personal):
    personal = [name for name, _ in perceptron().named_parameters()][-2:] if personal else []
    clients, fake = on_actors(2, personal=personal, fails=[False, False, True])
    plain = in_process(personal)
    spec = replace(SPEC, optimizer="adam", keep_state=True)
    for number in (1, 2, 2, 3):  # the second is put again, as a server may
        this = replace(ROUND, number=number, local=spec)
        for each in (clients, plain):
            if not personal:
                rows = [OWN if number > 1 else 0] * 3
                each.train([0, 2, 4], models(each), rows, this, OF_ITS_OWN)
            each.train([1, 3, 5], models(each), [0, 1, 1], this)
        clients._place({client: 1 - home for client, home in clients._homes.items()})
    kept, expected = clients.store.tensors(before=True), plain.store.tensors(before=True)
    assert set(kept) == set(expected)
    assert kept
    for name, tensor in expected.items():
        torch.testing.assert_close(kept[name], tensor, rtol=1e-5, atol=1e-6)
    assert clients.kept.keys() == plain.kept.keys()
    rows = [0, 0] if personal else [OWN, OWN]
    asked = [1, 5] if personal else [0, 4]
    scores = [each.evaluate(asked, models(each), rows, "test").losses for each in (clients, plain)]
    torch.testing.assert_close(*scores)
    assert not any(
        actor.shard._clients.store.tensors() for actor in fake.actors if actor.calls == 0
    )


@pytest.mark.parametrize("room", [3, 2])
def test_an_actor_that_dies_is_replaced_or_its_clients_go_to_the_others(room, caplog):
    clients, _ = on_actors(3, fails=[False, True], room=room)
    got = clients.train(clients.ids, models(clients), [0] * 7, ROUND)
    assert_same(got, in_process().train(range(7), models(clients), [0] * 7, ROUND))
    assert len(clients._pool.slots) == room
    assert "an actor died, and its part of the round is repeated: killed by a signal" in caplog.text
    assert ("are assigned to the other 2" in caplog.text) == (room == 2)
    again = replace(ROUND, number=2)
    expected = in_process().train(range(7), models(clients), [0] * 7, again)
    assert_same(clients.train(clients.ids, models(clients), [0] * 7, again), expected)


def test_actors_that_die_again_and_again_end_the_run():
    clients, _ = on_actors(2, fails=[True] * 9)
    with pytest.raises(
        EngineError,
        match=r"actors have died 4 times on the same part of a query; the last .*: killed",
    ):
        clients.train(clients.ids, models(clients), [0] * 7, ROUND)
    clients, _ = on_actors(1, fails=[True], room=0)
    with pytest.raises(
        EngineError,
        match="the only actor has died, and the Ray cluster has no room for another actor: killed",
    ):
        clients.train(clients.ids, models(clients), [0] * 7, ROUND)


class Refuses(torch.nn.Linear):
    """Fails once it takes a step, which no check before round 1 does."""

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            raise RuntimeError("not in training")
        return super().forward(x)


def test_errors_of_clients_are_raised_as_they_are():
    clients, _ = on_actors(2, module=Refuses(FEATURES, LABELS))
    model = clients.layout.flatten(Refuses(FEATURES, LABELS))[None]
    with pytest.raises(
        ModelError, match=r"round 1: the model fails on the data of client \d .*: not in training"
    ):
        clients.train([0, 1], model, [0, 0], ROUND)


def test_a_model_that_does_not_fit_and_one_that_cannot_be_sent_are_found_here():
    task = Task().of(FEDERATION.pool.schema)
    with pytest.raises(ModelError, match="outputs"):
        RayClients(Setup(FEDERATION, torch.nn.Linear(FEATURES, 3), task))
    module = perceptron()
    module.lock = Lock()
    with pytest.raises(
        ConfigError, match="engine 'ray' cannot send the model, the data or the task to its actors"
    ):
        on_actors(1, module=module)


def test_what_is_logged_on_actors_is_said_here_once(caplog):
    caplog.set_level("INFO")
    clients, fake = on_actors(2)
    for actor in fake.actors:
        actor.shard._log._lines.append((30, "look here"))
    clients.train(clients.ids, models(clients), [0] * 7, ROUND)
    assert caplog.messages.count("look here") == 1


def test_actors_end_once_and_reply_no_more():
    clients, fake = on_actors(2)
    clients.close()
    clients.close()
    assert fake.left
    with pytest.raises(EngineError, match="the actors of this run have been ended"):
        clients.train([0], models(clients), [0], ROUND)


@pytest.mark.parametrize(
    ("engine", "before", "expected"),
    [
        ("ray", None, None),
        ("ray", "ray, stacked", "ray, stacked"),
        ("ray", "stacked", None),
        ("auto", "ray (cuda), stacked, replayed", "stacked, replayed"),
        ("auto", "loop", "loop"),
    ],
)
def test_a_run_goes_on_with_the_engine_inside(engine, before, expected):
    assert taken_by(engine, before) == expected
    assert here(engine) == "auto"
    setup = Setup(FEDERATION, perceptron(), Task().of(FEDERATION.pool.schema))
    if engine == "ray":
        assert RayClients(setup, Actors(count=1), resolved=expected).engine_taken == expected
