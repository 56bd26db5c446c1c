"""A page as a story: its blocks run in order, in one folder and one namespace."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from fedclade.cli import app
from fedclade.core import installed
from tests.docs import setups
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.shell import commands

SHELLS = ("sh", "bash")
LENT = ("benchmarks", "configs", "examples", "packages")
"""Folders of the repository that commands name, and only read."""

PREAMBLE = (
    f'set -e; pip() {{ :; }}; python() {{ "{sys.executable}" "$@"; }}; '
    'fedclade() { python -m fedclade "$@"; }; '
)
"""Before what a shell runs: what is to be installed is there, and python is this one."""

TOLERANCE = 0.05
"""How far a number with a fraction may be off that of a page: sums are rounded in another order elsewhere. Whole
numbers, which count clusters and their clients, must be those, and seconds may be any."""

SECONDS = re.compile(r"\b[\d.]+ s\b")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
PRINTED = re.compile(r"^print\(.*\)\s+# (.*)$", flags=re.MULTILINE)
"""A call of ``print`` with what it prints behind it."""


@dataclass
class Story:
    """What came of a page: its names, what it printed, and its folder."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    output: str = ""  # of the last block that ran


def runs(block: Block) -> bool:
    """Whether a block does something in the story of its page, rather than being only looked at."""
    if "example" in block.marks:
        return False
    ran = block.language in SHELLS and ("run" in block.marks or block.is_slow)
    python = block.language == "python" and "parse" not in block.marks
    return ran or python or block.file is not None or "prints" in block.marks


@contextmanager
def reading_in(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Be in an empty folder, as one who tries a page out."""
    for name in LENT:
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        patch.setenv("BROWSER", "true")  # which opens nothing
        patch.syspath_prepend(folder)
        yield patch
    installed.cache_clear()  # of a package that a page has added


def tell(page: str, folder: Path, *, slow: bool = False) -> Story:
    """Run a page in an empty folder; its slow blocks as well if so asked."""
    story = Story(folder)
    with reading_in(folder) as patch:
        for block in blocks_of(page):
            if runs(block) and (slow or not block.is_slow):
                run(block, story, patch)
    return story


def run(block: Block, story: Story, patch: pytest.MonkeyPatch) -> None:
    """Run one block."""
    if name := block.marks.get("setup"):
        getattr(setups, name)(story.names, patch)
    if block.file is not None:
        Path(block.file).parent.mkdir(parents=True, exist_ok=True)
        Path(block.file).write_text(block.text, encoding="utf-8")
    if "prints" in block.marks:
        if command := block.marks["prints"]:
            run_shell(command, story)
        check_printed(block.text, story.output, str(block))
    elif block.language == "python" and "parse" not in block.marks:
        with _heard(story):
            exec(compile(block.text, str(block), "exec"), story.names)
        check_printed("\n".join(PRINTED.findall(block.text)), story.output, str(block))
    elif block.language in SHELLS and ("run" in block.marks or block.is_slow):
        run_shell(block.text, story)


def run_shell(script: str, story: Story) -> None:
    """Run a script: ``fedclade`` in this process, which has imported all it needs, and other lines by a shell."""
    with _heard(story) as heard:
        for ours, lines in groupby(script.replace("\\\n", " ").splitlines(), _is_ours):
            text = "\n".join(lines)
            for _, *arguments in commands(text) if ours else ():
                assert not app(arguments, standalone_mode=False), arguments
            if not ours:
                done = subprocess.run(
                    ["bash", "-c", PREAMBLE + text], capture_output=True, text=True, check=False
                )
                assert not done.returncode, done.stderr
                heard.write(done.stdout)


def _is_ours(line: str) -> bool:
    return line.startswith("fedclade ")


@contextmanager
def _heard(story: Story) -> Iterator[io.StringIO]:
    """Keep what is printed."""
    with redirect_stdout(io.StringIO()) as heard:
        yield heard
    story.output = heard.getvalue()


def agrees(line: str, expected: str) -> bool:
    """Whether a line says what another does: the same words, and the same numbers within the tolerance."""
    line, expected = (SECONDS.sub("some s", " ".join(each.split())) for each in (line, expected))
    numbers = zip(NUMBER.findall(line), NUMBER.findall(expected), strict=False)
    near = [
        abs(float(a) - float(b)) <= (TOLERANCE * float(b) if "." in b else 0) for a, b in numbers
    ]
    return NUMBER.sub("#", line) == NUMBER.sub("#", expected) and all(near)


def check_printed(text: str, output: str, where: str) -> None:
    """Check that all lines of a text were printed, apart from ``...`` and from headers, which have no number."""
    lines, whole = output.splitlines(), " ".join(output.split())
    for expected in filter(re.compile(r"\d").search, text.splitlines()):
        inside = (
            any(agrees(line, expected) for line in lines) or " ".join(expected.split()) in whole
        )
        assert inside, f"{where} says that {expected!r} is printed, but it is:\n{output}"
