"""Configs as TOML text, with and without the package ``tomli_w``.

A machine that runs the source tree without installing it may lack that package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fedclade.runs.store.contents import without_unset


def to_toml(config: Mapping[str, Any]) -> str:
    """Return a config as TOML, without unset values.

    ``tomli_w`` writes it. Without that package each top-level setting is written on one line, with
    inline tables: this is harder to read, but parses to the same config.
    """
    table = without_unset(config)
    try:
        import tomli_w  # not needed to simulate, only to save
    except ImportError:
        return "".join(f"{_quoted(key)} = {_inline(value)}\n" for key, value in table.items())
    return tomli_w.dumps(table)


def _inline(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, Mapping):
        entries = (f"{_quoted(key)} = {_inline(entry)}" for key, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"{value}"
    if isinstance(value, str):
        return _quoted(value)
    raise TypeError(f"a config should hold numbers, text, lists and tables, got {value!r}")


def _quoted(text: str) -> str:
    """Return text as a TOML string: JSON's escapes, and DEL, which JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
