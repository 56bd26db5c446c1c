"""Look-up of algorithms, models, data and other plug-ins by name.

A name is one of fedclade's own, an entry point of an installed package, or ``module:name`` for a
user's own object.
"""

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

# Display in notebooks. The package that draws depends on this one, so it is imported only when
# something is drawn.

_room = ""


def draw_with(room: str) -> None:
    """Set the name of the package whose functions display objects in notebooks.

    Packages that it imports find it by this name, because they must not import it.
    """
    global _room
    _room = room


def drawn(maker: str, *things: Any, **options: Any) -> Any:
    """Draw things with a function of the drawing package, such as ``html_of`` a run."""
    return getattr(import_module(_room), maker)(*things, **options)


class Displayed:
    """Base class of objects that a notebook shows as self-contained HTML."""

    def _repr_html_(self) -> str:
        return drawn("html_of", self)


def at_prompt() -> bool:
    """Return whether Python is interactive: in a notebook or at a prompt, not in a script."""
    return hasattr(sys, "ps1")  # IPython sets it as well, in a terminal and in a notebook


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
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
"""Kinds of plug-ins that packages can add; the group of the entry points is ``fedclade.<kind>``."""

KINDS: tuple[Kind, ...] = get_args(Kind)

BY_A_SERVER = (
    "is not imported here, since the run names it and not this client; to allow it, add it to "
    "imports in its node config"
)
"""Reason why a client of a network does not import a name, and what its owner can do."""

BY_A_FOLDER = (
    "is named by the config of the run folder, and importing it would run code; if you trust "
    "where the folder comes from, allow it with --trust, in Python with Run.load(folder, "
    "trust=True)"
)
"""Reason why a command that reads a run folder does not import a name, and what the user can do."""


@dataclass(frozen=True)
class ImportLimit:
    """Allowed references ``module:name``, and the reason that errors give for all others."""

    allowed: Collection[str]
    reason: str


_limit: ContextVar[ImportLimit | None] = ContextVar("_limit", default=None)

_imported: set[str] = set()


def named(kind: Kind, name: object, builtin: Mapping[str, T], what: str) -> T | Any:
    """Return the object that a name stands for.

    Names of fedclade come first, then entry points of installed packages, then ``module:name``.

    Parameters
    ----------
    kind
        Kind of the plug-in, which determines the group of entry points.
    name
        The name that the user wrote.
    builtin
        Fedclade's own objects by name; no package can replace them.
    what
        Kind of the object for messages, such as ``model``.

    Raises
    ------
    ConfigError
        If nothing has that name, or it cannot be imported.
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
    """Return the record that a name stands for, for kinds whose entries are records of a function.

    A record has a function and a line that describes it. A user's own entry may be a plain
    function: it is checked with :func:`check_function` and wrapped in a record.

    Parameters
    ----------
    kind, name, builtin
        As for :func:`named`; ``builtin`` has at least one record.
    wrapper
        Makes a record of a function and its description.
    returns
        Description of the function's result, for messages.
    takes
        Names of the arguments that it is called with by position.

    Raises
    ------
    ConfigError
        If nothing has that name, or the function cannot be called in this way.
    """
    what = kind.removesuffix("s")
    found = named(kind, name, builtin, what)
    if isinstance(found, type(next(iter(builtin.values())))):
        return found
    function = check_function(found, f"{what} {shown(name)}", returns, takes)
    return wrapper(function, summary_of(function))


def imported(reference: str, what: str) -> Any:
    """Return the object that ``module:name`` refers to, such as ``my_models:resnet``.

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
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        hint = "; run from its folder, or set PYTHONPATH" if isinstance(error, ImportError) else ""
        raise ConfigError(
            f"{what} {shown(reference)} cannot be imported: {_in_a_line(error)}{hint}"
        ) from error
    _imported.add(reference)
    return found


@contextmanager
def importing_only(references: Collection[str], reason: str = BY_A_SERVER) -> Generator[None]:
    """Refuse to import references ``module:name`` other than the given ones, inside the block.

    Code that handles names written by others, such as a server, should run inside it, since an
    import runs code.
    """
    before = _limit.set(ImportLimit(references, reason))
    try:
        yield
    finally:
        _limit.reset(before)


@contextmanager
def reading_folder(*, trust: bool) -> Generator[None]:
    """Refuse to import any ``module:name`` inside the block, unless the run folder is trusted.

    The folder's author chose these names, and importing one runs its module.
    """
    if trust:
        yield
        return
    with importing_only((), BY_A_FOLDER):
        yield


def has_imported_names() -> bool:
    """Return whether this process has imported any ``module:name``.

    If it has, a resumed run would import one too.
    """
    return bool(_imported)


@cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points of installed packages by name.

    If several have the same name, the first that Python finds is returned.
    """
    return {point.name: point for point in reversed([*entry_points(group=f"fedclade.{kind}")])}


def loaded(point: EntryPoint, what: str) -> Any:
    """Return the object that an entry point refers to.

    Raises
    ------
    ConfigError
        If it cannot be imported.
    """
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
    """Return the name by which :func:`named` finds a class or function again.

    An object that only the running program has, such as a class in ``__main__`` or inside a
    function, has no such name; its ``__name__`` is returned.

    Parameters
    ----------
    kind, builtin
        As for :func:`named`.
    thing
        The class or function.
    unwrap
        Returns the object of a record, for kinds whose names may stand for records.
    """
    unwrap = unwrap or (lambda found: found)
    for name, known in builtin.items():
        if unwrap(known) is thing:
            return name
    for name, point in installed(kind).items():
        with suppress(ConfigError):  # a package that cannot be imported cannot define it
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
    """Return a user's own function after checking that it can be called as needed.

    Parameters
    ----------
    found
        The object that a name stands for.
    what
        Description of the object for messages, such as ``partition 'my_data:by_age'``.
    returns
        Description of its result, for messages.
    takes
        Names of the arguments that it is called with by position; its other parameters are options.
        None: it is called by keywords only.

    Raises
    ------
    ConfigError
        If it is not a function, takes fewer arguments by position, or requires more.
    """
    if not callable(found):
        raise ConfigError(
            f"{what} should name a function that returns {returns}, got {shown(found)}"
        )
    try:
        parameters = [*inspect.signature(found).parameters.values()]
    except (TypeError, ValueError) as error:  # some functions that are not written in Python
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
    """Call a user's own function.

    Raises
    ------
    DataError
        If it fails with an error that is not fedclade's; the message is one line.
    """
    try:
        return function(*arguments, **options)
    except FedcladeError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"{what} failed: {_in_a_line(error)}") from error


def summary_of(thing: object) -> str:
    """Return a one-line description of an object, for people.

    It is the object's ``summary`` or ``description``, or the first line of its docstring.
    """
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
    """Return an error's message in one line.

    The class is added unless the message names what could not be imported.
    """
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, ImportError | AttributeError)
        else f"{type(error).__name__}: {text}"
    )
