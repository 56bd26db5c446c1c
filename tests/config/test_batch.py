"""Several configs, each with several seeds: what fails does not end the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedclade import Run
from fedclade.config import Batch, check_config
from fedclade.core import FolderInUseError, RunInterrupted

DIGITS = {
    "rounds": 1,
    "engine": "loop",
    "data": {"name": "digits", "clients": 2, "samples_per_client": 40},
    "model": {"name": "mclr"},
}


def test_a_batch_goes_on_when_runs_of_it_fail(tmp_path, caplog):
    """The first config has no true clusters for the oracle, the second is broken, and the third is well."""
    config = check_config(DIGITS)
    configs = {
        "a": replace(config, algorithm={"name": "oracle"}),
        "b": replace(config, data={}),
        "c": config,
    }
    started: list[tuple[str, int]] = []
    finished = []

    def start(name, rounds):
        started.append((name, rounds))
        return lambda row, tree: None

    batch = Batch(start, finished=lambda run, folder: finished.append(folder))
    runs = batch.run(configs, 2, tmp_path, "suite: ")
    assert {label: [run.config["seed"] for run in each] for label, each in runs.items()} == {
        "c": [0, 1]
    }
    assert started == [(f"suite: {label} seed {seed}", 1) for label in "abc" for seed in (0, 1)]
    assert finished == [tmp_path / "c" / "seed-0", tmp_path / "c" / "seed-1"]
    assert batch.failures == {
        "algorithm 'oracle' needs data whose true clusters are known; set data.shift or, for your own data, "
        "pass Oracle(true_clusters) in Python": ["suite: a seed 0", "suite: a seed 1"],
        "KeyError: 'name'": ["suite: b seed 0", "suite: b seed 1"],
    }
    assert "suite: b seed 0 failed" in caplog.text
    assert "suite: a seed 0 failed" not in caplog.text
    assert "Traceback" in caplog.text


def silent(name, rounds):
    return lambda row, tree: None


def test_only_some_runs_are_made_and_others_are_read(tmp_path):
    configs = {"a": check_config(DIGITS), "b": check_config(DIGITS)}
    assert Batch(silent, only="*a seed 1").run(configs, 2, tmp_path).keys() == {"a"}
    later = Batch(silent, only="b seed 0")
    runs = later.run(configs, 2, tmp_path)
    assert {label: [run.config["seed"] for run in each] for label, each in runs.items()} == {
        "a": [1],
        "b": [0],
    }
    assert later.left == ["a seed 0", "b seed 1"]


def test_no_run_begins_when_it_is_too_late(tmp_path):
    batch = Batch(silent, over=lambda: bool(list(tmp_path.glob("*/*/summary.json"))))
    assert len(batch.run({"a": check_config(DIGITS)}, 3, tmp_path)["a"]) == 1
    assert batch.left == ["a seed 1", "a seed 2"]


def test_a_run_that_another_process_makes_is_left_to_it(tmp_path):
    config = check_config({**DIGITS, "checkpoint_every": 1})
    inner = Batch(silent)

    def meanwhile(name, rounds):
        def on_round(row, tree):
            assert inner.run({"a": config}, 1, tmp_path) == {}

        return on_round

    assert Batch(meanwhile).run({"a": config}, 1, tmp_path).keys() == {"a"}
    assert inner.left == ["a"]
    assert inner.failures == {}


def test_runs_of_one_scenario_have_their_data_in_common(tmp_path):
    config, loaded = check_config(DIGITS), []

    class Counted(type(config)):
        def federation(self, data_dir=None):
            loaded.append(self.top.seed)
            return super().federation(data_dir)

    counted = Counted(**{name: getattr(config, name) for name in config.__dataclass_fields__})
    Batch(silent).run(
        {"a": counted, "b": replace(counted, algorithm={"name": "local"})}, 2, tmp_path
    )
    assert loaded == [0, 1]


def test_runs_of_fewer_rounds_go_on_only_if_they_are_wanted_and_it_is_not_too_late(tmp_path):
    configs = {"a": check_config(DIGITS), "b": check_config(DIGITS)}
    Batch(silent).run(configs, 1, tmp_path)
    longer = {label: check_config({**DIGITS, "rounds": 2}) for label in configs}
    late = Batch(silent, over=lambda: True)
    assert (late.run(longer, 1, tmp_path), late.left) == ({}, ["a", "b"])
    some = Batch(silent, only="b")
    assert (some.run(longer, 1, tmp_path).keys(), some.left) == ({"b"}, ["a"])
    assert [Run.load(tmp_path / label / "seed-0").summary["rounds"] for label in "ab"] == [1, 2]


def test_a_run_that_another_process_has_made_meanwhile_is_read(tmp_path, monkeypatch):
    """It is in use when the batch comes to it, and done when the batch is through with the others."""
    configs, tries = {label: check_config(DIGITS) for label in "abc"}, list[str]()
    whole = Batch._run_one

    def busy(self, config, name, folder):
        tries.append(name)
        if tries.count("a") == 1 and name == "a":
            whole(Batch(silent), config, name, folder)  # the other process
            raise FolderInUseError(str(folder))
        return whole(self, config, name, folder)

    monkeypatch.setattr(Batch, "_run_one", busy)
    batch = Batch(silent)
    assert [*batch.run(configs, 1, tmp_path)] == ["a", "b", "c"]
    assert (tries, batch.left) == (["a", "b", "c", "a"], [])


def test_what_is_interrupted_is_named(tmp_path):
    rounds = []

    def start(name, number):
        return lambda row, tree: rounds.append(row)

    batch = Batch(start, stop=lambda: len(rounds) == 1)
    with pytest.raises(RunInterrupted, match="interrupted after round 1 of suite: a seed 0"):
        batch.run({"a": check_config({**DIGITS, "rounds": 2})}, 2, tmp_path, "suite: ")
