from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from fedclade.data import arrays as cache
from fedclade.data.arrays import Arrays, load_cached, stamp_files


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {"x": np.arange(6, dtype=np.uint8).reshape(2, 3), "words": np.asarray(["a", "bcd"])}


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_builds_once_and_then_reads(tmp_path: Path) -> None:
    build = Builder()
    first, second = load_cached("name", {"a": 1}, build), load_cached("name", {"a": 1}, build)
    assert build.calls == 1
    assert only_file(tmp_path / "cache").name.startswith("name-")
    for arrays in (first, second):
        assert arrays["x"].dtype == np.uint8
        assert arrays["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["words"].tolist() == ["a", "bcd"]


def test_another_key_name_or_format_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    load_cached("name", {"a": 1}, build)
    load_cached("name", {"a": 2}, build)
    load_cached("other", {"a": 1}, build)
    monkeypatch.setattr(cache, "CACHE_FORMAT", cache.CACHE_FORMAT + 1)
    load_cached("name", {"a": 1}, build)
    assert build.calls == 4


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_a_damaged_file_is_built_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    load_cached("name", {}, build)
    file = only_file(tmp_path / "cache")
    whole = file.read_bytes()
    middle = whole.index(bytes(range(6)))  # the numbers of x
    file.write_bytes(
        {
            "empty": b"",
            "cut": whole[: len(whole) // 2],
            "flipped": whole[:middle] + b"\xff" + whole[middle + 1 :],
            "text": b"not an archive",
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert load_cached("name", {}, build)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert build.calls == 2
    assert f"cannot use the cached data in {file}" in caplog.text
    load_cached("name", {}, build)
    assert build.calls == 2, "the new file is good"


def test_works_without_a_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    build = Builder()
    with caplog.at_level(logging.WARNING):
        load_cached("name", {}, build)
        assert load_cached("name", {}, build)["x"].shape == (2, 3)
    assert build.calls == 2
    assert (
        f"cannot store decoded data in the cache folder {tmp_path / 'file' / 'cache'}"
        in caplog.text
    )


def test_a_crash_while_writing_leaves_no_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(file: Path, **_: object) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", crash)
    with pytest.raises(KeyboardInterrupt):
        load_cached("name", {}, Builder())
    assert list((tmp_path / "cache").iterdir()) == []


def test_stamps_change_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("a")
    before = stamp_files([file])
    file.write_text("ab")
    assert before[0][:2] == (str(file), 1)
    assert stamp_files([file]) != before
