"""Clients that join a run late, and clients that leave it early."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import fedclade
from fedclade import (
    CFL,
    FLHC,
    IFCA,
    OCFL,
    CLoVE,
    ConfigError,
    FedAvg,
    FedDrift,
    FedGroup,
    FedSoft,
    FeSEM,
    FlexCFL,
    Local,
    LocalTraining,
    Run,
    StoCFL,
)
from fedclade.algorithms import FLUX, PACFL, CFLState, Ditto, FineTune, Oracle, Scaffold, State
from fedclade.config import check_config
from fedclade.core.errors import RunInterrupted
from fedclade.core.queries import RoundPlan
from fedclade.core.tree import ParameterTree
from fedclade.runs.churn import Churn
from tests.tiny import ScriptedClients

JOIN, LEAVE, ROUNDS = 9, 13, 16
METHODS = {
    "fedavg": FedAvg(),
    "cfl": CFL(eps2=0.4, split_rounds=(6,)),
    "fl_hc": FLHC(rounds_before=3, metric="l2", n_clusters=2),
    "fedgroup": FedGroup(groups=2),
    "flexcfl": FlexCFL(groups=2, pretrain_steps=8),
    "ifca": IFCA(clusters=2, restarts=2, restart_rounds=10),
    "fedsoft": FedSoft(selection=12),
    "clove": CLoVE(clusters=2),
    "ocfl": OCFL(method="hdbscan"),
    "fesem": FeSEM(clusters=2),
    "feddrift": FedDrift(step_rounds=2, delta=0.2),
    "pacfl": PACFL(n_clusters=2, distance="per_label"),
    "stocfl": StoCFL(tau=0.6, anchor_epochs=5),
    "flux": FLUX(clusters=2, components=5),
    "local": Local(),
    "ditto": Ditto(),
    "scaffold": Scaffold(),
    "finetune": FineTune(),
    "oracle": "oracle",
}


@cache
def digits() -> fedclade.Federation:
    settings = {
        "clients": 8,
        "samples_per_client": 80,
        "shift": "label_swap",
        "clusters": 2,
        "newcomers": 4,
    }
    return fedclade.load_federation("digits", **settings)


@cache
def run_of(name: str, join: int | None = JOIN, leave: int | None = LEAVE) -> Run:
    presence = Churn(join_round=join, leave_round=leave)
    spec = LocalTraining(epochs=2, lr=0.2)
    return fedclade.simulate(
        METHODS[name], "mclr", digits(), local=spec, rounds=ROUNDS, presence=presence
    )


def told(run: Run, kind: str, number: int) -> list[list[int]]:
    return [
        event["clients"]
        for event in run.events
        if (event["kind"], event["round"]) == (kind, number)
    ]


@pytest.mark.parametrize("name", METHODS)
def test_newcomers_take_part_from_their_round_on_and_who_leaves_up_to_the_round_before(name):
    run = run_of(name)
    seen = {
        number: [row["client"] for row in run.client_rows if row["round"] == number]
        for number in range(1, ROUNDS + 1)
    }
    assert {tuple(seen[number]) for number in range(1, JOIN)} == {tuple(range(8))}
    assert {tuple(seen[number]) for number in range(JOIN, LEAVE)} == {tuple(range(12))}
    ((*left,),) = told(run, "left", LEAVE)
    assert len(left) == 4
    for number in range(LEAVE, ROUNDS + 1):
        assert set(seen[number]) == set(range(12)) - set(left)
    assert told(run, "joined", JOIN)[0] == [8, 9, 10, 11]
    trained = {row["round"]: row["clients_trained"] for row in run.metric_rows}
    assert (trained[JOIN - 1], trained[LEAVE - 1], trained[ROUNDS]) == (8, 12, 8)
    assert all(not set(left) & set(node.members) for node in run.tree.nodes)
    assert all(
        node.cached is None or len(node.cached) == len(node.members) for node in run.tree.nodes
    )


@pytest.mark.parametrize("name", METHODS)
def test_until_somebody_comes_or_goes_the_run_is_the_same(name):
    run, plain = run_of(name), run_of(name, None, None)
    for number in range(JOIN - 1):
        for column in ("accuracy_mean", "train_loss", "clusters", "bytes_up"):
            assert run.metric_rows[number][column] == plain.metric_rows[number][column]


@pytest.mark.parametrize("name", ["cfl", "fl_hc", "fesem", "pacfl", "stocfl", "oracle"])
def test_newcomers_find_their_true_clusters(name):
    before, after = (run_of(name).metric_rows[number - 1] for number in (JOIN - 1, LEAVE - 1))
    assert before["ari"] == 1.0, "or there would be nothing to find"
    assert after["ari"] == 1.0


def test_members_leave_where_nobody_joins():
    run = run_of("fedavg", None, LEAVE)
    ((*left,),) = told(run, "left", LEAVE)
    assert set(left) < set(range(8))
    assert run.summary["clients"] == 8
    assert sorted(run.tree.leaf_of) == sorted(set(range(8)) - set(left))


def test_a_tree_keeps_the_models_of_who_left_and_drops_their_updates():
    tree = ParameterTree.root_only(range(4), torch.zeros(2))
    cached = [torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[3.0, 0.0], [4.0, 0.0]])]
    tree = tree.split(
        0, [[0, 2], [1, 3]], params=torch.ones(2), cached=cached, round_number=1, criteria={}
    )
    left = tree.without([2, 1, 3])
    assert [node.members for node in left.nodes] == [(0,), (0,), ()]
    assert [node.cached.tolist() for node in left.nodes[1:]] == [[[1.0, 0.0]], []]
    assert torch.equal(left.nodes[2].params, tree.nodes[2].params)
    assert tree.with_newcomers([9, 5]).nodes[0].members == (0, 1, 2, 3, 5, 9)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"join_round": 1}, "newcomers.join_round should be at least 2, or left out, got 1"),
        ({"leave_round": 0}, "newcomers.leave_round should be at least 2, or left out, got 0"),
        (
            {"join_round": 5, "leave_round": 5},
            "newcomers.leave_round should be after join_round, 5, got 5",
        ),
    ],
)
def test_rounds_that_cannot_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        Churn(**settings)


@pytest.mark.parametrize(
    ("newcomers", "told"),
    [
        (
            {"clients": 2, "join_round": 9},
            "newcomers.join_round should be at most 8, the number of rounds, with",
        ),
        (
            {"join_round": 3},
            "newcomers.join_round should be at most 8, the number of rounds, with newcomers.clients at",
        ),
        (
            {"clients": 4, "leave_round": 3},
            "newcomers.clients should be less than 4, so that not all of these clients leave, got 4",
        ),
        (
            {"clients": 4, "join_round": 1},
            "newcomers.join_round should be at least 2, or left out, got 1",
        ),
    ],
)
def test_a_config_says_what_cannot_be(newcomers, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({"rounds": 8, "data": {"clients": 4}, "newcomers": newcomers})
    assert check_config(
        {"newcomers": {"clients": 2, "join_round": 9, "leave_round": 12}}
    ).newcomers.presence == Churn(join_round=9, leave_round=12)


def test_an_oracle_that_was_not_told_of_newcomers_says_so():
    truth = {client.id: client.id % 2 for client in digits().clients}
    with pytest.raises(
        ConfigError,
        match=r"algorithm 'oracle' cannot assign the newcomers \[8, 9, 10, 11\]: their true clusters",
    ):
        fedclade.simulate(Oracle(truth), "mclr", digits(), rounds=3, presence=Churn(join_round=2))


@pytest.mark.parametrize("stopped_after", [JOIN - 1, JOIN, LEAVE])
@pytest.mark.parametrize("name", ["cfl", "ifca"])
def test_a_run_that_is_continued_ends_like_one_that_was_not_interrupted(
    name, stopped_after, tmp_path
):
    rounds_seen: list[int] = []

    def once_more(stop_after: int | None) -> Run:
        return fedclade.simulate(
            METHODS[name],
            "mclr",
            digits(),
            local=LocalTraining(epochs=2, lr=0.2),
            rounds=ROUNDS,
            presence=Churn(join_round=JOIN, leave_round=LEAVE),
            folder=tmp_path / "run",
            on_round=lambda row, _: rounds_seen.append(row["round"]),
            stop=lambda: rounds_seen[-1] == stop_after,
        )

    with pytest.raises(RunInterrupted):
        once_more(stopped_after)
    run, whole = once_more(None), run_of(name)
    assert rounds_seen == list(range(1, ROUNDS + 1))
    assert list(run.events) == list(whole.events)
    assert [row["accuracy"] for row in run.client_rows] == [
        row["accuracy"] for row in whole.client_rows
    ]
    assert all(
        torch.equal(a.params, b.params)
        for a, b in zip(run.tree.nodes, whole.tree.nodes, strict=True)
    )


def test_nobody_goes_where_everybody_has_left():
    """Not even the client whose update is the opposite of all that are cached in the other branch."""
    tree = ParameterTree.root_only(range(3), torch.zeros(2))
    cached = [torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0], [-1.0, 0.0]])]
    tree = tree.split(
        0, [[0], [1, 2]], params=torch.zeros(2), cached=cached, round_number=1, criteria={}
    )
    state = State(tree.without([0]).with_newcomers([7]))
    clients = ScriptedClients({1: [0.0, 1.0], 2: [0.0, 1.0], 7: [1.0, 0.0]})
    (found,) = CFL().assign(state.tree, [7], clients, RoundPlan(2, LocalTraining()))
    assert found.node == 2
    state = CFLState(state.tree, torch.zeros(3, dtype=torch.float64))
    after, _ = CFL().step(state, [1, 2, 7], clients, RoundPlan(2, LocalTraining()))
    assert after.tree.leaf_of[7] == 2
