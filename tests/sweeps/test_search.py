"""Sweeps: what they go by, that they can be interrupted, and what is left in their folders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedclade
from fedclade import ConfigError, RunError, RunInterrupted
from fedclade.cli import main
from fedclade.config import read_config
from fedclade.sweeps import places, sweep
from fedclade.sweeps.places import ProcessExecutor

pytest.importorskip("optuna")

BASE = {
    **{"rounds": 3, "engine": "loop", "model": {"name": "mclr"}, "local": {"batch_size": 20}},
    "data": {"name": "digits", "clients": 2, "samples_per_client": 40, "validation_fraction": 0.25},
}
LR = ["local.lr=0.001..0.3(log)"]


def test_a_sweep_goes_by_validation_data_and_leaves_a_comparison(tmp_path):
    told = []
    found = sweep(
        BASE,
        {"local.lr": [1e-4, 0.3]},
        tmp_path / "s",
        sampler="grid",
        on_trial=lambda n, *_: told.append(n),
    )
    found.save()
    assert told == [0, 1]
    assert [row.values for row in found.trials] == [{"local.lr": 0.3}, {"local.lr": 1e-4}]
    best = found.best
    (run,) = found.runs[best.label]
    assert (
        best.validation
        == run.summary["chosen"]["validation"]["accuracy"]
        > found.trials[1].validation
    )
    assert (best.test, best.last) == (
        run.summary["chosen"]["test"]["accuracy"],
        run.summary["accuracy"]["mean"],
    )
    rows = json.loads((tmp_path / "s" / "comparison.json").read_text())["rows"]
    assert [row["label"] for row in rows] == ["trial-01", "trial-00"]
    assert rows[0]["chosen"]["mean"] == best.test
    config = read_config(tmp_path / "s" / "best.toml")
    assert config.local.lr == 0.3
    assert config.top.evaluate_validation
    assert (tmp_path / "s" / "trial-01" / "seed-0" / "summary.json").is_file()


def test_trials_may_stop_early_and_keep_their_best_round(tmp_path):
    config = {**BASE, "keep_best": True, "stop": {"patience": 1, "min_delta": 1.0}}
    found = sweep(config, {"local.lr": [0.1, 0.3]}, tmp_path / "s", sampler="grid")
    for row in found.trials:
        (run,) = found.runs[row.label]
        assert run.summary["stopped"]["round"] == 2
        assert (
            row.test == run.summary["chosen"]["test"]["accuracy"] == run.summary["accuracy"]["mean"]
        )
        assert row.last == run.summary["last"]["test"]["accuracy"]


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    rounds = 0

    def on_start(name, number):
        def on_round(row, tree):
            nonlocal rounds
            rounds += 1

        return on_round

    def go(**more):
        return sweep(BASE, LR, tmp_path / "s", trials=2, on_start=on_start, **more)

    with pytest.raises(RunInterrupted):
        go(stop=lambda: rounds == 2)
    found = go(resume=True)
    assert rounds == 2 * 3  # none twice
    assert go(resume=True).trials == found.trials
    assert rounds == 2 * 3
    with pytest.raises(RunError, match="already contains a sweep; continue it with --resume"):
        go()
    with pytest.raises(
        RunError, match=re.escape("contains a sweep with other settings: its rounds is 3, not 4")
    ):
        sweep({**BASE, "rounds": 4}, LR, tmp_path / "s", resume=True)


def test_the_mean_over_seeds_counts(tmp_path):
    found = fedclade.sweep(BASE, LR, tmp_path / "s", trials=1, seeds=2)
    scores = [run.summary["chosen"]["validation"]["accuracy"] for run in found.runs["trial-00"]]
    assert len(scores) == 2
    assert found.best.validation == pytest.approx(sum(scores) / 2)


def test_a_trial_that_fails_does_not_end_the_others(tmp_path):
    over = ["model.name=mclr,cnn"]  # which digits of 8 x 8 pixels are too small for
    found = sweep(BASE, over, tmp_path / "s", sampler="grid")
    assert [row.label for row in found.trials] == ["trial-00"]
    assert list(found.failures) == ["trial-01"]
    assert sweep(BASE, over, tmp_path / "s", sampler="grid", resume=True).failures == found.failures


@pytest.mark.slow
def test_a_sweep_goes_by_the_clients_that_have_a_score(tmp_path):
    data = {**BASE["data"], "clients": 3, "partition": "pathological", "labels_per_client": 1}
    with pytest.raises(RunError, match="no round has a finite auroc on validation data"):
        sweep(
            {**BASE, "data": data},
            LR,
            tmp_path / "s",
            trials=1,
            overrides=['task.metrics=["auroc"]'],
        )


def test_trials_run_side_by_side_in_processes(tmp_path):
    place = ProcessExecutor(1)  # as two would, at half the price
    try:
        alone = sweep(BASE, LR, tmp_path / "alone", trials=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedclade.sweeps.search.ProcessExecutor", lambda count: place)
            beside = sweep(BASE, LR, tmp_path / "beside", trials=2, processes=2)
    finally:
        place.close()
    assert beside.trials == alone.trials
    assert all(process.exitcode == 0 for process in place._processes.values())


@pytest.mark.parametrize(
    ("status", "started", "told"),
    [
        (
            -9,
            True,
            "a process of the sweep has died, perhaps because it ran out of memory; set fewer --processes",
        ),
        (
            -9,
            False,
            "a process of the sweep has died, perhaps because it ran out of memory; set fewer --processes",
        ),
        (
            1,
            False,
            "ended with status 1 as it started; each process imports the script that calls sweep(), so put the",
        ),
    ],
)
def test_a_process_that_dies_ends_the_sweep(status, started, told):
    place = ProcessExecutor.__new__(ProcessExecutor)
    ours, theirs = places.multiprocessing.Pipe()
    ended = SimpleNamespace(exitcode=status, join=lambda seconds: None)
    place.count, place._is_stopping, place._processes, place._idle = 1, False, {ours: ended}, [ours]
    place._started = {ours} if started else set()
    theirs.close()
    with pytest.raises(RunError) as caught:
        place.outcome(place._idle.pop(), lambda: False)
    assert told in str(caught.value)


def test_a_script_without_a_main_guard_is_named_in_the_process_that_imports_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        places.multiprocessing.current_process(), "_inheriting", True, raising=False
    )
    with pytest.raises(RunError, match=r"put the call under: if __name__ == '__main__':"):
        sweep(BASE, LR, tmp_path / "sweep", processes=2)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"from fedclade import sweep\nsweep({BASE!r}, {LR!r}, {str(tmp_path / 'sweep')!r}, processes=2)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "RunError: a process of the sweep ended with status 1 as it started" in done.stderr
    assert "put the call under: if __name__ == '__main__':" in done.stderr


def test_bad_arguments_are_named(tmp_path):
    cases = {
        "unknown sampler 'gird'; did you mean 'grid'": {"sampler": "gird"},
        "a grid needs single values; list them": {"sampler": "grid"},
        "unknown value of --metric 'acc'": {"metric": "acc"},
        "trials should be at least 1, got 0": {"trials": 0},
        "a sweep needs validation data of every client": {
            "overrides": ["data.validation_fraction=0"]
        },
    }
    for why, arguments in cases.items():
        with pytest.raises(ConfigError, match=re.escape(why)):
            sweep(BASE, LR, tmp_path / "s", **arguments)
    assert not (tmp_path / "s").exists()


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("my.toml").write_text(
        'rounds = 1\nengine = "loop"\n[data]\nname = "digits"\nclients = 2\nsamples_per_client = 40\n'
        '[model]\nname = "mclr"'
    )
    command = "fedclade sweep my.toml --over local.lr=0.01..0.3(log) --over local.epochs=1,2 --trials 2 --out s"
    monkeypatch.setattr("sys.argv", [*command.split(), "--set", "data.validation_fraction=0.2"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    out = capsys.readouterr().out
    assert "trial 1: local.lr 0.01002, local.epochs " in out
    assert "Best 2 of 2 trials" in out
    names = {"best.toml", "comparison.md", "comparison.png", "trials.html", "trials.journal"}
    assert names <= {path.name for path in Path("s").iterdir()}
