"""What is in the files of Weights & Biases after a run that is offline."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedclade import Callback, ConfigError, MissingExtraError, RoundRecord, WandbTracker
from tests.trackers.runs import run_in_two_parts, run_with


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves the machine, or the folder of the test."""
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


class Heard(Callback):
    """Keeps the numbers of rounds."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_round(self, record: RoundRecord, /) -> None:
        self.rounds.append(record.round)


def records(path: Path) -> Iterator[Any]:
    """Read a file of W&B: a header of seven bytes, then blocks of 32 KiB with records, as LevelDB's logs have them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = data[at + 7 : at + 7 + size], at + 7 + size
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield Record.FromString(whole)


def wait_for_the_end(path: Path) -> None:
    """Wait until a file is whole: W&B writes it in another process, which a run of no more than seconds outpaces."""
    for _ in range(100):
        if any(record.WhichOneof("record_type") == "exit" for record in records(path)):
            return
        time.sleep(0.1)


def rows(path: Path) -> list[dict[str, float]]:
    """Return the history in a file."""
    found = [
        record.history for record in records(path) if record.WhichOneof("record_type") == "history"
    ]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in found
    ]


@pytest.mark.slow
def test_both_parts_of_a_run_have_one_id(tmp_path: Path):
    tracker = WandbTracker("mine")
    run = run_in_two_parts(tmp_path / "run", tracker, tracker)
    kept = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    assert kept == {"id": kept["id"], "round": 4}
    known = kept["id"]
    first, second = sorted(
        (tmp_path / "run").glob(f"wandb/offline-run-*-{known}*/run-{known}.wandb")
    )
    wait_for_the_end(second)
    assert [row["_step"] for row in rows(first)] == [1, 2, 3]
    assert [row["_step"] for row in rows(second)] == [4]
    written = [row["accuracy/mean"] for row in [*rows(first), *rows(second)]]
    assert written == pytest.approx([row["accuracy_mean"] for row in run.metric_rows])
    of_kind = {record.WhichOneof("record_type"): record for record in records(second)}
    begun = next(
        record.run for record in records(first) if record.WhichOneof("record_type") == "run"
    )
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert (begun.project, begun.display_name) == ("mine", "run")
    assert "method:cfl" in begun.tags
    assert config["algorithm.eps2"] == 0.001
    assert of_kind["exit"].exit.exit_code == 0
    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records(second)
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["accuracy.mean"] == run.summary["accuracy"]["mean"]
    assert {path.name for path in second.parent.glob("files/*")} >= {"summary.json", "config.toml"}
    heard = Heard()
    run_with(heard, tracker, folder=tmp_path / "run", rounds=6)
    *_, third = sorted((tmp_path / "run").glob(f"wandb/offline-run-*-{known}*/run-{known}.wandb"))
    wait_for_the_end(third)
    assert heard.rounds == [5, 6], "a run continues from its end"
    assert [row["_step"] for row in rows(third)] == [5, 6], "what was written is not written again"


def test_who_is_not_logged_in_is_told_so_before_the_run(monkeypatch: pytest.MonkeyPatch):
    import wandb

    monkeypatch.setattr(wandb.setup().settings, "mode", "online")
    with pytest.raises(
        ConfigError, match=r"Weights & Biases cannot be used: .*Or set WANDB_MODE=offline"
    ):
        WandbTracker()


def test_without_wandb_the_tracker_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"--log wandb needs .*'wandb'.*fedclade\[wandb\]"):
        WandbTracker()
