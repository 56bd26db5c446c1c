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
PRINTED = {
    "households": (r"rcfl +3 clusters, mae 0\.1\d\d kW", "households-rcfl.html", "MAE"),
    "hospitals": (
        r"AUROC +mean 8\d\.\d %[\s\S]*clusters +2 found; sizes 6, 6",
        "hospitals-example/run/report.html",
        "AUROC",
    ),
    "photographs": (r"3 clusters, accuracy 8\d\.\d %", "photographs.html", "accuracy"),
    "reviews": (r"2 clusters, accuracy (100\.0|9\d\.\d) %", "reviews.html", "accuracy"),
    "adapters": (r"adapters +2 clusters, perplexity 1\.\d\d, 1\.\d MB sent", "adapters.html", "perplexity"),
}
"""Of each example, what it prints, the page it writes, and the metric that the page names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_by_one_command_and_its_report_names_the_metric(name: str, tmp_path: Path):
    printed, page, metric = PRINTED[name]
    path = os.pathsep.join(str(p) for p in (ROOT / "src", os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout), done.stdout
    html = (tmp_path / page).read_text(encoding="utf-8")
    body = re.sub(r"<script[\s\S]*?</script>", "", html)
    assert metric.lower() in body.lower()
    if metric != "accuracy":
        assert "accuracy" not in body.lower()


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_is_short_and_in_the_docs(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 60
    assert f"python examples/{name}.py" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
