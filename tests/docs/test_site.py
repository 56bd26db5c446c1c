"""The docs site: a page for whatever has to have one, and nothing loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fedclade
from fedclade.algorithms import ALGORITHMS
from fedclade.config import check_config
from tests.docs.blocks import ROOT, blocks_of

DOCS = ROOT / "docs"


def test_every_algorithm_has_a_page_with_pseudo_code_and_a_config_that_holds():
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")} - {"index"}
    assert pages == set(ALGORITHMS)
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in ALGORITHMS:
        page = f"methods/{name}.md"
        assert f"- {name}: {page}\n" in nav
        texts = [block.text for block in blocks_of(f"docs/{page}") if block.language == "text"]
        pseudo_code = texts[0]  # what follows is output of examples
        assert 6 <= len(pseudo_code.splitlines()) <= 25, name
        configs = [block.text for block in blocks_of(f"docs/{page}") if block.language == "toml"]
        assert configs, name
        for config in configs:
            data = {} if "shift" in config else {"data": {"shift": "label_swap"}}
            assert check_config({**data, **tomllib.loads(config)}).algorithm["name"] == name


def test_every_room_that_users_import_has_a_page_of_reference():
    rooms = {path.parent.name for path in (ROOT / "src" / "fedclade").glob("*/__init__.py")}
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"- fedclade\.([a-z]+): reference/", nav)) == rooms


class Loaded(HTMLParser):
    """What a page loads, and where its links and anchors are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag in ("script", "img", "iframe", "source", "video") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given.get("href", ""))


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8")
        for path in tmp_path.rglob("*.html")
    }
    for name, text in pages.items():
        outside = [url for url in Loaded(text).loads if url.startswith(("http:", "https:", "//"))]
        assert not outside, f"{name} loads {outside}"
        assert not re.search(r"""import\s*\(?["']https?:""", text), f"{name} imports a script"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(
            r"url\([\"']?(https?:)?//|@import", sheet.read_text(encoding="utf-8")
        ), sheet
    named = Loaded(pages["reference/index.html"]).ids
    assert not [name for name in fedclade.__all__ if f"fedclade.{name}" not in named]
    assert f"reproduce/{next((ROOT / 'results').glob('*.json')).stem}.html" in pages
