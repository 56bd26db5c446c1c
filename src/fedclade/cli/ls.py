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

from fedclade.algorithms import ALGORITHMS, algorithm_class
from fedclade.cli.console import new_console
from fedclade.config import config_folder
from fedclade.core import ConfigError, installed, named, summary_of
from fedclade.core import Kind as Group
from fedclade.data import PARTITIONS, SHIFTS, SOURCES, partition_named, shift_named
from fedclade.models import MODELS, model_factory


class Kind(StrEnum):
    """What can be listed."""

    ALGORITHMS = "algorithms"
    DATASETS = "datasets"
    PARTITIONS = "partitions"
    SHIFTS = "shifts"
    MODELS = "models"
    CONFIGS = "configs"


@dataclass(frozen=True)
class Shelf:
    """One kind of thing: fedclade's own, and how another of them is had by its name."""

    own: Mapping[str, object]
    group: Group
    get: Callable[[str], object]  # raises a ConfigError


SHELVES: Mapping[Kind, Shelf] = {
    Kind.ALGORITHMS: Shelf(ALGORITHMS, "algorithms", algorithm_class),
    Kind.DATASETS: Shelf(SOURCES, "data", lambda name: named("data", name, SOURCES, "dataset")),
    Kind.PARTITIONS: Shelf(PARTITIONS, "partitions", partition_named),
    Kind.SHIFTS: Shelf(SHIFTS, "shifts", shift_named),
    Kind.MODELS: Shelf(MODELS, "models", model_factory),
}


def list_known(kind: Annotated[Kind | None, typer.Argument(help="What to list; all if left out.")] = None) -> None:
    """List what there is by name, with a line about each: fedclade's own, and what installed packages add.

    A package adds things by its entry points in the groups fedclade.algorithms, .data, .models, .tasks, .partitions and
    .shifts. Your own need no package: where a config takes a name, it takes module:name too, such as
    my_methods:KMeans in the my_methods.py of the folder where you stand.

    Example: fedclade ls algorithms
    """
    console = new_console()
    for each in Kind if kind is None else [kind]:
        table = Table(box=None, show_header=False, pad_edge=False, title=None if kind else each, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, summary in _lines(each):
            table.add_row(Text(name), Text(summary))
        console.print(table)


def _lines(kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield every name with a line about it."""
    if kind is Kind.CONFIGS:
        yield from ((file.stem, _first_comment(file)) for file in sorted(config_folder().glob("*.toml")))
        return
    shelf = SHELVES[kind]
    yield from ((name, summary_of(thing)) for name, thing in shelf.own.items())
    for name, point in sorted(installed(shelf.group).items()):
        package = "" if point.dist is None else f" ({point.dist.name} {point.dist.version})"
        try:
            line = summary_of(shelf.get(name))
        except ConfigError as error:
            line = str(error)
        if name in shelf.own:
            line = f"hidden by fedclade's own of this name; write {point.value}"
        yield name, line + package


def _first_comment(file: Path) -> str:
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
