"""Commands ``inspect`` and ``init``: describe tables of data, and write a config for the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli import options
from fedclade.cli.options import new_console, say
from fedclade.config import TableFiles, write_starter
from fedclade.core import ConfigError, RunError, write_text
from fedclade.data import TextFormat, inspect_files
from fedclade.report.page import describe_inspection, inspection_page, inspection_tables, write_page

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILES...", help="Tables, a pattern in quotes, or a folder of tables."),
]
Client = Annotated[
    str | None,
    typer.Option(
        "--client", help="Column with the client of a row. Default: each file, or a guess."
    ),
]
Target = Annotated[
    str | None, typer.Option("--target", help="Column to predict. Default: a guess.")
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Encoding, as 'cp1252'. Default: detected.")
]
Separator = Annotated[
    str | None, typer.Option("--separator", help="Character between cells. Default: detected.")
]
Decimal = Annotated[
    str | None, typer.Option("--decimal", help="Decimal mark, '.' or ','. Default: detected.")
]
Dates = Annotated[
    str | None, typer.Option("--dates", help="Format of dates, as '%d.%m.%Y'. Default: detected.")
]


def inspect_tables(
    files: Files,
    client: Client = None,
    target: Target = None,
    encoding: Encoding = None,
    separator: Separator = None,
    decimal: Decimal = None,
    dates: Dates = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Also write a page.")
    ] = None,
) -> None:
    """Show the clients, columns and problems of tables, without training.

    Example: fedclade inspect hospitals/*.csv --out hospitals.html
    """
    text_format = TextFormat(encoding=encoding, separator=separator, decimal=decimal, dates=dates)
    if out is not None and out.suffix != ".html":
        raise RunError(f"--out should end in .html, got {out}")
    options.make_parent_folder(out)
    found = TableFiles.find(files)
    inspection = inspect_files(found.paths, client, target, text_format)
    console = new_console()
    for table in inspection_tables(inspection):
        console.print(table)
    for line in describe_inspection(inspection):
        say(console, line)
    if out is not None:
        say(console, f"page: {write_page(inspection_page(inspection, found.pattern), out)}")


def init_config(
    files: Files,
    client: Client = None,
    target: Target = None,
    encoding: Encoding = None,
    separator: Separator = None,
    decimal: Decimal = None,
    dates: Dates = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="CONFIG.toml",
            help="File to write; it must not exist yet. Default: the name of the folder or file.",
        ),
    ] = None,
) -> None:
    """Write a config for tables, in which each assumption is a line that you can change.

    Example: fedclade init hospitals/*.csv --target readmitted --out hospitals.toml
    """
    text_format = TextFormat(encoding=encoding, separator=separator, decimal=decimal, dates=dates)
    found = TableFiles.find(files)
    config = Path(f"{found.title}.toml") if out is None else out
    check_new_config(config)
    options.make_parent_folder(config)
    inspection = inspect_files(found.paths, client, target, text_format)
    text = write_starter(inspection, found, config, text_format)
    try:
        write_text(config, text)
    except OSError as error:
        raise RunError(f"cannot write {config}: {error}; choose another file") from error
    console = new_console()
    for line in describe_inspection(inspection):
        say(console, line)
    say(console, f"config: {config}; read it, change it, and start with: fedclade run {config}")


def check_new_config(config: Path) -> None:
    """Check that a config can be written to a file: it ends in .toml, and does not exist yet."""
    if config.suffix != ".toml":
        raise ConfigError(f"--out should end in .toml, got {config}")
    if config.exists():
        raise ConfigError(f"{config} exists already; choose another file with --out, or remove it")
