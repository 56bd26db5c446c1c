"""A client's masked update, as the server reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclade.core import UpdateError
from fedclade.flower.secure.numbers import BYTES_PER_ENTRY, Masked, unpack
from fedclade.flower.wire import Content, read_vector, shown


@dataclass(frozen=True, eq=False)
class MaskedReply:
    """A client's masked numbers, and in clear the sketches that it is compared by, concatenated.

    Nothing else in the reply depends on its data.
    """

    masked: Masked
    clear: Tensor


def read_masked(
    content: Content, length: int, clear: int, dtype: torch.dtype, expected: Mapping[str, Any]
) -> MaskedReply:
    """Check and read a vector of ``length`` masked numbers and ``clear`` others; an UpdateError if it is none.

    ``expected`` is what the reply must repeat of the query.
    """
    for name, sent in expected.items():
        if (got := content.get(name, type(sent))) != sent:
            raise UpdateError(f"answer of {name} {shown(got)}, expected {sent!r}")
    content.has_only(("masked", "clear") if clear else ("masked",))
    data = content.vector("masked")
    if len(data) != BYTES_PER_ENTRY * length:
        raise UpdateError(f"masked update of {len(data)} bytes, expected {BYTES_PER_ENTRY * length}")
    sketches = torch.empty(0, dtype=dtype)
    if clear:
        sketches = read_vector(content.vector("clear"), (clear,), dtype, "signatures")
        if odd := int((~torch.isfinite(sketches)).sum()):
            raise UpdateError(f"{odd} of {clear} entries of its signatures are NaN or infinite")
    return MaskedReply(unpack(data), sketches)
