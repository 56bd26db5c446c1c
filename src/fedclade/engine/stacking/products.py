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


def product(left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
    """Write the products of left ``[k, m, i]`` and right ``[k, i, n]`` into out ``[k, m, n]``, unseen by autograd.

    Parameters
    ----------
    left, right, out
        As above.
    plus
        What is added to every row of a product, ``[k, n]``; nothing if left out.
    """
    _, m, i = left.shape
    if (
        m * i * right.shape[2] <= TINY
        and left.is_cpu
        and left.dtype in TYPES
        and torch.get_num_threads() <= FEW_THREADS
    ):
        with np.errstate(all="ignore"):  # as torch does: of a client that diverges, the updates tell
            np.matmul(left.numpy(), right.numpy(), out=out.numpy())
        if plus is not None:
            out.add_(plus.unsqueeze(1))
    elif plus is None:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(plus.unsqueeze(1), left, right, out=out)
