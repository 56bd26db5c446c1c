"""The example of a package that adds one of each: it is installed, listed, and all of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedclade
from fedclade import ConfigError
from fedclade.algorithms import Method, build_algorithm, describe, method_named
from fedclade.cli import app
from fedclade.config import check_config
from fedclade.core import installed
from tests.docs.setups import plugin

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
ADDED = {
    "algorithms": "update_kmeans",
    "datasets": "blobs",
    "models": "bottleneck",
    "tasks": "smooth_labels",
    "partitions": "by_distance",
    "shifts": "label_roll",
}

CALLS = """
import json, sys
from fedclade.cli import app
for arguments in json.loads(sys.argv[1]):
    app(arguments, standalone_mode=False)
"""


@pytest.fixture
def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the example as if it were installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    plugin({}, monkeypatch)
    yield
    installed.cache_clear()
    for module in [name for name in sys.modules if name.partition(".")[0] == "fedclade_example"]:
        del sys.modules[module]


def test_everything_in_the_example_is_short():
    files = [path for path in (EXAMPLE / "src").rglob("*.py") if path.name != "__init__.py"]
    assert len(files) == len(ADDED)
    for path in files:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path


@pytest.mark.slow
def test_the_example_package_is_installed_listed_and_runs(tmp_path: Path):
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", str(site), str(EXAMPLE)], check=True)
    source = Path(fedclade.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{site}", "COLUMNS": "200"}

    config, run = str(EXAMPLE / "all.toml"), str(tmp_path / "run")
    calls = [
        ["ls"],
        ["run", config, "--out", run, "-q"],
        ["report", run],
        ["cite", "update_kmeans"],
    ]
    called = [sys.executable, "-c", CALLS, json.dumps(calls)]
    done = subprocess.run(called, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    listed = [
        line.split()[0] for line in lines if line.rstrip().endswith("(fedclade-example 0.1.0)")
    ]
    assert sorted(listed) == sorted(ADDED.values())
    found = fedclade.Run.load(tmp_path / "run")
    assert (found.summary["algorithm"], found.summary["rounds"]) == ("update_kmeans", 2)
    assert found.summary["clusters"]["ari"] == 1.0
    assert [each["name"] for each in found.summary["metrics"]] == ["f1", "accuracy"]
    assert (tmp_path / "run/report.html").is_file()
    assert "@misc{updatekmeans" in lines[-1]


@pytest.mark.usefixtures("_plugin")
def test_a_method_of_a_package_is_everywhere_where_fedclades_own_are(
    capsys: pytest.CaptureFixture[str],
):
    """By its record alone: in lists, errors, citations and configs."""
    app(["ls", "algorithms"], standalone_mode=False)
    summary = "Federated averaging, and in round r k-means on the directions of all updates (Author and Coauthor 2026)"
    listed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"update_kmeans {summary} (fedclade-example 0.1.0)" in listed
    assert (
        fedclade.report.cite_name("update_kmeans")
        == "@misc{updatekmeans, title = {k-means on updates}}"
    )
    with pytest.raises(
        ConfigError, match=r"did you mean 'update_kmeans'\? \(known: .*, update_kmeans\)"
    ):
        method_named("update_kmean")
    config = check_config({"algorithm": {"name": "update_kmeans", "r": 2}, "data": {"clients": 3}})
    assert config.algorithm == {"name": "update_kmeans", "r": 2, "n_clusters": 2}
    built = build_algorithm("update_kmeans", {"r": 2})
    assert describe(built) == {"name": "update_kmeans", "r": 2, "n_clusters": 2}
    assert Method.of_class("update_kmeans", type(built)).citations == (), (
        "the citation is the record's"
    )
