"""No two modules import each other, whatever lies between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fedclade
import fedclade_papers

PACKAGES = [Path(package.__file__).parent for package in (fedclade, fedclade_papers)]


def test_no_modules_import_each_other():
    imports = {name: set(find_imports(path)) for name, path in modules().items()}
    assert len(imports) > 100
    assert sum(map(len, imports.values())) > 500
    assert find_cycle(imports) == []


def test_a_cycle_is_found():
    cycle = find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert cycle[0] == cycle[-1]
    assert sorted(cycle[1:]) == ["a", "b", "c"]


def modules() -> dict[str, Path]:
    """Return the file of each module; packages, which only gather names, are left out."""
    return {
        name_of(path, package): path
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py"
    }


def name_of(path: Path, package: Path) -> str:
    """Return the dotted name of a module of a package."""
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def find_imports(path: Path) -> Iterator[str]:
    """Yield the modules of the packages that a module imports when it is imported itself.

    Imports inside a function are left out, since they happen later, and so are those that only a type checker sees.
    """
    known = modules()
    pending: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING":
            pending += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.Try):
            pending += statement.body
        elif isinstance(statement, ast.ImportFrom):
            candidates = [
                statement.module,
                *(f"{statement.module}.{alias.name}" for alias in statement.names),
            ]
            yield from (name for name in candidates if name in known)
        elif isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name in known)


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, the first of them again at the end; none if there is no cycle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
