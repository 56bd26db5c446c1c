"""Checks of arguments against the signatures and type hints of functions and classes.

:func:`check_arguments` checks the named arguments of a config before a call; :func:`checked` checks
the arguments of a call from Python.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints

import numpy as np

from fedclade.core.errors import ArgumentError, ConfigError, shown, unknown
from fedclade.core.files import path_problem

# Nested tables, such as configs, as one table.


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into one with dotted names; entries that are None are left out.

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


T = TypeVar("T")

Taker = Callable[..., Any]
"""A function, or a class such as a dataclass of hyper-parameters, whose arguments are checked."""

BITS = 64
"""Bits of a whole number, with its sign: neither tensors nor files can represent longer ones.

A longer number may also be too large for a float.
"""


def known_arguments(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, inspect.Parameter]:
    """Return the options of a function or class, or of several together, by name.

    If several have an option of the same name, that of the last one is returned.

    Parameters
    ----------
    takers
        The functions or classes.
    besides
        Names of parameters that are not options.
    positional
        Whether parameters that can be given by position and by name are options too. By default
        only keyword-only parameters are.
    """
    kinds = {inspect.Parameter.KEYWORD_ONLY} | (
        {inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set()
    )
    parameters = (item for taker in _each(takers) for item in _parameters(taker).items())
    return {name: p for name, p in parameters if p.kind in kinds and name not in besides}


def defaults(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, Any]:
    """Return the default values of all options that have one; see :func:`known_arguments`."""
    known = known_arguments(takers, besides, positional=positional)
    return {
        name: p.default for name, p in known.items() if p.default is not inspect.Parameter.empty
    }


def check_arguments(
    owner: str,
    takers: Taker | Collection[Taker],
    arguments: Mapping[str, Any],
    besides: Collection[str] = (),
    *,
    positional: bool = False,
) -> dict[str, Any]:
    """Return the options of a config's section, converted to the types that its takers declare.

    Lists become tuples, and whole numbers become floats where the type requires it.

    Parameters
    ----------
    owner
        Name of the section for messages, such as ``"[local]"``.
    takers
        The functions or classes that take the options. If one of them has a parameter
        ``**anything``, every name is accepted.
    arguments
        The options by name.
    besides, positional
        As for :func:`known_arguments`.

    Raises
    ------
    ConfigError
        If a name is unknown or a value is of the wrong type; one line for each.
    """
    each = _each(takers)
    known = known_arguments(takers, besides, positional=positional)
    hints = {name: hint for taker in each for name, hint in _hints(taker).items() if name in known}
    parameters = (p for taker in each for p in _parameters(taker).values())
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return _fit_all(owner, arguments, hints, None if open_ended else known)


def checked(*besides: str) -> Callable[[T], T]:
    """Return a decorator that checks the argument types of a function or class at each call.

    NumPy numbers and truth values are converted to Python's, and lists to tuples. Options declared
    as ``**options: Unpack[SomeTypedDict]`` are checked like arguments that are declared one by one.

    Parameters
    ----------
    besides
        Names of arguments that are not checked.

    Raises
    ------
    ConfigError
        By the decorated function: one line for each argument of a wrong type, and for each path
        that no file can have.
    ArgumentError
        By the decorated function: if arguments are missing or unknown; names the nearest known one.
    """

    def decorated(taker: Any) -> Any:
        call = taker.__init__ if inspect.isclass(taker) else taker

        @cache  # at the first call, since types may be defined below the function
        def takes() -> tuple[inspect.Signature, Mapping[str, Any]]:
            signature = inspect.signature(call)
            hints = dict(_hints(call))
            for name, parameter in signature.parameters.items():
                if (
                    parameter.kind is inspect.Parameter.VAR_KEYWORD
                    and get_origin(hints.get(name)) is Unpack
                ):
                    options = get_type_hints(get_args(hints.pop(name))[0])
                    keywords = [
                        inspect.Parameter(o, inspect.Parameter.KEYWORD_ONLY, default=None)
                        for o in options
                    ]
                    others = [p for p in signature.parameters.values() if p is not parameter]
                    signature = signature.replace(parameters=[*others, *keywords])
                    hints = {**hints, **options}
                elif parameter.kind in (
                    inspect.Parameter.VAR_POSITIONAL,
                    inspect.Parameter.VAR_KEYWORD,
                ):
                    hints.pop(name, None)
            return signature, {name: hint for name, hint in hints.items() if name not in besides}

        @wraps(call)
        def at_the_door(*args: Any, **kwargs: Any) -> Any:
            signature, hints = takes()
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _argument_error(taker.__name__, signature, kwargs, error) from None
            given.arguments.update(_fit_all(taker.__name__, given.arguments, hints, strict=True))
            return call(*given.args, **given.kwargs)

        if inspect.isclass(taker):
            taker.__init__ = at_the_door  # pyright: ignore[reportAttributeAccessIssue]
            return taker
        return at_the_door

    return decorated


def _argument_error(
    owner: str, signature: inspect.Signature, keywords: Collection[str], error: TypeError
) -> ArgumentError:
    """Return the error for a call that does not fit a signature, with the nearest known names."""
    known = [name for name in signature.parameters if name not in ("self", "cls")]
    problems = [
        unknown(f"argument of {owner}:", name, known) for name in keywords if name not in known
    ]
    return ArgumentError("\n".join(problems) if problems else f"{owner}: {error}")


def _each(takers: Taker | Collection[Taker]) -> Collection[Taker]:
    return [takers] if callable(takers) else takers


def _once(inspected: Callable[[Taker], Mapping[str, Any]]) -> Callable[[Taker], Mapping[str, Any]]:
    """Cache the result for each function or class: scenarios ask for it thousands of times."""
    remembered = lru_cache(maxsize=1024)(inspected)

    @wraps(inspected)
    def once(taker: Taker) -> Mapping[str, Any]:
        return remembered(taker) if type(taker).__hash__ is not None else inspected(taker)

    return once


@_once
def _parameters(taker: Taker) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(taker).parameters


@_once
def _hints(taker: Taker) -> Mapping[str, Any]:
    # For a class, use its __init__: dataclasses copy the annotations of their fields there.
    return get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else ()


def _fit_all(
    owner: str,
    arguments: Mapping[str, Any],
    hints: Mapping[str, Any],
    known: Collection[str] | None = None,
    *,
    strict: bool = False,
) -> dict[str, Any]:
    """Return values converted to their types, or raise one ConfigError with all problems."""
    problems: list[str] = []
    fitted = dict(arguments)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        if known is not None and name not in known:
            problems.append(unknown(f"key of {owner}:", name, known))
        elif (new := _fit(value, hint, strict=strict)) is _MISFIT:
            problems.append(
                _misfit_inside(name, owner, value, hint) or _told(f"{name} of {owner}", value, hint)
            )
        elif strict and _takes_paths(hint) and (problem := path_problem(new)):
            problems.append(
                f"{name} of {owner} should be a path that a file can have, got {shown(new)}: "
                f"{problem}"
            )
        else:
            fitted[name] = new
    if problems:
        raise ConfigError("\n".join(problems))
    return fitted


def _told(what: str, value: Any, hint: Any) -> str:
    """Return the message about a value that is not of its type."""
    why = f", of more than {BITS} bits" if _is_too_long(value) else ""
    kind = get_origin(hint) or hint
    if inspect.isclass(value) and inspect.isclass(kind) and issubclass(value, kind):
        why = f"; give an instance, such as {value.__name__}(...)"
    return f"{what} should be {_in_words(hint)}, got {shown(value)}{why}"


def _misfit_inside(name: str, owner: str, value: Any, hint: Any) -> str:
    """Return the message about the first entry of a table or list with a wrong type, or ""."""
    for member in _members(hint) or (hint,):
        kind = get_origin(member)
        of = get_args(member)
        if kind is Mapping and isinstance(value, dict):
            for key, entry in value.items():
                if _fit(key, of[0], strict=True) is _MISFIT:
                    return _told(f"each key of {name} of {owner}", key, of[0])
                if _fit(entry, of[1], strict=True) is _MISFIT:
                    return _told(f"{name}[{shown(key)}] of {owner}", entry, of[1])
        if kind is Sequence and isinstance(value, list | tuple):
            for place, entry in enumerate(value):
                if _fit(entry, of[0], strict=True) is _MISFIT:
                    return _told(f"{name}[{place}] of {owner}", entry, of[0])
    return ""


def _takes_paths(hint: Any) -> bool:
    return Path in (*_members(hint), hint)


_MISFIT = object()


def _fit(value: Any, hint: Any, *, strict: bool = False) -> Any:
    """Return a value converted to a type, or ``_MISFIT`` if it does not fit.

    In a call (``strict``), values are checked against classes too, and only the type of a literal
    is checked: the function checks the names itself. In a config, a type that is not one of
    ``_WORDS`` is left to the function that takes the value, and the names of a literal are checked.
    """
    if get_origin(hint) is Literal:
        known = any(
            isinstance(value, type(choice)) and (strict or value == choice)
            for choice in get_args(hint)
        )
        return value if known else _MISFIT
    if members := _members(hint):
        each = (_fit(value, member, strict=strict) for member in members)
        return next((new for new in each if new is not _MISFIT), _MISFIT)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            return _MISFIT
        entries = tuple(_fit(entry, get_args(hint)[0], strict=strict) for entry in value)
        return _MISFIT if any(entry is _MISFIT for entry in entries) else entries
    if hint is Any:
        return value
    if hint not in _WORDS:  # a user's own type, which the function that takes it must check
        kind = get_origin(hint) or hint
        if strict and getattr(kind, "_is_protocol", False):  # for a user's own function or object
            return value if callable(value) or "__call__" not in vars(kind) else _MISFIT
        if strict and not _fits_inside(value, kind, get_args(hint)):
            return _MISFIT
        return (
            value if not (strict and inspect.isclass(kind)) or isinstance(value, kind) else _MISFIT
        )
    if isinstance(value, bool | np.bool_):  # bool is a subclass of int
        return bool(value) if hint is bool else _MISFIT
    if _is_too_long(value) or not isinstance(value, _NUMBERS.get(hint, hint)):
        return _MISFIT
    if not strict and hint is float and math.isnan(value):  # NaN is in no range
        return _MISFIT
    return hint(value) if hint in _NUMBERS else value


def _fits_inside(value: Any, kind: Any, of: tuple[Any, ...]) -> bool:
    """Return whether the entries of a table or list have the right types; True for other values."""
    if kind is Mapping and isinstance(value, dict) and len(of) == 2:
        return _all_fit(value, of[0]) and _all_fit(value.values(), of[1])
    if kind is Sequence and isinstance(value, str | bytes):
        return False  # strings are sequences, but are not meant as lists of characters
    if kind is Sequence and isinstance(value, range) and of:
        return not value or _fit(value[0], of[0], strict=True) is not _MISFIT
    if kind is Sequence and isinstance(value, list | tuple) and of:
        return _all_fit(value, of[0])
    return True


def _all_fit(values: Iterable[Any], hint: Any) -> bool:
    if hint is Any:
        return True
    values = [*values]
    kinds = {*map(type, values)}
    if kinds == {str} and hint is str:  # a fast path, as tables can have a million clients
        return True
    if kinds == {int} and hint is int:
        return not (_is_too_long(max(values)) or _is_too_long(min(values)))
    return all(_fit(value, hint, strict=True) is not _MISFIT for value in values)


def _is_too_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() >= BITS


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if members := _members(hint):
        return " or ".join(_in_words(member) for member in members)
    if get_origin(hint) is tuple:
        return f"a list, each of it {_in_words(get_args(hint)[0])}"
    kind = get_origin(hint) or hint
    if getattr(kind, "_is_protocol", False) and "__call__" in vars(kind):
        return "a function"
    if kind is Sequence and get_args(hint):
        return f"a list, each of it {_in_words(get_args(hint)[0])}"
    return _WORDS.get(hint) or _WORDS.get(kind) or f"of type {getattr(kind, '__name__', kind)}"


_NUMBERS: Mapping[Any, Any] = {int: int | np.integer, float: int | float | np.integer | np.floating}

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    NoneType: "left out",
    Callable: "a function",
    type: "a class",
    Mapping: "a table",
}
