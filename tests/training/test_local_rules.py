"""Local rules: every engine and any memory give the same, and what clients keep lasts as it should."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedclade import APFL, Algorithm, LocalTraining, PerFedAvg, PFedMe, Scaffold
from fedclade.algorithms.apfl import Ruled
from fedclade.core import (
    AllData,
    ClientWork,
    ControlVariates,
    LocalRule,
    Nothing,
    Round,
    RoundPlan,
    SplitPart,
    local_rule,
)
from fedclade.training import SimulatedClients
from tests.tiny import FEATURES, LABELS, federation_of, own_models, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.1, weight_decay=0.01, clip_norm=2.0)
MOMENTUM = replace(SPEC, momentum=0.5)
SIZES = [20, 26, 32, 5]
METHODS: dict[str, Algorithm] = {
    "apfl": APFL(adaptive=True),
    "pfedme": PFedMe(lam=1.0, steps=2, personal_lr=0.05),
    "per_fedavg": PerFedAvg(variant="HF", alpha=0.05, delta=0.1),
    "scaffold": Scaffold(),
}
RULES: dict[str, LocalRule] = {
    **{name: method.rule for name, method in METHODS.items() if isinstance(method, Ruled)},
    "scaffold": ControlVariates(),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, LABELS))


def assert_same(here, there) -> None:
    for ours, theirs in zip(here.states, there.states, strict=True):
        torch.testing.assert_close(
            theirs.tree.nodes[0].params, ours.tree.nodes[0].params, rtol=0, atol=1e-5
        )
    ours, theirs = own_models(here), own_models(there)
    assert ours.keys() == theirs.keys()
    for client, model in ours.items():
        torch.testing.assert_close(theirs[client], model, rtol=0, atol=1e-5)


@each_method
def test_all_at_once_gives_what_the_loop_gives(method):
    spec = SPEC if isinstance(method, Scaffold) else MOMENTUM
    loop, together = (
        play(method, *simulated(world(), perceptron(), engine), 2, spec=spec)
        for engine in ("loop", "vmap")
    )
    assert together.clients.clients.engine == "vmap"
    assert_same(loop, together)


@pytest.mark.parametrize("engine", ["auto", "stacked", "workers"])
def test_engines_that_take_plain_steps_leave_it_to_others(engine):
    method = METHODS["apfl"]
    loop, other = (
        play(method, *simulated(world(), perceptron(), name), 2, spec=SPEC)
        for name in ("loop", engine)
    )
    assert other.clients.clients.engine in ("vmap", "loop")
    assert_same(loop, other)


@each_method
def test_a_module_with_buffers_takes_the_loop(method):
    loop = play(method, *simulated(world(), normed()), 2, spec=SPEC)
    clients, params = simulated(world(), normed(), "stacked")
    assert_same(loop, play(method, clients, params, 2, spec=SPEC))
    assert clients.engine == "loop"
    means = {
        client: model[clients.layout.n_parameters :][:8]
        for client, model in own_models(loop).items()
    }
    assert all(bool((mean != 0).all()) for mean in means.values()), "the running means have moved"


@each_method
def test_blocks_of_memory_change_nothing(method):
    loop = play(method, *simulated(world(), perceptron(), "vmap"), 2, spec=SPEC)
    few = SimulatedClients(world(), module := perceptron(), engine="vmap", memory=1)
    assert_same(loop, play(method, few, few.layout.flatten(module), 2, spec=SPEC))


@each_method
def test_a_round_that_is_asked_for_again_starts_from_before_it(method):
    clients, params = simulated(world(), perceptron())
    kept = []
    state, _ = method.step(method.init(params, clients), [0, 1], clients, RoundPlan(1, SPEC))
    for _ in range(2):
        method.step(state, [0, 1], clients, RoundPlan(2, SPEC))
        kept.append(dict(clients.store.latest(1)))
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@each_rule
def test_training_that_stores_nothing_keeps_nothing(rule):
    clients, params = simulated(world(), perceptron())
    for data in (AllData(), SplitPart(0, 2)):
        work = ClientWork(data=data, steps=rule, store=Nothing())
        clients.train([0], params[None], [0], Round(1, SPEC), work, anchors=[0])
        assert not clients.store


@each_rule
def test_who_diverges_is_left_out_and_keeps_nothing(rule):
    clients, params = simulated(world(), perceptron())
    spec = LocalTraining(epochs=2, batch_size=10, lr=3e38)
    work = ClientWork(steps=rule)
    updates = clients.train([0, 1], params[None], [0, 0], Round(1, spec), work, anchors=[0, 0])
    assert set(updates.left_out) == {0, 1}
    assert not any(clients.store.latest(client) for client in (0, 1))


@each_rule
def test_a_rule_travels_as_its_name_and_numbers(rule):
    assert local_rule(json.loads(json.dumps(rule.described()))) == rule
