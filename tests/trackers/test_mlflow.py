"""What is in MLflow's store after a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedclade import ConfigError, MissingExtraError, MLflowTracker, UpdateError
from tests.trackers.runs import CONFIG, Callback, round_record, run_in_two_parts, run_with


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only one that a test can write to: of files."""
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := (tmp_path / "store").as_uri())
    monkeypatch.chdir(tmp_path)
    return uri


def runs_of(uri: str, experiment: str = "fedclade") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def history(uri: str, run_id: str, tag: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return [
        (metric.step, metric.value) for metric in MlflowClient(uri).get_metric_history(run_id, tag)
    ]


def test_a_run_in_two_parts_is_one_run_there(tmp_path: Path, store: str):
    run = run_in_two_parts(tmp_path / "mine", MLflowTracker(), MLflowTracker())
    (found,) = runs_of(store)
    assert json.loads((tmp_path / "mine" / "trackers.json").read_text()) == {
        "mlflow": {"id": found.info.run_id}
    }
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.tags["method"] == "cfl"
    assert found.data.tags["data"] == "tiny"
    assert found.data.params["algorithm.eps2"] == "0.001"
    assert found.data.params["local.lr"] == "0.2"
    expected = [(row["round"], row["accuracy_mean"]) for row in run.metric_rows]
    assert history(store, found.info.run_id, "accuracy/mean") == expected
    assert history(store, found.info.run_id, "clusters/found") == [(1, 1), (2, 2), (3, 2), (4, 2)]
    artifacts = Path(found.info.artifact_uri.removeprefix("file://"))
    assert json.loads((artifacts / "summary.json").read_text()) == run.summary
    assert (artifacts / "config.toml").is_file()


def test_rounds_that_are_done_again_are_not_written_twice(tmp_path: Path, store: str):
    first, second = MLflowTracker("of my own"), MLflowTracker("of my own")
    for number in (1, 2, 3):
        first.on_round(round_record(number, tmp_path))
    for number in (2, 3, 4):
        second.on_round(round_record(number, tmp_path))
    (found,) = runs_of(store, "of my own")
    assert [step for step, _ in history(store, found.info.run_id, "clusters/found")] == [1, 2, 3, 4]


def test_a_run_that_the_store_does_not_have_is_begun_anew(tmp_path: Path, store: str):
    others = {"wandb": {"id": "kept", "round": 2}}
    gone = {"mlflow": {"id": "0123456789abcdef0123456789abcdef"}}
    (tmp_path / "trackers.json").write_text(json.dumps(gone | others))
    tracker = MLflowTracker()
    tracker.on_round(round_record(3, tmp_path))
    (found,) = runs_of(store)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {
        "mlflow": {"id": found.info.run_id},
        **others,
    }


@pytest.mark.parametrize("text", ["{", "[]", '{"mlflow": 1}', "\\x00"])
def test_ids_that_cannot_be_read_are_no_failure(tmp_path: Path, store: str, text: str):
    (tmp_path / "trackers.json").write_text(text)
    MLflowTracker().on_round(round_record(1, tmp_path))
    assert len(runs_of(store)) == 1


def test_a_run_that_fails_is_said_to_have_failed(store: str):
    class Fails(Callback):
        def on_round(self, record, /) -> None:
            raise UpdateError("enough")

    with pytest.raises(UpdateError):
        run_with(MLflowTracker(), Fails())
    (found,) = runs_of(store)
    assert (found.info.run_name, found.info.status) == ("cfl-seed0", "FAILED")


def test_a_store_that_cannot_be_used_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch):
    from mlflow import environment_variables

    if not hasattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE"):
        pytest.skip("this version of mlflow-skinny needs no permission to write files")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    with pytest.raises(ConfigError, match=r"MLflow cannot be used: .*MLFLOW_ALLOW_FILE_STORE"):
        MLflowTracker()


def test_without_sqlalchemy_it_writes_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    tracker = MLflowTracker()
    tracker.on_round(round_record(1, None, accuracy_mean=0.5))
    (found,) = runs_of((tmp_path / "mlruns").as_uri())
    assert found.data.metrics["accuracy/mean"] == 0.5
    assert found.data.params == {
        "seed": "0",
        "algorithm.name": "cfl",
        "algorithm.eps2": "0.8",
        "data.name": "tiny",
    }
    assert CONFIG["local"] == {"seed": None}, "what is unset is no parameter"


def test_without_mlflow_the_tracker_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        MissingExtraError, match=r"--log mlflow needs .*'mlflow-skinny'.*fedclade\[mlflow\]"
    ):
        MLflowTracker()
