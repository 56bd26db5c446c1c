"""The notebooks of the docs: none keeps an output, and all of them run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NAMES = ("quick-start", "which-clusters", "own-data", "compare", "newcomers", "flower")
MOST_WORDS = 120


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_these_are_all():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_kept_without_outputs(name: str):
    book = read(name)
    nbformat.validate(book)
    first, *others = book.cells
    assert first.source.startswith("# ")
    assert "pip install 'fedclade[notebook" in first.source
    assert len(others) < 9
    assert [cell.id for cell in book.cells] == [f"{name}-{i}" for i in range(len(book.cells))]
    assert (
        sum(len(cell.source.split()) for cell in book.cells if cell.cell_type == "markdown")
        < MOST_WORDS
    )
    for cell in book.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)
            assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path):
    """What it ends with is told by what it shows; without somebody who types there would be no bar."""
    book = read(name)
    nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output for output in outputs if output.output_type != "stream"]
    assert {output.output_type for output in shown} <= {"execute_result", "display_data"}
    written = [output.text for output in outputs if output.output_type == "stream"]
    # Tables say how they are read; nothing else is logged, since nothing is warned of.
    assert all(text.startswith("how the data is read: ") for text in written), written
    assert bool(written) == (name == "own-data")
    assert any("<progress" in output.data.get("text/html", "") for output in shown)
    plain = [output.data.get("text/plain", "") for output in shown]
    expected = {
        **{"quick-start": "4  1.0", "which-clusters": "Name: accuracy", "own-data": "shop 11"},
        **{"compare": "oracle", "newcomers": "'assignment_accuracy': 1.0", "flower": "True"},
    }
    assert any(expected[name] in text for text in plain), plain
