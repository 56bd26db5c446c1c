"""Import of a package's public names at their first use (PEP 562).

``import fedclade`` and ``fedclade --help`` need few of fedclade's modules, and torch takes seconds to
import. So the ``__init__.py`` of a package imports its public names only for type checkers, in a
block ``if TYPE_CHECKING:``, and :func:`lazy_names` reads from this block in which module each name
is defined. The block stays the only list of the names and their modules.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """Return the function ``__getattr__`` of a package that imports names at their first use.

    Parameters
    ----------
    package
        Full name of the package, or of a single module. Its file (``__init__.py``) imports the
        names, in the form ``from MODULE import NAME``, in a block ``if TYPE_CHECKING:``.

    Returns
    -------
    Callable
        Function that returns the value of a name, or raises an AttributeError if the package has
        no such name. A value is stored in the package, so that later uses of the name are as fast
        as those of any other.
    """

    @cache
    def modules() -> dict[str, str]:
        return dict(_read_modules(package))

    def import_name(name: str) -> Any:
        module = modules().get(name, package)
        value = _import_submodule(package, name) if module == package else _get(module, name)
        vars(sys.modules[package])[name] = value
        return value

    class Package(ModuleType):
        """Package in which a public name is never replaced by a submodule of the same name.

        Python stores each imported submodule in its package, such as ``fedclade.data.federation``,
        and would so hide the function of this name.
        """

        def __setattr__(self, name: str, value: Any) -> None:
            is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{package}.{name}"
            if not is_submodule or modules().get(name, package) == package:
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            """Pickle the package as its name: functions that are sent to actors may refer to it."""
            return import_module, (package,)

        def __dir__(self) -> Iterable[str]:
            """Return also the names that are not imported yet, for completion in a console."""
            return {*super().__dir__(), *vars(self).get("__all__", ())}

    sys.modules[package].__class__ = Package
    return import_name


def _get(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _import_submodule(package: str, name: str) -> ModuleType:
    """Import a submodule of a package; raise an AttributeError if the package has no such name."""
    path = f"{package}.{name}"
    # Python and its tools ask every module for names such as __path__.
    cannot_be_module = name.startswith("__") or not name.isidentifier()
    if cannot_be_module or not hasattr(sys.modules[package], "__path__") or find_spec(path) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(path)


def _read_modules(package: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a package imports by ``from MODULE import NAME``, and its module.

    The imports are read from the compiled file, which contains also those for type checkers only.
    Unlike the source, it is always present, also in an application that ships no sources.
    """
    loader: Any = getattr(find_spec(package), "loader", None)
    if not hasattr(loader, "get_code"):
        raise ImportError(f"the names of {package} cannot be read: {loader} has no compiled code")
    module = ""
    for instruction in dis.get_instructions(loader.get_code(package)):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            yield instruction.argval, module
