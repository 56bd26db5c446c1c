"""Exceptions of fedclade, one class for each kind of failure, and functions that word messages.

Every message names the value seen and the fix.
"""

from __future__ import annotations

import difflib
import importlib
import reprlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any


class FedcladeError(Exception):
    """Base class of every error that fedclade raises on purpose."""


class ConfigError(FedcladeError, ValueError):
    """Settings that are unknown, of the wrong type or out of range; one line for each problem."""


class UntrustedNameError(ConfigError):
    """A config written by others names a ``module:name``, which would run code if imported."""


class ArgumentError(ConfigError, TypeError):
    """An argument of a call is unknown, missing or given twice; this is a ``TypeError`` too."""


class DataError(FedcladeError):
    """Data is missing, unreadable, or cannot be partitioned as configured."""


class ModelError(FedcladeError):
    """The model cannot be built, or does not fit the data."""


class EngineError(FedcladeError):
    """Local training failed for a reason that lies neither in the model nor in the data."""


class UpdateError(FedcladeError):
    """A client's reply is not a usable update."""


class PrivacyError(FedcladeError):
    """An update may not leave a client.

    The client's privacy budget is spent, or its earlier releases are not known.
    """


class PolicyError(FedcladeError):
    """A client's own policy forbids a query, or allows no more queries of this kind."""


class RunError(FedcladeError):
    """A run folder is missing, exists already, or is damaged."""


class TreeError(FedcladeError, LookupError):
    """A client or node is not in the parameter tree, or a client's path has no such level."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or a run has no checkpoint from which it can continue."""


class RunInterrupted(FedcladeError):  # noqa: N818 -- nothing went wrong
    """A run stopped on request.

    Parameters
    ----------
    happened
        Description of when it stopped.
    then
        Description of what the user can do now.
    """

    def __init__(self, happened: str, then: str) -> None:
        super().__init__(f"{happened}; {then}")
        self.happened = happened


class FolderInUseError(RunError):
    """Another process, or another run in this process, is writing to a run folder."""


class MissingExtraError(FedcladeError, ImportError):
    """An optional dependency is not installed.

    Parameters
    ----------
    package
        The missing package.
    extra
        The extra of fedclade that installs it; None for a package that is installed by its own
        name.
    purpose
        The feature that needs the package, as the beginning of the message.
    """

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        source = package if extra is None else f"'fedclade[{extra}]'"
        super().__init__(
            f"{purpose} needs the package {package!r}; install it with: pip install {source}"
        )


def import_extra(module: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional package.

    Raises
    ------
    MissingExtraError
        If the package is not installed; names the extra of fedclade that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error


def require(*checks: tuple[str, Any, bool, str]) -> None:
    """Check settings, and report all that violate their rule in one error.

    Parameters
    ----------
    checks
        Tuples ``(name, value, holds, rule)``, where ``holds`` is whether the value obeys the rule.

    Raises
    ------
    ConfigError
        If some settings violate their rule; one line for each.
    """
    problems = [
        f"{name} should be {rule}, got {shown(value)}"
        for name, value, holds, rule in checks
        if not holds
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message that a name is unknown, with the nearest known name.

    >>> unknown("algorithm", "clf", ["cfl", "fedavg"])
    "unknown algorithm 'clf'; did you mean 'cfl'? (known: cfl, fedavg)"
    """
    known = sorted(known)
    known_ones = f"known: {', '.join(known)}" if known else "it takes none"
    return f"unknown {kind} {shown(name)}{nearest(name, known)} ({known_ones})"


def nearest(name: object, known: Sequence[str]) -> str:
    """Return the end of a message that suggests the nearest known name; "" if none is near."""
    near = (
        difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=1, cutoff=0.5)
        if isinstance(name, str)
        else []
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened in the middle if it is long.

    >>> shown([1, "two"])
    "[1, 'two']"
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4,300 digits
        return "a number of more than 4,300 digits"


_LONGEST_SHOWN = 200
"""Largest number of characters of a string or number in a message."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _LONGEST_SHOWN
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 20
