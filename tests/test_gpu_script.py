"""The script of measurements on a GPU, tried on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.scheduled
def test_the_script_writes_one_report_with_all_tables(tmp_path: Path):
    environment = {**os.environ, "SMOKE": "1", "PYTHON": sys.executable}
    script = ROOT / "benchmarks" / "gpu.sh"
    done = subprocess.run(
        ["sh", str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert report.startswith("CPU (a trial of the script), ")
    for title in (
        "Agreement with the loop on the CPU",
        "samples/s, 3 clients × batch 10",
        "bfloat16",
        "Seconds of a round of federated averaging, median",
        "A whole run of CFL: digits, 20 clients, four label swaps",
    ):
        assert title in report
