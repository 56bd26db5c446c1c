"""The command ``compare`` with a suite whose methods are tuned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sweeps.tuned_suite import SUITE, write_suite
from typer.testing import CliRunner

from fedclade.cli import app
from fedclade.sweeps import read_table


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return write_suite(tmp_path)


def call(*arguments: object) -> str:
    """Return what the command prints, after it has failed or not."""
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    error = result.exception
    return result.output + ("" if error is None or isinstance(error, SystemExit) else str(error))


def test_the_tables_are_printed_and_the_same_command_continues(suite):
    arguments = (suite, "--out", "out", "--methods", "fedavg,ditto", "--data-dir", ".")
    stopped = call(*arguments, "--at-most", 0)
    assert "14 of 14 runs left: continue with the same command and --out out" in stopped
    assert not Path("out/runs.parquet").exists()
    output = call(*arguments)
    assert "clinics: fedavg done, 7 runs left, about" in output
    assert "clinics: ditto done, 0 runs left" in output
    assert "clinics: mae of 2 clients, seeds 5, 6" in output
    assert "comparison folder: out" in output
    assert {run.method for run in read_table(Path("out/runs.parquet"))} == {"fedavg", "ditto"}
    again = call(*arguments, "--quiet")
    assert "done" not in again
    assert "clinics: mae of 2 clients, seeds 5, 6" in again
    fewer = call(suite, "--out", "out", "--methods", "fedavg", "--data-dir", ".", "--seeds", 1)
    assert "seeds 5 " in fewer
    # the table still has all results of the folder
    assert {run.method for run in read_table(Path("out/runs.parquet"))} == {"fedavg", "ditto"}


WRONG = [
    (("--only", "clinic"), "--only: unknown data set 'clinic'; did you mean 'clinics'?"),
    (("--only", ","), "--only should have at least 1 name, got ','"),
    (("--methods", "fedavgg"), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    (("--log", "mlflow"), "--log mlflow cannot be combined with a suite whose methods are tuned"),
    (("--data-dir", "nowhere"), "download the data from https://example.org/clinics (CC0)"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_named_before_the_first_run(suite, options, message):
    assert message in call(suite, "--out", "out", *options)
    assert not Path("out/runs").exists()


def test_methods_are_only_for_suites_whose_methods_are_tuned(suite):
    message = "--methods fedavg applies only to suites whose methods are tuned, such as natural"
    assert message in call("fedavg-digits-label-swap", "--methods", "fedavg", "--out", "out")


def test_failed_runs_are_listed_after_the_tables(suite):
    write_suite(
        suite.parent,
        SUITE.replace("finetune = {}", "ifca = { clusters = 9 }").replace(
            "finetune = { epochs = [2, 3] }", "ifca = { clusters = [7, 8] }"
        ),
    )
    output = call(suite, "--out", "out", "--data-dir", ".")
    assert "failed" in output
    assert "clinics: ifca seed 5, clinics: ifca seed 6" in output
    assert "to repeat the runs of a method, delete its folders in out/runs" in output
