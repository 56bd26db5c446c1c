"""The cache: pieces are kept, interrupted calls go on, and what is damaged is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedclade.core.errors import RunError, RunInterrupted
from fedclade_papers import ResultCache
from fedclade_papers.cache import is_at_hand


def test_parts_of_the_settings_share_their_pieces(tmp_path: Path):
    made: list[int] = []
    for whole in ({"a": 1}, {"a": 2}):
        part = ResultCache(whole, folder=tmp_path).within({"b": 1})
        assert part.piece("first", lambda: made.append(1) or len(made)) == 1
    cache = ResultCache({"a": 1}, folder=tmp_path)
    assert cache.within({"b": 2}).piece("first", lambda: 5) == 5
    assert cache.within({"b": 1}) is cache.within({"b": 1})
    assert cache.within({"b": 1}).piece("first", lambda: -1) == 1
    assert cache.seconds == sum(cache.within({"b": b}).seconds for b in (1, 2)) > 0


def test_a_piece_is_made_once_and_kept_as_json_has_it(tmp_path: Path):
    made: list[int] = []
    told: list[str] = []
    for _ in range(2):
        cache = ResultCache({"a": 1}, folder=tmp_path, say=told.append)
        value = cache.piece("first", lambda: made.append(1) or {"pair": (1, 2)})
        assert value == {"pair": [1, 2]}
    assert (made, told) == ([1], ["first"])
    assert cache.seconds > 0


def test_pieces_of_other_settings_are_not_taken(tmp_path: Path):
    ResultCache({"a": 1}, folder=tmp_path).piece("first", lambda: 1)
    assert ResultCache({"a": 2}, folder=tmp_path).piece("first", lambda: 2) == 2


def test_without_a_folder_nothing_is_kept():
    cache = ResultCache({})
    assert cache.piece("first", lambda: 1) == 1
    assert cache.folder_for("first") is None


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path):
    cache = ResultCache({}, folder=tmp_path)
    cache.piece("first", lambda: 1)
    cache.piece("second", lambda: 2)
    (file,) = tmp_path.rglob("pieces.jsonl")
    file.write_text(file.read_text()[:-4])
    again = ResultCache({}, folder=tmp_path)
    assert again.piece("first", lambda: -1) == 1
    assert again.piece("second", lambda: 22) == 22
    assert ResultCache({}, folder=tmp_path).piece("second", lambda: -1) == 22


@pytest.mark.parametrize(
    ("line", "told"), [("{not json", "JSONDecodeError"), ('{"key": "first"}', "KeyError")]
)
def test_a_damaged_file_is_said_to_be(tmp_path: Path, line: str, told: str):
    ResultCache({}, folder=tmp_path).piece("first", lambda: 1)
    (file,) = tmp_path.rglob("pieces.jsonl")
    file.write_text(f"{line}\n")
    with pytest.raises(
        RunError,
        match=rf"pieces.jsonl is damaged: {told}: .*; remove the file to measure all pieces again",
    ):
        ResultCache({}, folder=tmp_path)


def test_a_cache_that_is_asked_to_stop_begins_no_piece(tmp_path: Path):
    ResultCache({}, folder=tmp_path).piece("first", lambda: 1)
    cache = ResultCache({}, folder=tmp_path, stop=lambda: True)
    assert cache.piece("first", lambda: -1) == 1
    with pytest.raises(RunInterrupted, match="interrupted before measuring the piece 'second'"):
        cache.piece("second", lambda: 2)


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
    assert ResultCache({}, data_dir=tmp_path).may_have("mnist")
    assert not ResultCache({}, data_dir=tmp_path).may_have("cifar10")
    assert ResultCache({}).may_have("cifar10")


def test_the_run_folder_of_a_piece_is_removed_once_it_is_kept(tmp_path: Path):
    cache = ResultCache({}, folder=tmp_path)

    def make() -> int:
        folder = cache.folder_for("first")
        assert folder is not None
        folder.mkdir()
        (folder / "checkpoint").write_text("large")
        return 1

    assert cache.piece("first", make) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["pieces.jsonl"]
    assert not list(tmp_path.rglob("first"))


def test_a_piece_that_is_taken_twice_took_its_time_once():
    cache = ResultCache({})
    cache.piece("first", lambda: 1)
    once = cache.seconds
    assert cache.piece("first", lambda: 2) == 1
    assert cache.seconds == once > 0
