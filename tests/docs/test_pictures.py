"""The pictures of the documentation: every how-to page has one, and a script makes it."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of

DOCS = ROOT / "docs"
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
SCRIPT = "terminal_pictures.py"
URL = re.compile(r"""(?:href|src)\s*=\s*["'](?!#)|url\(["']?(?!#)|@import|@font-face""")
"""What an SVG would load: all but references within the file."""


def pictures_of(page: Path) -> list[tuple[str, Path]]:
    """Return the descriptions and the files of the pictures that a page shows."""
    found = PICTURE.findall(page.read_text(encoding="utf-8"))
    return [(words, (page.parent / path).resolve()) for words, path in found]


def how_to_pages() -> list[str]:
    """Return the pages of the section "How to" of the site."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    section = nav.split("  - How to:\n")[1].split("\n  - ")[0]
    return re.findall(r": (\S+\.md)$", section, flags=re.MULTILINE)


def tables() -> dict[str, ast.Dict]:
    """Return the tables of pictures of the script, which is not run."""
    tree = ast.parse((DOCS / SCRIPT).read_text(encoding="utf-8"))
    return {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
    }


def made_pictures() -> set[str]:
    """Return the names of the pictures that the script makes."""
    keys = [*tables()["RECORDINGS"].keys, *tables()["DRAWINGS"].keys]
    return {ast.literal_eval(key) for key in keys if key is not None}


def recorded_commands() -> list[tuple[str, str]]:
    """Return the first line of each command that the script records, with the picture's name."""
    recordings = tables()["RECORDINGS"]
    found: list[tuple[str, str]] = []
    for name, recording in zip(recordings.keys, recordings.values, strict=True):
        assert isinstance(recording, ast.Call)
        commands = recording.args[0]
        assert isinstance(name, ast.Constant)
        assert isinstance(commands, ast.Tuple)
        texts = [each.value for each in commands.elts if isinstance(each, ast.Constant)]
        found += [(str(name.value), str(text).partition("\n")[0]) for text in texts]
    return found


SHOWN = [
    (page, words, path) for page in sorted(DOCS.rglob("*.md")) for words, path in pictures_of(page)
]


@pytest.mark.parametrize("page", [*how_to_pages(), "quick-start.md"])
def test_a_how_to_page_has_a_picture(page: str):
    assert pictures_of(DOCS / page), f"docs/{page} has no picture; see docs/{SCRIPT}"


def test_every_picture_exists_and_is_described():
    for page, words, path in SHOWN:
        assert path.is_file(), f"{page} shows {path}, which does not exist"
        assert len(words) >= 20, f"{page} does not say what is seen in {path.name}"


def test_every_recorded_picture_is_shown_and_made_by_the_script():
    there = {path.stem for path in (DOCS / "pictures").iterdir()}
    shown = {path.stem for _, _, path in SHOWN if path.parent.name == "pictures"}
    assert there == shown == made_pictures()


@pytest.mark.parametrize(("name", "command"), recorded_commands())
def test_a_recording_shows_the_command_of_the_script(name: str, command: str):
    """A picture that was made by another command is stale."""
    svg = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert command in html.unescape(re.sub(r"<[^>]*>", "\n", svg)).replace("\xa0", " ")


@pytest.mark.parametrize(("name", "command"), recorded_commands())
def test_a_recorded_command_of_fedclade_exists(name: str, command: str):
    program, subcommand = command.split()[:2]
    if program == "fedclade":
        page = "\n".join(block.text for block in blocks_of("docs/command-line.md"))
        assert f"fedclade {subcommand} " in page, f"{name} shows fedclade {subcommand}"


def test_pictures_load_nothing():
    for path in DOCS.rglob("*.svg"):
        assert not URL.search(path.read_text(encoding="utf-8")), f"{path} loads a file or a font"
