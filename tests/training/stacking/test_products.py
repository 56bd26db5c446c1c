"""A product is the same, whoever computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclade.training.stacking import functions
from fedclade.training.stacking.functions import TINY, Product


def matrices(
    rows: int, inner: int, columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return three pairs; the right ones are stored by columns, as weights are."""
    draw = torch.Generator().manual_seed(1)
    left = torch.randn(3, rows, inner, generator=draw, dtype=dtype)
    return left, torch.randn(3, columns, inner, generator=draw, dtype=dtype).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (10, 784, 10), (10, 20, 300), (8, 256, 128), (8, 256, 129)]
)
def test_products_are_torch_s(shape: tuple[int, int, int], dtype: torch.dtype):
    left, right = matrices(*shape, dtype)
    out = torch.full((3, shape[0], shape[2]), torch.nan, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    Product(left, right, out)()
    torch.testing.assert_close(out, left @ right, rtol=0, atol=tolerance)
    row = torch.arange(3.0 * shape[2], dtype=dtype).view(3, -1)
    Product(left, right, out, row)()
    torch.testing.assert_close(out, left @ right + row[:, None], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("columns", "threads", "numpy"), [(128, 2, True), (129, 2, False), (128, 3, False)]
)
def test_tiny_products_are_numpy_s_unless_torch_has_many_threads(
    monkeypatch: pytest.MonkeyPatch, columns: int, threads: int, numpy: bool
):
    left, right = matrices(8, 256, columns)
    assert (8 * 256 * columns <= TINY) == (columns == 128)
    called: list[bool] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(functions.np, "matmul", lambda *_, out: called.append(True))
    Product(left, right, torch.empty(3, 8, columns))()
    assert bool(called) == numpy


def test_half_precision_is_left_to_torch():
    left, right = (matrix.bfloat16() for matrix in matrices(2, 3, 4))
    out = torch.empty(3, 2, 4, dtype=torch.bfloat16)
    Product(left, right, out)()
    torch.testing.assert_close(out, left @ right)


def test_what_overflows_does_so_without_a_word_and_alone():
    left, right = matrices(2, 3, 4)
    expected = left @ right
    left[1] = torch.inf
    right[1, 0] = -torch.inf
    out = torch.empty(3, 2, 4)
    with np.errstate(all="raise"):
        Product(left, right, out)()
    assert not out[1].isfinite().any()
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]])
