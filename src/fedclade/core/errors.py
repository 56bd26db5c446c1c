"""One exception class per broken contract; every message names the value seen and the fix."""

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
    """A setting is unknown, of the wrong type or out of range; one line for each problem."""


class UntrustedNameError(ConfigError):
    """A config by somebody else names a ``module:name``, and to import it would run code."""


class ArgumentError(ConfigError, TypeError):
    """A call has an argument that is unknown, is missing, or is given twice; it is a ``TypeError`` too."""


class DataError(FedcladeError):
    """Data is missing, unreadable, or cannot be partitioned as configured."""


class ModelError(FedcladeError):
    """The model cannot be built, or does not fit the data."""


class EngineError(FedcladeError):
    """Local training broke down for a reason that lies in neither the model nor the data."""


class UpdateError(FedcladeError):
    """A client answered with something that is not a usable update."""


class PrivacyError(FedcladeError):
    """An update may not leave a client: its privacy budget is spent, or what it has released is not known."""


class PolicyError(FedcladeError):
    """A query that a client's own policy forbids, or one more than the policy allows."""


class RunError(FedcladeError):
    """A run folder is missing, exists already, or is damaged."""


class TreeError(FedcladeError, LookupError):
    """A client or a node is not in the parameter tree, or a level is not on a client's path."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or there is none that a run can go on from."""


class RunInterrupted(FedcladeError):  # noqa: N818 -- nothing went wrong
    """A run stopped on request; ``happened`` says when, ``then`` what can be done now."""

    def __init__(self, happened: str, then: str) -> None:
        super().__init__(f"{happened}; {then}")
        self.happened = happened


class FolderInUseError(RunError):
    """Another process, or another run of this one, is writing to a run folder."""


class MissingExtraError(FedcladeError, ImportError):
    """An optional dependency is not installed.

    ``extra`` is the extra of fedclade that installs the package; None for a package that is
    installed by its own name.
    """

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        source = package if extra is None else f"'fedclade[{extra}]'"
        super().__init__(
            f"{purpose} needs the package {package!r}; install it with: pip install {source}"
        )


def import_extra(module: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional package; without it, name the extra of fedclade that installs the package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error


def require(*checks: tuple[str, Any, bool, str]) -> None:
    """Check settings ``(name, value, holds, rule)``; report every one that does not hold in a single ConfigError."""
    problems = [
        f"{name} should be {rule}, got {shown(value)}"
        for name, value, holds, rule in checks
        if not holds
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Say that a name is unknown, and suggest the nearest known one.

    >>> unknown("algorithm", "clf", ["cfl", "fedavg"])
    "unknown algorithm 'clf'; did you mean 'cfl'? (known: cfl, fedavg)"
    """
    known = sorted(known)
    known_ones = f"known: {', '.join(known)}" if known else "it takes none"
    return f"unknown {kind} {shown(name)}{nearest(name, known)} ({known_ones})"


def nearest(name: object, known: Sequence[str]) -> str:
    """Return the question whether the nearest known name was meant, or nothing where none is near."""
    near = (
        difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=1, cutoff=0.5)
        if isinstance(name, str)
        else []
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return a value for a message: its ``repr``, shortened in the middle, however long or nested it is.

    >>> shown([1, "two"])
    "[1, 'two']"
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of more than 4,300 digits"


_LONGEST_SHOWN = 200
"""Characters of a string or a number in a message."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _LONGEST_SHOWN
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 20
