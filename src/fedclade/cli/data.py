"""The commands ``data build``, for data in a folder that runs map in place of memory, and ``data schema``."""

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

app = typer.Typer(name="data", help="Put data in a folder, or write the schema of tables.", no_args_is_help=True)


@app.command()
def build(
    source: Annotated[
        str, typer.Argument(help="A config; a name of 'fedclade ls datasets'; files, or their folder; or 'planted'.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make; it must not exist yet.")],
    data_dir: options.DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    override: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write the clients' data to a folder, from which runs map it: memory then holds what is used.

    A run takes it by folder = "DIR" in its data section, without any other key of how data are shared out.

    'planted' makes clients up, of any number: --set data.clients=1000000 data.clusters=4 data.features=20.

    Example: fedclade data build planted --out million --set data.clients=1000000
    """
    building = Building.read(source, options.overrides(override, seed=seed))
    console, start = new_console(), perf_counter()
    columns = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.completed} clients"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task("writing", total=None)
        written = building.build(out, data_dir, lambda clients: bars.update(bar, completed=clients))
    size = sum(file.stat().st_size for file in out.iterdir())
    if not quiet:
        say(console, f"{written}: {size / 1e6:.1f} MB in {perf_counter() - start:.1f} s")
    say(console, f"data folder: {out}")
    if not quiet:
        say(console, f'take it by: fedclade run CONFIG, with folder = "{out}" alone in [data]')


@app.command()
def schema(
    source: Annotated[str, typer.Argument(help="A config; or files, or their folder.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file to write; it must not exist yet.")],
    data_dir: options.DataDir = None,
    override: options.Set = None,
    quiet: options.Quiet = False,
) -> None:
    """Write the schema of tables: columns, categories, labels and words, by which all clients encode their data.

    A run takes it by schema = "FILE" in its data section. The file holds values of the data: look at it before it is
    given to others, and add what only other clients have.

    Example: fedclade data schema hospitals --set data.target=readmitted --out schema.json
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name another file, or remove it")
    found = build_schema(source, options.overrides(override), data_dir)
    found.save(out)
    if not quiet:
        say(new_console(), f'schema: {out}; take it by schema = "{out}" in [data]')
