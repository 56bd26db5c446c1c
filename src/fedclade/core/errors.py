"""Exceptions of fedclade, one class for each kind of failure, and functions that format messages.

Every message states the bad value and how to fix the problem.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import reprlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any


class FedcladeError(Exception):
    """Base class of every error that fedclade raises on purpose."""


class ConfigError(FedcladeError, ValueError):
    """A setting is unknown, has the wrong type or is out of range; one line for each problem."""


class UntrustedNameError(ConfigError):
    """An untrusted config names an object as ``module:name``, whose import would run code.

    A config is untrusted if a server sent it, or if it is in a run folder of unknown origin.
    """


class ArgumentError(ConfigError, TypeError):
    """An argument of a function call is unknown, missing or given twice.

    The class is also a ``TypeError``, which Python raises for such calls.
    """


class DataError(FedcladeError):
    """Data is missing, unreadable, or cannot be partitioned as configured."""


class ModelError(FedcladeError):
    """The model cannot be built, or does not fit the data."""


class EngineError(FedcladeError):
    """Local training failed for a reason other than the model or the data.

    For example, a worker process ended, or the engine does not support the settings.
    """


class UpdateError(FedcladeError):
    """A model update, or a quantity that is computed from updates, is unusable or unavailable."""


class PrivacyError(FedcladeError):
    """A client must not send an update, for reasons of differential privacy.

    The client's privacy budget is spent, or the number of its earlier releases is unknown.
    """


class PolicyError(FedcladeError):
    """A client's policy forbids a query, or the policy's limit on such queries is reached."""


class RunError(FedcladeError):
    """A run folder is missing, exists already, or is damaged."""


class TreeError(FedcladeError, LookupError):
    """A client, a node or a level does not exist in the parameter tree."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or a run has no checkpoint from which it can continue."""


class RunInterrupted(FedcladeError):  # noqa: N818 -- nothing went wrong
    """A run stopped on request, for example because the user pressed Ctrl-C.

    Parameters
    ----------
    happened
        Description of when the run stopped, such as "interrupted after round 3".
    then
        Description of what the user can do next, such as how to continue the run.
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
        Name of the missing package.
    extra
        Name of the extra of fedclade that installs the package; None if the package has to be
        installed by its own name.
    purpose
        The feature that needs the package, such as "the report"; the message begins with it.
    """

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        source = package if extra is None else f"'fedclade[{extra}]'"
        super().__init__(
            f"{purpose} needs the package {package!r}; install it with: pip install {source}"
        )


def import_extra(module: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import and return a module of an optional package.

    Parameters
    ----------
    module
        Name of the module, such as ``"package.module"``.
    package, extra, purpose
        As for :class:`MissingExtraError`, for the message.

    Raises
    ------
    MissingExtraError
        If the package is not installed; the message names the extra of fedclade that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error


def check_extra(module: str, package: str, extra: str, purpose: str) -> None:
    """Check that an optional package is installed, without importing it.

    Parameters and errors are as for :func:`import_extra`.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(package, extra, purpose)


def require(*checks: tuple[str, Any, bool, str]) -> None:
    """Raise one error that lists all settings that violate their rule, if there are any.

    Parameters
    ----------
    checks
        Tuples ``(name, value, holds, rule)``: the name of a setting, its value, whether the value
        satisfies the rule, and the rule in words. A message has the form "NAME should be RULE, got
        VALUE".

    Raises
    ------
    ConfigError
        If some settings violate their rule; the message has a line for each setting.
    """
    problems = [
        f"{name} should be {rule}, got {shown(value)}"
        for name, value, holds, rule in checks
        if not holds
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the error message for an unknown name, with the nearest known name as a suggestion.

    >>> unknown("algorithm", "clf", ["cfl", "fedavg"])
    "unknown algorithm 'clf'; did you mean 'cfl'? (known: cfl, fedavg)"
    """
    known = sorted(known)
    known_ones = f"known: {', '.join(known)}" if known else "there are no valid names"
    return f"unknown {kind} {shown(name)}{nearest(name, known)} ({known_ones})"


def nearest(name: object, known: Sequence[str]) -> str:
    """Return the end of an error message that suggests the nearest known name.

    The result is "" if no known name is similar.
    """
    near = (
        difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=1, cutoff=0.5)
        if isinstance(name, str)
        else []
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return the ``repr`` of a value for an error message; a long ``repr`` is shortened.

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
