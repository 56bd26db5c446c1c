"""Examples of several tensors are rows of numbers, from which the same tensors come back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedclade.core import DataError, Structure
from fedclade.core.structure import LARGEST_EXACT

KINDS = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


@st.composite
def tensors(draw: Any) -> dict[str, Tensor]:
    n = draw(st.integers(0, 4))
    fields = draw(
        st.dictionaries(
            st.text(min_size=1, max_size=5),
            st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 3), max_size=3)),
            min_size=1,
            max_size=4,
        )
    )
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        name: (100 * torch.randn(n, *shape, generator=noise)).to(KINDS[kind])
        for name, (kind, shape) in fields.items()
    }


@given(tensors(), st.booleans())
def test_tensors_come_back_from_rows(given: dict[str, Tensor], as_tuple: bool):
    whole = tuple(given.values()) if as_tuple else given
    structure = Structure.of(whole, "inputs")
    rows = structure.pack(whole)
    assert rows.shape == (len(next(iter(given.values()))), structure.width)
    assert rows.dtype == structure.dtype
    back = structure.unpack(rows)
    assert isinstance(back, tuple) == as_tuple
    found = dict(zip(given, back, strict=True)) if isinstance(back, tuple) else back
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert Structure.read(asdict(structure)) == structure


def test_pixels_are_divided_by_255():
    given = {"picture": torch.tensor([[0, 51, 255]], dtype=torch.uint8)}
    structure = Structure.of(given, "inputs")
    assert torch.allclose(structure.pack(given), torch.tensor([[0.0, 0.2, 1.0]]))


def test_floats_get_the_type_of_the_model_and_tokens_do_not():
    structure = Structure.of({"ids": torch.zeros(1, 1).long(), "x": torch.zeros(1, 1)}, "inputs")
    back = structure.unpack(torch.tensor([[7.0, 0.5]]), torch.bfloat16)
    assert isinstance(back, dict)
    assert (back["ids"].dtype, back["x"].dtype) == (torch.int64, torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "inputs should have from 1 to 256 tensors for each example, got 0"),
        ({3: torch.zeros(2)}, "the names of inputs should be texts, got 3"),
        ({"a": torch.tensor(1.0)}, "'a' of inputs should have an entry for each example, got one"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3)},
            "inputs should have the same number of examples in all tensors, got {'a': 2, 'b': 3}",
        ),
    ],
)
def test_what_has_no_structure(given: Any, message: str):
    with pytest.raises(DataError) as caught:
        Structure.of(given, "inputs")
    assert message in str(caught.value)


def test_whole_numbers_that_float32_cannot_represent():
    large = {"ids": torch.tensor([LARGEST_EXACT + 1]), "x": torch.zeros(1)}
    structure = Structure.of(large, "inputs")
    with pytest.raises(DataError) as caught:
        structure.pack(large)
    assert "'ids'" in str(caught.value)
    assert "16,777,216, got 16,777,217" in str(caught.value)
    alone = {"ids": large["ids"]}  # without floats, int64 has them all
    assert int(Structure.of(alone, "inputs").pack(alone)) == LARGEST_EXACT + 1


@pytest.mark.parametrize(
    "stated",
    [
        {"fields": [], "is_named": True},
        {"fields": [{"name": "a", "kind": "text", "shape": []}], "is_named": True},
        {"fields": [{"name": "a", "kind": "int", "shape": [-1]}], "is_named": True},
        {"fields": [{"name": "a", "kind": "int", "shape": [2**30]}], "is_named": True},
        {"fields": [{"name": "a", "kind": "int", "shape": [1.5]}], "is_named": True},
        {"fields": [{"name": 5, "kind": "int", "shape": []}], "is_named": True},
        {"fields": 2 * [{"name": "a", "kind": "int", "shape": []}], "is_named": True},
        {"fields": [{"name": "a", "kind": "int", "shape": []}], "is_named": 1},
        {"fields": [{"name": "a"}], "is_named": True},
    ],
)
def test_malformed_structures_are_refused(stated: Any):
    with pytest.raises((TypeError, ValueError, KeyError)):
        Structure.read(stated)
