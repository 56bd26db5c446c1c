"""Patterns over the names of parameters, such as ``head.*``: which parts of a model something is about."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fedclade.core.errors import ConfigError, shown


def matching(patterns: Sequence[str], names: Collection[str], setting: str, what: str = "parameter") -> tuple[str, ...]:
    """Return those names that a pattern matches, in their order.

    A pattern is a name, or the beginning of one up to a dot: ``head`` and ``head.*`` are the same. One that fits no
    name so may also be a part of it between dots, as ``lora_B`` is one of ``blocks.0.lora_B.weight``.

    Parameters
    ----------
    patterns
        With the wildcards of a shell: ``*``, ``?``, ``[seq]``.
    names
        Of parameters or buffers, such as ``head.weight``.
    setting
        That the patterns come from, such as ``model.personal``, for the message.
    what
        The names are of, for the message.

    Raises
    ------
    ConfigError
        If a pattern matches nothing; with the nearest name.
    """
    found: set[str] = set()
    for pattern in patterns:
        fits = fitting(pattern, names)
        if not fits:
            near = get_close_matches(pattern.removesuffix(".*"), names, 1, 0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{setting} = {shown(pattern)} matches no {what} of the model{hint}")
        found.update(fits)
    return tuple(name for name in names if name in found)


def fitting(pattern: str, names: Collection[str]) -> list[str]:
    """Return those names that a single pattern matches, maybe none; see :func:`matching`."""
    return [name for name in names if _begins(pattern, name)] or [name for name in names if _holds(pattern, name)]


def _begins(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _holds(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")
