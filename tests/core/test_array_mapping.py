"""Mappings over arrays are the mappings that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedclade.core import ArrayMapping, Positions


@given(
    st.lists(st.integers(-5, 40), unique=True, max_size=12)
    | st.integers(0, 6).map(lambda n: list(range(n)))
)
def test_places_and_values_are_those_of_a_dict(ids: list[int]):
    positions = Positions(np.array(ids, dtype=np.int64))
    squares = ArrayMapping(positions, np.array([i * i for i in ids], dtype=np.int64))
    expected = {i: i * i for i in ids}
    assert dict(positions) == {i: k for k, i in enumerate(ids)}
    assert (dict(squares), list(squares.values()), list(positions.sequence)) == (
        expected,
        [*expected.values()],
        ids,
    )
    assert squares.of(ids[::-1]).tolist() == [*expected.values()][::-1]
    for other in (set(range(-7, 44)) - set(ids)) | {2**62}:
        assert other not in squares
        with pytest.raises(KeyError, match=str(other)):
            positions.of([*ids, other])
    assert "3" not in squares


def test_ids_that_repeat_are_named():
    assert Positions(np.array([3, 1, 3, 1, 0])).repeated == [1, 3]
    assert Positions(np.array([0, 1, 2])).repeated == []
