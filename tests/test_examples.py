"""The examples of what users can bring run by one command each, and end in a report of the task's own metric."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DOCS = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
PAGES = {
    "households": ("households-rcfl.html", "MAE"),
    "hospitals": ("hospitals-example/run/report.html", "AUROC"),
    "photographs": ("photographs.html", "accuracy"),
    "reviews": ("reviews.html", "accuracy"),
    "adapters": ("adapters.html", "perplexity"),
}
"""Of each example, the page it writes, and the metric that the page names."""

NUMBER = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE = 0.05
"""How far a number with a fraction may be off that of the docs: sums are rounded in another order elsewhere. Whole
numbers, which count clusters and their clients, must be those."""


def told(name: str) -> list[str]:
    """Return the lines that the docs say an example prints."""
    _, _, after = DOCS.partition(f"```\npython examples/{name}.py\n```\n```\n")
    return after.partition("\n```")[0].splitlines()


def agrees(line: str, expected: str) -> bool:
    """Whether a line says what another does: the same words, and the same numbers within the tolerance."""
    words, others = (NUMBER.sub("#", " ".join(each.split())) for each in (line, expected))
    numbers = zip(NUMBER.findall(line), NUMBER.findall(expected), strict=False)
    near = [abs(float(a) - float(b)) <= (TOLERANCE * float(b) if "." in b else 0) for a, b in numbers]
    return words == others and all(near)


def test_a_number_that_is_off_is_noticed():
    assert agrees("2 clusters,  accuracy 95.0 %", "2 clusters, accuracy 99.2 %")
    assert not agrees("2 clusters, accuracy 94.0 %", "2 clusters, accuracy 99.2 %")
    assert not agrees("3 clusters, accuracy 99.2 %", "2 clusters, accuracy 99.2 %")
    assert not agrees("2 clusters, auroc 99.2 %", "2 clusters, accuracy 99.2 %")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_an_example_prints_what_the_docs_say_and_its_report_names_the_metric(name: str, tmp_path: Path):
    page, metric = PAGES[name]
    path = os.pathsep.join(str(p) for p in (ROOT / "src", os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    missing = [expected for expected in told(name) if not any(agrees(line, expected) for line in lines)]
    assert not missing, done.stdout
    html = (tmp_path / page).read_text(encoding="utf-8")
    body = re.sub(r"<script[\s\S]*?</script>", "", html)
    assert metric.lower() in body.lower()
    if metric != "accuracy":
        assert "accuracy" not in body.lower()


@pytest.mark.parametrize("name", PAGES)
def test_an_example_is_short_and_in_the_docs(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60
    assert told(name), "the docs show the command, and below what it prints"
