"""Command ``ls``: list built-in and installed algorithms, data sets, models and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fedclade import catalogue
from fedclade.catalogue import ENGINES, REMOTE
from fedclade.cli.options import Kind, new_console
from fedclade.config import config_folder
from fedclade.core import ConfigError, installed, summary_of
from fedclade.core import Kind as Group


@dataclass(frozen=True)
class Listing:
    """Entries of one kind, such as algorithms.

    ``own`` has the summaries of built-in entries by name. Entries of installed packages are found
    in the group ``group`` of entry points.
    """

    own: Mapping[str, str]
    group: Group


LISTINGS: Mapping[Kind, Listing] = {
    Kind.ALGORITHMS: Listing(catalogue.CREDITED, "algorithms"),
    Kind.DATASETS: Listing(catalogue.DATASETS, "data"),
    Kind.PARTITIONS: Listing(catalogue.PARTITIONS, "partitions"),
    Kind.SHIFTS: Listing(catalogue.SHIFTS, "shifts"),
    Kind.MODELS: Listing(catalogue.MODELS, "models"),
    Kind.TASKS: Listing(catalogue.TASKS, "tasks"),
    Kind.CALLBACKS: Listing(catalogue.TRACKERS, "callbacks"),
}


def list_known(*, kind: Kind | None) -> None:
    """Carry out the command ``fedclade ls``."""
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
    listing = LISTINGS[kind]
    yield from listing.own.items()
    for name, point in sorted(installed(listing.group).items()):
        package = "" if point.dist is None else f" ({point.dist.name} {point.dist.version})"
        yield name, _describe_installed(name, point.value, listing) + package


def _describe_installed(name: str, value: str, listing: Listing) -> str:
    """Return the summary of an entry of a package, or the reason why the entry cannot be used.

    Parameters
    ----------
    name
        Name of the entry.
    value
        Object that the entry point names, as ``module:object``.
    listing
        Entries of the same kind.
    """
    if name in listing.own:
        return f"hidden by the built-in entry of this name: use {value}"
    # Only entries of other packages are imported here, and only they need torch.
    from fedclade.cli.installed_entries import load_entry

    try:
        return summary_of(load_entry(listing.group, name))
    except ConfigError as error:
        return str(error)


def _read_first_comment(file: Path) -> str:
    """Return the comment in the first line of a config, or an empty text."""
    line = file.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
