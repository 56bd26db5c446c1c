"""Every block of the documentation is right as far as reading it goes; what runs, runs in ``test_pages.py``."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from fedclade.core import FedcladeError
from tests.docs import setups
from tests.docs.blocks import PAGES, ROOT, Block, blocks_in, blocks_of
from tests.docs.configs import check_toml
from tests.docs.shell import commands
from tests.docs.story import agrees, check_printed, reading_in
from tests.docs.words import check_command

BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def check_shell(text: str) -> None:
    for command in commands(text):
        check_command(command)


def check_diff(text: str) -> None:
    """Check that a diff fits to the files of the repository, or, without file names, its marks."""
    if not re.search(r"^--- a/", text, flags=re.MULTILINE):
        assert all(line[:1] in ("", "+", "-", " ") for line in text.splitlines())
        return
    command = ["git", "apply", "--check", "--recount", "-"]
    done = subprocess.run(
        command, cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


def check_braces(text: str) -> None:
    assert re.sub(r"[^{}]", "", text).count("{") == text.count("}")


LANGUAGES: Mapping[str, Callable[[str], object]] = {
    "bash": check_shell,
    "console": lambda text: check_shell(
        "\n".join(re.findall(r"^\$ (.*)", text, flags=re.MULTILINE))
    ),
    "diff": check_diff,
    "json": json.loads,
    "markdown": lambda text: None,
    "nginx": check_braces,
    "python": ast.parse,
    "sh": check_shell,
    "text": lambda text: None,  # pseudo-code, layouts, and output, which `prints` compares
    "toml": check_toml,
    "yaml": yaml.safe_load,
}


def check(block: Block, folder: Path) -> None:
    """Check one block where a reader would try it, with what the reader is told to have."""
    assert block.language in LANGUAGES, (
        f"{block}: a block should begin with ``` and one of {', '.join(LANGUAGES)}, got {block.language!r}; "
        "what is neither code nor a command is a text, and another language gets a check in tests/docs/test_blocks.py"
    )
    checked = LANGUAGES[block.language]
    if block.language == "toml" and "parse" in block.marks:
        checked = tomllib.loads
    if block.language == "sh" and "example" in block.marks:
        checked = commands  # they name what the example adds
    with reading_in(folder) as patch:
        if (name := block.marks.get("setup")) and not {"run", "slow"} & set(block.marks):
            getattr(setups, name)({}, patch)
        checked(block.text)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_right(block: Block, tmp_path: Path):
    check(block, tmp_path)


WRONG = [
    ("", "fedclade ls", "should begin with ``` and one of"),
    ("perl", "print 1", "got 'perl'"),
    ("sh", "fedklade ls", "does not know the command 'fedklade'"),
    ("sh", "sudo fedklade ls", "sudo runs no command"),
    ("sh", "fedclade rum cfl-digits-label-swap", "No such command 'rum'"),
    ("sh", "fedclade ls --speed 3", "--speed"),
    ("sh", "fedclade run", "Missing argument"),
    ("sh", "cd here && for k in 1 2; do\n    FOO=1 fedclade run\ndone", "Missing argument"),
    ("sh", "fedclade run cfl-digit-label-swap", "cfl-digit-label-swap"),
    ("sh", "fedclade run my.toml --set local.speed=3", "speed"),
    ("sh", "fedclade reproduce fig-1000", "no experiment"),
    ("sh", "make tea", "no tea"),
    ("sh", "python benchmarks/tea.py", "there is no benchmarks/tea.py"),
    ("sh", "OMP_NUM_THREADS=1 python benchmarks/gains.py --tea", "knows no --tea"),
    ("sh", 'pip install "fedclade[tea]"', "no extras {'tea'}"),
    ("sh", "flwr list . --tea", "flwr knows no --tea"),
    ("sh", "for k in 1 2", "syntax error"),
    ("toml", "[local]\nspeed = 3", "speed"),
    ("toml", '[project.entry-points."fedclade.teas"]\nx = "y:z"', "no group of entry points"),
    ("python", "1 +", "invalid syntax"),
    ("diff", "--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-no such line\n+x\n", "README.md"),
    ("json", "{,}", "property name"),
]


@pytest.mark.parametrize(("language", "text", "told"), WRONG)
def test_a_wrong_block_is_noticed(language: str, text: str, told: str, tmp_path: Path):
    with pytest.raises(
        (AssertionError, FedcladeError, SyntaxError, ValueError), match=re.escape(told)
    ):
        check(Block("page.md", 1, language, text), tmp_path)


def test_a_page_has_blocks_with_marks():
    inside = '- x\n\n  <!-- test: slow, setup = x -->\n  ````toml title="a/b.toml"\n  a = 1\n  ```\n  ````\n'
    first, second = blocks_in("page.md", "```sh\nls\n```\n\n" + inside)
    assert (str(first), first.language, first.text, first.marks) == ("page.md:1", "sh", "ls\n", {})
    assert (second.text, second.marks) == ("a = 1\n```\n", {"slow": "", "setup": "x"})
    assert (second.language, second.file) == ("toml", "a/b.toml")
    with pytest.raises(AssertionError, match="has no end"):
        [*blocks_in("page.md", "```sh\nls")]
    with pytest.raises(AssertionError, match="does not know"):
        [*blocks_in("page.md", "<!-- test: tea -->\n```sh\nls\n```")]


def test_a_number_that_is_off_is_noticed():
    assert agrees("2 clusters,  accuracy 95.0 %, 3 s", "2 clusters, accuracy 99.2 %, 1.5 s")
    assert not agrees("2 clusters, accuracy 94.0 %", "2 clusters, accuracy 99.2 %")
    assert not agrees("3 clusters, accuracy 99.2 %", "2 clusters, accuracy 99.2 %")
    assert not agrees("2 clusters, auroc 99.2 %", "2 clusters, accuracy 99.2 %")
    check_printed("Clusters\n2  found in\n", "There are\n2 found \nin all", "page.md:1")
    with pytest.raises(AssertionError, match="is printed"):
        check_printed("3 found", "2 found", "page.md:1")
