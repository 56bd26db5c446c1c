"""The page of all results: written from JSON alone, and the committed one is that of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedclade.errors import DataError
from fedclade.reproduce import EXPERIMENTS
from fedclade.reproduce import book as module
from fedclade.reproduce.book import book, read_results, write_book
from fedclade.reproduce.result import measure
from tests.reproduce.examples import TINY

ROOT = Path(__file__).parents[2]
LARGEST_FIGURE = 60_000


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "EXPERIMENTS", {"tiny": TINY})
    folder = tmp_path / "results"
    folder.mkdir()
    for scale in ("smoke", "laptop"):
        result = measure(TINY, scale)
        result.save(folder / f"{result.stem}.json")
    return folder


def test_the_page_lists_all_results_and_what_was_not_confirmed(results: Path, tmp_path: Path):
    write_book(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.index("## tiny, smoke") < page.index("## tiny, laptop")
    assert "| [tiny](#tiny-laptop) | Nobody 2000, table 1 | laptop | 1 short | 1 seen, 1 not seen |" in page
    unconfirmed = page[page.index("## What we could not confirm") : page.index("## tiny, smoke")]
    assert "| tiny, laptop | always | once |" in unconfirmed
    assert "above 90 %" not in unconfirmed
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["tiny-laptop.png", "tiny-smoke.png"]


def test_a_folder_without_results_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=rf"{tmp_path} holds no results; make some with: fedclade reproduce"):
        read_results(tmp_path)


def test_results_of_unknown_experiments_are_refused(results: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "EXPERIMENTS", {})
    with pytest.raises(DataError, match="experiments that are not known: tiny, tiny"):
        read_results(results)


def test_the_committed_page_is_that_of_the_committed_results():
    committed = read_results(ROOT / "results")
    assert (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8") == book(committed, "reproduce")
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "reproduce").iterdir()}
    assert set(pictures) == {result.stem for result in committed}
    assert max(pictures.values()) < LARGEST_FIGURE


def test_committed_results_are_of_the_settings_as_they_stand():
    for result in read_results(ROOT / "results"):
        assert result.settings == EXPERIMENTS[result.name].settings(result.scale), result.stem
