"""Conversion of a config to TOML text, with or without the package ``tomli_w``.

The package may be missing on a machine that runs the source tree without installing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fedclade.runs.store.contents import without_unset


def to_toml(config: Mapping[str, Any]) -> str:
    """Return a config as TOML text, without unset values.

    The package ``tomli_w`` formats the text. Without this package, each top-level setting is
    written on one line, with inline tables: this is harder to read, but parses to the same config.
    """
    table = without_unset(config)
    try:
        import tomli_w  # imported here, since simulations that are not saved do not need it
    except ImportError:
        return "".join(f"{_quoted(key)} = {_inline(value)}\n" for key, value in table.items())
    return tomli_w.dumps(table)


def _inline(value: Any) -> str:
    """Return a value as TOML text on one line."""
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
    raise TypeError(f"a config can contain only numbers, text, lists and tables, got {value!r}")


def _quoted(text: str) -> str:
    """Return text as a quoted TOML string.

    TOML accepts the escapes of JSON, but also requires that the control character DEL is escaped.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
