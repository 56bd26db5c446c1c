"""The defaults of the public interface, as lines of text; ``python -m tests.defaults`` writes them to defaults.txt.

Public are the names that ``fedclade`` and its rooms export, the public methods of such classes, and the commands.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fedclade
from fedclade.cli import app
from fedclade_papers.command import reproduce

TABLE = Path(__file__).with_name("defaults.txt")
HEAD = """\
# The default of every parameter of the public interface. A changed default changes users' results: it belongs into the
# changelog. After a change that is meant, write this file anew with: python -m tests.defaults
"""
MODULES = ("fedclade.core.rng", "fedclade.report.style")
"""Modules that a room exports whole."""
ROOMS = sorted(path.parent.name for path in Path(fedclade.__file__).parent.glob("*/__init__.py"))


def default_lines() -> list[str]:
    """Return a line for each parameter that has a default, such as ``fedclade.CFL(eps1=0.4)``."""
    lines: set[str] = set()
    seen: set[int] = set()
    for module_name in [
        "fedclade",
        *(f"fedclade.{room}" for room in ROOMS),
        *MODULES,
        "fedclade_papers",
    ]:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            public = getattr(module, name)
            if callable(public) and id(public) not in seen and is_ours(public):
                seen.add(id(public))
                lines.update(lines_of(f"{module_name}.{name}", public))
    for callback in [*(command.callback for command in app.registered_commands), reproduce]:
        assert callback is not None
        lines.update(parameter_lines(f"command {callback.__name__}", callback))
    return sorted(lines)


def is_ours(public: Any) -> bool:
    """Return whether a name is defined here, rather than in another package."""
    return (getattr(public, "__module__", None) or "").startswith("fedclade")


def lines_of(path: str, public: Callable[..., Any]) -> Iterator[str]:
    """Yield the lines of a function, or of a class and its methods."""
    yield from parameter_lines(path, public)
    if not inspect.isclass(public):
        return
    for name, attribute in sorted(vars(public).items()):
        method = getattr(attribute, "__func__", attribute)
        if not name.startswith("_") and inspect.isfunction(method):
            yield from parameter_lines(f"{path}.{name}", method)


def parameter_lines(path: str, function: Callable[..., Any]) -> Iterator[str]:
    """Yield a line for each parameter with a default; those of a dataclass that are made anew each time are made."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # an exception, a protocol, or the like
        return
    fields = (
        {field.name: field for field in dataclasses.fields(function)}
        if dataclasses.is_dataclass(function)
        else {}
    )
    for parameter in parameters:
        default = parameter.default
        if default is inspect.Parameter.empty:
            continue
        field = fields.get(parameter.name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
            if dataclasses.is_dataclass(field.default_factory):  # whose own defaults are listed
                yield f"{path}({parameter.name}={type(default).__name__}())"
                continue
        yield f"{path}({parameter.name}={text_of(default)})"


def text_of(value: Any) -> str:
    """Return a value as text that is the same everywhere."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))


if __name__ == "__main__":
    TABLE.write_text(HEAD + "".join(f"{line}\n" for line in default_lines()))
