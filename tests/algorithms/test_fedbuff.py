"""FedBuff: against the paper's pseudo-code, as FedAvg, in the clusters of a run, and what becomes of who is missing."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import (
    ConfigError,
    FedAvg,
    FedBuff,
    LocalTraining,
    Run,
    RunError,
    RunInterrupted,
    simulate,
)
from fedclade.algorithms.fedbuff import FedBuffState, _with_momentum
from fedclade.channel import Faults
from fedclade.core import Aggregation, Updates
from fedclade.core.queries import RoundPlan
from fedclade.core.tree import ParameterTree
from fedclade.runs import Churn
from tests.reference.fedavg import as_numpy
from tests.reference.fedbuff import fedbuff
from tests.tiny import ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TWELVE = federation_of([0, 1] * 6)


def told(run, kind: str = "buffered") -> list[dict]:
    return [event for event in run.events if event["kind"] == kind]


@pytest.mark.parametrize(("M_c", "K", "seed"), [(6, 3, 0), (10, 4, 1), (3, 5, 2), (12, 12, 3)])
def test_equals_algorithm_1_step_by_step(M_c, K, seed):
    """Models, staleness and the clock; also with more updates in a buffer than clients in training."""
    clients, params = simulated(TWELVE, linear(seed))
    played = play(
        FedBuff(concurrency=M_c, buffer_size=K, eta_g=0.7), clients, params, 6, spec=SPEC, seed=seed
    )
    expected = fedbuff(
        as_numpy(params), TWELVE, linear(), SPEC, M_c=M_c, K=K, eta_g=0.7, seed=seed, steps=6
    )
    assert played.states[1:]
    for state, log, step in zip(played.states[1:], played.logs, expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), step.w, atol=1e-5)
        assert set(log.losses) == set(step.clients)
        assert log.numbers["staleness_mean"] == pytest.approx(np.mean(step.staleness))
        assert log.numbers["staleness_max"] == max(step.staleness)
        assert log.numbers["virtual_seconds"] == step.seconds
    if M_c > K:
        assert max(max(step.staleness) for step in expected) > 0, "or nothing is stale"


@pytest.mark.parametrize(
    ("options", "twin"),
    [
        ({"divide_by": "staleness"}, {"by_staleness": True}),
        ({"server_momentum": 0.6}, {"momentum": 0.6}),
        (
            {"divide_by": "staleness", "server_momentum": 0.6},
            {"by_staleness": True, "momentum": 0.6},
        ),
    ],
)
def test_the_servers_step_is_that_of_flsim(options, twin):
    """A weighted average, and torch's own SGD with momentum."""
    clients, params = simulated(TWELVE, linear())
    method = FedBuff(concurrency=6, buffer_size=3, eta_g=0.7, **options)
    played = play(method, clients, params, 5, spec=SPEC)
    arguments = {"M_c": 6, "K": 3, "eta_g": 0.7, "seed": 0, "steps": 5}
    expected = fedbuff(as_numpy(params), TWELVE, linear(), SPEC, **arguments, **twin)
    of_paper = fedbuff(as_numpy(params), TWELVE, linear(), SPEC, **arguments)
    for state, step in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), step.w, atol=1e-5)
    assert np.abs(expected[-1].w - of_paper[-1].w).max() > 1e-3, "or the test cannot fail"


def test_buffers_of_a_model_have_no_momentum():
    velocity = torch.tensor([2.0, 0.0])
    step = _with_momentum(torch.tensor([1.0, 5.0]), velocity, 0.5, n_parameters=1)
    assert step.tolist() == [2.0, 5.0]
    assert velocity.tolist() == [2.0, 0.0]


@pytest.mark.parametrize(("divide_by", "expected"), [("updates", 2.0), ("staleness", 4.0)])
def test_a_robust_rule_is_divided_alike(divide_by, expected):
    """Both updates are 4, and three steps old, so that s = 1/2: their median is 2, over s 4."""
    deltas = torch.tensor([[4.0], [4.0]])
    updates = Updates.received([0, 1], [1, 1], deltas, 1, torch.zeros(2), 1)
    updates = updates.with_common(aggregation=Aggregation(rule="median"))
    assert FedBuff(divide_by=divide_by)._average_discounted(updates, {0: 3, 1: 3}).tolist() == [
        expected
    ]


def test_momentum_is_continued_bit_for_bit(tmp_path):
    def once_more(folder=None, stop=None):
        algorithm = FedBuff(concurrency=6, buffer_size=3, server_momentum=0.5)
        return simulate(algorithm, linear(), TWELVE, local=SPEC, rounds=3, folder=folder, stop=stop)

    for _ in range(2):
        with pytest.raises(RunInterrupted):
            once_more(tmp_path / "run", lambda: True)
    assert once_more(tmp_path / "run").tree.nodes[0].params.equal(once_more().tree.nodes[0].params)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [("divide_by", "weights", "'updates' or 'staleness'"), ("server_momentum", 1.0, "in [0, 1)")],
)
def test_a_step_of_the_server_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        FedBuff(**{option: value})


def test_one_buffer_of_all_clients_at_equal_speeds_is_fedavg():
    clients, params = simulated(TWELVE, linear())
    ours = play(
        FedBuff(concurrency=12, buffer_size=12, duration="equal", seconds=2.0),
        clients,
        params,
        3,
        spec=SPEC,
    )
    plain = play(FedAvg(), clients, params, 3, spec=SPEC)
    assert ours.states
    for number, (mine, other) in enumerate(zip(ours.states, plain.states, strict=True)):
        assert torch.allclose(mine.tree.nodes[0].params, other.tree.nodes[0].params, atol=1e-6)
        assert mine.clocks == (2.0 * number,)


def test_a_cohort_at_equal_speeds_begins_from_the_new_model():
    """K = M_c < N: those that finish at the same time are one buffer, and nothing is ever stale."""
    clients, params = simulated(TWELVE, linear())
    played = play(
        FedBuff(concurrency=4, buffer_size=4, duration="equal"), clients, params, 4, spec=SPEC
    )
    assert [log.numbers["staleness_max"] for log in played.logs] == [0] * 4
    assert all(state.old is None and not state.training for state in played.states)


def test_sizes_do_not_weigh_and_staleness_does():
    """Client 2 takes ten times as long, so it is a version late."""
    clients = ScriptedClients({0: [1.0], 1: [3.0], 2: [8.0]}, {0: 1, 1: 1, 2: 10})
    algorithm = FedBuff(concurrency=3, buffer_size=2, duration="examples")
    this_round = RoundPlan(1, LocalTraining(batch_size=1))
    state, log = algorithm.step(
        algorithm.init(torch.zeros(1), clients), range(3), clients, this_round
    )
    assert (state.tree.nodes[0].params.tolist(), state.clocks) == ([2.0], (1.0,))
    assert (state.training, state.begun, state.finishes) == ((2,), (0,), (10.0,))
    assert (state.old.tolist(), state.old_node, state.old_version) == ([[0.0]], (0,), (0,))
    state, log = algorithm.step(state, [0], clients, replace(this_round, number=2))
    assert state.tree.nodes[0].params.tolist() == [pytest.approx(2 + (1 + 8 / 2**0.5) / 2)]
    assert (log.numbers["staleness_mean"], log.numbers["virtual_seconds"]) == (0.5, 10.0)
    assert state.old is None


def test_a_state_comes_back_from_a_checkpoint_as_it_was():
    state = FedBuffState(
        ParameterTree.root_only(range(3), torch.zeros(2)),
        clocks=(0.1 + 0.2,),
        versions=(2,),
        training=(1,),
        begun=(0,),
        finishes=(1 / 3,),
        old=torch.ones(1, 2),
        old_node=(0,),
        old_version=(0,),
    )
    again = FedBuffState.from_tensors(state.tree, state.tensors())
    assert {
        name: getattr(again, name)
        for name in ("clocks", "training", "begun", "finishes", "old_version")
    } == {
        "clocks": (0.1 + 0.2,),
        "training": (1,),
        "begun": (0,),
        "finishes": (1 / 3,),
        "old_version": (0,),
    }
    empty = FedBuffState.from_tensors(state.tree, FedBuffState.of(state.tree).tensors())
    assert (empty.training, empty.old, empty.versions) == ((), None, (0,))


def test_a_run_is_continued_bit_for_bit(tmp_path):
    def once_more(folder=None, stop=None):
        algorithm = FedBuff(concurrency=6, buffer_size=3)
        return simulate(algorithm, linear(), TWELVE, local=SPEC, rounds=3, folder=folder, stop=stop)

    for _ in range(2):
        with pytest.raises(RunInterrupted):
            once_more(tmp_path / "run", lambda: True)
    run, whole = once_more(tmp_path / "run"), once_more()
    assert run.tree.nodes[0].params.equal(whole.tree.nodes[0].params)
    assert told(run) == told(whole)
    assert [row["virtual_seconds"] for row in run.metric_rows] == [
        event["virtual_seconds"] for event in told(run)
    ]


def test_every_cluster_of_a_run_has_a_buffer_of_its_own(tmp_path):
    simulate("oracle", linear(), TWELVE, local=SPEC, rounds=2, folder=tmp_path / "clusters")
    models = []
    algorithm = FedBuff(concurrency=4, buffer_size=3, clusters_of=str(tmp_path / "clusters"))
    run = simulate(
        algorithm,
        linear(),
        TWELVE,
        local=SPEC,
        rounds=3,
        on_round=lambda _, tree: models.append(tree),
    )
    assert [(event["round"], event["node"]) for event in told(run)] == [
        (n, k) for n in (1, 2, 3) for k in (1, 2)
    ]
    assert run.summary["clusters"]["ari"] == 1.0
    last = [
        max(e["virtual_seconds"] for e in told(run) if e["round"] == number) for number in (1, 2, 3)
    ]
    assert [row["virtual_seconds"] for row in run.metric_rows] == last
    anew = replace(algorithm, from_scratch=True)
    anew = simulate(anew, linear(), TWELVE, local=SPEC, rounds=3)
    assert anew.metric_rows[0]["loss_mean"] > run.metric_rows[0]["loss_mean"]


def test_a_run_that_does_not_fit_is_refused(tmp_path):
    simulate("fedavg", linear(), federation_of([0, 1, 0]), rounds=1, folder=tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"should have the same clients as this run; clients .* runs: \[3, 4, 5"
    ):
        simulate(FedBuff(clusters_of=str(tmp_path / "other")), linear(), TWELVE, rounds=1)
    with pytest.raises(ConfigError, match=r"have 28 entries, but the models of this run have 24"):
        simulate(
            FedBuff(clusters_of=str(tmp_path / "other")),
            torch.nn.Linear(6, 4, bias=False),
            TWELVE,
            rounds=1,
        )
    with pytest.raises(RunError, match="there is no folder"):
        simulate(FedBuff(clusters_of=str(tmp_path / "none")), linear(), TWELVE, rounds=1)


def test_who_drops_out_is_missing_and_a_buffer_of_too_few_is_not_applied():
    settings = {"local": SPEC, "rounds": 6, "faults": Faults(dropout=0.5)}
    run = simulate(
        FedBuff(concurrency=4, buffer_size=3), linear(), TWELVE, min_clients=2, **settings
    )
    assert {event["clients"] for event in told(run)} == {2, 3}
    assert told(run, "too_few")
    assert [row["clients_trained"] for row in run.metric_rows if row["staleness_mean"] is None] == [
        1
    ] * len(told(run, "too_few"))


def test_only_those_begin_that_are_there(tmp_path):
    hours = "".join(f"c{client},0,{100 if client < 6 else 10}\n" for client in range(12))
    (tmp_path / "hours.csv").write_text("client,from,to\n" + hours)
    presence = Churn(trace=str(tmp_path / "hours.csv"), round_seconds=10.0)
    run = simulate(
        FedBuff(concurrency=6, buffer_size=3),
        linear(),
        TWELVE,
        local=SPEC,
        rounds=4,
        presence=presence,
    )
    assert [row["clients_present"] for row in run.metric_rows] == [12, 6, 6, 6]
    away = {int(client) for event in told(run, "left_out") for client in event["clients"]}
    assert away <= set(range(6, 12)), "they were in training when they went"


def test_a_round_in_which_nobody_is_there_has_its_columns_too(tmp_path):
    (tmp_path / "hours.csv").write_text(
        "client,from,to\n" + "".join(f"c{client},10,20\n" for client in range(12))
    )
    presence = Churn(trace=str(tmp_path / "hours.csv"), round_seconds=10.0)
    simulate(
        FedBuff(),
        linear(),
        TWELVE,
        local=SPEC,
        rounds=3,
        presence=presence,
        folder=tmp_path / "run",
    )
    rows = Run.load(tmp_path / "run").metric_rows
    assert [row["clients_present"] for row in rows] == [0, 12, 0]
    assert [row["virtual_seconds"] is None for row in rows] == [True, False, True]


def test_newcomers_come_to_a_cluster(tmp_path):
    federation = replace(
        TWELVE, clients=TWELVE.clients[:8], true_clusters={c: c % 2 for c in range(8)}
    )
    late = replace(
        TWELVE, clients=TWELVE.clients[8:], true_clusters={c: c % 2 for c in range(8, 12)}
    )
    simulate("oracle", linear(), federation, local=SPEC, rounds=4, folder=tmp_path / "clusters")
    algorithm = FedBuff(concurrency=4, buffer_size=3, clusters_of=str(tmp_path / "clusters"))
    federation = replace(federation, newcomers=late)
    run = simulate(
        algorithm, linear(), federation, local=SPEC, rounds=3, presence=Churn(join_round=2)
    )
    assert run.summary["clusters"]["ari"] == 1.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"concurrency": 0}, "algorithm.concurrency should be at least 1, got 0"),
        ({"buffer_size": 0}, "algorithm.buffer_size should be at least 1, got 0"),
        ({"eta_g": 0.0}, "algorithm.eta_g should be greater than 0, got 0"),
        ({"discount": 2.0}, r"algorithm.discount should be in \[0, 1\], got 2"),
        ({"duration": "gamma"}, "duration"),
        ({"seconds": 0.0}, "algorithm.seconds should be greater than 0, got 0"),
        (
            {"from_scratch": True},
            "algorithm.from_scratch should be false unless clusters_of is set, got True",
        ),
    ],
)
def test_options_out_of_range_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        FedBuff(**options)
