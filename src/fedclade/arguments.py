"""Named things that take options: what people wrote is checked against what the thing takes, before it is called."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedclade.errors import ConfigError, shown, unknown

Taker = Callable[..., Any]
"""A function, or a class such as a dataclass of hyper-parameters; its keyword-only parameters are options."""

BITS = 64
"""Of whole numbers, with their sign: neither tensors nor files hold longer ones, and a float need not reach as far."""


def known_arguments(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, inspect.Parameter]:
    """Return the options of a function or a class by name, or of several together.

    Parameters
    ----------
    takers
        Whose parameters; where several share a name, the last one's counts.
    besides
        Names of parameters that are not options.
    positional
        Whether parameters that are not keyword-only are options too, as in functions that users write.
    """
    each = [takers] if callable(takers) else takers
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set())
    parameters = (item for taker in each for item in inspect.signature(taker).parameters.items())
    return {name: p for name, p in parameters if p.kind in kinds and name not in besides}


def defaults(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, Any]:
    """Return the options that have a default, with it; see :func:`known_arguments`."""
    known = known_arguments(takers, besides, positional=positional)
    return {name: p.default for name, p in known.items() if p.default is not inspect.Parameter.empty}


def check_arguments(
    owner: str,
    takers: Taker | Collection[Taker],
    arguments: Mapping[str, Any],
    besides: Collection[str] = (),
    *,
    positional: bool = False,
) -> dict[str, Any]:
    """Check names and types of options.

    Parameters
    ----------
    owner
        Whose options they are, for the message: ``"partition 'dirichlet'"``, ``"[local]"``.
    takers, besides, positional
        What takes them; see :func:`known_arguments`. Where something takes ``**anything``, every name is known.
    arguments
        The names and values that were given.

    Returns
    -------
    dict
        The same, with lists made tuples and whole numbers made floats where the type says so.

    Raises
    ------
    ConfigError
        If a name is unknown or a value is of the wrong type; one line for each.
    """
    known = known_arguments(takers, besides, positional=positional)
    each: Collection[Taker] = [takers] if callable(takers) else takers
    hints = {name: hint for taker in each for name, hint in _hints(taker).items()}
    open_ended = any(
        p.kind is inspect.Parameter.VAR_KEYWORD for taker in each for p in inspect.signature(taker).parameters.values()
    )
    problems: list[str] = []
    fitted: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in known:
            if open_ended:
                fitted[name] = value
            else:
                problems.append(unknown(f"key of {owner}:", name, known))
        elif not _fits(value, hint := hints.get(name, Any)):
            why = f", of more than {BITS} bits" if _is_too_long(value) else ""
            problems.append(f"{name} of {owner} should be {_in_words(hint)}, got {shown(value)}{why}")
        else:
            fitted[name] = _as(value, hint)
    if problems:
        raise ConfigError("\n".join(problems))
    return fitted


def _hints(taker: Taker) -> Mapping[str, Any]:
    # Of a class, those of its __init__: dataclasses copy the annotations of their fields there.
    return get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else ()


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if members := _members(hint):
        return any(_fits(value, member) for member in members)
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(entry, get_args(hint)[0]) for entry in value)
    if hint not in _WORDS:  # a user's own type: the factory must judge
        return True
    if isinstance(value, bool):  # which Python counts as an int
        return hint is bool
    if _is_too_long(value):
        return False
    if hint is float:
        return isinstance(value, int | float) and not math.isnan(value)  # which is neither in nor out of any range
    return isinstance(value, hint)


def _is_too_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() >= BITS


def _as(value: Any, hint: Any) -> Any:
    if members := _members(hint):
        return _as(value, next(member for member in members if _fits(value, member)))
    if get_origin(hint) is tuple:
        return tuple(value)
    return float(value) if hint is float else value


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if members := _members(hint):
        return " or ".join(_in_words(member) for member in members)
    if get_origin(hint) is tuple:
        return f"a list, each of it {_in_words(get_args(hint)[0])}"
    return _WORDS[hint]


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", NoneType: "left out"}
