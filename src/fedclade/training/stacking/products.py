"""Batched matrix products."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TINY = 2**18
"""Up to so many multiplications for each client, NumPy's BLAS (OpenBLAS) is done sooner than torch's.

From there on it uses threads of its own, which get in the way of torch's. ``benchmarks/products.py`` compares them.
"""

TYPES = (torch.float32, torch.float64)
"""What NumPy has a BLAS for."""

FEW_THREADS = 2
"""How many threads of torch's are no faster than NumPy's one."""


class Product:
    """The products of matrices ``[k, m, i]`` and ``[k, i, n]``, unseen by autograd.

    It is made once, and can be called for every step that has its matrices in the same memory.

    Parameters
    ----------
    left, right
        The matrices.
    out
        Where the products go, ``[k, m, n]``.
    plus
        What is added to every row of a product, ``[k, n]``; nothing if left out.
    """

    def __init__(self, left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
        _, m, i = left.shape
        self._left, self._right, self._out = left, right, out
        self._plus = None if plus is None else plus.unsqueeze(1)
        tiny = (
            m * i * right.shape[2] <= TINY
            and left.is_cpu
            and left.dtype in TYPES
            and torch.get_num_threads() <= FEW_THREADS
        )
        self._arrays = (left.numpy(), right.numpy(), out.numpy()) if tiny else None

    @np.errstate(all="ignore")  # as torch does: of a client that diverges, the updates tell
    def __call__(self) -> None:
        """Write the products of what the matrices hold now."""
        if self._arrays is not None:
            left, right, out = self._arrays
            np.matmul(left, right, out=out)
            if self._plus is not None:
                self._out.add_(self._plus)
        elif self._plus is None:
            torch.bmm(self._left, self._right, out=self._out)
        else:
            torch.baddbmm(self._plus, self._left, self._right, out=self._out)
