"""A client's masked update, as the server reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core import LARGEST_NORM, UpdateError
from fedclade.flower.replies import read_repeated
from fedclade.flower.secure.secrets import Masked
from fedclade.flower.wire import Content, read_vector


@dataclass(frozen=True, eq=False)
class MaskedReply:
    """A client's masked numbers, and what it says in clear: |D_i|, its loss, the norms of its update, and signatures.

    ``norms`` are of the parameters and of the buffers; ``clear`` are the signatures, one behind the other.
    """

    size: int
    loss: float | None
    norms: tuple[float, float]
    clipped: int
    masked: Masked
    clear: Tensor


def read_masked(
    content: Content, entries: int, clear: int, dtype: torch.dtype, size: int, expected: Mapping[str, Any]
) -> MaskedReply:
    """Check and read an update of so many masked ``entries`` and ``clear`` ones; an UpdateError if it is none."""
    loss = read_repeated(content, size, expected)
    norms = content.get("norm", float), content.get("norm_of_buffers", float)
    for norm in norms:
        if not 0 <= norm <= LARGEST_NORM:  # NaN is not less than anything
            raise UpdateError(f"norm {norm:.3g}, expected one of at most {LARGEST_NORM:.3g}")
    clipped = content.get("clipped", int)
    if not 0 <= clipped <= entries:
        raise UpdateError(f"{clipped} of {entries} entries clipped")
    content.has_only(("masked", "clear") if clear else ("masked",))
    data = content.vector("masked")
    if len(data) != 4 * entries:
        raise UpdateError(f"masked update of {len(data)} bytes, expected {4 * entries}")
    signatures = torch.empty(0, dtype=dtype)
    if clear:
        signatures = read_vector(content.vector("clear"), (clear,), dtype, "signatures")
        if odd := int((~torch.isfinite(signatures)).sum()):
            raise UpdateError(f"{odd} of {clear} entries of its signatures are NaN or infinite")
    masked = np.frombuffer(data, "<u4").astype(np.uint32)
    return MaskedReply(size, loss, norms, clipped, masked, signatures)
