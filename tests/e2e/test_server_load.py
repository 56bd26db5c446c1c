"""Many clients of a large model, as ``benchmarks/federation.py`` scripts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "federation.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read in /proc"
)
def test_a_server_that_streams_keeps_no_copy_of_all_updates(tmp_path: Path):
    """150 updates take 240 MB; a run without splits that keeps them takes just these, and a stream a few at a time."""
    options = ["--clients", "150", "--rounds", "2", "--splits", "--encodings", "float32"]
    subprocess.run(
        [sys.executable, SCRIPT, *options, "--json", tmp_path / "found.json"],
        check=True,
        timeout=200,
    )
    kept, streamed = json.loads((tmp_path / "found.json").read_text())
    assert (
        streamed["up"] == kept["up"] == streamed["update_bytes"] == 150 * 4 * streamed["parameters"]
    )
    assert streamed["peak"] < streamed["update_bytes"] / 2
    assert kept["update_bytes"] * 0.9 < kept["peak"] < kept["update_bytes"] * 1.5
