"""The example of a federation with a liar."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/flower/adversary.py"


def test_the_liar_ends_alone():
    spec = importlib.util.spec_from_file_location("adversary_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert [leaf.members for leaf in example.main().tree.leaves] == [(0, 1, 2), (example.LIAR,)]
