"""The bench: pieces are kept, interrupted calls go on, and what is damaged is said to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedclade.core.errors import ConfigError, RunError, RunInterrupted
from fedclade.papers import ResultCache
from fedclade.papers.experiment import is_at_hand
from tests.papers.examples import TINY


def test_a_scale_changes_the_papers_settings_where_it_says_so():
    assert TINY.settings("laptop") == {"seeds": [1, 3], "rounds": 10, "data": "mnist"}
    assert TINY.differences(TINY.settings("laptop")) == {"seeds": ([0, 1, 2], [1, 3]), "rounds": (100, 10)}
    assert TINY.settings("paper") == TINY.paper
    assert TINY.differences(TINY.settings("paper")) == {}


def test_a_scale_can_be_changed_by_settings_that_there_are():
    changed = TINY.settings("laptop", {"rounds": 100, "seeds": [7]})
    assert changed == {"seeds": [7], "rounds": 100, "data": "mnist"}
    assert TINY.differences(changed) == {"seeds": ([0, 1, 2], [7])}
    with pytest.raises(ConfigError, match=r"unknown setting of tiny 'round'.*rounds"):
        TINY.settings("laptop", {"round": 100})


def test_parts_of_the_settings_share_their_pieces(tmp_path: Path):
    made: list[int] = []
    for whole in ({"a": 1}, {"a": 2}):
        part = ResultCache(whole, folder=tmp_path).within({"b": 1})
        assert part.piece("first", lambda: made.append(1) or len(made)) == 1
    bench = ResultCache({"a": 1}, folder=tmp_path)
    assert bench.within({"b": 2}).piece("first", lambda: 5) == 5
    assert bench.within({"b": 1}) is bench.within({"b": 1})
    assert bench.within({"b": 1}).piece("first", lambda: -1) == 1
    assert bench.seconds == sum(bench.within({"b": b}).seconds for b in (1, 2)) > 0


def test_a_change_of_a_setting_that_the_paper_has_not_is_refused():
    with pytest.raises(
        ConfigError, match=r"tiny: the scale 'smoke' changes \['lr'\], which the paper's settings have not"
    ):
        replace(TINY, changes={"smoke": {"lr": 1}, "laptop": {}})


def test_a_piece_is_made_once_and_kept_as_json_has_it(tmp_path: Path):
    made: list[int] = []
    told: list[str] = []
    for _ in range(2):
        bench = ResultCache({"a": 1}, folder=tmp_path, say=told.append)
        value = bench.piece("first", lambda: made.append(1) or {"pair": (1, 2)})
        assert value == {"pair": [1, 2]}
    assert (made, told) == ([1], ["first"])
    assert bench.seconds > 0


def test_pieces_of_other_settings_are_not_taken(tmp_path: Path):
    ResultCache({"a": 1}, folder=tmp_path).piece("first", lambda: 1)
    assert ResultCache({"a": 2}, folder=tmp_path).piece("first", lambda: 2) == 2


def test_without_a_folder_nothing_is_kept():
    bench = ResultCache({})
    assert bench.piece("first", lambda: 1) == 1
    assert bench.folder_for("first") is None


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path):
    bench = ResultCache({}, folder=tmp_path)
    bench.piece("first", lambda: 1)
    bench.piece("second", lambda: 2)
    (file,) = tmp_path.rglob("pieces.jsonl")
    file.write_text(file.read_text()[:-4])
    again = ResultCache({}, folder=tmp_path)
    assert again.piece("first", lambda: -1) == 1
    assert again.piece("second", lambda: 22) == 22
    assert ResultCache({}, folder=tmp_path).piece("second", lambda: -1) == 22


@pytest.mark.parametrize(("line", "told"), [("{not json", "JSONDecodeError"), ('{"key": "first"}', "KeyError")])
def test_a_damaged_file_is_said_to_be(tmp_path: Path, line: str, told: str):
    ResultCache({}, folder=tmp_path).piece("first", lambda: 1)
    (file,) = tmp_path.rglob("pieces.jsonl")
    file.write_text(f"{line}\n")
    with pytest.raises(RunError, match=rf"pieces.jsonl is damaged: {told}: .*; remove it to measure anew"):
        ResultCache({}, folder=tmp_path)


def test_a_bench_that_is_asked_to_stop_begins_no_piece(tmp_path: Path):
    ResultCache({}, folder=tmp_path).piece("first", lambda: 1)
    bench = ResultCache({}, folder=tmp_path, stop=lambda: True)
    assert bench.piece("first", lambda: -1) == 1
    with pytest.raises(RunInterrupted, match="interrupted before the piece 'second'"):
        bench.piece("second", lambda: 2)


def test_a_long_piece_has_a_run_folder_of_its_own(tmp_path: Path):
    one, other = ResultCache({"a": 1}, folder=tmp_path), ResultCache({"a": 2}, folder=tmp_path)
    folders = {
        one.folder_for("C = 0.1, seed 1"),
        one.folder_for("C = 0.1, seed 2"),
        other.folder_for("C = 0.1, seed 1"),
    }
    assert len(folders) == 3
    assert all(folder.parent.is_dir() and not folder.exists() for folder in folders if folder)


def test_bundled_data_is_at_hand_and_other_data_where_its_folder_holds_files(tmp_path: Path):
    (tmp_path / "mnist").mkdir()
    assert is_at_hand("digits", None)
    assert not is_at_hand("mnist", None)
    assert not is_at_hand("mnist", tmp_path)
    (tmp_path / "mnist" / "train.parquet").touch()
    assert ResultCache({}, data_dir=tmp_path).has("mnist")


def test_the_run_folder_of_a_piece_is_removed_once_it_is_kept(tmp_path: Path):
    bench = ResultCache({}, folder=tmp_path)

    def make() -> int:
        folder = bench.folder_for("first")
        assert folder is not None
        folder.mkdir()
        (folder / "checkpoint").write_text("large")
        return 1

    assert bench.piece("first", make) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["pieces.jsonl"]
    assert not list(tmp_path.rglob("first"))


def test_the_smallest_scale_may_need_other_data():
    experiment = replace(TINY, data=("mnist",))
    assert experiment.needs("smoke") == experiment.needs("laptop") == ("mnist",)
    alone = replace(experiment, smoke_data=())
    assert (alone.needs("smoke"), alone.needs("paper")) == ((), ("mnist",))


def test_a_piece_that_is_taken_twice_took_its_time_once():
    bench = ResultCache({})
    bench.piece("first", lambda: 1)
    once = bench.seconds
    assert bench.piece("first", lambda: 2) == 1
    assert bench.seconds == once > 0
