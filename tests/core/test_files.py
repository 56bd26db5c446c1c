from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from fedclade.core.files import appear, remove, sha256_of, write_tensors


def write(text: str):
    return lambda path: path.write_text(text)


def write_folder(path: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "new.txt").write_text("new")


def test_a_file_takes_the_place_of_another(tmp_path):
    for text in ("first", "second"):
        appear(tmp_path / "file", write(text))
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", text)]


def test_a_folder_takes_the_place_of_another(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old.txt").write_text("old")
    appear(tmp_path / "folder", write_folder)
    assert [path.name for path in (tmp_path / "folder").rglob("*.txt")] == ["new.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_nothing_changes_when_the_writing_fails(tmp_path):
    def fails(path: Path) -> None:
        path.write_text("half")
        raise ZeroDivisionError("in the middle")

    (tmp_path / "file").write_text("old")
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        appear(tmp_path / "file", fails)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_what_a_crash_left_half_written_is_no_hindrance(tmp_path):
    (tmp_path / ".folder.writing" / "deep").mkdir(parents=True)
    appear(tmp_path / "folder", write_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_not_there_need_not_be_removed(tmp_path):
    remove(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_the_sum_is_that_of_the_standard(tmp_path):
    """The first example of FIPS 180-4."""
    (tmp_path / "abc").write_text("abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of(tmp_path / "abc") == expected


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_tensors_are_as_readable_as_other_files_unless_they_are_private(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "shared", {"x": torch.ones(2)})
        write_tensors(tmp_path / "private", {"x": torch.ones(2)}, private=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
