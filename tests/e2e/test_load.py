"""Many clients of a large model, as ``benchmarks/federation.py`` scripts them."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read in /proc")
def test_a_server_that_streams_keeps_no_copy_of_all_updates(monkeypatch: pytest.MonkeyPatch):
    """150 updates take 240 MB; a run without splits that keeps them takes just these, and a stream a few at a time."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from federation import in_a_process  # pyright: ignore[reportMissingImports]

    streamed, kept = (in_a_process(stream, "float32", 150, 2, ()) for stream in (True, False))
    assert streamed["up"] == kept["up"] == streamed["update_bytes"] == 150 * 4 * streamed["parameters"]
    assert streamed["peak"] < streamed["update_bytes"] / 2
    assert kept["update_bytes"] * 0.9 < kept["peak"] < kept["update_bytes"] * 1.5
