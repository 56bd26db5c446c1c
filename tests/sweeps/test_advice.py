"""Advice: the method that suits made-up clients, its gain, and the splits of training data."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest

import fedclade
from fedclade import ConfigError, DataError, Federation, RunError
from fedclade.sweeps import Gain
from fedclade.sweeps.inner_data import check_inner, split_training
from fedclade.tasks import Metric

N_CLIENTS = 8


def clients_with(mapping: str, task: str = "classification", rows: int = 160) -> Federation:
    """Return clients whose targets are one mapping of the inputs, one of two, or one for each."""
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(N_CLIENTS, 6))
    data: dict[str, Any] = {}
    for client in range(N_CLIENTS):
        number = {"one": 0, "groups": client % 2, "own": client}[mapping]
        x = generator.normal(size=(rows, 6)).astype(np.float32)
        outputs = x @ weights[number]
        y: Any = outputs.astype(np.float32)
        if task != "regression":
            y = (outputs > 0).astype(np.int64 if task == "classification" else np.float32)
        data[f"client-{client}"] = (x, y)
    return fedclade.federation(data, task=task)  # pyright: ignore[reportArgumentType]


def advise(source: Any, rounds: int = 8, **options: Any) -> fedclade.Advice:
    return fedclade.advise(source, rounds=rounds, seeds=1, overrides=["local.lr=0.05"], **options)


def test_clients_with_one_mapping_are_served_with_one_model() -> None:
    lines: list[str] = []
    advice = advise(clients_with("one", "binary"), report=lines.append)
    assert advice.method == "fedavg"
    assert advice.served == {"one model": N_CLIENTS}
    assert advice.gain_of in ("rcfl", "auto")
    assert advice.gain < 0.05
    assert len(advice.sentences) == 3
    assert advice.sentences[0] == "Serve all 8 clients with one model."
    assert "Expect no gain" in advice.sentences[2]
    assert "budget: 4 methods, 8 rounds and 1 seed: about 6 times" in lines[0]
    assert lines[1].startswith("time: about")
    assert lines[2].startswith(f"spent: {advice.steps:.1f} times")
    assert 4 < advice.steps < 8


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_two_groups_are_found_and_served_with_their_models(task: str) -> None:
    advice = advise(clients_with("groups", task))
    assert advice.method == advice.gain_of == "rcfl"
    even = [f"client-{number}" for number in range(0, N_CLIENTS, 2)]
    odd = [f"client-{number}" for number in range(1, N_CLIENTS, 2)]
    assert advice.groups == [even, odd]
    assert advice.served == {"cluster": N_CLIENTS}
    assert "2 groups of 4 and 4 clients" in advice.sentences[0]
    assert 0.1 < advice.interval[0] < advice.gain <= advice.interval[1] <= 1
    assert advice.is_certain
    assert advice.losses["fedavg"] * (1 - advice.gain) == pytest.approx(advice.losses["rcfl"])
    assert tomllib.loads(advice.to_toml()) == {
        "rounds": 8,
        "algorithm": {"name": "rcfl"},
        "local": {"lr": 0.05},
    }


def test_clients_with_mappings_of_their_own_are_served_with_own_models() -> None:
    advice = advise(clients_with("own"), rounds=40)
    assert advice.method == "auto"
    assert sum(advice.served.values()) == N_CLIENTS
    assert advice.served.get("own", 0) + advice.served.get("fine-tuned", 0) >= N_CLIENTS - 2
    assert "own models" in advice.sentences[0]
    assert advice.gain > 0.3
    assert advice.is_certain
    assert str(advice) == "\n".join(advice.sentences)


def test_options_of_the_users_method_are_kept_and_auto_gets_validation_data() -> None:
    config = {
        "rounds": 50,
        "algorithm": {"name": "rcfl", "level": 0.05},
        "data": {"name": "digits", "clients": 6, "shift": "label_swap", "clusters": 2},
        "stop": {"patience": 3},
    }
    advice = fedclade.advise(config, rounds=8, seeds=1)
    assert advice.method == "rcfl"
    assert advice.config == config
    config["algorithm"] = {"name": "auto", "budget": 1.0}
    prepared = fedclade.advise(config, rounds=1, seeds=1).config
    assert prepared["data"].get("validation_fraction", 0) == 0.2 * (
        prepared["algorithm"]["name"] == "auto"
    )


def test_splits_use_training_data_only_and_held_out_parts_do_not_overlap() -> None:
    federation = clients_with("one", rows=50)
    allowed = {client.id: {*client.train.tolist()} for client in federation.clients}
    held = dict.fromkeys(allowed, frozenset[int]())
    for repetition in range(5):
        inner = split_training(federation, repetition, 0.2)
        for client, plain in zip(
            inner.with_validation.clients, inner.without_validation.clients, strict=True
        ):
            parts = [{*rows.tolist()} for rows in (client.train, client.validation, client.test)]
            assert set.union(*parts) == allowed[client.id]
            assert sum(map(len, parts)) == len(allowed[client.id]) == 40
            assert [len(part) for part in parts] == [24, 8, 8]
            assert {*plain.train.tolist()} == parts[0] | parts[1]
            assert len(plain.validation) == 0
            assert not held[client.id] & parts[2]
            held[client.id] |= parts[2]
            share = federation.pool.y[client.test].float().mean()
            assert abs(share - federation.pool.y[sorted(allowed[client.id])].float().mean()) < 0.15
    assert held == allowed


def test_a_rule_of_the_user_divides_the_rows_of_the_held_out_examples() -> None:
    x = np.arange(40, dtype=np.float32)[:, None]
    data = {name: (x, np.tile([0, 1], 20)) for name in "ab"}
    last = fedclade.federation(data, test="last", validation_fraction=0.4)
    inner = split_training(last, 0, 0.2, is_fixed=True)
    for client, plain in zip(
        inner.with_validation.clients, inner.without_validation.clients, strict=True
    ):
        assert client.train.max() < min(client.validation.min(), client.test.min())
        assert not {*client.validation.tolist()} & {*client.test.tolist()}
        assert plain.train.tolist() == client.train.tolist()


def test_small_clients_are_left_out() -> None:
    data = {
        name: (np.ones((n, 1)), np.arange(n) % 2)
        for name, n in zip("abc", (20, 20, 3), strict=True)
    }
    federation = fedclade.federation(data)
    assert check_inner(federation) == ["c"]
    assert len(split_training(federation, 0, 0.2).with_validation) == 2
    lonely = fedclade.federation({"a": data["a"], "c": data["c"]})
    with pytest.raises(DataError, match=r"at least 2 clients with 3 or more .* got 1, and 1 with"):
        check_inner(lonely)


def test_gain_is_a_share_of_the_mean_loss_paired_over_clients() -> None:
    base = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    gain = Gain.of(base, base - 0.5)
    assert gain.mean == pytest.approx(0.25)
    assert gain.error == pytest.approx(0)
    assert gain.is_beyond_noise
    assert not gain.has_zero
    noisy = Gain.of(base, base + np.array([0.5, -0.5, 0.1]))
    assert noisy.has_zero
    assert not noisy.is_beyond_noise
    assert Gain.of(base, base * np.nan).mean == -np.inf


def test_errors_name_the_problem_and_the_fix() -> None:
    federation = clients_with("one", rows=10)
    with pytest.raises(ConfigError, match="rounds should be at least 1, got 0"):
        fedclade.advise(federation, rounds=0)
    with pytest.raises(ConfigError, match="seeds should be at least 1, got 0"):
        fedclade.advise(federation, seeds=0)
    with pytest.raises(DataError, match=r"at least 2 clients with 3 or more examples .* got 1;"):
        fedclade.advise(federation.alone(0))
    with pytest.raises(ConfigError, match=r"--set data\.target=age"):
        fedclade.advise({"data": {"name": "digits"}}, target="age")
    with pytest.raises(ConfigError, match=r"data that does not change during a run, got data with"):
        fedclade.advise(
            {"data": {"name": "digits", "shift": "label_swap", "drift": {"rounds": [2]}}}
        )
    with pytest.raises(RunError, match=r"diverged.*--set local\.lr=0\.01"):
        fedclade.advise(clients_with("one"), rounds=2, seeds=1, overrides=["local.lr=100"])


def test_scores_name_the_metric() -> None:
    advice = advise(clients_with("groups", "binary"))
    assert advice.metric == Metric("accuracy", True, True).name
    assert "with accuracy" in advice.sentences[2]
