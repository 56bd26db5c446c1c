"""Gains over a network: clients compare models on their own test rows, and report scores alone."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

import fedclade
from fedclade import DataSpec, RunError
from fedclade.flower.gain_query import GainQuery
from fedclade.flower.policy import NotDisclosedError, Policy
from fedclade.runs import Run, gains
from tests.flower.grids import FOUR, LOCAL, federated, grid_of, network_of, node_of
from tests.tiny import federation_of, perceptron

FEDERATION = federation_of(FOUR)
SCORES = ("trivial", "cluster_model", "own_model")
ROW = [8.0, 0.0, *[0.5, 0.25, 0.75] * 5]


def simulated(algorithm: str) -> Run:
    return fedclade.simulate(algorithm, perceptron, FEDERATION, rounds=4, local=LOCAL)


def intervals_of(run: Run, kind: str) -> dict[int, dict[str, list[float]]]:
    """Return the scores or gains of the models that both kinds of runs know, by client."""
    assert run.gains is not None
    found: dict[int, dict[str, list[float]]] = {}
    for client in run.gains.clients:
        intervals = getattr(client, kind)
        found[client.client] = {
            name: [intervals[name].value, intervals[name].low, intervals[name].high]
            for name in SCORES
            if name in intervals
        }
    return found


@pytest.mark.parametrize("algorithm", ["fedavg", "oracle", "ditto", "local", "fedper"])
def test_a_network_measures_the_same_gains_as_a_simulation(algorithm: str):
    here = simulated(algorithm)
    personal = {"personal": "head"} if algorithm == "fedper" else {}
    there = federated(grid_of(FEDERATION, **personal), algorithm)
    assert here.gains is not None
    assert there.gains is not None
    for kind in ("scores", "gains"):
        expected = intervals_of(here, kind)
        found = intervals_of(there, kind)
        assert found.keys() == expected.keys()
        for client, intervals in expected.items():
            assert found[client].keys() == intervals.keys()
            for name, numbers in intervals.items():
                assert found[client][name] == pytest.approx(numbers, abs=1e-6)
    for one, other in zip(there.gains.clients, here.gains.clients, strict=True):
        assert (one.n_test, one.n_train) == (other.n_test, other.n_train)
        assert (one.name, one.cluster, one.deployed) == (other.name, other.cluster, other.deployed)
    assert there.gains.intervals == here.gains.intervals == "shares"
    assert there.gains.missing["alone"].startswith("a network trains no reference")


def test_gains_are_measured_with_permuted_models(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    plain = federated(grid_of(FEDERATION), "fedavg")
    permuted = federated(
        grid_of(FEDERATION, config={"secret-file": str(secret)}), "fedavg", permute=True
    )
    assert permuted.gains is not None
    last = {row["client"]: row for row in permuted.client_rows if row["round"] == 4}
    for client in permuted.gains.clients:
        score = client.scores["cluster_model"].value
        assert score == pytest.approx(last[client.client]["accuracy"])
    trivial = [intervals["trivial"] for intervals in intervals_of(permuted, "scores").values()]
    assert trivial == [each["trivial"] for each in intervals_of(plain, "scores").values()]


def test_the_gains_are_in_the_folder_of_the_run(tmp_path):
    run = federated(grid_of(FEDERATION), "fedavg", folder=tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    assert intervals_of(loaded, "scores") == intervals_of(run, "scores")


def test_a_folder_that_takes_no_gains_loses_none_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise RunError("cannot write gains.json: no space left")

    monkeypatch.setattr(gains, "write_gains", fail)
    run = federated(grid_of(FEDERATION), "fedavg", folder=tmp_path / "run")
    assert run.gains is not None
    assert Run.load(tmp_path / "run").gains is None


def test_weights_of_mixtures_leave_the_score_that_clients_reported():
    run = federated(grid_of(FEDERATION), "fedem")
    assert run.gains is not None
    last = [row for row in run.client_rows if row["round"] == run.model_round]
    for client, row in zip(run.gains.clients, last, strict=True):
        assert client.scores["own_model"].value == row["accuracy"]
        assert client.scores["own_model"].low is None
        assert client.scores["trivial"].low is not None
        assert client.gains == {}


def test_a_client_that_does_not_report_gains_has_its_reported_score():
    grid = grid_of(FEDERATION)
    node = grid.nodes[node_of(2)]
    # Four rounds are evaluated, and the limit leaves nothing for more.
    node.config = {**node.config, "max-evaluations": 4}
    run = federated(grid, "fedavg")
    assert run.gains is not None
    silent = run.gains.clients[2]
    [row] = [row for row in run.client_rows if row["round"] == 4 and row["client"] == 2]
    assert (silent.n_test, silent.gains) == (None, {})
    assert {name: each.value for name, each in silent.scores.items()} == {
        "cluster_model": row["accuracy"]
    }
    assert all(run.gains.clients[place].n_test for place in (0, 1, 3))


def test_a_run_is_complete_if_no_client_reports_gains(caplog: pytest.LogCaptureFixture):
    grid = grid_of(FEDERATION, config={"max-evaluations": 4})
    with caplog.at_level(logging.WARNING):
        run = federated(grid, "fedavg")
    assert run.gains is None
    assert run.summary["rounds"] == 4
    assert "the gains of clients could not be measured" in caplog.text


def test_clients_with_sums_alone_are_not_queried(caplog: pytest.LogCaptureFixture):
    grid = grid_of(FEDERATION, config={"secure-aggregation": True, "trust-server-keys": True})
    network = network_of(grid, secure_aggregation=True)
    with caplog.at_level(logging.WARNING):
        run = federated(grid, "fedavg", network=network, evaluate_every=4)
    assert run.gains is None
    assert "could not be measured" not in caplog.text


def test_a_closed_client_refuses_unless_it_discloses_gains():
    closed = Policy(secure_aggregation=True, trust_server_keys=True)
    with pytest.raises(NotDisclosedError, match='set disclose="gains"'):
        closed.check_disclosed(GainQuery.discloses, GainQuery.reveals, private=False)
    willing = Policy(secure_aggregation=True, trust_server_keys=True, disclose=("gains",))
    willing.check_disclosed(GainQuery.discloses, GainQuery.reveals, private=False)


def test_a_reply_has_the_length_that_its_query_says():
    query = GainQuery(
        [0], model=torch.zeros(3), has_cluster_model=True, has_own_model=False, seed=0
    )
    assert query.shape(DataSpec("tiny", (4,), 2)) == (len(ROW),)


@pytest.mark.parametrize(
    ("place", "value", "is_valid"),
    [
        (0, 8.0, True),
        (0, 8.5, False),
        (0, -1.0, False),
        (0, math.nan, False),
        (1, 2.0, True),
        (1, 3.0, False),
        (1, 0.5, False),
        (2, math.nan, False),
        (2, 0.8, False),
        (2, math.inf, False),
        (3, math.nan, False),
        (4, 0.4, False),
    ],
)
def test_a_reply_has_possible_counts_and_ordered_intervals(
    place: int, value: float, is_valid: bool
):
    query = GainQuery(
        [0], model=torch.zeros(3), has_cluster_model=True, has_own_model=False, seed=0
    )
    row = torch.tensor(ROW, dtype=torch.float64)
    assert query.is_valid(row)
    row[place] = value
    assert query.is_valid(row) == is_valid
    row = torch.tensor([*ROW[:2], *[math.nan] * 15], dtype=torch.float64)
    assert query.is_valid(row)  # all intervals are unknown
