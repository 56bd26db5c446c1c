from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedclade import ConfigError, MissingExtraError, TensorBoardTracker
from tests.trackers.runs import end_record, round_record, run_with


def events_in(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = events_in(folder)
    return {
        tag: [(e.step, round(e.value, 5)) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def text(folder: Path, tag: str) -> str:
    (event,) = events_in(folder).Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_every_number_of_a_round_is_a_scalar(tmp_path: Path):
    tracker = TensorBoardTracker()
    assert list(tmp_path.iterdir()) == [], "before the first round the run has no folder"
    tracker.on_round(round_record(1, tmp_path, accuracy_mean=0.5, ari=None, bytes_up=7))
    tracker.on_round(round_record(2, tmp_path, (3, 1), accuracy_mean=0.75, ari=1.0, bytes_up=7))
    tracker.on_end(end_record())
    assert scalars(tmp_path / "tensorboard") == {
        "accuracy/mean": [(1, 0.5), (2, 0.75)],
        "clusters/found": [(1, 1), (2, 2)],
        "clusters/ARI": [(2, 1)],
        "clusters/largest": [(1, 2), (2, 3)],
        "clusters/smallest": [(1, 2), (2, 1)],
        "cluster sizes/node 0": [(1, 2)],
        "cluster sizes/node 1": [(2, 3)],
        "cluster sizes/node 2": [(2, 1)],
        "traffic/bytes up": [(1, 7), (2, 7)],
    }
    assert '| algorithm.name | "cfl" |' in text(tmp_path / "tensorboard", "config")


def test_a_run_that_is_continued_replaces_what_it_does_again(tmp_path: Path):
    first, second = TensorBoardTracker(), TensorBoardTracker()
    for number in (1, 2, 3):
        first.on_round(round_record(number, tmp_path, accuracy_mean=0.1))
    first.on_end(end_record(tmp_path))
    for number in (3, 4):
        second.on_round(round_record(number, tmp_path, accuracy_mean=0.9))
    second.on_end(end_record(tmp_path))
    assert scalars(tmp_path / "tensorboard")["accuracy/mean"] == [
        (1, 0.1),
        (2, 0.1),
        (3, 0.9),
        (4, 0.9),
    ]


def test_one_tracker_follows_one_run_after_another_and_keeps_their_summaries(tmp_path: Path):
    tracker = TensorBoardTracker()
    runs = [run_with(tracker, folder=tmp_path / name, rounds=2) for name in ("one", "two")]
    assert runs
    for run, name in zip(runs, ("one", "two"), strict=True):
        folder = tmp_path / name / "tensorboard"
        assert [step for step, _ in scalars(folder)["accuracy/mean"]] == [1, 2]
        assert json.loads(text(folder, "summary")) == run.summary


def test_a_tracker_of_no_rounds_leaves_nothing(tmp_path: Path):
    TensorBoardTracker().on_end(end_record(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_a_run_folder_it_needs_one_of_its_own(tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match="TensorBoardTracker has no folder to write to; set its folder, or the run's folder",
    ):
        run_with(TensorBoardTracker())
    run_with(TensorBoardTracker(tmp_path / "events"))
    assert len(scalars(tmp_path / "events")["clusters/found"]) == 4


def test_without_tensorboard_the_tracker_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        MissingExtraError, match=r"--log tensorboard needs .*'tensorboard'.*fedclade\[tensorboard\]"
    ):
        TensorBoardTracker()
