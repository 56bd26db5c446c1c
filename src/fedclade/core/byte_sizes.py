"""Sizes in bytes that users write as text, such as ``"2GB"``."""

from __future__ import annotations

import re

from fedclade.core.errors import ConfigError, shown

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def memory_bytes(memory: int | str, name: str = "memory") -> int:
    """Return a memory size such as ``"2GB"``, ``"500 MiB"`` or a number of bytes, in bytes.

    Parameters
    ----------
    memory
        The size.
    name
        Name of the setting, for the error.

    Raises
    ------
    ConfigError
        If the value is not a size, or not above 0.
    """
    size: float = 0.0 if isinstance(memory, str | bool) else memory
    if isinstance(memory, str) and (
        found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", memory.strip())
    ):
        size = float(found[1]) * UNITS.get((found[2] or "B").upper(), 0)
    if not 1 <= size < 2**63:  # also excludes infinity, the value of a number with many digits
        raise ConfigError(
            f"{name} should be a size such as 2GB, 500MiB or a number of bytes, got {shown(memory)}"
        )
    return int(size)
