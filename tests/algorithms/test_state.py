from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from fedclade.algorithms import State
from fedclade.core import CheckpointError, ParameterTree

TREE = ParameterTree.root_only([0, 1], torch.zeros(2))


@dataclass(frozen=True, eq=False)
class Kept(State):
    models: Tensor | None = None
    peaks: Tensor | None = None
    rounds: int = 0
    ids: tuple[int, ...] = ()
    group: tuple[int, ...] | None = None
    share: float = 0.0
    done: bool = False


@pytest.mark.parametrize(
    "kept",
    [
        Kept(TREE),
        Kept(
            TREE,
            torch.arange(6.0).view(2, 3),
            torch.zeros(1, dtype=torch.float64),
            7,
            (3, 1),
            (2,),
            0.1,
            done=True,
        ),
    ],
)
def test_a_state_comes_back_from_its_tensors_with_its_types(kept: Kept):
    again = Kept.from_tensors(TREE, kept.tensors())
    for each in fields(Kept):
        ours, theirs = getattr(kept, each.name), getattr(again, each.name)
        assert type(theirs) is type(ours)
        assert torch.equal(theirs, ours) if isinstance(ours, Tensor) else theirs == ours


def test_what_is_none_or_false_is_not_kept():
    assert Kept(TREE).tensors().keys() == {"rounds", "ids", "share"}
    assert State(TREE).tensors() == {}


def test_tensors_keep_their_dtype_and_their_place():
    kept = Kept(TREE, peaks=torch.zeros(3, dtype=torch.float64))
    assert kept.tensors()["peaks"] is kept.peaks


def test_the_state_of_another_class_is_one_clear_error():
    with pytest.raises(
        CheckpointError,
        match="not a Kept: these fields are in only one of the two: checks; continue",
    ):
        Kept.from_tensors(TREE, {"checks": torch.ones(1)})
