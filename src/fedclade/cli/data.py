"""Commands ``data build``, which writes memory-mapped data, and ``data schema``."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from fedclade.cli import options
from fedclade.cli.options import new_console, say
from fedclade.config import Building, build_schema
from fedclade.core import ConfigError


def build(
    *,
    source: str,
    out: Path,
    data_dir: Path | None,
    seed: int | None,
    override: list[str] | None,
    quiet: bool,
) -> None:
    """Carry out the command ``fedclade data build``."""
    building = Building.read(source, options.overrides(override, seed=seed))
    console = new_console()
    start = perf_counter()
    columns = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.completed} clients"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task("writing", total=None)
        written = building.build(
            out, data_dir, lambda clients: progress.update(bar, completed=clients)
        )
    size = sum(file.stat().st_size for file in out.iterdir())
    if not quiet:
        say(console, f"{written}: {size / 1e6:.1f} MB in {perf_counter() - start:.1f} s")
    say(console, f"data folder: {out}")
    if not quiet:
        say(console, f'use it with: fedclade run CONFIG, with only folder = "{out}" in [data]')


def schema(
    *, source: str, out: Path, data_dir: Path | None, override: list[str] | None, quiet: bool
) -> None:
    """Carry out the command ``fedclade data schema``."""
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another file, or remove it")
    table_schema = build_schema(source, options.overrides(override), data_dir)
    table_schema.save(out)
    if not quiet:
        say(new_console(), f'schema: {out}; use it with schema = "{out}" in [data]')
