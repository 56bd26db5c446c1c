"""How exactly a GPU multiplies float32 matrices."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def float32_products(tf32: bool) -> Generator[None]:
    """Let a GPU round the factors of float32 products to 10 bits of mantissa in the block (TF32), or not.

    Torch by itself rounds them in convolutions and recurrent layers, but not in products of matrices. Nothing changes
    on a CPU.
    """
    cudnn: Any = torch.backends.cudnn  # whose types do not know its parts
    kinds = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision
