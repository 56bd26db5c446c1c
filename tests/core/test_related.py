"""Parts of data with examples that depend on each other: copies, and groups that the user specifies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.core import DataError, Related, SplitPart, are_copies, draw_examples

PARTS = 4


def multiplicities(*counts: tuple[int, int]) -> np.ndarray:
    """Return a number for each example: for each pair (k, m), k examples occur m times."""
    times = np.concatenate([np.full(examples, each) for examples, each in counts])
    return np.repeat(np.arange(len(times)), times)


@pytest.mark.parametrize(
    ("equal", "expected"),
    [
        (multiplicities((100, 1)), False),  # no example is repeated
        (multiplicities((95, 1), (5, 20)), True),
        (multiplicities((98, 1), (2, 50)), True),
        (multiplicities((64, 1), (1, 2), (4, 3), (8, 4), (7, 5)), True),  # after a hold-out
        (multiplicities((64, 1), (8, 2), (8, 3), (4, 6)), False),  # many in between
        (multiplicities((90, 1), (4, 4), (1, 13)), False),  # one is far more frequent than others
        (multiplicities((90, 1), (4, 4), (1, 12)), True),
        (multiplicities((80, 4)), True),  # all examples are copied
        (multiplicities((30, 3), (30, 4), (20, 5)), True),
        (multiplicities((80, 12)), True),
        (multiplicities((8, 12)), False),  # too few different examples
        (multiplicities((39, 4)), False),
        (multiplicities((40, 4)), True),
        (multiplicities((37, 1), (18, 2), (6, 3), (2, 4)), False),  # like Poisson draws with mean 1
        (multiplicities((560, 1), (20, 2)), True),  # rare copies
        (multiplicities((560, 1), (20, 2), (1, 23)), True),  # at most 15 % of a part
        (multiplicities((560, 1), (20, 2), (1, 24)), False),
        (multiplicities((70, 1), (1, 30)), False),  # one frequent value
    ],
)
def test_copies_are_recognized_by_how_often_examples_occur(equal: np.ndarray, expected: bool):
    assert are_copies(equal, equal, PARTS) is expected
    shuffled = np.random.default_rng(0).permutation(equal)
    assert are_copies(shuffled, shuffled, PARTS) is expected


def test_equal_inputs_with_different_targets_are_no_copies():
    examples = multiplicities((95, 1), (5, 10), (5, 10))
    inputs = examples.copy()
    assert are_copies(examples, inputs, PARTS)
    inputs[examples == 104] = 99  # one of ten repeated inputs has two targets
    assert not are_copies(examples, inputs, PARTS)


@pytest.mark.parametrize("numbers", [8, 25, 100, 400])
@pytest.mark.parametrize("is_even", [True, False])
def test_few_values_of_a_distribution_are_not_taken_for_copies(numbers: int, is_even: bool):
    draw = np.random.default_rng(numbers)
    for _ in range(200):
        p = np.ones(numbers) if is_even else draw.gamma(1.0, size=numbers)
        drawn = draw.choice(numbers, 2 * numbers, p=p / p.sum())
        equal = np.unique(drawn, return_inverse=True)[1]
        assert not are_copies(equal, equal, PARTS)


def parts_of(groups: np.ndarray, count: int, size: int, seed: int, **options) -> list[np.ndarray]:
    each = [SplitPart(place, count, size, **options) for place in range(count)]
    related = Related(groups)
    return [part.of_client(len(groups), 7, seed, 3, related) for part in each]


@given(
    groups=st.lists(st.integers(0, 30), min_size=20, max_size=80),
    count=st.integers(2, 8),
    is_fixed=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_rows_of_a_group_are_never_in_two_parts(
    groups: list[int], count: int, is_fixed: bool, seed: int
):
    numbers = np.array(groups)
    size = len(groups) // count if is_fixed else 0
    if len(set(groups)) < count:
        with pytest.raises(
            DataError,
            match=f"form {len(set(groups))} groups, fewer than the {count} parts that the method",
        ):
            parts_of(numbers, count, size, seed)
        return
    parts = parts_of(numbers, count, size, seed)
    owners: dict[int, int] = {}
    for place, part in enumerate(parts):
        assert (np.diff(part) >= 0).all()
        assert part.min() >= 0
        assert part.max() < len(groups)
        assert len(part) == (size or len(range(place, len(groups), count)))
        occurrences = np.bincount(part)
        occurrences = occurrences[occurrences > 0]
        assert occurrences.max() - occurrences.min() <= 1
        for group in set(numbers[part].tolist()):
            assert owners.setdefault(group, place) == place
    again = parts_of(numbers, count, size, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_parts_of_groups_of_one_size_have_all_rows_of_equally_many_groups():
    groups = np.arange(105) % 21  # five rows each; one group is left over
    parts = parts_of(groups, 4, 25, seed=0)
    assert [len(set(groups[part].tolist())) for part in parts] == [5] * 4
    assert len(set(np.concatenate(parts).tolist())) == 100
    halves = parts_of(groups, 2, 0, seed=0)
    assert [len(set(groups[part].tolist())) for part in halves] == [11, 10]


def test_a_part_is_cut_or_filled_to_its_size():
    groups = np.array([0] * 50 + [1] * 3 + [2] * 3 + [3] * 50)
    parts = parts_of(groups, 4, 20, seed=0)
    different = sorted(len(set(part.tolist())) for part in parts)
    assert different == [3, 3, 20, 20]
    assert {len(part) for part in parts} == {20}


@pytest.mark.parametrize("size", [0, 24])
def test_copies_of_an_example_count_once(size: int):
    equal = np.random.default_rng(0).permutation(multiplicities((80, 1), (5, 4)))
    related = Related(equal, are_copies=True)
    parts = [SplitPart(k, 4, size).of_client(len(equal), 7, 1, 2, related) for k in range(4)]
    seen = [set(equal[part].tolist()) for part in parts]
    assert sum(map(len, seen)) == len(set.union(*seen)) == (84 if size else 85)
    for part in parts:
        used = np.unique(part)
        assert len(set(equal[used].tolist())) == len(used)  # one row for each example
        occurrences = np.bincount(part)[used]
        assert occurrences.max() <= occurrences.min() + 1
        assert len(part) == (size or 25)


def test_groups_are_those_of_the_examples_that_parts_are_drawn_from():
    groups = np.arange(60) // 3
    some = draw_examples(60, 48, key=7)
    data = SplitPart(0, 2, 20, drawn_from=48)
    part = data.of_client(60, key=7, seed=0, number=1, related=Related(groups))
    assert set(part.tolist()) <= set(some.tolist())
    other = replace(data, place=1).of_client(60, key=7, seed=0, number=1, related=Related(groups))
    assert not set(groups[part].tolist()) & set(groups[other].tolist())
