"""Lookup, construction and recording of user-defined middleware that a config names.

The section ``[middleware.NAME]`` of a config has the settings of one middleware. NAME is the name
of an entry point in the group ``fedclade.middleware``, or ``module:Class``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    ConfigError,
    call_own,
    check_arguments,
    known_arguments,
    name_of,
    named,
    setting_defaults,
    settings_of,
    shown,
)


def middleware_class(name: str) -> type[Middleware]:
    """Return the middleware class with a given name, which is an entry point or ``module:Class``.

    Raises
    ------
    ConfigError
        If no class has that name, the class cannot be imported, or the class is not a subclass of
        :class:`~fedclade.Middleware`.
    """
    found = named("middleware", name, {}, "middleware")
    if not (inspect.isclass(found) and issubclass(found, Middleware)):
        raise ConfigError(
            f"middleware {shown(name)} should be a subclass of fedclade.Middleware, got "
            f"{shown(found)}"
        )
    return found


def check_middleware(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Check the config section of one middleware, and return it with the defaults of missing keys.

    Parameters
    ----------
    name
        Name of the middleware class: an entry point or ``module:Class``.
    section
        Values by key in the section ``[middleware.NAME]``: settings of the class, or arguments of a
        class without settings.

    Raises
    ------
    ConfigError
        If the class is not found, or a key is unknown, missing, of a wrong type or out of range.
    DataError
        If the constructor of the user-defined class raises any other error.
    """
    kind = middleware_class(name)
    owner = f"[middleware.{name}]"
    own = settings_of(kind)
    arguments = known_arguments(kind, positional=True)
    no_keys = arguments.keys() - own.keys() if own else ()
    fitted = check_arguments(owner, kind, section, no_keys, positional=True)
    filled = {**setting_defaults(kind), **fitted}
    try:
        inspect.signature(kind).bind(**filled)
    except TypeError as error:
        raise ConfigError(
            f"the keys of {owner} do not fit the arguments of the middleware class: {error}; "
            "correct the keys"
        ) from error
    call_own(f"middleware {shown(name)}", kind, **filled)
    return filled


def build_middleware(sections: Mapping[str, Mapping[str, Any]]) -> list[Middleware]:
    """Build the middleware objects of a checked config, in the order of its sections.

    Parameters
    ----------
    sections
        Settings of each middleware, by the name of the middleware class.
    """
    return [middleware_class(name)(**settings) for name, settings in sections.items()]


def describe_middleware(middleware: Sequence[Middleware]) -> dict[str, dict[str, Any]]:
    """Return config sections from which the given middleware objects can be built again.

    Middleware objects without settings are left out, since the arguments that they were built with
    are unknown. Of several objects of one class, only the last is recorded, since a config has one
    section for each class.
    """
    with_settings = [each for each in middleware if settings_of(type(each))]
    return {name_of("middleware", type(each), {}): _section(each) for each in with_settings}


def _section(middleware: Middleware) -> dict[str, Any]:
    """Return the settings of a middleware object, by name."""
    return {name: getattr(middleware, name) for name in settings_of(type(middleware))}
