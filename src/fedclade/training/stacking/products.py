"""Batched matrix products, the small ones by NumPy's BLAS.

On one thread that makes the stacked engine 1.3 times as fast for ``mclr``, and for ``mlp`` no slower
(``benchmarks/gains.py --only NumPy``; ``benchmarks/products.py`` compares the products alone).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TINY = 2**18
"""Up to so many multiplications for each client, NumPy's BLAS (OpenBLAS) is done sooner than torch's.

From there on it uses threads of its own, which get in the way of torch's.
"""

TYPES = (torch.float32, torch.float64)
"""What NumPy has a BLAS for."""

FEW_THREADS = 2
"""How many threads of torch's are no faster than NumPy's one."""


class Product:
    """The products of ``[k, m, i]`` and ``[k, i, n]``, plus ``[k, n]`` in every row, into ``out``; unseen by autograd.

    It is made once, and can be called for every step that has its matrices in the same memory.
    """

    def __init__(self, left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
        _, m, i = left.shape
        self._left, self._right, self._out = left, right, out
        self._plus = None if plus is None else plus.unsqueeze(1)
        tiny = m * i * right.shape[2] <= TINY and torch.get_num_threads() <= FEW_THREADS
        numpy = tiny and left.is_cpu and left.dtype in TYPES
        self._arrays = (left.numpy(), right.numpy(), out.numpy()) if numpy else None

    @np.errstate(all="ignore")  # as torch does: a client that diverges is found by its update
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
