"""The precision of products on a GPU is what was asked for, in the block and nowhere else."""

from __future__ import annotations

import pytest
import torch

from fedclade.engine.precision import float32_products


def precisions() -> list[str]:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    return [backend.fp32_precision for backend in backends]


@pytest.mark.parametrize(("tf32", "expected"), [(True, "tf32"), (False, "ieee")])
def test_the_precision_holds_in_the_block(tf32, expected):
    before = precisions()
    with float32_products(tf32):
        assert precisions() == [expected] * 3
    assert precisions() == before


def test_it_does_not_outlive_an_error():
    before = precisions()
    with pytest.raises(RuntimeError, match="stop"), float32_products(True):
        raise RuntimeError("stop")
    assert precisions() == before
