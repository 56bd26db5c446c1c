"""Comparisons of tuned methods: their trials, what is chosen, and how they continue."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedclade.config import read_scenarios
from fedclade.core import ConfigError, DataError, RunError, RunInterrupted
from fedclade.sweeps import TunedComparison, TunedRun, read_folder, read_table, select_methods
from fedclade.sweeps import tuned as module
from fedclade.sweeps.tuned import write_table
from tests.sweeps.tuned_suite import SUITE, scenarios_in, write_suite


def compare(folder: Path, data: Path, **options: object) -> list[TunedRun]:
    return TunedComparison(scenarios_in(data), folder, data, device="cpu", **options).run()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[TunedRun]]:
    """Folders of a finished comparison and of its data, and its results."""
    folder = tmp_path_factory.mktemp("finished")
    data = tmp_path_factory.mktemp("data")
    return folder, data, compare(folder, data)


@pytest.fixture
def copied(finished, tmp_path: Path) -> Path:
    """Copy of the folder of the finished comparison."""
    return Path(shutil.copytree(finished[0], tmp_path / "copied"))


def test_every_method_has_as_many_trials_and_the_best_one_is_chosen(finished):
    runs = finished[2]
    for method in ("fedavg", "finetune"):
        own = [run for run in runs if run.method == method]
        trials = [run for run in own if run.purpose == "trial"]
        assert [run.number for run in trials] == [0, 1, 2, 3]
        assert {run.seed for run in trials} == {7}
        best = min(trials, key=lambda run: run.validation)  # an error is better if lower
        others = [run for run in own if run.purpose != "trial"]
        assert [(run.purpose, run.seed) for run in others] == [
            ("test", 5),
            ("test", 6),
            ("cost", 5),
        ]
        assert {(run.step_size, run.setting) for run in others} == {(best.step_size, best.setting)}
    fedavg = [run for run in runs if run.method == "fedavg" and run.purpose == "trial"]
    first_best = min(fedavg[:2], key=lambda run: run.validation).step_size
    expected = [0.02, 0.1, *(float(f"{first_best * factor:.2g}") for factor in (0.45, 2.2))]
    assert [run.step_size for run in fedavg] == expected
    finetune = [run for run in runs if run.method == "finetune" and run.purpose == "trial"]
    assert [run.setting for run in finetune] == [
        "epochs = 1",
        "epochs = 1",
        "epochs = 2",
        "epochs = 3",
    ]


def test_costs_are_measured_without_the_evaluations_between(finished):
    runs = finished[2]
    finetune = {run.purpose: run for run in runs if run.method == "finetune" and run.seed == 5}
    fedavg = {run.purpose: run for run in runs if run.method == "fedavg" and run.seed == 5}
    epochs = int(finetune["cost"].setting.rpartition(" ")[2])
    assert fedavg["cost"].steps == fedavg["test"].steps
    assert finetune["cost"].steps == fedavg["cost"].steps * (2 + epochs) / 2  # copies after round 2
    assert finetune["test"].steps == fedavg["cost"].steps * (1 + epochs)  # copies after each round
    assert finetune["cost"].score == finetune["test"].score


def test_a_comparison_continues_where_it_stopped_and_equals_one_that_did_not(finished, tmp_path):
    _, data, whole = finished
    seen: list[int] = []
    with pytest.raises(RunInterrupted, match="stopped before clinics: fedavg, trial 3"):
        compare(
            tmp_path / "out",
            data,
            on_run=lambda _, left: seen.append(left),
            stop=lambda: len(seen) > 2,
        )
    assert seen == [13, 12, 11]
    assert len(read_table(tmp_path / "out" / "runs.parquet")) == 3

    def without_seconds(runs: list[TunedRun]) -> list[TunedRun]:
        return [replace(run, seconds=None) for run in runs]

    assert without_seconds(compare(tmp_path / "out", data)) == without_seconds(whole)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").rglob("*.json")}
    compare(tmp_path / "out", data)
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


def test_rows_have_versions_and_checksums_and_are_read_as_they_were_written(finished):
    folder, _, runs = finished
    table = read_table(folder / "runs.parquet")
    assert sorted(table, key=str) == sorted(runs, key=str)
    assert table == read_folder(folder)
    for run in runs:
        assert run.versions["torch"]
        assert len(run.config_sha256) == len(run.data_sha256) == 64
        assert run.metric == "mae"
        assert 1 <= run.best_round <= 2
    assert len({run.config_sha256 for run in runs if run.purpose == "test"}) == 2  # not of the seed


def test_results_of_other_settings_are_refused(finished, copied):
    data = finished[1]
    others = read_scenarios(data / "small.toml", ["rounds=3"])
    with pytest.raises(
        RunError, match=r"trial-0\.json has the result of a run with other settings"
    ):
        TunedComparison(others, copied, data).run()


def test_a_damaged_result_is_named(finished, copied):
    path = copied / "runs" / "clinics" / "fedavg" / "trial-1.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=r"trial-1\.json: .*delete the file to repeat its run"):
        compare(copied, finished[1])


def test_a_table_that_is_none_is_refused(tmp_path):
    path = tmp_path / "runs.parquet"
    with pytest.raises(RunError, match=r"cannot read the results .*runs\.parquet"):
        read_table(path)
    path.write_text("no table", encoding="utf-8")
    with pytest.raises(RunError, match=r"cannot read the results .*runs\.parquet"):
        read_table(path)


def test_a_table_or_result_that_cannot_be_written_is_named(tmp_path, data):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="cannot write the result"):
        compare(tmp_path / "file", data)
    with pytest.raises(RunError, match=r"cannot write .*runs\.parquet"):
        write_table(tmp_path / "file" / "runs.parquet", [])


def test_a_failed_run_is_reported_and_not_chosen(tmp_path, data, monkeypatch):
    broken = SUITE.replace("finetune = {}", "ifca = { clusters = 9 }").replace(
        "finetune = { epochs = [2, 3] }", "ifca = { clusters = [2, 8] }"
    )
    suite = read_scenarios(write_suite(data, broken))
    runs = TunedComparison(suite, tmp_path / "out", data).run()
    ifca = [run for run in runs if run.method == "ifca"]
    failed = [run.setting for run in ifca if run.failure]
    # Trials with more clusters than clients fail, and are not chosen.
    assert failed == ["clusters = 9", "clusters = 9", "clusters = 8"]
    assert {run.setting for run in ifca if run.purpose != "trial"} == {"clusters = 2"}
    assert all(run.score is None and run.metric == "" for run in ifca if run.failure)
    monkeypatch.setattr(module._MethodRuns, "_execute", pytest.fail)  # results are not repeated
    assert TunedComparison(suite, tmp_path / "out", data).run() == runs


def test_methods_are_selected_and_added_by_their_records(data):
    scenarios = scenarios_in(data)
    (chosen,) = select_methods(scenarios, ["finetune", "fl_hc", "fedclade.algorithms:Ditto"])
    assert list(chosen.configs) == ["finetune", "fl_hc", "Ditto"]
    assert chosen.configs["fl_hc"].algorithm["rounds_before"] == 5  # the record's, not the default
    assert chosen.configs["Ditto"].data == scenarios[0].configs["fedavg"].data
    with pytest.raises(ConfigError, match="unknown method 'fedavgg'; did you mean 'fedavg'"):
        select_methods(scenarios, ["fedavgg"])
    with pytest.raises(ConfigError, match=r"fedclade\.nothing"):
        select_methods(scenarios, ["fedclade.nothing:Ditto"])


def test_a_scenario_needs_a_tuning_with_valid_settings(tmp_path, data):
    (scenario,) = scenarios_in(data)
    with pytest.raises(ConfigError, match="'clinics' should have a table \\[tuning\\], got none"):
        TunedComparison([replace(scenario, tuning=None)], tmp_path / "out", data)
    tuning = replace(scenario.tuning, settings={"finetune": ("epochs", (0, 1))})
    with pytest.raises(
        ConfigError, match=r"a setting of finetune in .* is invalid: .*epochs.* got 0"
    ):
        TunedComparison([replace(scenario, tuning=tuning)], tmp_path / "out", data)


def test_data_with_other_contents_is_refused_before_the_first_run(tmp_path, data):
    scenarios = scenarios_in(data)
    (data / "clinics" / "b.csv").write_text("p,q,y\n1,2,3\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.csv should have the SHA-256 checksum"):
        TunedComparison(scenarios, tmp_path / "out", data).run()
    (data / "clinics" / "b.csv").unlink()
    with pytest.raises(
        DataError, match=r"download the data from https://example.org/clinics \(CC0\)"
    ):
        TunedComparison(scenarios, tmp_path / "out", data).run()
    assert not (tmp_path / "out").exists()


def test_data_that_cannot_be_read_is_no_failure_of_a_method(tmp_path, data):
    broken = SUITE.replace('target = "y"', 'target = "z"')
    suite = read_scenarios(write_suite(data, broken))
    with pytest.raises((ConfigError, DataError), match="z"):
        TunedComparison(suite, tmp_path / "out", data).run()
    assert not [*tmp_path.glob("out/runs/**/*.json")]


def test_a_result_is_a_readable_file(finished):
    path = finished[0] / "runs" / "clinics" / "finetune" / "test-5.json"
    assert json.loads(path.read_text(encoding="utf-8"))["setting"].startswith("epochs = ")
