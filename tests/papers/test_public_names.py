"""What the papers' package uses of fedclade: only names that fedclade or one of its packages exports."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import fedclade
import fedclade_papers

LIBRARY = Path(fedclade.__file__).parent
PAPERS = Path(fedclade_papers.__file__).parent
ROOMS = {f"fedclade.{path.parent.name}" for path in LIBRARY.glob("*/__init__.py")}


def read_sources(package: Path) -> dict[str, str]:
    """Return the text of each file of a package."""
    return {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield each module of fedclade that a file imports from, and the name; no name for ``import fedclade.module``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.startswith("fedclade.")
            )
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fedclade":
            yield from ((str(node.module), alias.name) for alias in node.names)


def is_public(module: str, name: str) -> bool:
    return module in {"fedclade", *ROOMS} and name in importlib.import_module(module).__all__


def test_every_import_is_of_a_public_name():
    sources = read_sources(PAPERS)
    assert len(sources) > 20
    imports = {each for source in sources.values() for each in imports_of(source)}
    assert len(imports) > 30
    assert [each for each in sorted(imports) if not is_public(*each)] == []


def test_an_import_that_is_not_public_is_noticed():
    def problems(source: str) -> list[tuple[str, str]]:
        return [each for each in imports_of(source) if not is_public(*each)]

    assert (
        problems(
            "from fedclade import CFL\nfrom fedclade.core import rng, unknown\nimport fedclade"
        )
        == []
    )
    assert problems("from fedclade.core.rng import generator") == [
        ("fedclade.core.rng", "generator")
    ]
    assert problems("from fedclade.runs import Run, backend") == [("fedclade.runs", "backend")]
    assert problems("import fedclade.core") == [("fedclade.core", "")]


def test_every_function_and_class_that_is_imported_says_what_it_does():
    imports = {each for source in read_sources(PAPERS).values() for each in imports_of(source)}
    values = {name: getattr(importlib.import_module(module), name) for module, name in imports}
    kinds = inspect.isfunction, inspect.isclass, inspect.ismodule
    described = {
        name: value for name, value in values.items() if any(is_kind(value) for is_kind in kinds)
    }
    assert len(described) > 30
    assert [name for name, value in described.items() if not value.__doc__] == []


def test_the_library_never_names_the_papers_package():
    sources = read_sources(LIBRARY)
    assert len(sources) > 100
    assert [path for path, source in sources.items() if "fedclade_papers" in source] == []
