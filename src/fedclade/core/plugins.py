"""Things by their names: what fedclade has, entry points of installed packages, and a user's own by ``module:name``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

from fedclade.core.errors import ConfigError, shown, unknown

T = TypeVar("T")

Kind = Literal["algorithms", "data", "models", "tasks", "partitions", "shifts"]
"""What packages may add to; the group of its entry points is ``fedclade.<kind>``."""


def named(kind: Kind, name: object, builtin: Mapping[str, T], what: str) -> T | Any:
    """Return what a name stands for: of fedclade's own, of an installed package, or imported by ``module:name``.

    Parameters
    ----------
    kind
        Of thing, which is also the group of the entry points.
    name
        What the user wrote.
    builtin
        Fedclade's own, which no package can replace.
    what
        What to call it in a message, such as ``model``.

    Raises
    ------
    ConfigError
        If there is nothing of that name, or it cannot be imported.
    """
    if isinstance(name, str) and name in builtin:
        return builtin[name]
    if isinstance(name, str) and name in (added := installed(kind)):
        return _loaded(added[name], what)
    if isinstance(name, str) and ":" in name:
        return imported(name, what)
    known = [*builtin, *installed(kind)]
    raise ConfigError(unknown(what, name, known) + "; your own is given as 'module:name'")


def imported(reference: str, what: str) -> Any:
    """Return the object that ``module:name`` names, such as ``my_models:resnet``.

    Raises
    ------
    ConfigError
        If it cannot be imported.
    """
    module, _, attribute = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a user's own file does when it is imported
        raise ConfigError(
            f"{what} {shown(reference)} cannot be imported: {error}; run from its folder, or set PYTHONPATH"
        ) from error
    return found


@cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points of installed packages, by name."""
    return {point.name: point for point in entry_points(group=f"fedclade.{kind}")}


def _loaded(point: EntryPoint, what: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        package = "a package" if point.dist is None else f"package {point.dist.name}"
        raise ConfigError(f"{what} {point.name!r} of {package} cannot be imported ({point.value}): {error}") from error
