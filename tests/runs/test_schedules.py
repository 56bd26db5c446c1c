"""Schedules of the step size: literal twins, every engine and a network alike, and continued runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedclade import ConfigError, LocalTraining, UpdateError, simulate
from fedclade.config import check_config
from fedclade.core import TrainQuery
from fedclade.core.schedules import SCHEDULES, factor_in
from fedclade.flower import wire
from fedclade.flower.models_sent import read_spec
from fedclade.flower.wire import Content
from fedclade.runs.newcomers import assign
from fedclade.training import clients as simulated_clients
from tests.flower.grids import FOUR, federated, grid_of
from tests.tiny import federation_of, perceptron


def halving(number: int, rounds: int) -> float:
    """A user's schedule."""
    return 0.5 ** (number - 1)


def literal(name: str, t: int, T: int) -> float:
    """The formulas of the documentation, written out."""
    if name == "cosine":
        return (1 + math.cos(math.pi * (t - 1) / T)) / 2
    if name == "step":
        passed = t - 1  # rounds before this round
        return 1.0 if passed < T / 2 else (0.1 if passed < 3 * T / 4 else 0.01)
    warm = -(-T // 10)
    if t <= warm:
        return t / warm
    return (1 + math.cos(math.pi * (t - warm - 1) / (T - warm))) / 2


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 8, 20, 41])
def test_factors_are_those_of_the_formulas(name: str, rounds: int):
    found = [factor_in(name, number, rounds) for number in range(1, rounds + 1)]
    expected = [literal(name, number, rounds) for number in range(1, rounds + 1)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert all(0 < factor <= 1 for factor in found)


def run_of(schedule: Any, engine: str = "loop", rounds: int = 4, **settings: Any) -> Any:
    local = LocalTraining(batch_size=8, lr=0.4, lr_schedule=schedule)
    federation = federation_of(FOUR)
    return simulate(
        "fedavg", perceptron, federation, rounds=rounds, local=local, engine=engine, **settings
    )


def model_of(run: Any) -> torch.Tensor:
    return run.tree.nodes[0].params


def test_each_round_trains_with_its_step_size(monkeypatch: pytest.MonkeyPatch):
    """The step sizes that clients are sent, with which all engines train."""
    sent: list[float] = []
    train = simulated_clients.SimulatedClients.ask

    def ask(self: Any, query: Any, sink: Any = None) -> Any:
        if isinstance(query, TrainQuery):
            sent.append(query.round.lr)
        return train(self, query, sink)

    monkeypatch.setattr(simulated_clients.SimulatedClients, "ask", ask)
    for schedule in (*SCHEDULES, halving, "tests.runs.test_schedules:halving"):
        sent.clear()
        run_of(schedule)
        factors = [halving(number, 4) for number in range(1, 5)]
        if schedule in SCHEDULES:
            factors = [literal(schedule, number, 4) for number in range(1, 5)]
        assert sent == pytest.approx([0.4 * factor for factor in factors])


@pytest.mark.parametrize("engine", ["stacked", "workers", "vmap"])
def test_every_engine_equals_the_loop(engine: str):
    torch.testing.assert_close(
        model_of(run_of("warmup_cosine", engine)), model_of(run_of("warmup_cosine"))
    )


def test_a_network_equals_a_simulation():
    local = LocalTraining(batch_size=8, lr=0.4, lr_schedule="cosine")
    run = federated(grid_of(federation_of(FOUR)), "fedavg", local=local, rounds=4)
    torch.testing.assert_close(model_of(run), model_of(run_of("cosine")))
    assert run.config["local"]["lr_schedule"] == "cosine"


def test_a_client_imports_no_schedule_that_a_query_names():
    spec = dataclasses.asdict(LocalTraining()) | {"lr_schedule": "os:system"}
    content = Content.of(wire.record({"spec": json.dumps(spec)}))
    with pytest.raises(UpdateError, match="the query names a schedule of the step size"):
        read_spec(content)


def test_the_config_of_a_run_records_the_schedule(tmp_path: Path):
    run = run_of(halving, rounds=2, folder=tmp_path / "run")
    assert run.config["local"]["lr_schedule"] == "tests.runs.test_schedules:halving"
    again = check_config({"local": {"lr_schedule": "tests.runs.test_schedules:halving"}})
    assert again.local.in_round(2, 9).lr == pytest.approx(0.05)
    assert "lr_schedule" not in run_of(None, rounds=1).config["local"]
    assert check_config({"local": {"lr_schedule": "cosine"}}).local.lr_schedule == "cosine"


def test_a_continued_run_follows_the_schedule_of_all_rounds_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for rounds in (2, 4):
        longer = run_of("cosine", rounds=rounds, folder=tmp_path / "run")
    assert "since the step sizes of local.lr_schedule depended on the number of rounds" in (
        caplog.text
    )
    factors = [literal("cosine", 1, 2), literal("cosine", 2, 2)]
    factors += [literal("cosine", 3, 4), literal("cosine", 4, 4)]
    twin = run_of(lambda number, rounds: factors[number - 1])
    assert model_of(longer).allclose(model_of(twin), rtol=1e-6, atol=1e-8)


def test_newcomers_train_with_the_step_size_of_the_last_round():
    run = run_of("cosine")
    newcomers = federation_of((1, 0))
    found = assign(run, newcomers, model=perceptron, engine="loop")
    same = run_of(lambda number, rounds: literal("cosine", number, rounds))
    twin = assign(
        same,
        newcomers,
        model=perceptron,
        engine="loop",
        local=LocalTraining(batch_size=8, lr=0.4, lr_schedule="cosine"),
    )
    assert found.rows == twin.rows


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr_schedule": "cosin"}, "unknown schedule in local.lr_schedule: 'cosin'; did you mean"),
        (
            {"lr_schedule": "cosine", "lr_decay": 0.9},
            "local.lr_decay should be 1, or left out, with",
        ),
        ({"lr_schedule": 3}, "3"),
    ],
)
def test_a_wrong_schedule_is_refused(settings: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        LocalTraining(**settings)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "much"])
def test_a_factor_that_is_none_is_one_clear_error(value: Any):
    with pytest.raises(
        ConfigError, match=r"should return a finite number greater than 0, by which"
    ):
        run_of(lambda number, rounds: value, rounds=1)


def test_a_function_that_fails_is_one_clear_error():
    def failing(number: int, rounds: int) -> float:
        raise KeyError("no")

    with pytest.raises(ConfigError, match=r"local.lr_schedule: .*failing\(1, 2\) failed: KeyError"):
        run_of(failing, rounds=2)
    with pytest.raises(ConfigError, match="schedule 'nowhere:f'"):
        run_of("nowhere:f", rounds=1)
    with pytest.raises(ConfigError, match="should be a function of the round and the number of"):
        run_of("math:pi", rounds=1)
