"""The page of all results: written from JSON alone, and the committed one is that of the committed results."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fedclade.core.errors import DataError
from fedclade_papers import EXPERIMENTS
from fedclade_papers import docs as module
from fedclade_papers.command import changes
from fedclade_papers.docs import detail_pages, page_of, read_results, write_page
from fedclade_papers.result import measure
from tests.papers.examples import TINY

ROOT = Path(__file__).parents[2]
LARGEST_FIGURE = 60_000
LONGEST_OVERVIEW = 1800
"""Words."""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "EXPERIMENTS", {"tiny": TINY})
    folder = tmp_path / "results"
    folder.mkdir()
    for scale in ("smoke", "laptop"):
        result = measure(TINY, scale)
        result.save(folder / f"{result.stem}.json")
    return folder


def section(page: str, title: str) -> str:
    """Return what stands between a heading and the next."""
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_overview_has_a_line_for_each_result_and_its_anchor(results: Path, tmp_path: Path):
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.index('id="tiny-smoke"') < page.index('id="tiny-laptop"')
    line = '| <a id="tiny-laptop"></a>[tiny](page/tiny-laptop.md) | Nobody 2000, table 1 | laptop |'
    assert (
        f"{line} seeds [0, 1, 2] → [1, 3]; rounds 100 → 10 | 1 short | 1 seen, 1 not seen |" in page
    )
    pages = [
        "sentences.md",
        "times.md",
        "tiny-laptop.md",
        "tiny-laptop.png",
        "tiny-smoke.md",
        "tiny-smoke.png",
        "unconfirmed.md",
    ]
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == pages


def test_a_run_that_is_shown_twice_counts_once(results: Path, tmp_path: Path):
    for path in results.glob("*.json"):
        result = module.Result.load(path)
        (row,) = result.outcome.rows
        again = replace(row, what="again", repeats="accuracy")
        replace(result, outcome=replace(result.outcome, rows=(row, again))).save(path)
    write_page(results, tmp_path / "page.md")
    assert "| 1 short | 1 seen, 1 not seen |" in (tmp_path / "page.md").read_text()
    assert (
        "| again | 95.0 % | 92.0 ± 12.7 % | −3.0 % | the run of accuracy |"
        in (tmp_path / "page" / "tiny-laptop.md").read_text()
    )


def test_each_result_has_a_page_and_all_are_told_in_sentences(results: Path):
    pages = detail_pages(read_results(results))
    assert sorted(pages) == [
        "sentences.md",
        "times.md",
        "tiny-laptop.md",
        "tiny-smoke.md",
        "unconfirmed.md",
    ]
    assert pages["tiny-laptop.md"].startswith("# tiny, laptop\n")
    assert "](tiny-laptop.png)" in pages["tiny-laptop.md"]
    sentences = "| [tiny](tiny-laptop.md) | 95 % on average. | 92.0 %. | The seeds are others. |"
    assert f"{sentences} seeds [0, 1, 2] → [1, 3]; rounds 100 → 10 |" in pages["sentences.md"]


def test_a_page_tells_what_was_not_confirmed_and_why(results: Path):
    unconfirmed = detail_pages(read_results(results))["unconfirmed.md"]
    assert "| [tiny](tiny-laptop.md) | always | no | once |" in unconfirmed
    assert "above 90 %" not in unconfirmed
    assert "| [tiny](tiny-laptop.md) | 1, by −3.0 % | The seeds are others. |" in unconfirmed


def test_the_page_names_what_was_not_measured(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_page(results, tmp_path / "page.md")
    assert "Not measured" not in (tmp_path / "page.md").read_text()
    other = replace(TINY, name="other", source="Nobody 2000, table 2", data=("femnist",))
    monkeypatch.setattr(module, "EXPERIMENTS", {"tiny": TINY, "other": other})
    write_page(results, tmp_path / "page.md")
    line = "| other | Nobody 2000, table 2 | femnist | `fedclade reproduce other --scale paper` |"
    assert line in section((tmp_path / "page.md").read_text(), "Not measured")


def test_a_folder_without_results_is_refused(tmp_path: Path):
    with pytest.raises(
        DataError,
        match=rf"folder {tmp_path} contains no results of experiments; write some with: fedclade",
    ):
        read_results(tmp_path)


def test_results_of_unknown_experiments_are_refused(results: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "EXPERIMENTS", {})
    with pytest.raises(
        DataError, match="contains results of unknown experiments: tiny, tiny; remove"
    ):
        read_results(results)


def test_the_committed_page_is_that_of_the_committed_results():
    committed = read_results(ROOT / "results")
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert page == page_of(committed, "reproduce")
    assert len(page.split()) <= LONGEST_OVERVIEW
    pictures = {
        path.stem: path.stat().st_size for path in (ROOT / "docs" / "reproduce").glob("*.png")
    }
    assert set(pictures) == {result.stem for result in committed}
    assert max(pictures.values()) < LARGEST_FIGURE


def test_every_page_that_the_overview_links_to_is_committed_and_up_to_date():
    folder = ROOT / "docs" / "reproduce"
    pages = detail_pages(read_results(ROOT / "results"))
    assert {path.name for path in folder.glob("*.md")} == set(pages)
    for name, text in pages.items():
        assert (folder / name).read_text(encoding="utf-8") == text, name
    links = re.findall(
        r"\]\(([^)#]+)\)", (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    )
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_no_run_of_the_committed_results_is_counted_twice():
    seen: dict[tuple[str, tuple[tuple[str, float], ...]], str] = {}
    for result in read_results(ROOT / "results"):
        cells: dict[str, list[tuple[str, float]]] = {}
        for row in result.outcome.rows:
            cell, _, what = row.what.partition(" · ")
            if row.counts and what:
                cells.setdefault(cell, []).append((what, row.ours))
        for cell, numbers in cells.items():
            if len(numbers) < 3:  # one or two figures can be equal by chance
                continue
            twin = seen.setdefault(
                (result.source.partition(",")[0], tuple(numbers)), f"{result.stem}: {cell}"
            )
            assert twin == f"{result.stem}: {cell}", (
                f"{twin} is counted again as {result.stem}: {cell}"
            )


def test_committed_results_are_of_the_settings_as_they_stand():
    results = read_results(ROOT / "results")
    assert len(results) == len(list((ROOT / "results").glob("*.json"))) > 0
    for result in results:
        by_hand = changes(shlex.split(result.command)[6::2])
        assert result.settings == EXPERIMENTS[result.name].settings(result.scale, by_hand), (
            result.stem
        )


def test_committed_results_say_what_they_come_to_and_why_they_fall_short():
    results = read_results(ROOT / "results")
    assert len(results) == len(list((ROOT / "results").glob("*.json"))) > 0
    for result in results:
        summary, outcome = result.outcome.summary, result.outcome
        assert summary.shows, result.stem
        assert summary.found, result.stem
        short = [row.what for row in outcome.rows if row.verdict.startswith(("short", "off"))]
        short += [claim.text for claim in outcome.claims if claim.seen in ("no", "direction only")]
        assert summary.because or not short, f"{result.stem}: {short} without a reason"


def test_the_time_on_a_gpu_names_the_gpu(results: Path, tmp_path: Path):
    path = results / "tiny-smoke.json"
    result = module.Result.load(path)
    replace(result, machine={**result.machine, "device": "NVIDIA H200"}, seconds=252.0).save(path)
    write_page(results, tmp_path / "page.md")
    assert "| 4 min 12 s on NVIDIA H200 |" in (tmp_path / "page.md").read_text()
