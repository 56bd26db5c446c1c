"""The example of a package that adds one of each: it is installed, listed, and all of it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedclade

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
ADDED = {
    "algorithms": "update_kmeans",
    "datasets": "blobs",
    "models": "bottleneck",
    "tasks": "smooth_labels",
    "partitions": "by_distance",
    "shifts": "label_roll",
}


def test_everything_in_the_example_is_short():
    files = [path for path in EXAMPLE.rglob("*.py") if path.name != "__init__.py"]
    assert len(files) == len(ADDED)
    for path in files:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 35, path


@pytest.mark.slow
def test_the_example_package_is_installed_listed_and_runs(tmp_path: Path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(EXAMPLE)], check=True)
    source = Path(fedclade.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{site}", "COLUMNS": "200"}

    def command(*arguments: str) -> str:
        called = [sys.executable, "-m", "fedclade", *arguments]
        done = subprocess.run(called, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = command("ls").splitlines()
    for name in ADDED.values():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert line.rstrip().endswith("(fedclade-example 0.1.0)")
    command("run", str(EXAMPLE / "all.toml"), "--out", "run", "-q")
    run = fedclade.Run.load(tmp_path / "run")
    assert (run.summary["algorithm"], run.summary["rounds"]) == ("update_kmeans", 2)
    assert len(run.tree.leaves) == 2
    assert run.summary["ari"] == 1.0
    command("report", "run")
    assert "updatekmeans" in command("cite", "update_kmeans")
