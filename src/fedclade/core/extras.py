"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedclade.core.errors import MissingExtraError


def import_extra(module: str, package: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional package.

    Parameters
    ----------
    module, package
        The module, and the package that has it.
    extra
        The extra of fedclade that installs the package.
    purpose
        What needs it, for the message: ``"decoding images"``.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error
