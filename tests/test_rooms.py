"""The layout of docs/design.md: rooms at the top, each with its door, and imports through it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedclade

HOUSE = Path(fedclade.__file__).parent
ROOMS = sorted(path.name for path in HOUSE.iterdir() if (path / "__init__.py").is_file())
AT_THE_TOP = {"__init__.py", "__main__.py", "py.typed", "__pycache__", "configs"}

OPTIONAL = {"fedclade.report.page"}
"""Rooms within a room, which need packages that the rest of the room does not."""


def test_at_the_top_are_rooms_alone():
    there = {
        path.name for path in HOUSE.iterdir() if path.is_file() or next(path.rglob("*.py"), None)
    }
    assert there - AT_THE_TOP == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_there_and_exports_what_others_may_use(room: str):
    module = importlib.import_module(f"fedclade.{room}")
    assert "import" in (module.__doc__ or ""), "who may import it"
    assert sorted(module.__all__) == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_from_rooms_and_not_from_their_files(room: str):
    assert [
        f"{path.relative_to(HOUSE)}: {module}"
        for path, module in imports_of(room)
        if module.count(".") > 1
    ] == []


def imports_of(room: str) -> Iterator[tuple[Path, str]]:
    """Yield what the files of a room import of other rooms."""
    for path in sorted((HOUSE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if (
                    name.startswith("fedclade.")
                    and name.split(".")[1] != room
                    and name not in OPTIONAL
                ):
                    yield path, name
