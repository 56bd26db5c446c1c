"""The blocks of the pages, and the hidden comments that say how they are tested.

A page is one story: its blocks run in order in one folder and, as far as they are Python, in one namespace. Python
always runs, other languages are checked. A block that begins with ```toml title="my.toml" is written to a file of that
name. A comment on the line before a block, such as ``<!-- test: slow, setup = finished -->``, changes what is done:

================== =====================================================================================================
``run``            a shell block is run, too; it is checked in any case
``slow``           as ``run``, but only in the slow tests; with everything that needs it
``parse``          Python, or TOML that is not fedclade's, is only parsed
``setup = NAME``   first, the function of that name in ``setups.py`` makes what the reader is told to have
``example``        a part of a worked example, which ``test_worked_examples.py`` applies and runs
``prints``         a text is what the block before it prints; it is as slow; ``prints = COMMAND``: what this prints
================== =====================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/**/*.md",
        "examples/**/README.md",
        "packages/*/README.md",
    )
    for path in ROOT.glob(pattern)
)
MARKS = ("run", "slow", "parse", "setup", "prints", "example")
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(.*)$")
TITLE = re.compile(r'title="([^"]+)"')
COMMENT = re.compile(r"<!-- test: (.*) -->")


@dataclass(frozen=True)
class Block:
    """A block of a page; ``str()`` of it is where it is."""

    page: str
    line: int
    language: str
    text: str = field(repr=False)
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_slow(self) -> bool:
        return "slow" in self.marks


def marks_of(before: str) -> dict[str, str]:
    """Return what the line before a block says of its test."""
    found = COMMENT.search(before)
    pairs = [each.partition("=") for each in found[1].split(",")] if found else []
    marks = {key.strip(): value.strip() for key, _, value in pairs}
    assert set(marks) <= set(MARKS), f"{before} has a word that tests/docs/blocks.py does not know"
    return marks


def blocks_in(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page."""
    lines = text.splitlines()
    at, slow = 0, {}
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is not None:
            _, fence, info = opening.groups()
            language, title = info.split(" ")[0], TITLE.search(info)
            end = next((k for k in range(at + 1, len(lines)) if lines[k].strip() == fence), None)
            assert end is not None, f"{page}:{at + 1}: the block has no end"
            inside = dedent("\n".join(lines[at + 1 : end])) + "\n"
            marks = marks_of(lines[at - 1]) if at else {}
            if marks.get("prints") == "":
                marks |= slow
            slow = {"slow": ""} if "slow" in marks else {}
            yield Block(page, at + 1, language, inside, marks, title[1] if title else None)
            at = end
        at += 1


def blocks_of(page: str) -> list[Block]:
    return list(blocks_in(page, (ROOT / page).read_text(encoding="utf-8")))


def text_of(page: str, language: str) -> str:
    """Return the only block of a page in a language."""
    (block,) = (block for block in blocks_of(page) if block.language == language)
    return block.text
