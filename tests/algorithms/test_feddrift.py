"""FedDrift: against the algorithm in plain loops, what becomes of models, and who does not take part."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, FedDrift, LocalTraining, RunFacts, simulate
from fedclade.algorithms.feddrift import FedDriftState, TimeStep
from fedclade.core import ParameterTree, RoundPlan
from fedclade.data import Federation, concepts
from fedclade.data.federation import ClientData
from fedclade.runs import Churn
from tests.reference.fedavg import as_numpy
from tests.reference.feddrift import feddrift
from tests.tiny import ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
STEPS = 5


def drifting(each: int = 1) -> Federation:
    """Return clients of several sizes, whose concepts change every so many rounds."""
    rows = ((0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0), (0, 1, 0, 1), (0, 1, 0, 1))
    drifts = concepts(
        kind="sine", clients=4, samples=40, steps=STEPS, step_rounds=each, pattern=rows
    )

    def cut(clients: tuple[ClientData, ...]) -> tuple[ClientData, ...]:
        return tuple(
            replace(c, train=c.train[:count])
            for c, count in zip(clients, (40, 24, 32, 18), strict=True)
        )

    stages = tuple(replace(stage, clients=cut(stage.clients)) for stage in drifts.stages)
    return replace(drifts, clients=cut(drifts.clients), stages=stages)


def two() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("each", "options", "literal"),
    [
        (1, {}, {}),
        (3, {}, {}),
        (1, {"isolation": 2}, {"W": 2}),
        (1, {"start": "together"}, {"together": True}),
        (2, {"start": "together", "eager": True}, {"together": True, "eager": True}),
    ],
)
def test_equals_the_algorithm_in_plain_loops(each, options, literal):
    """The same model of each client, and every model, at the end of each time step."""
    federation, spec = drifting(each), LocalTraining(epochs=6, batch_size=20, lr=2.0)
    steps = [federation.in_round(1 + each * t) for t in range(STEPS)]
    theta, trees = as_numpy(simulated(steps[0], two())[1]), []
    expected = feddrift(theta, steps, two(), spec, d=0.1, rounds=each, seed=3, **literal)
    settings = {"rounds": STEPS * each, "local": spec, "engine": "loop", "seed": 3}
    algorithm = FedDrift(delta=0.1, step_rounds=each, **options)
    run = simulate(
        algorithm, two(), federation, on_round=lambda row, tree: trees.append(tree), **settings
    )
    for tree, wanted in zip(trees[each - 1 :: each], expected, strict=True):
        assert dict(tree.leaf_of) == {c: 1 + m for c, m in wanted.now.items()}
        for m, theta in enumerate(wanted.models):
            if wanted.owned[m]:
                np.testing.assert_allclose(tree.nodes[1 + m].params.numpy(), theta, atol=2e-5)
    assert len(expected[-1].models) > len(expected[0].models)  # some were opened
    assert any(event["kind"] == "merged" for event in run.events) != algorithm.eager


def test_together_over_data_that_stays_the_same_is_fedavg():
    federation = federation_of([0, 1, 2, 3])
    settings = {"rounds": 5, "local": SPEC, "engine": "loop"}
    ours = simulate(
        FedDrift(start="together", step_rounds=2, delta=1.0), linear(), federation, **settings
    )
    theirs = simulate(FedAvg(), linear(), federation, **settings)
    assert torch.allclose(ours.tree.leaves[0].params, theirs.tree.nodes[0].params, atol=1e-6)


def test_it_finds_the_concepts_of_data_that_stays_the_same():
    federation = federation_of([0, 0, 1, 1, 0, 1], sizes=[200] * 6)
    run = simulate(
        FedDrift(step_rounds=2, delta=0.2),
        linear(),
        federation,
        rounds=4,
        local=LocalTraining(batch_size=10, lr=0.5),
    )
    assert [row["ari"] for row in run.metric_rows] == [0.0, 0.0, 1.0, 1.0]


class Accurate(ScriptedClients):
    """Clients that are the more accurate, the nearer a model of one entry is to where they would have it."""

    wants = (0.0, 0.0, 1.0, 1.0)

    def evaluate(self, ids, models, assignment, split):
        self.right = lambda client, model: max(0.0, 1 - abs(model - self.wants[client]))
        return super().evaluate(ids, models, assignment, split)


def leaves(state) -> list[list[int]]:
    return sorted([list(leaf.members) for leaf in state.tree.leaves if leaf.members])


def played(rounds: int = 3, deltas=(0.0, 0.0, 1.0, 1.0), **options):
    clients = Accurate({client: [delta] for client, delta in enumerate(deltas)})
    return play(FedDrift(step_rounds=1, **options), clients, torch.zeros(1), rounds)


def test_models_that_agree_on_each_others_data_are_merged():
    states = played(2).states
    assert leaves(states[1]) == [[0], [1], [2], [3]]
    assert leaves(states[2]) == [[0, 1], [2, 3]]
    assert states[2].assigned.tolist() == [[1, 1, 3, 3], [1, 1, 3, 3]]


def test_models_merge_up_to_a_distance():
    assert leaves(played(2, delta_merge=0.99).states[2]) == [[0, 1], [2, 3]]
    assert leaves(played(2, delta_merge=1.0).states[2]) == [[0, 1, 2, 3]]


def drift_after_two(**options):
    """Let client 1 want something else from the third round on."""
    clients = Accurate({client: [0.0] for client in range(4)})
    clients.wants = (0.0, 0.0, 0.0, 0.0)
    algorithm = FedDrift(step_rounds=1, start="together", **options)
    states = [play(algorithm, clients, torch.zeros(1), 2).states[-1]]
    clients.wants = (0.0, 1.0, 1.0, 0.0)
    for number in (3, 4, 5):
        states.append(algorithm.step(states[-1], (0, 1, 2, 3), clients, RoundPlan(number, SPEC))[0])
    return states


def test_those_who_drift_open_models_and_are_isolated():
    states = drift_after_two(isolation=2)
    assert leaves(states[1]) == [[0, 3], [1], [2]]
    assert states[1].until.tolist() == [0, 4, 4, 0]
    assert states[1].free == [1]
    assert leaves(states[2]) == [[0, 3], [1], [2]]
    assert states[3].until.tolist() == [0, 0, 0, 0]


def test_the_eager_open_one_together():
    states = drift_after_two(eager=True)
    assert leaves(states[1]) == [[0, 3], [1, 2]]
    assert states[1].until.tolist() == [0, 0, 0, 0]


def test_a_cap_on_models():
    states = drift_after_two(models=2)
    assert leaves(states[1]) == [[0, 2, 3], [1]]
    with pytest.raises(
        ConfigError, match="models should be at least the number of clients, 4, if start is 'alone'"
    ):
        FedDrift(models=3).check(RunFacts(clients=4))


def test_the_model_that_was_used_least_recently_makes_room():
    tree = ParameterTree.star([[0], [1], []], torch.zeros(3, 1))
    clients = Accurate({0: [0.0], 1: [0.0]})
    state = FedDriftState.first(tree, (0, 1))
    assigned = torch.tensor([[3, 3], [2, 1], [1, 2]])
    state = replace(state, assigned=assigned, begun=(1, 2, 3), stages=(0, 0, 0))
    time_step = TimeStep.begin(state, clients, RoundPlan(4, SPEC))
    time_step.assigned[-1] = [1, 1]
    time_step.open_model([1], 3)
    assert time_step.assigned.tolist() == [[0, 0], [2, 1], [1, 2], [1, 4]]


@pytest.mark.parametrize("start", ["alone", "together"])
def test_clients_may_all_come_after_the_first_rounds(tmp_path, start):
    federation, hours = federation_of([0, 0, 1]), tmp_path / "hours.csv"
    names = [str(federation.by_id[client].name) for client in federation.ids]
    hours.write_text("client,from,to\n" + "".join(f"{name},1.5,90\n" for name in names))
    run = simulate(
        FedDrift(start=start),
        linear(),
        federation,
        rounds=4,
        local=SPEC,
        presence=Churn(trace=str(hours), round_seconds=1.0, trace_period=100.0),
    )
    assert run.summary["rounds"] == 4
    assert {0} != set(run.tree.leaf_of.values()) or start == "together"


def test_newcomers_take_the_most_accurate_model():
    late = federation_of([0, 0, 1, 1, 0, 1], sizes=[100] * 6)
    newcomers = replace(late, clients=late.clients[4:], true_clusters={4: 0, 5: 1})
    federation = replace(
        late, clients=late.clients[:4], true_clusters={c: late.true_clusters[c] for c in range(4)}
    )
    run = simulate(
        FedDrift(step_rounds=2, delta=0.2),
        linear(),
        replace(federation, newcomers=newcomers),
        rounds=6,
        local=LocalTraining(batch_size=10, lr=0.5),
        presence=Churn(join_round=4, leave_round=5),
    )
    leaf_of = run.tree.leaf_of
    assert all(leaf_of[c] for c in (4, 5))
    assert run.metric_rows[3]["ari"] == 1.0


def test_a_run_of_one_time_step_is_told():
    run = RunFacts(rounds=20)
    text = "every client trains alone; set a smaller algorithm.step_rounds"
    assert text in FedDrift().check(run)[0]
    assert "it is federated averaging" in FedDrift(start="together").check(run)[0]
    assert FedDrift(step_rounds=5).check(run) == ()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"step_rounds": 0}, "algorithm.step_rounds should be at least 1, got 0"),
        ({"delta": -0.1}, "algorithm.delta should be at least 0, got -0.1"),
        ({"delta_merge": -1.0}, "algorithm.delta_merge should be at least 0, or left out"),
        ({"isolation": 0}, "algorithm.isolation should be at least 1"),
        ({"start": "apart"}, "algorithm.start should be 'alone' or 'together'"),
        ({"models": 0}, "algorithm.models should be at least 1, or left out"),
    ],
)
def test_options_that_cannot_be_are_refused(options, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        FedDrift(**options)
