"""Runs during which clients' data changes."""

from __future__ import annotations

import json

import pytest
import torch

from fedclade import IFCA, FedAvg, FlexCFL, LocalTraining, load_federation, simulate
from fedclade.data import Federation
from fedclade.report.curves import score_picture
from fedclade.report.run_view import RunView
from fedclade.runs import Churn
from tests.properties.test_resume import bytes_of

DRIFT = {"rounds": (3, 5), "share": 0.5, "examples": "same"}
ROUNDS = 6


@pytest.fixture(scope="module")
def federation() -> Federation:
    settings = {
        "clients": 6,
        "shift": "label_swap",
        "clusters": 2,
        "newcomers": 2,
        "samples_per_client": 60,
    }
    return load_federation("digits", **settings, drift=DRIFT)


def run(federation: Federation, algorithm=None, **settings):
    spec = LocalTraining(epochs=2, lr=0.2)
    return simulate(
        algorithm or IFCA(clusters=2),
        "mclr",
        federation,
        **{"rounds": ROUNDS, "local": spec, **settings},
    )


def test_clusters_are_scored_by_those_of_the_stage(federation):
    found = run(federation)
    for row in found.client_rows:
        assert row["true_cluster"] == federation.in_round(row["round"]).true_clusters[row["client"]]
    changes = [event for event in found.events if event["kind"] == "data_changed"]
    for event, (before, after) in zip(changes, ((2, 3), (4, 5)), strict=True):
        now, then = (federation.in_round(number).true_clusters for number in (after, before))
        assert (event["round"], event["clients"]) == (after, [c for c in now if now[c] != then[c]])
    assert score_picture(RunView(found)).uprights == {3: "other data", 5: "other data"}


@pytest.mark.parametrize("join", [None, 4])
def test_the_oracle_knows_the_clusters_of_every_stage(federation, join):
    found = run(federation, "oracle", presence=Churn(join_round=join))
    assert [row["ari"] for row in found.metric_rows] == [1.0] * ROUNDS


def test_before_the_first_stage_a_run_is_that_of_the_data_alone(federation):
    whole, first = (run(of, FedAvg(), rounds=2) for of in (federation, federation.in_round(1)))
    assert torch.equal(whole.tree.nodes[0].params, first.tree.nodes[0].params)
    then = run(federation, FedAvg(), rounds=3)
    assert not torch.equal(
        then.tree.nodes[0].params,
        run(federation.in_round(1), FedAvg(), rounds=3).tree.nodes[0].params,
    )


@pytest.mark.parametrize("way", [{"presence": Churn(join_round=4)}, {"client_fraction": 0.5}])
def test_a_run_that_stops_in_a_stage_ends_in_the_same_bytes(federation, way, tmp_path):
    run(federation, engine="loop", folder=tmp_path / "whole", **way)
    for _ in range(ROUNDS - 1):
        with pytest.raises(Exception, match="interrupted after round"):
            run(federation, engine="loop", folder=tmp_path / "resumed", stop=lambda: True, **way)
    run(federation, engine="loop", folder=tmp_path / "resumed", **way)
    whole, resumed = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "resumed")
    assert [name for name in whole if resumed[name] != whole[name]] == []
    assert json.loads(whole["summary"])["clusters"]["true"] == 2


def test_newcomers_hold_what_the_others_do_in_the_stage(federation):
    found = run(federation, presence=Churn(join_round=4))
    rows = {(row["round"], row["client"]): row["true_cluster"] for row in found.client_rows}
    for number in (4, 5):
        assert federation.newcomers.ids
        for client in federation.newcomers.ids:
            assert (
                rows[number, client] == federation.newcomers.in_round(number).true_clusters[client]
            )


def test_clients_of_flexcfl_migrate_in_the_rounds_in_which_their_labels_shift(federation):
    found = run(federation, FlexCFL(groups=2, by_label=True, shift_share=0.0))
    changed = {
        event["round"]: set(event["clients"])
        for event in found.events
        if event["kind"] == "data_changed"
    }
    for row in found.metric_rows:
        most = len(changed.get(row["round"], ()))
        assert 0 < row["clients_shifted"] <= most if most else row["clients_shifted"] == 0
        assert row["ari"] == 1.0
    assert sum(row["clients_migrated"] for row in found.metric_rows) == sum(
        map(len, changed.values())
    )
