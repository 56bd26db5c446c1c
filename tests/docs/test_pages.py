"""Every page of the documentation works from its first block to its last, and leads to what there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks_of
from tests.docs.story import Story, runs, tell

TELLING = {page: [block for block in blocks_of(page) if runs(block)] for page in PAGES}
QUICK = [page for page, blocks in TELLING.items() if any(not block.is_slow for block in blocks)]
SLOW = [page for page, blocks in TELLING.items() if any(block.is_slow for block in blocks)]

Told = Callable[[str], Story]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Run a page once, for all that is to be said of it."""
    stories: dict[str, Story] = {}

    def tell_once(page: str) -> Story:
        if page not in stories:
            stories[page] = tell(page, tmp_path_factory.mktemp("page"))
        return stories[page]

    return tell_once


@pytest.mark.parametrize("page", QUICK)
def test_the_blocks_of_a_page_run(page: str, told: Told):
    told(page)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_all_blocks_of_a_page_run(page: str, tmp_path: Path):
    tell(page, tmp_path, slow=True)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_links_to_exists(page: str):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
