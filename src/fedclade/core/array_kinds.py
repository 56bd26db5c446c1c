"""Check for arrays and tensors that cannot be converted to plain arrays without loss.

Examples are masked arrays and sparse, quantized or nested tensors.
"""

from __future__ import annotations

import numpy as np
import torch


def array_problem(values: object) -> str:
    """Return the reason why an array or tensor cannot be read, with a fix for the user.

    The result is "" if the values can be read.

    >>> array_problem(np.ma.masked_array([1, 2], mask=[False, True]))
    "1 of 2 values are masked, which means missing; fill them in (array.filled(...)) or leave these examples out"
    """
    if isinstance(values, np.ma.MaskedArray):
        return _mask_problem(values)
    if not isinstance(values, torch.Tensor):
        return ""
    if values.is_meta:
        return "the tensor is on the 'meta' device and has no values; make it on the CPU"
    if values.layout != torch.strided:
        return f"the tensor is sparse ({values.layout}); make it dense with tensor.to_dense()"
    if values.is_quantized:
        return f"the tensor is quantized ({values.dtype}); make it float with tensor.dequantize()"
    if values.is_nested:
        return "the tensor is nested; pad its parts to one shape with tensor.to_padded_tensor(...)"
    return ""


def _mask_problem(array: np.ma.MaskedArray) -> str:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    masked = int(np.ma.getmaskarray(array).sum())
    if not masked:
        return ""
    return (
        f"{masked} of {array.size} values are masked, which means missing; fill them in "
        "(array.filled(...)) or leave these examples out"
    )
