"""The example of a clustering method of one's own."""

from __future__ import annotations

import runpy
from pathlib import Path

import fedclade

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_method.py"


def test_a_method_of_ones_own_is_one_short_file_that_finds_the_clusters():
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    assert "from fedclade." not in source, "what authors need is exported from fedclade itself"
    method = runpy.run_path(str(EXAMPLE), run_name="example")["UpdateKMeans"]
    federation = fedclade.load_federation(
        "digits", clients=20, shift="label_permutation", clusters=4
    )
    run = fedclade.simulate(method(r=2), "mlp", federation, rounds=3, engine="loop")
    assert run.metric_rows[-1]["ari"] == 1.0
    assert [event["sizes"] for event in run.events if event["kind"] == "k_means"] == [[5, 5, 5, 5]]
