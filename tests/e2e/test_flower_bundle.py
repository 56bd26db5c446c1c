"""``flwr build`` makes a bundle of the example app: what travels to the nodes, and nothing else."""

from __future__ import annotations

import os
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from deployment import OFFLINE
from flower_command import program

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


@pytest.mark.slow
def test_flower_builds_a_bundle_of_the_app_and_its_config_alone(tmp_path: Path):
    environment = {**os.environ, **OFFLINE, "FLWR_HOME": str(tmp_path / "home")}
    build = [program("flwr"), "build", "--app", str(EXAMPLE)]
    done = subprocess.run(
        build, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing" not in done.stdout  # a property that Flower recommends
    (bundle,) = tmp_path.glob("fedclade.fedclade-app.1-0-0.*.fab")
    with zipfile.ZipFile(bundle) as files:
        assert sorted(files.namelist()) == [".info/CONTENT", "fedclade_app.py", "pyproject.toml"]
        assert files.read("fedclade_app.py") == (EXAMPLE / "fedclade_app.py").read_bytes()
        bundled = tomllib.loads(files.read("pyproject.toml").decode())
    assert bundled == tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    assert bundled["project"]["dependencies"] == ["fedclade[flower]>=1.0,<2"]
