"""The docs site: a page for whatever has to have one, a quick start that works, and nothing loaded from elsewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedclade
from fedclade import Run
from fedclade.algorithms import ALGORITHMS
from fedclade.cli.app import app
from fedclade.config import check_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LONGEST = 25_000
"""Words of all pages together."""


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page that are in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_algorithm_has_a_page_with_pseudo_code_and_a_config_that_holds():
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")} - {"index"}
    assert pages == set(ALGORITHMS)
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in ALGORITHMS:
        page = f"methods/{name}.md"
        assert f"- {name}: {page}\n" in nav
        (pseudo_code,), (config,) = blocks(page, "text"), blocks(page, "toml")
        assert 6 <= len(pseudo_code.splitlines()) <= 25, name
        data = {} if "shift" in config else {"data": {"shift": "label_swap"}}
        assert check_config({**data, **tomllib.loads(config)}).algorithm["name"] == name


def test_every_room_that_users_import_has_a_page_of_reference():
    rooms = {path.parent.name for path in (ROOT / "src" / "fedclade").glob("*/__init__.py")} - {"cli", "papers"}
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"- fedclade\.([a-z]+): reference/", nav)) == rooms


@pytest.mark.slow
def test_the_quick_start_gets_from_a_folder_of_files_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every line but that of pip, in under ten; what it prints is what the page shows."""
    monkeypatch.chdir(tmp_path)
    first, then = blocks("quick-start.md", "bash")
    install, *lines = first.splitlines()
    assert install == 'pip install "fedclade[report]"'
    assert len(lines) < 9
    printed = ""
    for line in [*lines, *then.splitlines()]:
        if line.startswith("fedclade "):
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, result.output
            printed += result.output
        else:
            subprocess.run(["bash", "-ec", line.replace("python ", f"{sys.executable} ")], check=True)
    (shown,) = blocks("quick-start.md", "text")
    assert set(map(str.strip, shown.splitlines())) <= set(map(str.strip, printed.splitlines()))
    assert (tmp_path / "first/report.html").stat().st_size > 100_000
    one = Run.load(tmp_path / "one").summary["accuracy"]["mean"]
    assert f"{100 * one:.1f} %" in (DOCS / "quick-start.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["index.md", pytest.param("quick-start.md", marks=pytest.mark.slow)])
def test_the_python_of_a_page_finds_the_four_clusters(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page, "python")
    exec(compile(code, page, "exec"), {})
    assert "'found': 4, 'true': 4, 'ari': 1.0" in capsys.readouterr().out


def test_pages_are_brief():
    words = {str(path.relative_to(DOCS)): len(path.read_text(encoding="utf-8").split()) for path in DOCS.rglob("*.md")}
    assert sum(words.values()) <= LONGEST, sorted(words.items(), key=lambda each: -each[1])[:8]


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
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    for name, text in pages.items():
        outside = [url for url in Loaded(text).loads if url.startswith(("http:", "https:", "//"))]
        assert not outside, f"{name} loads {outside}"
        assert not re.search(r"""import\s*\(?["']https?:""", text), f"{name} imports a script"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet
    named = Loaded(pages["reference/index.html"]).ids
    assert not [name for name in fedclade.__all__ if f"fedclade.{name}" not in named]
    assert f"reproduce/{next((ROOT / 'results').glob('*.json')).stem}.html" in pages
