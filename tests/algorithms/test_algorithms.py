from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import CFL, ConfigError, FedAvg, Local, LocalTraining, Oracle, simulate
from fedclade.algorithms import ALGORITHMS, State, build_algorithm
from fedclade.algorithms.base import sample
from fedclade.algorithms.cluster_update import membership_events
from fedclade.core import KEEPS_NONE, MANY_IDS
from fedclade.core.queries import RoundPlan
from fedclade.core.tree import ParameterTree
from tests.tiny import Metered, ScriptedClients, details, federation_of, linear, play


def test_every_algorithm_can_be_built_by_its_name():
    built = {name: build_algorithm(name, true_clusters={0: 0}) for name in ALGORITHMS}
    assert {name: type(algorithm) for name, algorithm in built.items()} == {
        name: method.algorithm for name, method in ALGORITHMS.items()
    }
    assert all(method.summary for method in ALGORITHMS.values())


def test_options_reach_the_algorithm():
    assert build_algorithm("cfl", {"eps2": 0.5, "split_rounds": [2, 4]}) == CFL(
        eps2=0.5, split_rounds=(2, 4)
    )


def test_an_unknown_algorithm_suggests_the_nearest():
    told = r"unknown algorithm 'clf'; did you mean 'cfl'\? \(known: apfl, auto, cfl, .*, fedavg, "
    with pytest.raises(ConfigError, match=told):
        build_algorithm("clf")


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("cfl", "esp1", "eps1"),
        ("cfl", "gama_max", "gamma_max"),
        ("ifca", "restart", "restarts"),
        ("pacfl", "treshold", "threshold"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(name, option, hint):
    with pytest.raises(ConfigError, match=f"'{option}'; did you mean '{hint}'"):
        build_algorithm(name, {option: 1})


@pytest.mark.parametrize("name", ["fedavg", "local", "oracle"])
@pytest.mark.parametrize("option", ["eps1", "clusters", "true_clusters"])
def test_algorithms_without_options_take_none(name, option):
    with pytest.raises(ConfigError, match=f"'{option}'"):
        build_algorithm(name, {option: {0: 0}}, true_clusters={0: 0})


def test_nobody_but_the_oracle_is_told_the_truth():
    truth = {0: 7, 1: 7, 2: 9}
    assert build_algorithm("oracle", true_clusters=truth) == Oracle(truth)
    for name in set(ALGORITHMS) - {"oracle"}:
        assert build_algorithm(name, true_clusters=truth) == build_algorithm(name)


def test_the_oracle_needs_a_truth():
    with pytest.raises(
        ConfigError,
        match=r"algorithm 'oracle' needs data whose true clusters are known; set data\.shift",
    ):
        build_algorithm("oracle")


def test_the_oracle_needs_to_know_every_client():
    clients = ScriptedClients({0: [0], 1: [0], 2: [0]})
    text = re.escape(
        "and none is known for the clients [1, 2]; set data.shift or a partition with label groups"
    )
    with pytest.raises(ConfigError, match=text):
        Oracle({0: 0}).init(torch.zeros(1), clients)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("eps1", 0.0, "greater than 0, or 'auto'"),
        ("eps1", "automatic", "greater than 0, or 'auto'"),
        ("eps2", 0.0, "greater than 0"),
        ("gamma_max", 1.0, "in [0, 1)"),
        ("gamma_max", -0.1, "in [0, 1)"),
        ("similarity", "cosine", "'updates' or 'gradients'"),
        ("split_rounds", (5, 0), "round numbers of at least 1"),
        ("min_cluster_size", 0, "at least 1"),
    ],
)
def test_an_option_of_cfl_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        CFL(**{option: value})


def test_all_errors_of_cfl_come_at_once():
    with pytest.raises(ConfigError) as caught:
        CFL(eps1=-1.0, eps2=0.0, gamma_max=2.0)
    assert len(str(caught.value).splitlines()) == 3


def test_clusters_never_change_but_each_is_a_federation_of_its_own():
    """Three clients of 1, 3 and 1 examples whose updates are 1, 5 and 9, for two rounds."""
    clients = ScriptedClients({0: [1], 1: [5], 2: [9]}, {0: 1, 1: 3, 2: 1})
    start = torch.tensor([100.0])
    ends = {
        name: play(build_algorithm(name, true_clusters={0: 4, 1: 4, 2: 8}), clients, start, 2)
        .states[-1]
        .tree
        for name in ("fedavg", "oracle")
    }
    models = {
        name: {
            client: float(tree.nodes[leaf].params) for client, leaf in sorted(tree.leaf_of.items())
        }
        for name, tree in ends.items()
    }
    everybody, pair = (1 * 1 + 3 * 5 + 1 * 9) / 5, (1 * 1 + 3 * 5) / 4
    assert models["fedavg"] == dict.fromkeys(range(3), 100 + 2 * everybody)
    assert models["oracle"] == {0: 100 + 2 * pair, 1: 100 + 2 * pair, 2: 100 + 2 * 9}


def test_a_cluster_without_an_answer_keeps_its_model():
    clients = ScriptedClients({0: [1], 1: [5]})
    algorithm = Oracle({0: 0, 1: 1})
    state = algorithm.init(torch.zeros(1), clients)
    state, log = algorithm.step(state, [1], clients, RoundPlan(1, LocalTraining()))
    assert [float(leaf.params) for leaf in state.tree.leaves] == [0, 5]
    assert list(log.criteria) == [2]
    assert log.losses == {1: 0.0}


class Forgetful(ScriptedClients):
    """Clients of whom the first, in the second round, has lost its model."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = super().train(ids, models, assignment, this_round, work)
        if this_round.number != 2:
            return updates
        return replace(
            updates.select(list(ids)[1:]), left_out={ids[0]: f"{KEEPS_NONE}: it was lost"}
        )


def test_alone_each_is_sent_the_initial_model_once_and_again_if_it_has_lost_its_own():
    algorithm, start = Local(), torch.tensor([7.0])
    played = play(algorithm, Metered(Forgetful({0: [1], 1: [5], 2: [9]})), start, 4, fraction=0.3)
    sent = [played.clients.asked("train", number)[0].models for number in (1, 2, 3, 4)]
    assert sent == [dict.fromkeys((0, 1, 2), start), {}, {0: start}, {}]
    assert [algorithm.models_for(state, played.clients).own for state in played.states] == [
        (),
        (0, 1, 2),
        (1, 2),
        (0, 1, 2),
        (0, 1, 2),
    ]
    assert [list(log.losses) for log in played.logs] == [[0, 1, 2], [1, 2], [0, 1, 2], [0, 1, 2]]
    readings = played.clients.clients.meter.readings()
    assert (readings["bytes_up"], readings["bytes_down"]) == (0, (3 + 1) * 4)
    assert len(played.states[-1].tree.nodes) == 1


@pytest.mark.parametrize(
    ("fraction", "count"), [(1.0, 10), (0.5, 5), (0.1, 1), (0.01, 1), (0.34, 3)]
)
def test_sample_draws_a_fraction_and_at_least_one(fraction, count):
    drawn = sample(range(20, 30), fraction, np.random.default_rng(0))
    assert len(drawn) == count
    assert set(drawn) <= set(range(20, 30))
    assert list(drawn) == sorted(set(drawn))


def test_sample_does_not_depend_on_the_order_of_the_members():
    draws = [
        sample(members, 0.5, np.random.default_rng(3)) for members in ([1, 5, 3, 9], [9, 3, 5, 1])
    ]
    assert draws[0] == draws[1]
    assert len({sample(range(10), 0.3, np.random.default_rng(seed)) for seed in range(20)}) > 10


def test_a_cohort_has_its_fraction_of_every_cluster():
    clients = ScriptedClients(dict.fromkeys(range(9), (0,)))
    algorithm = Oracle({client: 0 if client < 6 else client for client in range(9)})
    cohort = algorithm.sample_cohort(
        algorithm.init(torch.zeros(1), clients), 0.5, np.random.default_rng(0)
    )
    assert len([client for client in cohort if client < 6]) == 3
    assert set(cohort) >= {6, 7, 8}


def test_a_method_by_the_former_name_of_sample_cohort_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^Own\.cohort\(\) should be called sample_cohort\(\); rename the method$",
    ):
        type("Own", (FedAvg,), {"cohort": lambda self, state, fraction, draw: ()})


def test_a_cohort_has_nobody_of_an_empty_cluster_and_somebody_of_those_who_wait_for_one():
    state = State(ParameterTree.star([(0, 1), ()], torch.zeros(1), unassigned=[2]))
    assert FedAvg().sample_cohort(state, 0.1, np.random.default_rng(0)) in {(0, 2), (1, 2)}


def test_membership_events_tell_who_joined_what_and_which_clusters_became_empty():
    before = ParameterTree.star([(0, 1), (2,), ()], torch.zeros(1), unassigned=[3])
    told = membership_events(before, before.reassigned({2: 1, 3: 1}))
    assert [(event.kind, event.node, details(event)) for event in told] == [
        ("joined", 1, {"clients": [2, 3]}),
        ("empty", 2, {}),  # and not 3, which was empty before
    ]
    assert membership_events(before, before) == []


def test_membership_events_of_clusters_with_many_members_are_those_of_small_ones():
    half = MANY_IDS + 1  # so that members are stored in arrays
    before = ParameterTree.star([range(half), range(half, 2 * half)], torch.zeros(1))
    told = membership_events(before, before.reassigned({5: 2, 3: 2}))
    assert [(event.kind, event.node, details(event)) for event in told] == [
        ("joined", 2, {"clients": [3, 5]})
    ]
    assert membership_events(before, before.moved(1, torch.ones(1))) == []


def test_membership_events_of_the_first_assignment_tell_all_empty_clusters():
    before = ParameterTree.star([(), ()], torch.zeros(1), unassigned=[0])
    assert [
        (event.kind, event.node) for event in membership_events(before, before.reassigned({0: 2}))
    ] == [("empty", 1), ("joined", 2)]


def test_cfl_says_before_round_1_that_no_cluster_can_be_split(caplog):
    federation = federation_of([0, 0, 1, 1])
    simulate(CFL(min_cluster_size=99), linear(), federation, rounds=1, engine="loop")
    assert (
        "two clusters of at least min_cluster_size = 99 members need 198 clients, but there are 4"
        in caplog.text
    )
    caplog.clear()
    simulate(CFL(min_cluster_size=2), linear(), federation, rounds=1, engine="loop")
    assert "min_cluster_size" not in caplog.text
