"""The worked examples of CONTRIBUTING.md: each is applied to a copy of the repository, and its commands run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks_in

COPIED = ("benchmarks", "configs", "docs", "examples", "packages", "results", "src", "tests")
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STARTS = re.split(
    r"^### Worked example: a (.*)\n", TEXT.partition("\n## Principles")[0], flags=re.MULTILINE
)
SECTIONS = dict(zip(STARTS[1::2], STARTS[2::2], strict=True))
EXAMPLES = {name: [*blocks_in("CONTRIBUTING.md", section)] for name, section in SECTIONS.items()}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository's files."""
    left_out = shutil.ignore_patterns("__pycache__", ".venv", "*.egg-info")
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, tmp_path)
    return tmp_path


def apply(block: Block, folder: Path) -> None:
    """Do what a block states: write a file, change files, or run commands."""
    if block.file is not None:
        (folder / block.file).write_text(block.text, encoding="utf-8")
        return
    paths = [str(folder / "src"), str(folder / "packages/fedclade-papers/src")]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if block.language == "diff":
        command = ["git", "apply", "--recount", "-"]
        given = block.text
    else:
        assert block.language == "sh"
        command = ["bash", "-euxo", "pipefail"]
        given = block.text.replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **settings, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_examples_are_a_metric_a_data_set_and_a_method():
    assert [*EXAMPLES] == ["metric", "data set", "method"]
    for blocks in EXAMPLES.values():
        assert all("example" in block.marks for block in blocks)
        assert "pytest" in blocks[-1].text


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_table_of_an_example_names_its_files(name: str):
    table = re.findall(r"^\| (`.*?) \|", SECTIONS[name], flags=re.MULTILINE)
    named = {path for row in table for path in re.findall(r"`([^`]+)`", row)}
    files = {block.file for block in EXAMPLES[name] if block.file is not None}
    for block in EXAMPLES[name]:
        if block.language == "diff":
            files.update(re.findall(r"^\+\+\+ b/(.*)", block.text, flags=re.MULTILINE))
    assert files <= named
    assert "CHANGELOG.md" in files


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_name_of_a_new_file_stands_above_its_block(name: str):
    # GitHub does not show the title of a block
    shown = re.findall(
        r'^Create `(.*)`:\n\n<!-- test: example -->\n`{3,}\w+ title="(.*)"$',
        SECTIONS[name],
        flags=re.MULTILINE,
    )
    assert [title for _, title in shown] == [b.file for b in EXAMPLES[name] if b.file is not None]
    assert all(path == title for path, title in shown)


@pytest.mark.scheduled
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_files_and_commands_of_an_example_work(name: str, copy: Path):
    for block in EXAMPLES[name]:
        apply(block, copy)
