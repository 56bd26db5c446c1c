"""Commands ``data build``, which writes memory-mapped data, and ``data schema``."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from fedclade.cli import options
from fedclade.cli.options import new_console, say
from fedclade.config import Building, build_schema
from fedclade.core import ConfigError

app = typer.Typer(
    name="data",
    help="Write data into a folder for memory mapping, or write the schema of tables.",
    no_args_is_help=True,
)


@app.command()
def build(
    source: Annotated[
        str,
        typer.Argument(
            help="Config, name of a data set in 'fedclade ls datasets', files, folder of files, or 'planted'."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist yet.")],
    data_dir: options.DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    override: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write the clients' data into a folder that runs can map into memory, in place of loading it.

    To use the folder, set folder = "DIR" in the section "data" of a config. Leave out the keys
    that divide data among clients, such as partition.

    'planted' generates synthetic clients: --set data.clients=1000000 --set data.clusters=4.

    Example: fedclade data build planted --out million --set data.clients=1000000
    """
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


@app.command()
def schema(
    source: Annotated[str, typer.Argument(help="Config, files, or folder of files.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; it must not exist yet.")],
    data_dir: options.DataDir = None,
    override: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write the schema of tables: columns, categories, labels and words for encoding the data.

    To use the schema, set schema = "FILE" in the section "data" of a config. In a federation over a
    network, only the server needs the file. The file contains values of the data: check it before
    you share it, and add values that only other clients have.

    Example: fedclade data schema hospitals/hospitals.toml --out schema.json
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another file, or remove it")
    table_schema = build_schema(source, options.overrides(override), data_dir)
    table_schema.save(out)
    if not quiet:
        say(new_console(), f'schema: {out}; use it with schema = "{out}" in [data]')
