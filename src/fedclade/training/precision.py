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
    kinds: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn  # types know neither setting
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = tf32
        yield
    finally:
        for kind, allowed in zip(kinds, before, strict=True):
            kind.allow_tf32 = allowed
