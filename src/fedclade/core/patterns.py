"""Patterns over the names of parameters, such as ``head.*``: which parts of a model something is about."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fedclade.core.errors import ConfigError, shown


def matching(patterns: Sequence[str], names: Collection[str], setting: str) -> tuple[str, ...]:
    """Return those names that a pattern matches, in their order; a pattern without wildcards may name a module.

    Parameters
    ----------
    patterns
        With the wildcards of a shell: ``*``, ``?``, ``[seq]``.
    names
        Of parameters or buffers, such as ``head.weight``.
    setting
        That the patterns come from, such as ``model.personal``, for the message.

    Raises
    ------
    ConfigError
        If a pattern matches nothing; with the nearest name.
    """
    for pattern in patterns:
        if not any(_fits(pattern, name) for name in names):
            near = get_close_matches(pattern.removesuffix(".*"), names, 1, 0.0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{setting} = {shown(pattern)} matches no parameter of the model{hint}")
    return tuple(name for name in names if any(_fits(pattern, name) for pattern in patterns))


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
