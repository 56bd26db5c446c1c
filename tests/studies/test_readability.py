"""The readability study: what counts as a finding, and which samples are drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(STUDIES))

import readability  # noqa: E402

SOURCE = '''"""What a module holds."""

# A reason.
def told(a, b):
    """Return how it is."""
    first, second = a + 1, b + 1
    a, b = b, a
    rows = [[x for x in row] for row in a]
    return call(1, 2, 3, 4, 5) if a else call(*rows, 1, 2, 3, 4)


def compute_mean(values):
    """Compute a mean."""
    return sum(values)
'''

COMPLEX = "def run(x):\n" + "".join(f"    if x == {k}:\n        pass\n" for k in range(12))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(SOURCE + f"LONG = '{'x' * 100}'\n", encoding="utf-8")
    (tmp_path / "complex.py").write_text(COMPLEX, encoding="utf-8")
    return tmp_path


def test_each_kind_of_finding_is_counted_once_where_it_stands(tree: Path):
    findings = {
        (each.kind, each.path.name, each.line) for each in readability.measure([tree]).findings
    }
    assert findings == {
        ("relative clause", "module.py", 1),
        ("relative clause", "module.py", 4),
        ("packed assignment", "module.py", 6),
        ("nested comprehension", "module.py", 8),
        ("conditional expression", "module.py", 9),
        ("long call", "module.py", 9),
        ("long line", "module.py", 15),
        ("complex", "complex.py", 1),
    }


def test_figures_are_shares_of_lines_functions_and_docstrings(tree: Path):
    figures = readability.measure([tree]).figures()
    assert figures["modules"] == 2
    assert figures["lines"] == 40
    assert figures["lines of code"] == 33
    assert figures["names of one word, %"] == pytest.approx(66.7)
    assert figures["names that begin with a verb, %"] == pytest.approx(66.7)
    assert figures["docstrings that begin with a relative clause, %"] == pytest.approx(66.7)
    assert figures["functions of complexity 13 or more, %"] == pytest.approx(33.3)


def test_figures_are_printed_as_json(tree: Path, capsys: pytest.CaptureFixture[str]):
    readability.main(["figures", str(tree), "--json"])
    assert json.loads(capsys.readouterr().out)["modules"] == 2


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        readability.main(["figures", str(tmp_path / "missing")])
    assert f"no such folder: {tmp_path / 'missing'}" in capsys.readouterr().err


def test_the_same_seed_draws_the_same_sample_and_another_seed_another():
    samples = readability.errors_below(readability.REPOSITORY / "src/fedclade/core")
    assert all(sample.text.startswith("raise ") for sample in samples)
    assert readability.draw(samples, size=10, seed=1) == readability.draw(samples, size=10, seed=1)
    assert readability.draw(samples, size=10, seed=1) != readability.draw(samples, size=10, seed=2)


def test_docstrings_stand_under_the_line_that_they_document():
    samples = readability.docstrings_below(readability.REPOSITORY / "src/fedclade/core")
    places = {sample.place: sample.text for sample in samples}
    place, text = next(
        (place, text) for place, text in places.items() if text.startswith("class ConfigError")
    )
    assert place.startswith("src/fedclade/core/errors.py:")
    assert "\n" in text


def test_pages_of_results_are_not_drawn():
    pages = {sample.place for sample in readability.pages_below(readability.REPOSITORY / "docs")}
    assert "docs/quick-start.md:1" in pages
    assert not [page for page in pages if page.startswith("docs/reproduce/")]
