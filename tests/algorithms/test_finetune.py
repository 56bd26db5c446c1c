"""FedAvg with fine-tuning: the copies, when they are made, and what they may not do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import ConfigError, FedAvg, FineTune, LocalSpec, rng, simulate
from fedclade.clients import Round
from fedclade.engine import loop
from fedclade.meter import MeteredClients
from fedclade.params import Layout
from tests.tiny import ScriptedClients, SpyClients, federation_of, perceptron, play, simulated

SPEC = LocalSpec(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
SIZES = [20, 26, 31, 5]


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


def test_each_client_fine_tunes_the_global_model_that_the_round_led_to():
    """As the plain loop does it, over the client's own training data, in an order of its own."""
    federation = world()
    clients, params = simulated(federation, perceptron())
    tree = play(FineTune(epochs=3), clients, params, 2, spec=SPEC, seed=7).states[-1].tree
    theta = play(FedAvg(), clients, params, 2, spec=SPEC, seed=7).states[-1].tree.nodes[0].params
    assert torch.equal(tree.nodes[0].params, theta)
    module, layout = perceptron(), Layout.of(perceptron())
    for client, leaf in tree.leaf_of.items():
        draw = rng.torch_generator(7, "finetune", 2, client)
        examples = federation.examples(client, "train")
        delta, _ = loop.train(module, layout, theta, examples, replace(SPEC, epochs=3), SPEC.lr_at(2), draw)
        torch.testing.assert_close(tree.nodes[leaf].params, theta + delta, rtol=0, atol=1e-6)


def test_copies_are_made_in_evaluated_rounds_only_and_anew_each_time():
    clients = SpyClients(ScriptedClients({0: [1.0], 1: [5.0]}))
    algorithm = FineTune()
    state = algorithm.init(torch.zeros(1), clients)
    for number, evaluated in [(1, False), (2, True), (3, False), (4, True)]:
        state, _ = algorithm.step(state, [0, 1], clients, Round(number, SPEC, evaluated=evaluated))
    assert [len(clients.asked("train", number)) for number in (1, 2, 3, 4)] == [1, 2, 1, 2]
    assert float(state.tree.nodes[0].params) == 4 * 3
    assert [float(leaf.params) for leaf in state.tree.leaves] == [4 * 3 + 1, 4 * 3 + 5]


def test_all_clients_fine_tune_whoever_was_in_the_cohort():
    clients, params = simulated(world(), perceptron())
    played = play(FineTune(), clients, params, 1, spec=SPEC, fraction=0.25)
    regular, tuning = played.clients.asked("train", 1)
    assert (len(regular.ids), len(tuning.ids)) == (1, 4)
    assert list(played.logs[0].losses) == list(regular.ids)


def test_it_only_ever_trains():
    """No evaluation, so no test data, has a say in what is served."""
    clients, params = simulated(world(), perceptron())
    played = play(FineTune(), clients, params, 2, spec=SPEC)
    assert {call.what for call in played.clients.calls} == {"train"}
    assert FineTune().serve(played.states[-1], played.clients) == {0: 1, 1: 2, 2: 3, 3: 4}


def test_the_rounds_of_simulate_that_are_evaluated_are_those_with_copies():
    """Round 2, and 3 as the last."""
    settings = {"local": SPEC, "rounds": 3, "evaluate_every": 2, "engine": "loop"}
    run, plain = (simulate(each, perceptron(), world(), **settings) for each in (FineTune(epochs=5), FedAvg()))
    assert [row["accuracy_mean"] is None for row in run.metrics] == [True, False, False]
    assert run.summary["accuracy"]["mean"] > plain.summary["accuracy"]["mean"]
    assert {row["served_by"] for row in run.clients} == {1, 2, 3, 4}
    assert (run.summary["bytes_up"], run.summary["bytes_down"]) == (plain.summary["bytes_up"],) * 2


def test_nothing_travels_for_the_copies():
    meter = MeteredClients(ScriptedClients({0: [1.0, 2.0], 1: [1.0, 2.0]}))
    play(FineTune(), meter, torch.zeros(2), 2)
    assert (meter.readings()["bytes_up"], meter.readings()["bytes_down"]) == (2 * 2 * 2 * 4,) * 2


def test_epochs_below_1_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.epochs should be at least 1, got 0"):
        FineTune(epochs=0)
