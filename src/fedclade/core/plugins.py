"""Things by their names: what fedclade has, entry points of installed packages, and a user's own by ``module:name``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar, get_args

from fedclade.core.errors import (
    ConfigError,
    DataError,
    FedcladeError,
    UntrustedNameError,
    nearest,
    shown,
    unknown,
)

# How things show themselves: what draws them is in a room above, and is imported when something is
# to be drawn.

_room = ""


def draw_with(room: str) -> None:
    """Say which room draws the things of the rooms below it; the package says it, which is above all of them."""
    global _room
    _room = room


def drawn(maker: str, *things: Any, **options: Any) -> Any:
    """Return what a function of the room that draws makes of things, such as ``html_of`` of a run."""
    return getattr(import_module(_room), maker)(*things, **options)


class Displayed:
    """Something that a notebook shows as HTML: a small part of a page, which needs nothing else."""

    def _repr_html_(self) -> str:
        return drawn("html_of", self)


def at_prompt() -> bool:
    """Whether somebody types: in a notebook, or at Python's prompt; no script runs, and no test."""
    return hasattr(sys, "ps1")  # which IPython has as well, in a terminal and in a notebook


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


T = TypeVar("T")

Kind = Literal[
    "algorithms",
    "data",
    "models",
    "tasks",
    "partitions",
    "shifts",
    "callbacks",
    "commands",
    "queries",
]
"""What packages may add to; the group of its entry points is ``fedclade.<kind>``."""

KINDS: tuple[Kind, ...] = get_args(Kind)

BY_A_SERVER = (
    "is not imported here, since the run names it and not this client; to allow it, add it to "
    "imports in its node config"
)
"""Why a client of a network does not import a name, and what its owner can do."""

BY_A_FOLDER = (
    "is named by the config of the run folder, and importing it would run code; if you trust "
    "where the folder comes from, allow it with --trust, in Python with Run.load(folder, "
    "trust=True)"
)
"""Why a command that reads a run folder does not import a name, and what the user can do."""


@dataclass(frozen=True)
class ImportLimit:
    """Which ``module:name`` references may be imported, and what an error says of the others."""

    allowed: Collection[str]
    reason: str


_limit: ContextVar[ImportLimit | None] = ContextVar("_limit", default=None)

_imported: set[str] = set()


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
        return loaded(added[name], what)
    if isinstance(name, str) and ":" in name:
        return imported(name, what)
    known = {*builtin, *installed(kind)}
    raise ConfigError(unknown(what, name, known) + "; your own is given as 'module:name'")


def function_named(
    kind: Kind,
    name: object,
    builtin: Mapping[str, T],
    wrapper: Callable[..., T],
    returns: str,
    takes: Collection[str],
) -> T:
    """Return what a name stands for, where fedclade's own are records of a function and a line about it.

    A user's own may be a plain function: it is checked for what it ``takes``, see
    :func:`check_function`, and wrapped.
    """
    what = kind.removesuffix("s")
    found = named(kind, name, builtin, what)
    if isinstance(found, type(next(iter(builtin.values())))):
        return found
    function = check_function(found, f"{what} {shown(name)}", returns, takes)
    return wrapper(function, summary_of(function))


def imported(reference: str, what: str) -> Any:
    """Return the object that ``module:name`` names, such as ``my_models:resnet``.

    Raises
    ------
    ConfigError
        If it cannot be imported.
    UntrustedNameError
        If it may not be imported: see :func:`importing_only`.
    """
    limit = _limit.get()
    if limit is not None and reference not in limit.allowed:
        raise UntrustedNameError(f"{what} {shown(reference)} {limit.reason}")
    module, _, attributes = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attributes.split("."):
            found = _attribute(found, part)
    except (Exception, SystemExit) as error:  # whatever a user's own file does when it is imported
        hint = "; run from its folder, or set PYTHONPATH" if isinstance(error, ImportError) else ""
        raise ConfigError(
            f"{what} {shown(reference)} cannot be imported: {_in_a_line(error)}{hint}"
        ) from error
    _imported.add(reference)
    return found


@contextmanager
def importing_only(references: Collection[str], reason: str = BY_A_SERVER) -> Generator[None]:
    """Refuse to import any ``module:name`` but these; around what handles names that others wrote, such as a server."""
    before = _limit.set(ImportLimit(references, reason))
    try:
        yield
    finally:
        _limit.reset(before)


@contextmanager
def reading_folder(*, trust: bool) -> Generator[None]:
    """Refuse to import any ``module:name`` while a run folder is read, unless its origin is trusted.

    Whoever wrote the folder wrote these names, and to import one runs its module.
    """
    if trust:
        yield
        return
    with importing_only((), BY_A_FOLDER):
        yield


def has_imported_names() -> bool:
    """Return whether this process has imported something by ``module:name``, which a resumed run would import too."""
    return bool(_imported)


@cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points of installed packages, by name; of several of one name, the first that Python finds."""
    return {point.name: point for point in reversed([*entry_points(group=f"fedclade.{kind}")])}


def loaded(point: EntryPoint, what: str) -> Any:
    """Return what an entry point names; a ConfigError says why it cannot be imported."""
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        package = "a package" if point.dist is None else f"package {point.dist.name}"
        why = f"({point.value}): {_in_a_line(error)}"
        raise ConfigError(f"{what} {point.name!r} of {package} cannot be imported {why}") from error


def name_of(
    kind: Kind,
    thing: Any,
    builtin: Mapping[str, object],
    unwrap: Callable[[Any], object] | None = None,
) -> str:
    """Return the name by which :func:`named` finds a class or a function again.

    What only the program that runs knows, such as a class in ``__main__`` or in a function, has
    none: it gets its own. Where a name may stand for a record of the thing, ``unwrap`` returns the
    thing of a record.
    """
    unwrap = unwrap or (lambda found: found)
    for name, known in builtin.items():
        if unwrap(known) is thing:
            return name
    for name, point in installed(kind).items():
        with suppress(ConfigError):  # what cannot be imported has not made the thing
            if (
                name not in builtin
                and point.module in sys.modules
                and unwrap(loaded(point, kind)) is thing
            ):
                return name
    module = thing.__module__
    path = thing.__qualname__
    found = None if module == "__main__" else sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is thing else thing.__name__


def check_function(
    found: Any, what: str, returns: str, takes: Collection[str] | None = None
) -> Callable[..., Any]:
    """Return a user's own function, checked for how it can be called.

    Parameters
    ----------
    found
        What a name stands for.
    what
        What to call it in a message, such as ``partition 'my_data:by_age'``.
    returns
        What it returns, in words.
    takes
        What it is called with by position; all else are options. None: it is called by name alone.

    Raises
    ------
    ConfigError
        If it is no function, or takes less by position, or needs more.
    """
    if not callable(found):
        raise ConfigError(
            f"{what} should name a function that returns {returns}, got {shown(found)}"
        )
    try:
        parameters = [*inspect.signature(found).parameters.values()]
    except (TypeError, ValueError) as error:  # of some functions that are not written in Python
        raise ConfigError(f"{what} cannot be used: {error}; wrap it in a function") from error
    if takes is None:
        return found
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    enough = len(ordered) >= len(takes) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not enough or any(p.default is p.empty for p in ordered[len(takes) :]):
        given = ", ".join(str(p) for p in parameters)
        raise ConfigError(
            f"{what} should take ({', '.join(takes)}), and options after a *, got ({given})"
        )
    return found


def call_own(what: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a user's own function; a DataError says what it failed of, in a line."""
    try:
        return function(*arguments, **options)
    except FedcladeError:
        raise
    except Exception as error:  # whatever it does
        raise DataError(f"{what} failed: {_in_a_line(error)}") from error


def summary_of(thing: object) -> str:
    """Return the line about a thing for people: its ``summary`` or ``description``, or its docstring's first line."""
    if isinstance(thing, str):
        return thing
    for name in ("summary", "description"):
        if isinstance(line := getattr(thing, name, None), str) and line:
            return line
    return (inspect.getdoc(thing) or "").partition("\n")[0].rstrip(".")


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise AttributeError(f"{error}{nearest(name, dir(owner))}") from error


def _in_a_line(error: BaseException) -> str:
    """Return what an error of a user's own code says; with its class, unless it says what could not be imported."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, ImportError | AttributeError)
        else f"{type(error).__name__}: {text}"
    )
