"""Arguments are checked against what a function or a class says that it takes, before it is called.

Those of a config by name, and those of Python (:func:`checked`) as they are given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, lru_cache, wraps
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import numpy as np

from fedclade.core.errors import ConfigError, shown, unknown

T = TypeVar("T")

Taker = Callable[..., Any]
"""A function, or a class such as a dataclass of hyper-parameters; its keyword-only parameters are options."""

BITS = 64
"""Of whole numbers, with their sign: neither tensors nor files hold longer ones, and a float need not reach as far."""


def known_arguments(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, inspect.Parameter]:
    """Return the options of a function or a class by name, or of several together; the last one's of each name.

    Options are parameters not in ``besides`` that are keyword-only, or with ``positional`` any that have a name.
    """
    kinds = {inspect.Parameter.KEYWORD_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if positional else set())
    parameters = (item for taker in _each(takers) for item in _parameters(taker).items())
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
    """Return options of an ``owner``, such as ``"[local]"``, in the types that what takes them says.

    Lists become tuples and whole numbers floats where the type says so. Where something takes ``**anything``, every
    name is known.

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
    """Let a function, or a class, check the types of its arguments when it is called, except of those in ``besides``.

    It raises a ConfigError with a line for each argument of a wrong type; arguments that are missing or unknown stay
    Python's own ``TypeError``. Numbers and truth values of NumPy become Python's, and lists tuples. Options declared as
    ``**options: Unpack[SomeTypedDict]`` are checked like arguments that are spelt out.
    """

    def decorated(taker: Any) -> Any:
        call = taker.__init__ if inspect.isclass(taker) else taker

        @cache  # when it is first called: the types may be defined after it
        def takes() -> tuple[inspect.Signature, Mapping[str, Any]]:
            signature, hints = inspect.signature(call), dict(_hints(call))
            for name, parameter in signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD and get_origin(hints.get(name)) is Unpack:
                    options = get_type_hints(get_args(hints.pop(name))[0])
                    keywords = [inspect.Parameter(o, inspect.Parameter.KEYWORD_ONLY, default=None) for o in options]
                    others = [p for p in signature.parameters.values() if p is not parameter]
                    signature, hints = signature.replace(parameters=[*others, *keywords]), {**hints, **options}
                elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                    hints.pop(name, None)
            return signature, {name: hint for name, hint in hints.items() if name not in besides}

        @wraps(call)
        def at_the_door(*args: Any, **kwargs: Any) -> Any:
            signature, hints = takes()
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                return call(*args, **kwargs)  # which raises the same, in its own name
            given.arguments.update(_fit_all(taker.__name__, given.arguments, hints, strict=True))
            return call(*given.args, **given.kwargs)

        if inspect.isclass(taker):
            taker.__init__ = at_the_door  # pyright: ignore[reportAttributeAccessIssue]
            return taker
        return at_the_door

    return decorated


def _each(takers: Taker | Collection[Taker]) -> Collection[Taker]:
    return [takers] if callable(takers) else takers


def _once(inspected: Callable[[Taker], Mapping[str, Any]]) -> Callable[[Taker], Mapping[str, Any]]:
    """Remember what a function or a class takes: scenarios ask for it thousands of times."""
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
    # Of a class, those of its __init__: dataclasses copy the annotations of their fields there.
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
    """Return values as of their types; raise one error for all that do not fit, and for names that are not known."""
    problems: list[str] = []
    fitted = dict(arguments)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        if known is not None and name not in known:
            problems.append(unknown(f"key of {owner}:", name, known))
        elif (new := _fit(value, hint, strict=strict)) is _MISFIT:
            why = f", of more than {BITS} bits" if _is_too_long(value) else ""
            problems.append(f"{name} of {owner} should be {_in_words(hint)}, got {shown(value)}{why}")
        else:
            fitted[name] = new
    if problems:
        raise ConfigError("\n".join(problems))
    return fitted


_MISFIT = object()


def _fit(value: Any, hint: Any, *, strict: bool = False) -> Any:
    """Return a value as one of a type, or ``_MISFIT``.

    In a call (``strict``) classes are checked too, and of a literal only the type: the function knows the names itself.
    In a config every value is of a class, and names are checked.
    """
    if get_origin(hint) is Literal:
        known = any(isinstance(value, type(choice)) and (strict or value == choice) for choice in get_args(hint))
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
    if hint not in _WORDS:  # a user's own type: the factory must judge
        kind = get_origin(hint) or hint
        return value if not (strict and inspect.isclass(kind)) or isinstance(value, kind) else _MISFIT
    if isinstance(value, bool | np.bool_):  # which Python counts as an int
        return bool(value) if hint is bool else _MISFIT
    if _is_too_long(value) or not isinstance(value, _NUMBERS.get(hint, hint)):
        return _MISFIT
    if not strict and hint is float and math.isnan(value):  # of no range
        return _MISFIT
    return hint(value) if hint in _NUMBERS else value


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
