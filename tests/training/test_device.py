"""The precision of products on a GPU is what was asked for, in the block and nowhere else."""

from __future__ import annotations

import pytest
import torch

from fedclade.training.threads import float32_products


def allowed() -> list[bool]:
    return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]


@pytest.mark.parametrize("tf32", [True, False])
def test_the_precision_holds_in_the_block(tf32):
    before = allowed()
    with float32_products(tf32):
        assert allowed() == [tf32] * 2
    assert allowed() == before


def test_it_does_not_outlive_an_error():
    before = allowed()
    with pytest.raises(RuntimeError, match="stop"), float32_products(True):
        raise RuntimeError("stop")
    assert allowed() == before
