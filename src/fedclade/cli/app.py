"""Typer application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from fedclade import __version__
from fedclade.cli import advise, assign, compare, data, example, inspect, ls, predict, run, sweep
from fedclade.cli.plugged import PluggedGroup
from fedclade.cli.report import cite, export, report, tree, validate

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


app.command()(compare.demo)
app.command("example")(example.copy_example)
app.command("inspect")(inspect.inspect_tables)
app.command("init")(inspect.init_config)
app.command("advise")(advise.advise_on_data)
app.command("run")(run.run_config)
app.command()(run.resume)
app.command()(compare.compare)
app.command("sweep")(sweep.sweep_config)
app.command("assign")(assign.assign_newcomers)
app.command("predict")(predict.predict_rows)
app.command("evaluate")(predict.evaluate_data)
app.command()(report)
app.command()(tree)
app.command()(export)
app.command()(validate)
app.command("ls")(ls.list_known)
app.command()(cite)
app.add_typer(data.app)
