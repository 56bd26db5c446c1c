"""Clients that hold other data from some round on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclade import LocalTraining
from fedclade.algorithms import SubspaceQuery
from fedclade.core import ClientWork, FullGradient, Models, OfRounds, Round, TrainQuery
from fedclade.data import Federation, Stage
from fedclade.training import SimulatedClients
from fedclade.training.stages import Stages
from tests.tiny import FEATURES, federation_of, linear

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)


def changing() -> Federation:
    """Return clients that hold others' data, and another number of examples, from rounds 2 and 4 on; one stays."""
    federation = federation_of([0, 1, 2, 3], [24, 31, 7, 40])
    stages = []
    for first, order in ((2, (1, 0, 2, 3)), (4, (3, 1, 2, 0))):
        held = [federation.clients[k] for k in order]
        clients = tuple(
            now if now.id == at else replace(now, id=at, name=f"c{at}", key=at)
            for at, now in enumerate(held)
        )
        stages.append(Stage(first, clients, {0: 1, 1: 0, 2: 2, 3: 3}))
    return replace(federation, stages=tuple(stages))


def trained(clients: SimulatedClients, number: int, data_rounds=None) -> Tensor:
    models = torch.stack([clients.layout.flatten(linear(0))])
    work = ClientWork()
    if data_rounds is not None:
        work = ClientWork(data=OfRounds(dict(zip(clients.ids, data_rounds, strict=True))))
    updates = clients.train(clients.ids, models, [0] * 4, Round(number, SPEC), work)
    return torch.cat([updates.required_deltas.flatten(), updates.sizes.float()])


@pytest.mark.parametrize(("engine", "memory"), [("loop", 1), ("stacked", None), ("workers", None)])
def test_clients_train_on_what_they_hold_in_the_round(engine, memory):
    federation = changing()
    clients = SimulatedClients(federation, linear(), engine=engine, memory=memory)
    for number in (1, 2, 3, 4, 2):  # as one who asks for a round again
        expected = trained(
            SimulatedClients(federation.in_round(number), linear(), engine="loop"), number
        )
        assert torch.allclose(trained(clients, number), expected, atol=1e-5)
    assert clients.sizes == federation.in_round(4).sizes


@pytest.mark.parametrize(("engine", "memory"), [("loop", 1), ("stacked", None), ("workers", None)])
def test_clients_train_on_what_they_held_before(engine, memory):
    """What is the same in several rounds is there once: client 2 holds the same in all."""
    federation = changing()
    clients = SimulatedClients(federation, linear(), engine=engine, memory=memory)
    rounds = [(1, 2), (4,), (1, 2, 4), (2, 3)]
    for _ in range(2):
        found = trained(clients, 5, rounds)
        assert found[-4:].tolist() == [24 + 31, 31, 7, 40]
    joined = [federation.in_round(number).examples(0, "train") for number in (1, 2)]
    x, y = (torch.cat(column) for column in zip(*joined, strict=True))
    layout, model = clients.layout, linear(0)
    of_rounds = OfRounds(dict(zip(clients.ids, rounds, strict=True)))
    work = ClientWork(data=of_rounds, steps=FullGradient())
    models = Models(layout.flatten(model)[None], [0] * 4)
    query = TrainQuery(clients.ids, models, Round(5, SPEC), work)
    gradient = clients.ask(query).required_deltas[0]
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    assert torch.allclose(
        gradient, -torch.cat([p.grad.flatten() for p in model.parameters()]), atol=1e-6
    )


JOINED = (24 + 31) * (FEATURES * 4 + 8)
"""Bytes of the examples that client 0 holds in rounds 1 and 2: inputs in float32, targets in int64."""


def stages_of(federation: Federation, budget: int) -> Stages:
    """Return what clients hold, where nothing is evaluated."""
    return Stages(federation, torch.device("cpu"), budget, lambda *_: None)


def ask_for_joined(stages: Stages, number: int = 3) -> Tensor:
    """Let client 0 train on what it held in rounds 1 and 2; return the inputs."""
    work = ClientWork(data=OfRounds({0: (1, 2)}))
    query = TrainQuery((0,), Models(torch.zeros(1, 1), [0]), Round(number, SPEC), work)
    ((client, inputs, targets),) = stages.trained(query, [0], stages.of(query))
    assert (client, len(inputs), len(targets)) == (0, 55, 55)
    return inputs


def test_examples_of_several_stages_count_in_the_bytes_that_are_kept_once():
    stages = stages_of(changing(), 10**6)
    stages.in_round(2)
    before = stages.bytes_kept
    first = ask_for_joined(stages)
    after = stages.bytes_kept
    of_stages = sum(stages.in_round(number).data.bytes_kept for number in (1, 2))
    assert after - before == JOINED + of_stages - before
    assert ask_for_joined(stages) is first, "the same tensors again"
    assert stages.bytes_kept == after


def test_examples_of_several_stages_that_do_not_fit_are_not_kept():
    roomy = stages_of(changing(), 10**6)
    roomy.in_round(2)
    ask_for_joined(roomy)
    for budget, fits in ((roomy.bytes_kept, True), (roomy.bytes_kept - 1, False)):
        stages = stages_of(changing(), budget)
        stages.in_round(2)
        first = ask_for_joined(stages)
        assert (ask_for_joined(stages) is first) == fits
        assert stages.bytes_kept == (budget if fits else budget - JOINED + 1)


def test_a_later_stage_lets_go_of_what_was_joined():
    stages = stages_of(changing(), 10**6)
    stages.in_round(2)
    first = ask_for_joined(stages)
    stages.in_round(4)
    assert stages.bytes_kept == stages.now.data.bytes_kept
    again = ask_for_joined(stages, number=4)
    assert again is not first
    assert torch.equal(again, first)


def test_every_query_is_about_a_round():
    federation = changing()
    clients, models = SimulatedClients(federation, linear(), engine="loop"), linear(0)
    models = clients.layout.flatten(models)[None]
    for number in (1, 4, 3):
        then = SimulatedClients(federation.in_round(number), linear(), engine="loop")
        for split in ("train", "validation", "test"):
            found = clients.evaluate(clients.ids, models, [0] * 4, split, number)
            expected = then.evaluate(clients.ids, models, [0] * 4, split)
            assert torch.equal(found.losses, expected.losses)
            assert torch.equal(found.examples, expected.examples)
        query = SubspaceQuery(clients.ids, 2, per_label=True, data_round=number)
        assert torch.equal(clients.ask(query), then.ask(query))
    now = clients.evaluate(clients.ids, models, [0] * 4, "train")
    assert torch.equal(
        now.losses, clients.evaluate(clients.ids, models, [0] * 4, "train", 4).losses
    )


def test_what_clients_accumulate_they_train_on_once():
    """A later stage holds what the first held, and more; a client that sees it otherwise has it twice."""
    federation = federation_of([0, 1, 2, 3], [24, 31, 7, 40])
    more = tuple(
        replace(each, train=np.concatenate([each.train, each.validation]))
        for each in federation.clients
    )
    turned = (replace(more[0], label_map=torch.tensor([1, 0, 2, 3])), *more[1:])
    federation = replace(federation, stages=(Stage(2, more, None), Stage(3, turned, None)))
    clients = SimulatedClients(federation, linear(), engine="loop")
    found = trained(clients, 3, [(1, 2), (1, 2), (1,), (2,)])
    assert found[-4:].tolist() == [34, 41, 7, 50]
    assert torch.equal(
        found[: len(found) // 4], trained(clients, 3, [(2,), (1, 2), (1,), (2,)])[: len(found) // 4]
    )
    assert trained(clients, 3, [(1, 2, 3), (2, 3), (3,), (1,)])[-4:].tolist() == [68, 41, 17, 40]
