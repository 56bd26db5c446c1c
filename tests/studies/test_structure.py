"""What the study of the structure counts."""

from __future__ import annotations

import sys
from pathlib import Path

STUDIES = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(STUDIES))

import structure  # noqa: E402

PAGE = STUDIES.parent / "docs" / "design.md"


class Example:
    limit = 3
    _hidden = 4

    @property
    def ready(self) -> bool:
        return True

    def step(self) -> None: ...

    def _inner(self) -> None: ...


def test_hooks_are_public_methods_and_properties_and_attributes_are_the_rest():
    assert structure.hooks_of(Example) == ["ready", "step"]
    assert structure.attributes_of(Example) == ["limit"]


def test_the_frames_of_a_step_lead_from_the_algorithm_to_the_training():
    frames = structure.frames_of_step()
    assert (frames[0], frames[-1]) == ("train", "step")
    assert "train_clusters" in frames


def test_the_page_has_a_row_for_each_measure():
    measured = structure.measures()
    assert measured["modules in a cycle of imports"] == 0
    rows = PAGE.read_text(encoding="utf-8").partition("## The structure in numbers")[2].splitlines()
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows if row.startswith("| ")]
    assert [name for name in names if name in measured] == list(measured)
