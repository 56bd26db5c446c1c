"""Private modules of Flower: imported in one module only, and each import still exists."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from fedclade.flower import flwr_internals

FILE = Path(flwr_internals.__file__)
SOURCE = FILE.parents[1]
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")


@cache
def imports_of(file: Path) -> list[tuple[str, str]]:
    """Return each import of a file, as a module and a name in it; the name is empty for a module."""
    text = file.read_text(encoding="utf-8")
    return [*_list_imports(text)] if "flwr" in text else []


def _list_imports(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                yield node.module, each.name
        elif isinstance(node, ast.Import):
            for each in node.names:
                yield each.name, ""


PRIVATE = [(module, name) for module, name in imports_of(FILE) if module.startswith("flwr.")]


def users_of(name: str) -> list[str]:
    """Return the modules that use a name of ``flwr_internals``."""
    wanted = ("fedclade.flower.flwr_internals", name)
    files = sorted(SOURCE.rglob("*.py"))
    return [str(file.relative_to(SOURCE)) for file in files if wanted in imports_of(file)]


def why_moved(module: str, name: str) -> str:
    """Return what to change if an import does not exist any more; empty if it exists."""
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return (
            f"flwr {version('flwr')} has no {module}.{name}: find its new place, correct the import "
            f"in src/fedclade/flower/{FILE.name}, and check what uses it: {', '.join(users_of(name))}"
        )
    return ""


@pytest.mark.parametrize(("module", "name"), PRIVATE)
def test_a_private_import_exists_and_is_used(module: str, name: str):
    assert why_moved(module, name) == ""
    assert users_of(name), f"{name} is not used: remove it from {FILE.name}"


def test_an_import_that_has_moved_is_named_with_what_uses_it():
    assert why_moved("flwr.superlink.grids", "HttpGrid") == (
        f"flwr {version('flwr')} has no flwr.superlink.grids.HttpGrid: find its new place, correct "
        "the import in src/fedclade/flower/flwr_internals.py, and check what uses it: "
        "flower/exchange.py"
    )
    assert why_moved("flwr.supercore.run", "Runs").startswith("flwr ")


def test_no_other_module_imports_private_modules():
    found: list[str] = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file == FILE:
            continue
        for module, name in imports_of(file):
            if module.split(".")[0] == "flwr" and module not in PUBLIC:
                found.append(f"{file.relative_to(SOURCE)}: {module} {name}".rstrip())
    assert found == [], f"import private modules of flwr in {FILE.name} only"


def test_exactly_the_imports_are_exported():
    assert sorted(flwr_internals.__all__) == sorted(name for _, name in PRIVATE)
