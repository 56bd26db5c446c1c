"""A run counts the training steps of its clients, and compares them with one training of each cohort."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fedclade import (
    CFL,
    FINISH,
    Callback,
    FedAvg,
    FineTune,
    LocalTraining,
    ReplicatedCFL,
    Run,
    RunInterrupted,
    simulate,
)
from fedclade.channel import Channel, Meter, StepCounting
from fedclade.core import ClientWork, Splits, count_steps
from fedclade.core.queries import Round
from fedclade.training import SimulatedClients
from tests.tiny import ScriptedClients, federation_of, linear

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
SIZES = [40, 42, 55, 80, 100, 121]
STEPS = sum(2 * batches for batches in (4, 5, 6, 8, 10, 13))
"""Steps of one training of each client: two epochs of one step for each mini-batch of ten examples."""
FEDERATION = federation_of([0, 1] * 3, SIZES)


def run_of(algorithm, **settings):
    settings = {"local": SPEC, "rounds": 4, "engine": "loop"} | settings
    return simulate(algorithm, linear(), FEDERATION, **settings)


def test_fedavg_takes_the_steps_of_one_training_of_each_cohort():
    run = run_of(FedAvg())
    assert [row["steps"] for row in run.metric_rows] == [STEPS] * 4
    assert run.summary["steps"] == {"total": 4 * STEPS, "of_cohorts": 4 * STEPS, "ratio": 1.0}


def test_only_clients_that_are_sampled_count():
    run = run_of(FedAvg(), client_fraction=0.5)
    assert all(0 < row["steps"] == row["cohort_steps"] < STEPS for row in run.metric_rows)


def test_a_model_that_trains_in_addition_doubles_the_steps_after_the_split():
    run = run_of(CFL(eps2=1e-3, split_rounds=(2,), fallback=True))
    assert [row["steps"] for row in run.metric_rows] == [STEPS, STEPS, 2 * STEPS, 2 * STEPS]
    assert run.summary["steps"]["ratio"] == 1.5


def test_fine_tuning_for_the_evaluation_counts():
    run = run_of(FineTune(epochs=4), evaluate_every=4)
    assert [row["steps"] for row in run.metric_rows] == [STEPS, STEPS, STEPS, 3 * STEPS]
    assert [row["cohort_steps"] for row in run.metric_rows] == [STEPS] * 4


def test_the_last_evaluation_of_a_run_that_ends_early_counts():
    """The run is stopped after round 3; round 3 is then evaluated, for which clients fine-tune."""

    class Stopping(Callback):
        def on_round(self, record):
            return FINISH if record.round == 3 else None

    run = run_of(FineTune(epochs=4), evaluate_every=4, callbacks=[Stopping()])
    assert [row["steps"] for row in run.metric_rows] == [STEPS, STEPS, 3 * STEPS]


def test_steps_are_the_steps_that_simulated_clients_take():
    taken = 0
    handle_updates = SimulatedClients.handle_updates

    def counted(clients, query, sink=None):
        nonlocal taken
        for client in query.ids:
            examples = len(query.examples(clients.sizes[client], key=0))
            taken += query.work.steps.count_steps(query.local, examples)
        return handle_updates(clients, query, sink)

    with mock.patch.object(SimulatedClients, "handle_updates", counted):
        run = run_of(ReplicatedCFL(fallback=True, personalize=True, check_every=3), rounds=8)
    assert run.summary["steps"]["total"] == taken
    assert run.summary["steps"]["ratio"] > 1.2, "checks and fine-tuning come in addition"


def counted_of(work):
    """Return the steps that are counted for two clients with 40 and 55 examples."""
    clients = ScriptedClients({0: [0.0], 1: [0.0]}, {0: 40, 1: 55})
    meter = Meter()
    channel = Channel(clients, StepCounting(meter, lambda _: clients.sizes))
    channel.train([0, 1], torch.zeros(1, 1), [0, 0], Round(1, SPEC), work)
    return meter.steps


def test_all_parts_of_a_clients_data_count():
    """With two parts of 10 examples, a batch has 5 examples, so each part takes 2 · 2 steps."""
    assert counted_of(ClientWork()) == 2 * (4 + 6)
    assert counted_of(ClientWork(data=Splits(2, 10))) == 2 * (2 * 2 * 2)
    assert counted_of(ClientWork(data=Splits(4))) == 2 * (4 * 1 + 4 * 2)


def test_a_full_batch_gradient_is_no_step():
    clients = ScriptedClients({0: [0.0]}, {0: 40})
    meter = Meter()
    channel = Channel(clients, StepCounting(meter, lambda _: clients.sizes))
    channel.gradients([0], torch.zeros(1, 1), [0], Round(1, SPEC))
    assert meter.steps == 0
    assert count_steps(ClientWork(), SPEC, {0: 40}, [0]) == 8


def test_a_run_that_an_earlier_version_began_has_no_steps_in_its_summary(tmp_path):
    readings = Meter.readings

    def without_steps(meter):
        return {name: n for name, n in readings(meter).items() if "steps" not in name}

    settings = {"folder": tmp_path / "run", "evaluate_every": 3}
    with mock.patch.object(Meter, "readings", without_steps), pytest.raises(RunInterrupted):
        run_of(FedAvg(), **settings, stop=lambda: True)
    run = run_of(FedAvg(), **settings)
    assert [row.get("steps") for row in run.metric_rows] == [None, STEPS, STEPS, STEPS]
    assert "steps" not in run.summary
    assert Run.load(tmp_path / "run").summary == run.summary
