"""Names of engines, and the check of a name.

A config is checked without the engines themselves, which take long to import.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedclade import catalogue
from fedclade.core import ConfigError, unknown

ENGINES: Mapping[str, str] = catalogue.ENGINES
"""Names of all engines that run on this machine, with a line of help for each."""

REMOTE: Mapping[str, str] = catalogue.REMOTE
"""Names of engines that train in other processes or on other machines, with a line of help."""


def check_engine(name: str, known: Collection[str] = (*ENGINES, *REMOTE)) -> None:
    """Check that a name is one of the ``known`` names of engines.

    Raises
    ------
    ConfigError
        If the name is not one of these names.
    """
    if name not in known:
        raise ConfigError(unknown("engine", name, known))
