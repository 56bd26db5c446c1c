"""Every block of the documentation is right as far as reading it goes; what runs, runs in ``test_pages.py``."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.docs import setups
from tests.docs.blocks import PAGES, Block, blocks_in, blocks_of
from tests.docs.configs import check_toml
from tests.docs.shell import commands
from tests.docs.story import agrees, check_printed, reading_in
from tests.docs.words import check_command

BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def check_shell(text: str) -> None:
    for command in commands(text):
        check_command(command)


def check_braces(text: str) -> None:
    assert re.sub(r"[^{}]", "", text).count("{") == text.count("}")


LANGUAGES: Mapping[str, Callable[[str], object]] = {
    "bash": check_shell,
    "console": lambda text: check_shell("\n".join(re.findall(r"^\$ (.*)", text, flags=re.MULTILINE))),
    "json": json.loads,
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
    with reading_in(folder) as patch:
        if (name := block.marks.get("setup")) and not {"run", "slow"} & set(block.marks):
            getattr(setups, name)({}, patch)
        checked(block.text)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_right(block: Block, tmp_path: Path):
    check(block, tmp_path)


WRONG = {
    "no language": ("", "fedclade ls"),
    "unknown language": ("perl", "print 1"),
    "unknown program": ("sh", "fedklade ls"),
    "unknown command": ("sh", "fedclade rum cfl-digits-label-swap"),
    "unknown option": ("sh", "fedclade ls --speed 3"),
    "missing argument": ("sh", "fedclade run"),
    "behind others": ("sh", "cd here && for k in 1 2; do\n    FOO=1 fedclade run\ndone"),
    "unknown config": ("sh", "fedclade run cfl-digit-label-swap"),
    "unknown key": ("sh", "fedclade run my.toml --set local.speed=3"),
    "unknown experiment": ("sh", "fedclade reproduce fig-1000"),
    "unknown target": ("sh", "make tea"),
    "unknown script": ("sh", "python benchmarks/tea.py"),
    "unknown option of a script": ("sh", "OMP_NUM_THREADS=1 python benchmarks/gains.py --tea"),
    "unknown extra": ("sh", 'pip install "fedclade[tea]"'),
    "unknown option of flower": ("sh", "flwr list . --tea"),
    "no shell": ("sh", "for k in 1 2"),
    "config": ("toml", "[local]\nspeed = 3"),
    "plug-in": ("toml", '[project.entry-points."fedclade.teas"]\nx = "y:z"'),
    "python": ("python", "1 +"),
    "json": ("json", "{,}"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_block_is_noticed(wrong: str, tmp_path: Path):
    language, text = WRONG[wrong]
    with pytest.raises(Exception, match=r"."):  # of the command, the config, the parser
        check(Block("page.md", 1, language, text), tmp_path)


def test_a_page_has_blocks_with_marks():
    page = "```sh\nls\n```\n\n- x\n\n  <!-- test: slow, file = a/b.toml -->\n  ````toml\n  a = 1\n  ```\n  ````\n"
    first, second = blocks_in("page.md", page)
    assert (str(first), first.language, first.text, first.marks) == ("page.md:1", "sh", "ls\n", {})
    assert (second.text, second.marks) == ("a = 1\n```\n", {"slow": "", "file": "a/b.toml"})
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
