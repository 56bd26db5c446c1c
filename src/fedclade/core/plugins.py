"""Functions that find algorithms, models, data and other plug-ins by name.

A name is either a name of fedclade's own, or the name of an entry point of an installed package, or
``module:name`` for a user's own object. The module also limits the import of names that come from
an untrusted config, since an import runs code.
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
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
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

# Display in notebooks. The package that draws (fedclade.report) depends on this package, so the
# drawing package is imported only when something is drawn, by a name that is set below.

_room = ""


def draw_with(room: str) -> None:
    """Set the name of the package whose functions draw objects for display in notebooks.

    The drawing package (``fedclade.report``) imports other packages of fedclade. To avoid circular
    imports, these packages do not import the drawing package; they call its functions through
    :func:`drawn`, which imports the package of the given name when it is needed.
    """
    global _room
    _room = room


def drawn(maker: str, *things: Any, **options: Any) -> Any:
    """Call a function of the drawing package by its name, and return its result.

    For example, ``drawn("html_of", run)`` returns the HTML of a run. See :func:`draw_with`.
    """
    return getattr(import_module(_room), maker)(*things, **options)


class Displayed:
    """Base class of objects that a notebook displays as self-contained HTML."""

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
    "middleware",
    "trainers",
]
"""Kinds of plug-ins that packages can add by entry points in the group ``fedclade.<kind>``."""

KINDS: tuple[Kind, ...] = get_args(Kind)

BY_A_SERVER = (
    "the server chose the name, and importing it would run code on this client; to allow the "
    "import, add the name to 'imports' in the client's node config"
)
"""Reason why a client in a network does not import a name that the server chose, with a fix."""

BY_A_FOLDER = (
    "the config of the run folder names it, and importing it would run code; if you trust the "
    "source of the folder, allow the import with --trust, or in Python with "
    "Run.load(folder, trust=True)"
)
"""Reason why a command does not import a name in the config of a run folder, with a fix."""


@dataclass(frozen=True)
class ImportLimit:
    """Limit on imports: the allowed names ``module:name``, and the reason to refuse other names."""

    allowed: Collection[str]
    reason: str


_limit: ContextVar[ImportLimit | None] = ContextVar("_limit", default=None)

_imported: set[str] = set()


def named(kind: Kind, name: object, builtin: Mapping[str, T], what: str) -> T | Any:
    """Return the plug-in, such as an algorithm class, that has a given name.

    The name is looked up among fedclade's own objects, then among the entry points of installed
    packages, and then, in the form ``module:name``, imported.

    Parameters
    ----------
    kind
        Kind of the plug-in, which determines the group of entry points.
    name
        The name that the user wrote.
    builtin
        Fedclade's own objects by name; a package cannot replace them.
    what
        Kind of the object in messages, such as ``model``.

    Raises
    ------
    ConfigError
        If no object has the name, or if the object cannot be imported.
    """
    if isinstance(name, str) and name in builtin:
        return builtin[name]
    if isinstance(name, str) and name in (added := installed(kind)):
        return loaded(added[name], what)
    if isinstance(name, str) and ":" in name:
        return imported(name, what)
    known = {*builtin, *installed(kind)}
    raise ConfigError(
        unknown(what, name, known) + "; for an object of your own, write 'module:name'"
    )


def function_named(
    kind: Kind,
    name: object,
    builtin: Mapping[str, T],
    wrapper: Callable[..., T],
    returns: str,
    takes: Collection[str],
) -> T:
    """Return the plug-in with a given name, for kinds of plug-ins that wrap a function.

    Such a plug-in, for example a partition, is a record: an object with a function and a one-line
    description. A user's own plug-in may be a plain function. The function is then checked with
    :func:`check_function` and wrapped in a record.

    Parameters
    ----------
    kind, name, builtin
        As for :func:`named`; ``builtin`` has at least one record.
    wrapper
        Function that returns a record, given a function and its description.
    returns
        Description of the function's result, for messages.
    takes
        Names of the positional arguments with which the function is called.

    Raises
    ------
    ConfigError
        If no object has the name, or if the function does not have the positional arguments.
    """
    what = kind.removesuffix("s")
    found = named(kind, name, builtin, what)
    if isinstance(found, type(next(iter(builtin.values())))):
        return found
    function = check_function(found, f"{what} {shown(name)}", returns, takes)
    return wrapper(function, summary_of(function))


def imported(reference: str, what: str) -> Any:
    """Import and return a user's own object, given its name such as ``my_models:resnet``.

    Parameters
    ----------
    reference
        The name in the form ``module:name``.
    what
        Kind of the object in messages, such as ``model``.

    Raises
    ------
    ConfigError
        If the object cannot be imported.
    UntrustedNameError
        If the import is not allowed; see :func:`importing_only`.
    """
    limit = _limit.get()
    if limit is not None and reference not in limit.allowed:
        raise UntrustedNameError(
            f"{what} {shown(reference)} is not imported, because {limit.reason}"
        )
    module, _, attributes = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attributes.split("."):
            found = _get_attribute(found, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        hint = (
            "; run from the module's folder, or set PYTHONPATH"
            if isinstance(error, ImportError)
            else ""
        )
        raise ConfigError(
            f"{what} {shown(reference)} cannot be imported: {_in_a_line(error)}{hint}"
        ) from error
    _imported.add(reference)
    return found


@contextmanager
def importing_only(references: Collection[str], reason: str = BY_A_SERVER) -> Generator[None]:
    """Allow the import of the given names ``module:name`` only, inside a ``with`` block.

    Code that handles names from an untrusted source, such as a server's config on a client, should
    run inside the block, since an import runs code. All other names raise an
    :class:`UntrustedNameError`.

    Parameters
    ----------
    references
        The allowed names.
    reason
        Second part of the error message, after "is not imported, because": the reason, and advice
        to the user.
    """
    before = _limit.set(ImportLimit(references, reason))
    try:
        yield
    finally:
        _limit.reset(before)


@contextmanager
def reading_folder(*, trust: bool) -> Generator[None]:
    """Forbid imports of names ``module:name`` inside a ``with`` block, unless ``trust`` is set.

    The block should contain the code that reads a run folder. The names in the folder's config were
    chosen by the author of the folder, and an import runs code.
    """
    if trust:
        yield
        return
    with importing_only((), BY_A_FOLDER):
        yield


def has_imported_names() -> bool:
    """Return whether this process has imported a user's own object by a name ``module:name``.

    If so, a user who resumes the run will have to trust the run folder, since resuming imports the
    object again.
    """
    return bool(_imported)


@cache
def installed(kind: Kind) -> Mapping[str, EntryPoint]:
    """Return the entry points by which installed packages add plug-ins of a kind, by name.

    If several entry points have the same name, the first that Python finds is returned.
    """
    return {point.name: point for point in reversed([*entry_points(group=f"fedclade.{kind}")])}


def loaded(point: EntryPoint, what: str) -> Any:
    """Import and return the object that an entry point of an installed package refers to.

    ``what`` is the kind of the object in messages, such as ``model``.

    Raises
    ------
    ConfigError
        If the object cannot be imported.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        package = "a package" if point.dist is None else f"package {point.dist.name}"
        raise ConfigError(
            f"{what} {point.name!r} of {package} cannot be imported ({point.value}): "
            f"{_in_a_line(error)}; install a working version of the package, or uninstall it"
        ) from error


def name_of(
    kind: Kind,
    thing: Any,
    builtin: Mapping[str, object],
    unwrap: Callable[[Any], object] | None = None,
) -> str:
    """Return the name under which a run's config records a class or function.

    :func:`named` finds the object again by this name. An object that only the running program has,
    such as a class in ``__main__`` or inside a function, cannot be found again; for such an object
    the result is its ``__name__``.

    Parameters
    ----------
    kind, builtin
        As for :func:`named`.
    thing
        The class or function.
    unwrap
        Function that returns the class or function in a record, for kinds of plug-ins that are
        records; see :func:`function_named`.
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
        The object that was found under the user's name.
    what
        Description of the object for messages, such as ``partition 'my_data:by_age'``.
    returns
        Description of the function's result, for messages.
    takes
        Names of the positional arguments with which the function is called; its other parameters
        are options. None: the function is called with keyword arguments only.

    Raises
    ------
    ConfigError
        If the object is not a function, or if it takes fewer positional arguments than ``takes``
        has, or requires more.
    """
    if not callable(found):
        raise ConfigError(
            f"{what} should name a function that returns {returns}, got {shown(found)}"
        )
    try:
        parameters = [*inspect.signature(found).parameters.values()]
    except (TypeError, ValueError) as error:  # some functions that are not written in Python
        raise ConfigError(
            f"{what} cannot be used: {error}; wrap it in a Python function"
        ) from error
    if takes is None:
        return found
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    enough = len(ordered) >= len(takes) or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not enough or any(p.default is p.empty for p in ordered[len(takes) :]):
        given = ", ".join(str(p) for p in parameters)
        raise ConfigError(
            f"{what} should have the parameters ({', '.join(takes)}), and options after a *, got "
            f"({given})"
        )
    return found


def call_own(what: str, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a user's own function and return its result.

    Parameters
    ----------
    what
        Description of the function, with which the error message begins.
    function, arguments, options
        The function, and its positional and keyword arguments.

    Raises
    ------
    DataError
        If the function raises an error that is not an error of fedclade; the message is one line.
    """
    try:
        return function(*arguments, **options)
    except FedcladeError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise DataError(
            f"{what} failed: {_in_a_line(error)}; correct its code or its options"
        ) from error


def summary_of(thing: object) -> str:
    """Return a one-line description of a plug-in for lists that users read.

    The description is the plug-in's ``summary`` or ``description`` attribute, or the first line of
    its docstring.
    """
    if isinstance(thing, str):
        return thing
    for name in ("summary", "description"):
        if isinstance(line := getattr(thing, name, None), str) and line:
            return line
    return (inspect.getdoc(thing) or "").partition("\n")[0].rstrip(".")


def _get_attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise AttributeError(f"{error}{nearest(name, dir(owner))}") from error


def _in_a_line(error: BaseException) -> str:
    """Return an error's message as a single line, with the name of the error's class in front.

    The class is left out for errors whose message states that something could not be imported.
    """
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, ImportError | AttributeError)
        else f"{type(error).__name__}: {text}"
    )


def version_of(package: str) -> str:
    """Return the version of an installed package; "unknown" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:  # the package is imported from a source folder
        return "unknown"
