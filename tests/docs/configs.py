"""What a TOML block may be: a config of fedclade's or a part of one, or what a package says of its apps or plug-ins."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

from fedclade.algorithms import Method
from fedclade.config import check_config
from fedclade.core.plugins import KINDS
from fedclade.flower.from_config import RunConfig

SMALL: Mapping[str, Any] = {"name": "digits", "clients": 40}


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config as Flower hands it over."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


def check_toml(text: str) -> object:
    """Return what a block says, checked by what its tables are; what a config leaves out is that of a run on digits."""
    raw = tomllib.loads(text)
    if "superlink" in raw:  # Flower's own, which Flower reads
        return raw
    if "tool" in raw:
        return RunConfig.read(flat(raw["tool"]["flwr"]["app"]["config"]))
    if "project" in raw:
        for group, things in raw["project"]["entry-points"].items():
            assert group.removeprefix("fedclade.") in KINDS, (
                f"{group} is no group of entry points that fedclade reads"
            )
            for name, value in things.items():
                thing = EntryPoint(name, value, group).load()
                assert callable(thing) or isinstance(thing, Method)
        return raw
    own = {"files", "folder", "name"} & set(raw.get("data", {}))
    return check_config(raw if own else {**raw, "data": {**SMALL, **raw.get("data", {})}})
