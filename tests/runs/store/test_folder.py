"""The folder of a run in progress: which runs may go on in it, from which checkpoint, and what a full disk leaves."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from torch import nn

from fedclade import (
    CFL,
    CheckpointError,
    ConfigError,
    LocalTraining,
    Run,
    RunError,
    RunInterrupted,
    UpdateError,
    simulate,
)
from fedclade.cli import main as cli_main
from fedclade.core import FolderInUseError
from fedclade.core import files as files_module
from fedclade.runs import rounds as rounds_module
from fedclade.runs.store import checkpoint as checkpoint_module
from fedclade.runs.store import run as run_module
from fedclade.runs.store.folder import first_difference
from fedclade.runs.store.manifest import Lock
from fedclade.runs.store.run import check_free
from tests.tiny import federation_of, linear

TRUTH = [0, 1, 0, 1]


def run_in(folder: Path, after: int | None = None, truth=TRUTH, model=None, **settings) -> Run:
    """Run in a folder, with a checkpoint after every round; stop after one of them."""
    settings = {
        "local": LocalTraining(batch_size=10),
        "rounds": 5,
        "engine": "loop",
        "checkpoint_every": 1,
    } | settings
    rounds = iter(range(1, 100))
    stop = (lambda: next(rounds) == after) if after else None
    algorithm = settings.pop("algorithm", CFL(eps2=1e-3, split_rounds=(2,)))
    return simulate(
        algorithm, model or linear(), federation_of(truth), folder=folder, stop=stop, **settings
    )


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A run that was stopped after its third round of five."""
    with pytest.raises(
        RunInterrupted, match="interrupted after round 3; the same call continues from"
    ):
        run_in(tmp_path / "run", after=3)
    return tmp_path / "run"


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def end_of(folder: Path) -> bytes:
    return (folder / "tree/tree.safetensors").read_bytes() + (
        folder / "clients.parquet"
    ).read_bytes()


def test_the_last_two_checkpoints_are_kept(unfinished):
    assert checkpoints(unfinished) == ["round-000002", "round-000003"]
    assert {path.name for path in unfinished.iterdir()} == {"config.toml", "checkpoints"}


def test_what_a_killed_run_half_wrote_is_cleared_away(unfinished):
    (unfinished / "checkpoints/.round-000009.writing/tree").mkdir(parents=True)
    run_in(unfinished)
    assert [path.name for path in (unfinished / "checkpoints").glob(".*")] == []


def test_a_finished_run_is_returned_as_it_was(tmp_path):
    first = run_in(tmp_path / "run")
    before = snapshot(tmp_path / "run")
    again = run_in(tmp_path / "run")
    assert again.summary == first.summary
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("keep_checkpoints", [True, False])
def test_a_finished_run_can_be_given_more_rounds(tmp_path, keep_checkpoints):
    run_in(tmp_path / "short", rounds=3)
    if not keep_checkpoints:
        shutil.rmtree(tmp_path / "short/checkpoints")
    assert run_in(tmp_path / "short").summary["rounds"] == 5
    run_in(tmp_path / "long")
    assert end_of(tmp_path / "short") == end_of(tmp_path / "long")
    with pytest.raises(
        RunError,
        match="contains a run with another config: its rounds is 5, which cannot be lowered to 4",
    ):
        run_in(tmp_path / "short", rounds=4)


def test_a_run_begun_before_its_first_checkpoint_starts_again(tmp_path):
    run_in(tmp_path / "whole")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "whole/config.toml", tmp_path / "run")
    run_in(tmp_path / "run")
    assert end_of(tmp_path / "run") == end_of(tmp_path / "whole")


def test_an_empty_folder_is_taken_and_another_is_left_as_it_is(tmp_path):
    (tmp_path / "empty").mkdir()
    assert run_in(tmp_path / "empty").summary["rounds"] == 5
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        text = (
            f"{tmp_path / name} exists already, but does not contain a run; name another folder, or "
            "remove it"
        )
        with pytest.raises(RunError, match=re.escape(text)):
            run_in(tmp_path / name)
    assert snapshot(tmp_path / "mine") == {"thesis.txt": b"mine"}


@pytest.mark.parametrize(
    "left", [[".config.toml.writing"], [".lock"], [".config.toml.writing", ".lock"]]
)
def test_what_a_run_left_that_was_killed_before_its_config_was_written_is_taken_over(
    tmp_path, left
):
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).write_text("rounds = ")
    assert check_free(tmp_path / "run", take_over=True) == tmp_path / "run"
    assert run_in(tmp_path / "run").summary["rounds"] == 5
    assert not {".config.toml.writing", ".lock"} & {
        path.name for path in (tmp_path / "run").iterdir()
    }
    run_in(tmp_path / "other")
    assert end_of(tmp_path / "run") == end_of(tmp_path / "other")


def test_a_file_of_the_user_beside_such_leftovers_is_left_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    for name in (".config.toml.writing", "thesis.txt"):
        (tmp_path / "run" / name).write_text("mine")
    with pytest.raises(
        RunError, match=re.escape(f"{tmp_path / 'run'} exists already, but does not contain a run")
    ):
        run_in(tmp_path / "run")
    with pytest.raises(
        RunError, match=re.escape(f"{tmp_path / 'run'} exists already; name another folder")
    ):
        check_free(tmp_path / "run", take_over=True)
    assert set(snapshot(tmp_path / "run")) == {".config.toml.writing", "thesis.txt"}


def test_leftovers_of_a_run_that_is_still_beginning_are_not_taken_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.writing").write_text("rounds = ")
    lock = Lock()
    lock.take(tmp_path / "run")
    try:
        with pytest.raises(
            FolderInUseError, match=re.escape(f"writing to the run folder {tmp_path / 'run'}")
        ):
            run_in(tmp_path / "run")
        assert set(snapshot(tmp_path / "run")) == {".config.toml.writing", ".lock"}
    finally:
        lock.let_go()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 4}, "its seed is 0, not 4"),
        ({"engine": "stacked"}, "its engine is 'loop', not 'stacked'"),
        (
            {"algorithm": CFL(eps2=1e-3, split_rounds=(3,))},
            "its algorithm.split_rounds is [2], not [3]",
        ),
        ({"algorithm": "fedavg"}, "its algorithm.name is 'cfl', not 'fedavg'"),
        ({"target": 0.5}, "its target.accuracy is None, not 0.5"),
        (
            {"local": LocalTraining(batch_size=10, clip_norm=0.5)},
            "its local.clip_norm is None, not 0.5",
        ),
        ({"rounds": 4}, "its rounds is 5, which cannot be lowered to 4"),
    ],
)
def test_a_run_of_another_config_is_refused_and_left_as_it_is(unfinished, change, told):
    before = snapshot(unfinished)
    text = f"{unfinished} contains a run with another config: {told}; name another folder"
    with pytest.raises(RunError, match=re.escape(text)):
        run_in(unfinished, **change)
    assert snapshot(unfinished) == before


@pytest.mark.parametrize(("was", "now"), [("stacked", "auto"), ("loop", "loop")])
def test_what_was_left_to_auto_can_stay_so(was, now):
    """A finished run's config names the engine that was chosen."""
    assert first_difference({"rounds": 1, "engine": was}, {"rounds": 1, "engine": now}) is None


def test_what_nobody_has_set_and_earlier_versions_noted_is_no_other_config():
    now = {
        "rounds": 1,
        "local": {"lr": 0.1},
        "signature": {},
        "algorithm": {"name": "cfl", "split_rounds": []},
    }
    then = {**now, "local": {"lr": 0.1, "options": {}}, "signature": {"of": []}}
    assert first_difference(then, now) is None
    assert (
        first_difference(now, {**now, "signature": {"of": ["head.*"]}})
        == "its signature.of is None, not ['head.*']"
    )
    assert (
        first_difference(now, {**now, "algorithm": {"name": "cfl"}})
        == "its algorithm.split_rounds is [], not None"
    )


def test_how_often_to_save_and_how_long_to_run_may_change(unfinished):
    assert run_in(unfinished, rounds=6, checkpoint_every=0).summary["rounds"] == 6


def test_other_data_and_another_model_are_refused(unfinished):
    before = snapshot(unfinished)
    with pytest.raises(
        CheckpointError, match="was made with other data than the data that is loaded now; pass"
    ):
        run_in(unfinished, truth=[0, 1, 1, 0])
    # of a class of the same name, and 28 + 20 parameters
    larger = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    text = "the checkpoint of round 3 contains models of 28 entries, but the given model has 48; pass the model"
    with pytest.raises(CheckpointError, match=text):
        run_in(unfinished, model=larger)
    assert snapshot(unfinished) == before


def test_a_run_of_the_cpu_cannot_go_on_elsewhere(unfinished):
    with pytest.raises(
        ConfigError,
        match="this run began on the CPU and can only be continued on the CPU; leave out --device cuda",
    ):
        run_in(unfinished, device="cuda")


DAMAGES = {
    "cut off": lambda path: (path / "run.json").write_bytes((path / "run.json").read_bytes()[:100]),
    "flipped": lambda path: _flip(path / "tree/tree.safetensors"),
    "no manifest": lambda path: (path / "checkpoint.json").unlink(),
    "of the future": lambda path: (path / "checkpoint.json").write_text(
        '{"format": 99, "sha256": {}}'
    ),
    "empty": lambda path: [shutil.rmtree(path), path.mkdir()],
}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    """Put another run's checkpoint in the place of one."""
    other = path.parent.parent.with_name("other")
    with pytest.raises(RunInterrupted):
        run_in(other, after=3, seed=9)
    shutil.rmtree(path)
    shutil.copytree(other / "checkpoints" / path.name, path)


@pytest.mark.parametrize("damage", [*DAMAGES, "foreign"])
def test_what_cannot_be_used_is_told_once_and_the_checkpoint_before_it_is_taken(
    unfinished, tmp_path, damage, caplog
):
    newest = unfinished / "checkpoints/round-000003"
    {**DAMAGES, "foreign": _foreign}[damage](newest)
    run_in(unfinished)
    (line,) = [record.message for record in caplog.records]
    assert str(newest) in line
    assert line.endswith("; continuing from round 2")
    if damage == "foreign":
        assert f"{newest} is from another run: its seed is 9, not 0" in line
    run_in(tmp_path / "whole")
    assert end_of(unfinished) == end_of(tmp_path / "whole")
    assert checkpoints(unfinished) == ["round-000004", "round-000005", "unusable-round-000003"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_no_checkpoint_can_be_used_nothing_is_destroyed(unfinished, damage):
    for path in (unfinished / "checkpoints").iterdir():
        DAMAGES[damage](path)
    before = snapshot(unfinished)
    with pytest.raises(
        CheckpointError, match=re.escape(f"no checkpoint of {unfinished} can be used: ")
    ) as caught:
        run_in(unfinished)
    assert all(f"round-00000{number}" in str(caught.value) for number in (2, 3))
    assert snapshot(unfinished) == before


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("writer", ["write_tree", "write_tensors", "_write_json"])
def test_a_disk_that_fills_up_leaves_the_checkpoints_before(
    unfinished, tmp_path, monkeypatch, writer
):
    before = snapshot(unfinished)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, writer, full)
        target = unfinished / "checkpoints/round-000004"
        text = (
            f"cannot write the checkpoint {target}: [Errno 28] No space left on device; the earlier"
        )
        with pytest.raises(CheckpointError, match=re.escape(text)):
            run_in(unfinished)
    assert snapshot(unfinished) == before
    run_in(unfinished)
    run_in(tmp_path / "whole")
    assert end_of(unfinished) == end_of(tmp_path / "whole")


def test_results_that_cannot_be_written_leave_a_run_that_resumes(unfinished, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_rows", full)
        text = f"cannot write the results of the run to {unfinished}: [Errno 28] No space left on device"
        with pytest.raises(RunError, match=re.escape(text)):
            run_in(unfinished)
    assert checkpoints(unfinished) == ["round-000004", "round-000005"]
    assert run_in(unfinished).summary["rounds"] == 5


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "take_place", full)
    text = f"cannot write the run folder {tmp_path / 'run'}: [Errno 28] No space left on device"
    with pytest.raises(RunError, match=re.escape(text)):
        run_in(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_config_is_one_clear_error(unfinished):
    (unfinished / "config.toml").write_text("seed = [")
    with pytest.raises(
        RunError,
        match=re.escape(
            f"the run folder {unfinished} is damaged: ValueError: config.toml is not valid TOML ("
        ),
    ):
        run_in(unfinished)


def test_a_run_that_fails_keeps_the_rounds_before_and_one_that_fails_at_once_nothing(tmp_path):
    with pytest.raises(UpdateError, match="round 1: "):
        run_in(tmp_path / "at once", local=LocalTraining(lr=1e30), checkpoint_every=0)
    assert list(tmp_path.iterdir()) == []

    def fails(row, tree):
        if row["round"] == 3:
            raise UpdateError("in a callback")

    with pytest.raises(UpdateError, match="in a callback"):
        run_in(tmp_path / "run", on_round=fails, checkpoint_every=0)
    assert checkpoints(tmp_path / "run") == ["round-000003"]
    run_in(tmp_path / "run")
    run_in(tmp_path / "whole")
    assert end_of(tmp_path / "run") == end_of(tmp_path / "whole")


def test_more_rounds_that_fail_at_once_leave_the_results_that_there_were(tmp_path, monkeypatch):
    run_in(tmp_path / "run", rounds=3, checkpoint_every=0)
    before = end_of(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(rounds_module, "run_round", full)
        with pytest.raises(OSError, match="No space left on device"):
            run_in(tmp_path / "run")
    assert end_of(tmp_path / "run") == before
    assert run_in(tmp_path / "run").summary["rounds"] == 5


def test_a_failure_is_not_hidden_by_a_checkpoint_that_cannot_be_written(
    tmp_path, monkeypatch, caplog
):
    def fails(row, tree):
        monkeypatch.setattr(checkpoint_module, "write_tree", full)
        raise UpdateError("in a callback")

    with pytest.raises(UpdateError, match="in a callback"):
        run_in(tmp_path / "run", on_round=fails)
    assert "cannot write the checkpoint" in caplog.text


def test_what_changed_since_a_checkpoint_is_told(unfinished, caplog):
    for run in (unfinished / "checkpoints").glob("*/run.json"):
        made = json.loads(run.read_text())
        made["made_with"]["threads"] = 64
        run.write_text(json.dumps(made))
        manifest = json.loads(run.with_name("checkpoint.json").read_text())
        manifest["sha256"]["run.json"] = files_module.sha256_of(run)
        run.with_name("checkpoint.json").write_text(json.dumps(manifest))
    run_in(unfinished)
    (line,) = [record.message for record in caplog.records]
    assert line == (
        "the result of the continued run may differ by rounding from an uninterrupted run, since the execution has "
        "changed: threads 64 is now 1"
    )


def test_an_unfinished_run_is_shown_as_of_its_newest_checkpoint(unfinished, tmp_path):
    with pytest.raises(RunError, match="is unfinished; continue with: fedclade resume"):
        Run.load(unfinished)
    shown = Run.load(unfinished, unfinished=True)
    assert shown.is_unfinished
    assert shown.summary["unfinished"] == {"round": 3, "of": 5}
    short = run_in(tmp_path / "short", rounds=3)
    assert [node.members for node in shown.tree.nodes] == [n.members for n in short.tree.nodes]
    assert shown.client_rows == short.client_rows
    same = ("accuracy", "clusters", "rounds", "task", "inputs", "bytes_up", "steps")
    assert [shown.summary[key] for key in same] == [short.summary[key] for key in same]
    with pytest.raises(RunError, match="the models of an unfinished run cannot be used; continue"):
        shown.predict([[0.0] * 6], client=0, model=linear())
    finished = run_in(unfinished)
    assert not finished.is_unfinished
    assert not Run.load(unfinished, unfinished=True).is_unfinished


def test_an_unfinished_run_without_an_evaluation_or_a_checkpoint_says_so(tmp_path):
    with pytest.raises(RunInterrupted):
        run_in(tmp_path / "run", after=1, evaluate_every=3)
    with pytest.raises(RunError, match="cannot be shown: no client was evaluated until round 1"):
        Run.load(tmp_path / "run", unfinished=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(RunError, match="cannot be shown: it has no checkpoint; continue it with"):
        Run.load(tmp_path / "run", unfinished=True)


def test_the_tree_and_the_report_of_an_unfinished_run(unfinished, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("tree", "report"):
        monkeypatch.setattr("sys.argv", ["fedclade", command, str(unfinished)])
        with pytest.raises(SystemExit) as leaving:
            cli_main()
        assert leaving.value.code in (0, None)
        printed = capsys.readouterr().out
        assert (
            "unfinished: state after round 3 of 5; to continue, run its Python program" in printed
        )
    page = (unfinished / "report.html").read_text()
    assert "Unfinished" in page
    assert "of 5; the page shows the newest checkpoint" in page
    run_in(unfinished)  # the report does not prevent the run from continuing
    assert Run.load(unfinished).summary["rounds"] == 5
