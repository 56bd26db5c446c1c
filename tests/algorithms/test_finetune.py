"""FedAvg with fine-tuning: the copies, when they are made, and what they may not do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, FineTune, LocalTraining, simulate
from fedclade.core.queries import RoundPlan
from fedclade.training import OWN_MODEL
from tests.reference.fedavg import as_numpy
from tests.reference.finetune import finetune
from tests.tiny import (
    Metered,
    ScriptedClients,
    SpyClients,
    federation_of,
    own_models,
    perceptron,
    play,
    simulated,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
SIZES = [20, 26, 31, 5]


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_equals_the_reference_round_by_round(epochs, fraction):
    """The global model after each of 4 rounds, and every client's copy at their end, whoever takes part."""
    federation = world()
    clients, params = simulated(federation, perceptron())
    played = play(FineTune(epochs=epochs), clients, params, 4, spec=SPEC, seed=7, fraction=fraction)
    cohorts = [sorted(log.losses) for log in played.logs]
    assert {len(cohort) for cohort in cohorts} == {4 * fraction}
    expected = finetune(
        as_numpy(params), federation, perceptron(), SPEC, epochs=epochs, seed=7, cohorts=cohorts
    )
    for state, (w, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), w, atol=1e-5)
    copies = own_models(played)
    assert copies.keys() == {0, 1, 2, 3}
    for client, copy in copies.items():
        np.testing.assert_allclose(copy.numpy(), expected[-1][1][client], atol=1e-5)


def test_the_global_model_is_fedavgs():
    clients, params = simulated(world(), perceptron())
    ours, fedavg = (
        play(each, clients, params, 3, spec=SPEC).states[-1].tree for each in (FineTune(), FedAvg())
    )
    assert torch.equal(ours.nodes[0].params, fedavg.nodes[0].params)
    assert len(ours.nodes) == 1


def test_copies_are_made_in_evaluated_rounds_only_and_anew_each_time():
    simulation, params = simulated(world(), perceptron())
    clients, algorithm, served = SpyClients(simulation), FineTune(), []
    state = algorithm.init(params, clients)
    for number, evaluated in [(1, False), (2, True), (3, False), (4, True)]:
        state, _ = algorithm.step(
            state, [0, 1], clients, RoundPlan(number, SPEC, evaluated=evaluated)
        )
        served.append(algorithm.models_for(state, clients).own)
    assert served == [(), (0, 1, 2, 3)] * 2
    assert [len(clients.asked("train", number)) for number in (1, 2, 3, 4)] == [1, 2, 1, 2]
    tuning, w = clients.asked("train", 4)[1], state.tree.nodes[0].params
    assert tuning.own
    assert all(torch.equal(model, w) for model in tuning.models.values())
    again = RoundPlan(4, SPEC.in_epochs(1), purpose="finetune")
    delta = simulated(world(), perceptron())[0].train([1], w[None], [0], again).required_deltas[0]
    assert torch.equal(simulation.store.latest(1)[OWN_MODEL], w + delta)


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
    assert FineTune().models_for(played.states[-1], played.clients).own == (0, 1, 2, 3)


def test_the_rounds_of_simulate_that_are_evaluated_are_those_with_copies():
    """Round 2, and 3 as the last."""
    settings = {"local": SPEC, "rounds": 3, "evaluate_every": 2, "engine": "loop"}
    run, plain = (
        simulate(each, perceptron(), world(), **settings) for each in (FineTune(epochs=5), FedAvg())
    )
    assert [row["accuracy_mean"] is None for row in run.metric_rows] == [True, False, False]
    assert run.summary["accuracy"]["mean"] > plain.summary["accuracy"]["mean"]
    assert {row["served_by"] for row in run.client_rows} == {0}
    assert run.kept.keys() == {0, 1, 2, 3}
    assert (run.summary["bytes_up"], run.summary["bytes_down"]) == (plain.summary["bytes_up"],) * 2


def test_nothing_travels_for_the_copies():
    metered = Metered(ScriptedClients({0: [1.0, 2.0], 1: [1.0, 2.0]}))
    play(FineTune(), metered, torch.zeros(2), 2)
    assert (metered.meter.readings()["bytes_up"], metered.meter.readings()["bytes_down"]) == (
        2 * 2 * 2 * 4,
    ) * 2


def test_personal_parameters_are_fine_tuned_with_the_rest():
    """From what they are after the round, of which they are then a part."""
    settings = {"local": SPEC, "rounds": 2, "engine": "loop", "personal": "head"}
    run = simulate(FineTune(), perceptron(), world(), **settings)
    assert run.layout is not None
    whole = run.layout.joined(run.tree.nodes[0].params, run.kept[1]["personal"])
    plain, _ = simulated(world(), perceptron())
    tuned = plain.train(
        [1], whole[None], [0], RoundPlan(2, SPEC.in_epochs(1), purpose="finetune")
    ).required_deltas[0]
    assert torch.equal(run.kept[1]["model"], whole + tuned)


def test_epochs_below_1_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.epochs should be at least 1, got 0"):
        FineTune(epochs=0)
