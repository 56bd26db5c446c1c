"""The command ``ls``: what there is by name, fedclade's own and what installed packages add."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fedclade.algorithms import ALGORITHMS, method_named
from fedclade.cli.options import new_console
from fedclade.config import config_folder
from fedclade.core import ConfigError, installed, named, summary_of
from fedclade.core import Kind as Group
from fedclade.data import PARTITIONS, SHIFTS, SOURCES, find_partition, find_shift
from fedclade.models import MODELS, model_factory
from fedclade.tasks import SUMMARIES, build_task
from fedclade.trackers import TRACKERS
from fedclade.training import ENGINES, REMOTE


class Kind(StrEnum):
    """What can be listed."""

    ALGORITHMS = "algorithms"
    DATASETS = "datasets"
    PARTITIONS = "partitions"
    SHIFTS = "shifts"
    MODELS = "models"
    TASKS = "tasks"
    ENGINES = "engines"
    CALLBACKS = "callbacks"
    CONFIGS = "configs"


@dataclass(frozen=True)
class Shelf:
    """One kind of thing: the lines about fedclade's own, and where a package's come from."""

    own: Mapping[str, str]
    group: Group
    get: Callable[[str], object]  # by name; raises a ConfigError


def _lines_about(things: Mapping[str, object]) -> Mapping[str, str]:
    return {name: summary_of(thing) for name, thing in things.items()}


def _task(name: str) -> object:
    """Return what a package's task is made of, or the function that makes it."""
    task, found = build_task(name), named("tasks", name, {}, "task")
    return found if callable(found) else ", ".join(f"{key} {value}" for key, value in task.described.items() if value)


SHELVES: Mapping[Kind, Shelf] = {
    Kind.ALGORITHMS: Shelf(_lines_about(ALGORITHMS), "algorithms", method_named),
    Kind.DATASETS: Shelf(_lines_about(SOURCES), "data", lambda name: named("data", name, {}, "dataset")),
    Kind.PARTITIONS: Shelf(_lines_about(PARTITIONS), "partitions", find_partition),
    Kind.SHIFTS: Shelf(_lines_about(SHIFTS), "shifts", find_shift),
    Kind.MODELS: Shelf(_lines_about(MODELS), "models", model_factory),
    Kind.TASKS: Shelf(SUMMARIES, "tasks", _task),
    Kind.CALLBACKS: Shelf(_lines_about(TRACKERS), "callbacks", lambda name: named("callbacks", name, {}, "callback")),
}


def list_known(kind: Annotated[Kind | None, typer.Argument(help="What to list; all if left out.")] = None) -> None:
    """List what there is by name, with a line about each: fedclade's own, and what installed packages add.

    A package adds to it by its entry points fedclade.algorithms, fedclade.models and so on.

    Your own needs no package: where a config takes a name, it takes module:name too.

    So an algorithm may be my_methods:KMeans, a class in the my_methods.py of this folder.

    Example: fedclade ls algorithms
    """
    console = new_console()
    for each in Kind if kind is None else [kind]:
        if kind is None:
            console.print(Text(f"\n{each}", style="underline"))
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, line in _lines(each):
            table.add_row(Text(name), Text(line))
        console.print(table)


def _lines(kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield every name with a line about it."""
    if kind is Kind.CONFIGS:
        yield from ((file.stem, _first_comment(file)) for file in sorted(config_folder().glob("*.toml")))
        return
    if kind is Kind.ENGINES:
        yield from {**ENGINES, **REMOTE}.items()
        return
    shelf = SHELVES[kind]
    yield from shelf.own.items()
    for name, point in sorted(installed(shelf.group).items()):
        package = "" if point.dist is None else f" ({point.dist.name} {point.dist.version})"
        yield name, _about(name, point.value, shelf) + package


def _about(name: str, value: str, shelf: Shelf) -> str:
    """Return a line about what a package adds, or why it cannot be had."""
    if name in shelf.own:
        return f"hidden by fedclade's own of this name: write {value}"
    try:
        return summary_of(shelf.get(name))
    except ConfigError as error:
        return str(error)


def _first_comment(file: Path) -> str:
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
