"""Sums over training examples: parts add up to the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade.data import Statistics


def of(x: torch.Tensor) -> Statistics:
    numbers = ~((x == 0) | (x == 1)).all(0)
    return Statistics(
        len(x), x.mean(0), (x - x.mean(0)).square().sum(0), numbers, torch.tensor([len(x), 0])
    )


@given(st.integers(1, 20), st.integers(1, 20), st.floats(-1e9, 1e9), st.integers(0, 2**31))
def test_parts_add_up_to_the_whole_however_far_from_zero(
    first: int, second: int, far: float, seed: int
):
    x = (
        torch.randn(
            first + second, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        + far
    )
    whole, parts = of(x), of(x[:first]).plus(of(x[first:]))
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(parts.std, whole.std, rtol=1e-5, atol=1e-6)
    assert (parts.count, parts.labels.tolist()) == (first + second, [first + second, 0])


def test_columns_of_0_and_1_stay_and_constant_ones_are_only_moved():
    x = torch.tensor([[0.0, 7, 0], [1, 7, 1], [1, 7, 2]], dtype=torch.float64)
    found = of(x[:1]).plus(of(x[1:]))
    assert found.mean.tolist() == [0, 7, 1]
    assert found.std.tolist() == [1, 1, (2 / 3) ** 0.5]
