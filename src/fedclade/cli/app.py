"""Typer application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from fedclade import __version__
from fedclade.cli import commands
from fedclade.cli.plugged import PluggedGroup

DESCRIPTION = "Clustered federated learning: find groups of clients with similar data from their model updates."

app = typer.Typer(
    name="fedclade",
    cls=PluggedGroup,
    help=DESCRIPTION,
    epilog="Start with: fedclade demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
"""The command line, as a Typer app."""


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"fedclade {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Clustered federated learning: find groups of similar clients from their model updates."""


app.command()(commands.demo)
app.command("example")(commands.copy_example)
app.command("inspect")(commands.inspect_tables)
app.command("init")(commands.init_config)
app.command("advise")(commands.advise_on_data)
app.command("run")(commands.run_config)
app.command()(commands.resume)
app.command()(commands.compare)
app.command("sweep")(commands.sweep_config)
app.command("assign")(commands.assign_newcomers)
app.command("predict")(commands.predict_rows)
app.command("evaluate")(commands.evaluate_data)
app.command()(commands.report)
app.command()(commands.tree)
app.command()(commands.export)
app.command()(commands.validate)
app.command("ls")(commands.list_known)
app.command()(commands.cite)

data = typer.Typer(
    name="data",
    help="Write data into a folder for memory mapping, or write the schema of tables.",
    no_args_is_help=True,
)
data.command()(commands.build)
data.command()(commands.schema)
app.add_typer(data)
