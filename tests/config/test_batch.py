"""Several configs, each with several seeds: what fails does not end the others."""

from __future__ import annotations

from dataclasses import replace

from fedclade.config import Batch, check_config

DIGITS = {
    "rounds": 1,
    "engine": "loop",
    "data": {"name": "digits", "clients": 2, "samples_per_client": 40},
    "model": {"name": "mclr"},
}


def test_a_batch_goes_on_when_runs_of_it_fail(tmp_path, caplog):
    """The first config has no true clusters for the oracle, the second is broken, and the third is well."""
    config = check_config(DIGITS)
    configs = {"a": replace(config, algorithm={"name": "oracle"}), "b": replace(config, data={}), "c": config}
    started: list[tuple[str, int]] = []
    finished = []

    def start(name, rounds):
        started.append((name, rounds))
        return lambda row, tree: None

    batch = Batch(start, finished=lambda run, folder: finished.append(folder))
    runs = batch.run(configs, 2, tmp_path, "suite: ")
    assert {label: [run.config["seed"] for run in each] for label, each in runs.items()} == {"c": [0, 1]}
    assert started == [(f"suite: {label} seed {seed}", 1) for label in "abc" for seed in (0, 1)]
    assert finished == [tmp_path / "c" / "seed-0", tmp_path / "c" / "seed-1"]
    assert batch.failures == {
        "algorithm 'oracle' needs data whose true clusters are known; set data.shift": [
            "suite: a seed 0",
            "suite: a seed 1",
        ],
        "KeyError: 'name'": ["suite: b seed 0", "suite: b seed 1"],
    }
    assert "suite: b seed 0 failed" in caplog.text
    assert "suite: a seed 0 failed" not in caplog.text
    assert "Traceback" in caplog.text
