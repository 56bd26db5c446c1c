"""Commands ``inspect`` and ``init``: describe tables of data, and write a config for the tables."""

from __future__ import annotations

from pathlib import Path

from fedclade.cli import arguments
from fedclade.cli.options import new_console, say
from fedclade.config import TableFiles, write_starter
from fedclade.core import ConfigError, RunError, write_text
from fedclade.data import TextFormat, inspect_files
from fedclade.report.page import describe_inspection, inspection_page, inspection_tables, write_page


def inspect_tables(
    *,
    files: list[str],
    client: str | None,
    target: str | None,
    encoding: str | None,
    separator: str | None,
    decimal: str | None,
    dates: str | None,
    out: Path | None,
) -> None:
    """Carry out the command ``fedclade inspect``."""
    text_format = TextFormat(encoding=encoding, separator=separator, decimal=decimal, dates=dates)
    if out is not None and out.suffix != ".html":
        raise RunError(f"--out should end in .html, got {out}")
    arguments.make_parent_folder(out)
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
    *,
    files: list[str],
    client: str | None,
    target: str | None,
    encoding: str | None,
    separator: str | None,
    decimal: str | None,
    dates: str | None,
    out: Path | None,
) -> None:
    """Carry out the command ``fedclade init``."""
    text_format = TextFormat(encoding=encoding, separator=separator, decimal=decimal, dates=dates)
    found = TableFiles.find(files)
    config = Path(f"{found.title}.toml") if out is None else out
    check_new_config(config)
    arguments.make_parent_folder(config)
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
