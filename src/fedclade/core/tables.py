"""Tables of tables, such as configs, as one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table of tables as one, by dotted names; what is None is left out.

    >>> flat({"rounds": 5, "model": {"name": "mlp", "adapter": {"rank": 8}, "seed": None}})
    {'rounds': 5, 'model.name': 'mlp', 'model.adapter.rank': 8}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found
