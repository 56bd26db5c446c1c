"""Clients that are there at certain hours."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedclade import (
    CFL,
    ConfigError,
    DataError,
    FedAvg,
    FedGroup,
    FlexCFL,
    LocalTraining,
    Run,
    simulate,
)
from fedclade.channel import CentralPrivacy
from fedclade.config import read_config
from fedclade.core.errors import CheckpointError, RunInterrupted
from fedclade.runs import Backend, Churn
from fedclade.runs.churn import DAY, Trace
from tests.runs.test_churn import METHODS, digits
from tests.tiny import federation_of, linear

FOUR = federation_of([0, 0, 1, 1])


def written(folder, rows: str, name: str = "hours.csv"):
    path = folder / name
    path.write_text("client,from,to\n" + rows)
    return path


def there(trace: Trace, *hours: float) -> list[list[int]]:
    return [np.flatnonzero(trace.there(3600 * hour)).tolist() for hour in hours]


def test_a_file_says_when_clients_are_there_by_name_or_id_and_begins_anew_after_its_last_day(
    tmp_path,
):
    path = written(tmp_path, "c0,0,3600\n1,1800,7200\nc0,82800,86400\n2,0,90000\n")
    trace = Trace.read(path, FOUR)
    assert there(trace, 0, 0.5, 1, 2, 23.5, 24, 25) == [
        [0, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3],
        [2, 3],
        [0, 2, 3],
        [2, 3],
        [3],
    ]
    assert trace.period == 2 * DAY
    assert there(trace, 48, 48.5) == there(trace, 0, 0.5)
    assert there(Trace.read(path, FOUR, 90_000.0), 25) == there(trace, 0)


def test_parquet_says_the_same(tmp_path):
    table = pa.table({"client": [1, 1], "to": [10.0, 30.0], "from": [0, 20]})
    pq.write_table(table, tmp_path / "hours.parquet")
    trace = Trace.read(tmp_path / "hours.parquet", FOUR, 40.0)
    assert [bool(trace.there(at)[1]) for at in (0, 10, 19, 20, 29, 30, 40)] == [
        True,
        False,
        False,
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("c0,5,5\n", "'from' should be at least 0 and less than 'to', got from 5 to 5 in row 1"),
        (
            "c0,0,5\nc1,-1,5\n",
            "'from' should be at least 0 and less than 'to', got from -1 to 5 in row 2",
        ),
        (
            "c0,0,5\nc1,0,9\nc0,4,6\n",
            "intervals of client 'c0' overlap: from 0 to 5 and from 4 to 6",
        ),
        (
            "c0,0,5\nnobody,0,9\n",
            "contains unknown clients in the column 'client': ['nobody']; expected names or ids of the run's clients, "
            "such as 'c0' or",
        ),
        ("c0,NaN,5\n", "column 'from' has an empty cell in row 1"),
        ("c0,0,inf\n", "column 'to' has inf in row 1"),
        ("c0,soon,5\n", "column 'from' should contain numbers, the seconds since the run's start"),
        ("", "should have at least 1 row, got none"),
    ],
)
def test_a_file_of_no_use_is_refused(rows, told, tmp_path):
    with pytest.raises(DataError, match=re.escape(told)):
        Trace.read(written(tmp_path, rows), FOUR)


def test_a_file_that_is_missing_lacks_a_column_or_outlasts_the_period_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none\.csv"):
        Trace.read(tmp_path / "none.csv", FOUR)
    (tmp_path / "odd.csv").write_text("client,start,to\nc0,0,1\n")
    with pytest.raises(DataError, match="'from'"):
        Trace.read(tmp_path / "odd.csv", FOUR)
    with pytest.raises(ConfigError, match=r"presence\.trace_period should be at least 9, .* got 5"):
        Trace.read(written(tmp_path, "c0,0,9\n"), FOUR, 5.0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"trace": ""}, "presence.trace should be a file, 'daily', or left out, got ''"),
        (
            {"trace": "daily", "round_seconds": 0.0},
            "presence.round_seconds should be greater than 0, got 0",
        ),
        (
            {"trace": "daily", "trace_period": 9.0},
            "presence.trace_period should be left out unless presence.trace is",
        ),
        (
            {"trace": "a.csv", "trace_period": -1.0},
            "presence.trace_period should be greater than 0, got -1",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        Churn(**settings)


def test_hours_of_the_day_belong_to_seed_and_key_alone():
    """10,000 clients for 8 hours on average: a share of 1/3, of which 0.02 is four standard deviations."""
    trace = Trace.daily(range(10_000), seed=3)
    shares = [trace.there(3600.0 * hour).mean() for hour in range(24)]
    assert max(abs(share - 1 / 3) for share in shares) < 0.02
    assert np.array_equal(Trace.daily([7, 9999], seed=3).there(0), trace.there(DAY)[[7, 9999]])
    assert not np.array_equal(Trace.daily(range(100), seed=4).there(0), trace.there(0)[:100])


@cache
def daily(name: str) -> Run:
    presence = Churn(join_round=5, trace="daily")
    return simulate(
        METHODS[name], "mclr", digits(), local=LocalTraining(lr=0.2), rounds=6, presence=presence
    )


@pytest.mark.parametrize("name", ["cfl", "fl_hc", "ifca", "pacfl", "finetune"])
def test_those_alone_that_are_there_train_and_all_that_belong_are_evaluated(name):
    run, trace = (
        daily(name),
        Trace.daily([c.key for c in digits().join(digits().newcomers).clients], 0),
    )
    assert run.metric_rows
    for row in run.metric_rows:
        number = row["round"]
        expected = trace.there(3600.0 * (number - 1))[: 8 if number < 5 else 12].sum()
        assert row["clients_present"] == expected
        assert row["clients_trained"] <= expected
        assert len([r for r in run.client_rows if r["round"] == number]) == (
            8 if number < 5 else 12
        )


def test_a_round_without_clients_leaves_the_models_as_they_are_and_so_does_a_cluster_without(
    tmp_path,
):
    rows = "c0,0,20\nc1,0,10\nc2,0,10\nc3,0,10\n"
    presence = Churn(trace=str(written(tmp_path, rows)), round_seconds=10.0)
    models = []
    run = simulate(
        "oracle",
        linear(),
        FOUR,
        rounds=3,
        presence=presence,
        on_round=lambda _, tree: models.append(tree.leaves),
    )
    told = [(e["round"], e["node"], e["clients"]) for e in run.events if e["kind"] == "too_few"]
    assert told == [(2, 2, 0), (3, 0, 0)]
    (_, two), (moved, same), (last, _) = models
    assert same.params is two.params
    assert not moved.params.equal(models[0][0].params)
    assert last.params is moved.params


def test_always_there_is_as_without_a_trace(tmp_path):
    path = written(tmp_path, "c0,0,86400\n")
    with_trace, without = (
        simulate(FedAvg(), linear(), FOUR, rounds=2, client_fraction=0.5, presence=presence)
        for presence in (Churn(trace=str(path)), None)
    )
    assert with_trace.tree.nodes[0].params.equal(without.tree.nodes[0].params)


def test_a_run_is_continued_bit_for_bit_and_not_with_another_trace(tmp_path):
    path = written(tmp_path, "0,0,9000\n1,0,5000\n2,5000,9000\n")

    def once_more(folder=None, stop=None) -> Run:
        presence = Churn(trace=str(path))
        return simulate(
            CFL(), "mclr", digits(), rounds=4, presence=presence, folder=folder, stop=stop
        )

    with pytest.raises(RunInterrupted):
        once_more(tmp_path / "run", lambda: True)
    kept = path.read_text()
    path.write_text(kept + "3,0,100\n")
    with pytest.raises(CheckpointError):
        once_more(tmp_path / "run")
    path.write_text(kept)
    run, whole = once_more(tmp_path / "run"), once_more()
    assert run.tree.nodes[0].params.equal(whole.tree.nodes[0].params)
    assert [row["clients_present"] for row in run.metric_rows] == [
        row["clients_present"] for row in whole.metric_rows
    ]


def test_a_config_names_a_trace_beside_it_and_says_nothing_where_there_is_none(tmp_path):
    written(tmp_path, "0,0,9000\n")
    (tmp_path / "run.toml").write_text('[presence]\ntrace = "hours.csv"\nround_seconds = 600\n')
    config = read_config(tmp_path / "run.toml")
    assert config.as_dict()["presence"]["trace"] == str(tmp_path / "hours.csv")
    assert config.presence.round_seconds == 600.0
    assert (
        read_config(tmp_path / "run.toml", ["presence.trace=daily"]).as_dict()["presence"]["trace"]
        == "daily"
    )
    (tmp_path / "plain.toml").write_text("rounds = 2\n")
    assert "presence" not in read_config(tmp_path / "plain.toml").as_dict()
    with pytest.raises(ConfigError, match=r"presence\.round_seconds should be greater than 0"):
        read_config(tmp_path / "run.toml", ["presence.round_seconds=0"])


def test_poisson_sampling_is_of_all_clients_whoever_is_available(tmp_path):
    """Models move by noise while all clients are away, and a sum's divisor counts all clients."""
    away = "".join(f"{client},{5000},9000\n" for client in range(8))  # all, in the first round
    path = written(tmp_path, away)
    privacy = CentralPrivacy(clip_norm=0.1, noise_multiplier=3.0)

    run = simulate(
        FedAvg(),
        linear(),
        federation_of([0] * 8),
        rounds=1,
        privacy=privacy,
        client_fraction=0.5,
        presence=Churn(trace=str(path)),
    )
    row = run.metric_rows[0]
    assert row["clients_present"] == row["clients_trained"] == 0
    assert [event["kind"] for event in run.events].count("private_release") == 1
    start = Backend.simulated_by(federation_of([0] * 8), linear(), FedAvg()).initial
    by_noise = run.tree.nodes[0].params - start
    # z·C noise on the sum, over 4 of 8 clients on average
    assert float(by_noise.std()) == pytest.approx(3.0 * 0.1 / 4, rel=0.5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", [FedGroup, FlexCFL])
def test_groups_are_founded_by_clients_that_are_there(method, seed):
    """With two clients to pre-train of eight, and a third of them there, both are away as a rule."""
    algorithm, spec = method(groups=2, pretrain_scale=1), LocalTraining(lr=0.2)
    run = simulate(
        algorithm, "mclr", digits(), local=spec, rounds=2, presence=Churn(trace="daily"), seed=seed
    )
    first = run.metric_rows[0]
    there = np.flatnonzero(Trace.daily([c.key for c in digits().clients], seed).there(0)).tolist()
    assert first["clients_present"] == len(there)
    placed = {row["client"] for row in run.client_rows if row["round"] == 1 and row["cluster"]}
    assert placed == (set(there) if len(there) >= 2 else set())  # with seed 2 one alone is there
