"""Checks of arguments against the signatures and type hints of functions and classes.

:func:`check_arguments` checks the keys of a config's section before they become arguments of a
call. The decorator :func:`checked` checks the arguments of each call from Python. In this module,
a "taker" is the function or class whose arguments are checked, and an "option" is an argument that
can be set by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, lru_cache, partial, wraps
from pathlib import Path
from types import FunctionType, MethodType, NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints

import numpy as np

from fedclade.core.errors import ArgumentError, ConfigError, shown, unknown
from fedclade.core.files import path_problem

# Nested tables, such as configs, as one table.


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables, such as a config, into one table with dotted keys.

    Entries whose value is None are left out.

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
"""Largest number of bits of an integer argument, including the sign.

Neither tensors nor files can represent longer integers, and a longer integer may also be too large
for a float.
"""


def known_arguments(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, inspect.Parameter]:
    """Return the options of one or several functions or classes as ``{name: parameter}``.

    If several takers have an option of the same name, the option of the last taker is returned.

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
    parameters = (
        item for taker in _as_collection(takers) for item in _read_parameters(taker).items()
    )
    return {name: p for name, p in parameters if p.kind in kinds and name not in besides}


def defaults(
    takers: Taker | Collection[Taker], besides: Collection[str] = (), *, positional: bool = False
) -> dict[str, Any]:
    """Return the default values of the options of functions or classes, by name.

    Options without a default are left out. See :func:`known_arguments` for the parameters.
    """
    known = known_arguments(takers, besides, positional=positional)
    return {
        name: p.default for name, p in known.items() if p.default is not inspect.Parameter.empty
    }


def is_choice(value: object, choices: Any) -> bool:
    """Return whether a value is one of the texts of a ``Literal`` type.

    Values of other types are no choice. The operator ``in`` alone would raise an error for an
    array, which it compares entry by entry.
    """
    return isinstance(value, str) and value in get_args(choices)


def check_arguments(
    owner: str,
    takers: Taker | Collection[Taker],
    arguments: Mapping[str, Any],
    besides: Collection[str] = (),
    *,
    positional: bool = False,
) -> dict[str, Any]:
    """Check a config section's options and convert their values to the declared types.

    The types are those that the takers declare: the functions or classes to which the options are
    passed. Lists become tuples, and integers become floats, where the declared type requires it.

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

    Returns
    -------
    dict
        The converted options by name.

    Raises
    ------
    ConfigError
        If the section is no table, a name is unknown, or a value is of the wrong type; the message
        has a line for each problem.
    """
    # The value comes from a file, and need not be what the annotation says.
    if not isinstance(arguments, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{owner} should be a table of settings with their names, got {shown(arguments)}"
        )
    each = _as_collection(takers)
    known = known_arguments(takers, besides, positional=positional)
    hints: dict[str, Any] = {}
    if known:
        for taker in each:
            try:
                of_taker = _read_hints(taker, *known)
            except Exception as error:  # the annotations of a user's function may be any text
                raise ConfigError(
                    f"{owner}: the types of the arguments of {getattr(taker, '__name__', taker)} "
                    f"cannot be read: {type(error).__name__}: {error}; import these types also when "
                    "the program runs, or leave the annotations out"
                ) from error
            hints |= {name: hint for name, hint in of_taker.items() if name in known}
    parameters = (p for taker in each for p in _read_parameters(taker).values())
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return _convert_all(owner, arguments, hints, None if open_ended else known)


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
        that is not a valid path of a file.
    ArgumentError
        By the decorated function: if arguments are missing or unknown. The message names the
        nearest known argument.
    """

    def decorated(taker: Any) -> Any:
        call = taker.__init__ if inspect.isclass(taker) else taker

        @cache  # at the first call, since types may be defined below the function
        def takes() -> tuple[inspect.Signature, Mapping[str, Any]]:
            signature = inspect.signature(call)
            hints = dict(_read_hints(taker if is_dataclass(taker) else call))
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
            given.arguments.update(
                _convert_all(taker.__name__, given.arguments, hints, strict=True)
            )
            return call(*given.args, **given.kwargs)

        if inspect.isclass(taker):
            taker.__init__ = at_the_door  # pyright: ignore[reportAttributeAccessIssue]
            return taker
        return at_the_door

    return decorated


def _argument_error(
    owner: str, signature: inspect.Signature, keywords: Collection[str], error: TypeError
) -> ArgumentError:
    """Return the error for a call with missing or unknown arguments.

    For each unknown argument, the message suggests the nearest known name.
    """
    known = [name for name in signature.parameters if name not in ("self", "cls")]
    problems = [
        unknown(f"argument of {owner}:", name, known) for name in keywords if name not in known
    ]
    return ArgumentError("\n".join(problems) if problems else f"{owner}: {error}")


def _as_collection(takers: Taker | Collection[Taker]) -> Collection[Taker]:
    """Return one or several takers as a collection."""
    return [takers] if callable(takers) else takers


def _cache_by_taker(
    inspected: Callable[..., Mapping[str, Any]],
) -> Callable[..., Mapping[str, Any]]:
    """Return a cached version of a function that inspects another function or class.

    Reading a scenario inspects the same functions thousands of times, and inspection is slow.
    Objects that cannot be hashed are inspected again in each call.
    """
    remembered = lru_cache(maxsize=1024)(inspected)

    @wraps(inspected)
    def once(taker: Taker, *names: str) -> Mapping[str, Any]:
        function = remembered if type(taker).__hash__ is not None else inspected
        return function(taker, *names)

    return once


@_cache_by_taker
def _read_parameters(taker: Taker) -> Mapping[str, inspect.Parameter]:
    """Return the parameters in the signature of a function or class, by name."""
    return inspect.signature(taker).parameters


@_cache_by_taker
def _read_hints(taker: Taker, *names: str) -> Mapping[str, Any]:
    """Return the type hints of a function's or class's arguments, at least of those in ``names``.

    Without ``names``, the type hints of all arguments are returned.
    """
    # A dataclass may inherit fields from a base class in another module, whose annotations can be
    # resolved in that module only. get_type_hints does this for a class, but not for __init__.
    if is_dataclass(taker):
        return get_type_hints(taker)
    call: Any = taker.__init__ if inspect.isclass(taker) else taker
    if isinstance(call, partial):
        return _read_hints(call.func, *names)
    if not isinstance(call, FunctionType):
        # A method, an object that can be called, or a function in C, which has no type hints.
        function = call.__func__ if isinstance(call, MethodType) else type(call).__call__
        return _read_hints(function, *names) if isinstance(function, FunctionType) else {}
    # Other hints, such as that of the result, may be types of torch, whose import takes long.
    wanted = set(names or call.__annotations__) - {"return"}
    annotations = {name: hint for name, hint in call.__annotations__.items() if name in wanted}
    module_names = getattr(inspect.unwrap(call), "__globals__", {})
    return get_type_hints(SimpleNamespace(__annotations__=annotations, __globals__=module_names))


def _union_members(hint: Any) -> tuple[Any, ...]:
    """Return the member types of a union; the result is empty for other types."""
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else ()


def _convert_all(
    owner: str,
    arguments: Mapping[str, Any],
    hints: Mapping[str, Any],
    known: Collection[str] | None = None,
    *,
    strict: bool = False,
) -> dict[str, Any]:
    """Return all arguments with their values converted to the declared types.

    All problems are collected and raised in one ConfigError.
    """
    problems: list[str] = []
    fitted = dict(arguments)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        if known is not None and name not in known:
            problems.append(unknown(f"key of {owner}:", name, known))
        elif (new := _convert(value, hint, strict=strict)) is _MISFIT:
            problems.append(
                _describe_misfit_inside(name, owner, value, hint)
                or _describe_misfit(f"{name} of {owner}", value, hint)
            )
        elif strict and _takes_paths(hint) and (problem := path_problem(new)):
            problems.append(
                f"{name} of {owner} should be a valid file path, got {shown(new)}: {problem}"
            )
        else:
            fitted[name] = new
    if problems:
        raise ConfigError("\n".join(problems))
    return fitted


def _describe_misfit(what: str, value: Any, hint: Any) -> str:
    """Return the error message about a value that does not have the declared type."""
    why = f", of more than {BITS} bits" if _is_too_long(value) else ""
    kind = get_origin(hint) or hint
    if inspect.isclass(value) and inspect.isclass(kind) and issubclass(value, kind):
        why = f"; give an instance, such as {value.__name__}(...)"
    return f"{what} should be {_in_words(hint)}, got {shown(value)}{why}"


def _describe_misfit_inside(name: str, owner: str, value: Any, hint: Any) -> str:
    """Return the error message about the first entry of a wrong type in a table or list.

    The result is "" if the value is neither a table nor a list, or if no entry has a wrong type.
    """
    for member in _union_members(hint) or (hint,):
        kind = get_origin(member)
        of = get_args(member)
        if kind is Mapping and isinstance(value, dict):
            for key, entry in value.items():
                if _convert(key, of[0], strict=True) is _MISFIT:
                    return _describe_misfit(f"each key of {name} of {owner}", key, of[0])
                if _convert(entry, of[1], strict=True) is _MISFIT:
                    return _describe_misfit(f"{name}[{shown(key)}] of {owner}", entry, of[1])
        if kind is Sequence and isinstance(value, list | tuple):
            for place, entry in enumerate(value):
                if _convert(entry, of[0], strict=True) is _MISFIT:
                    return _describe_misfit(f"{name}[{place}] of {owner}", entry, of[0])
    return ""


def _takes_paths(hint: Any) -> bool:
    return Path in (*_union_members(hint), hint)


_MISFIT = object()


def _convert(value: Any, hint: Any, *, strict: bool = False) -> Any:
    """Return a value converted to a declared type, or ``_MISFIT`` if the conversion is impossible.

    Values of plain types (numbers, strings, tables and others in ``_WORDS``) are always checked.
    The check of other declared types depends on ``strict``, which is set for calls from Python and
    unset for configs:

    - ``Literal``: if strict, a value needs only the type of a choice, since the called function
      checks the choice itself; if not strict, the value must be one of the choices.
    - Other classes: if strict, a value must be an instance of the class; if not strict, every value
      is accepted, and the function that gets the value checks it.
    """
    if hint is Any:
        return value
    if get_origin(hint) is Literal:
        known = any(
            isinstance(value, type(choice)) and (strict or value == choice)
            for choice in get_args(hint)
        )
        return value if known else _MISFIT
    if members := _union_members(hint):
        each = (_convert(value, member, strict=strict) for member in members)
        return next((new for new in each if new is not _MISFIT), _MISFIT)
    if get_origin(hint) is tuple:
        return _convert_entries(value, get_args(hint)[0], strict=strict)
    if hint in _WORDS:
        return _convert_plain(value, hint, strict=strict)
    # In a config, the function that gets the value checks it.
    return value if not strict or _is_instance(value, hint) else _MISFIT


def _convert_entries(value: Any, hint: Any, *, strict: bool) -> Any:
    """Return a list as a tuple of converted entries, or ``_MISFIT`` if an entry does not fit."""
    if not isinstance(value, list | tuple):
        return _MISFIT
    entries = tuple(_convert(entry, hint, strict=strict) for entry in value)
    return _MISFIT if any(entry is _MISFIT for entry in entries) else entries


def _is_instance(value: Any, hint: Any) -> bool:
    """Return whether a value is an instance of a declared class.

    The function is for classes that are not in ``_WORDS``; :func:`_convert_plain` checks values of
    plain types, such as numbers. The entries of a table or list must also have their declared
    types. If the declared class is a protocol for functions, the value must be callable; for other
    protocols, every value is accepted.
    """
    kind = get_origin(hint) or hint
    if getattr(kind, "_is_protocol", False):
        return callable(value) or "__call__" not in vars(kind)
    if not _fits_inside(value, kind, get_args(hint)):
        return False
    return not inspect.isclass(kind) or isinstance(value, kind)


def _convert_plain(value: Any, hint: Any, *, strict: bool) -> Any:
    """Return a value converted to a plain type of ``_WORDS``; ``_MISFIT`` if this is impossible."""
    if isinstance(value, bool | np.bool_):  # bool is a subclass of int
        return bool(value) if hint is bool else _MISFIT
    if _is_too_long(value) or not isinstance(value, _NUMBERS.get(hint, hint)):
        return _MISFIT
    if not strict and hint is float and math.isnan(value):  # NaN is in no range
        return _MISFIT
    return hint(value) if hint in _NUMBERS else value


def _fits_inside(value: Any, kind: Any, of: tuple[Any, ...]) -> bool:
    """Return whether all entries of a table or list have the declared types.

    The result is True for values that are neither a table nor a list.

    Parameters
    ----------
    value
        The table or list.
    kind
        Its declared type without the types of entries, such as ``Mapping`` or ``Sequence``.
    of
        The declared types of keys and values of a table, or of the entries of a list.
    """
    if kind is Mapping and isinstance(value, dict) and len(of) == 2:
        return _all_fit(value, of[0]) and _all_fit(value.values(), of[1])
    if kind is Sequence and isinstance(value, str | bytes):
        return False  # strings are sequences, but are not meant as lists of characters
    if kind is Sequence and isinstance(value, range) and of:
        return not value or _convert(value[0], of[0], strict=True) is not _MISFIT
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
    return all(_convert(value, hint, strict=True) is not _MISFIT for value in values)


def _is_too_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() >= BITS


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if members := _union_members(hint):
        words = [_in_words(member) for member in members]
        has_list = any(" each " in word for word in words)  # what is each entry, and what the list?
        return (", or " if has_list else " or ").join(words)
    if get_origin(hint) is tuple:
        return f"a list with entries that are each {_in_words(get_args(hint)[0])}"
    kind = get_origin(hint) or hint
    if getattr(kind, "_is_protocol", False) and "__call__" in vars(kind):
        return "a function"
    if kind is Sequence and get_args(hint):
        return f"a list with entries that are each {_in_words(get_args(hint)[0])}"
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
