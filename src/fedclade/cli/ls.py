"""Command ``ls``: list built-in and installed algorithms, data sets, models and more."""

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
    """Kind of entries that the command ``ls`` can list."""

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
class Catalogue:
    """Entries of one kind, such as algorithms.

    ``own`` has the summaries of built-in entries by name. Entries of installed packages are found
    in the group ``group`` of entry points.
    """

    own: Mapping[str, str]
    group: Group
    get: Callable[[str], object]
    """Function that loads an installed entry by name, or raises a ConfigError."""


def _summarize(entries: Mapping[str, object]) -> Mapping[str, str]:
    """Return the summary of each entry, by name."""
    return {name: summary_of(entry) for name, entry in entries.items()}


def _load_task(name: str) -> object:
    """Return the object that summarizes a task of an installed package.

    The result is the function that makes the task, whose docstring is the summary. If the package
    provides the task itself, the result is a text with the task's settings.
    """
    task = build_task(name)
    entry = named("tasks", name, {}, "task")
    if callable(entry):
        return entry
    return ", ".join(f"{key} {value}" for key, value in task.described.items() if value)


def _load_dataset(name: str) -> object:
    """Return the data set that an installed package adds with this name."""
    return named("data", name, {}, "dataset")


def _load_callback(name: str) -> object:
    """Return the callback that an installed package adds with this name."""
    return named("callbacks", name, {}, "callback")


CATALOGUES: Mapping[Kind, Catalogue] = {
    Kind.ALGORITHMS: Catalogue(_summarize(ALGORITHMS), "algorithms", method_named),
    Kind.DATASETS: Catalogue(_summarize(SOURCES), "data", _load_dataset),
    Kind.PARTITIONS: Catalogue(_summarize(PARTITIONS), "partitions", find_partition),
    Kind.SHIFTS: Catalogue(_summarize(SHIFTS), "shifts", find_shift),
    Kind.MODELS: Catalogue(_summarize(MODELS), "models", model_factory),
    Kind.TASKS: Catalogue(SUMMARIES, "tasks", _load_task),
    Kind.CALLBACKS: Catalogue(_summarize(TRACKERS), "callbacks", _load_callback),
}


def list_known(
    kind: Annotated[
        Kind | None, typer.Argument(help="Kind of entries to list. Default: all.")
    ] = None,
) -> None:
    """List algorithms, data sets, models and more, built in or from installed packages.

    Packages add entries with the entry points fedclade.algorithms, fedclade.models and so on.

    Your own code needs no package: wherever a config takes a name, it also takes module:name.

    For example, my_methods:KMeans is the class KMeans in the current folder's my_methods.py.

    Example: fedclade ls algorithms
    """
    console = new_console()
    for each in Kind if kind is None else [kind]:
        if kind is None:
            console.print(Text(f"\n{each}", style="underline"))
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, summary in _list_entries(each):
            table.add_row(Text(name), Text(summary))
        console.print(table)


def _list_entries(kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield the name and the summary of every entry of a kind."""
    if kind is Kind.CONFIGS:
        for file in sorted(config_folder().glob("*.toml")):
            yield file.stem, _read_first_comment(file)
        return
    if kind is Kind.ENGINES:
        yield from {**ENGINES, **REMOTE}.items()
        return
    catalogue = CATALOGUES[kind]
    yield from catalogue.own.items()
    for name, point in sorted(installed(catalogue.group).items()):
        package = "" if point.dist is None else f" ({point.dist.name} {point.dist.version})"
        yield name, _describe_installed(name, point.value, catalogue) + package


def _describe_installed(name: str, value: str, catalogue: Catalogue) -> str:
    """Return the summary of an entry of a package, or the reason why the entry cannot be used.

    Parameters
    ----------
    name
        Name of the entry.
    value
        Object that the entry point names, as ``module:object``.
    catalogue
        Entries of the same kind.
    """
    if name in catalogue.own:
        return f"hidden by the built-in entry of this name: use {value}"
    try:
        return summary_of(catalogue.get(name))
    except ConfigError as error:
        return str(error)


def _read_first_comment(file: Path) -> str:
    """Return the comment in the first line of a config, or an empty text."""
    line = file.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
