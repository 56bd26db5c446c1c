"""The commands, gathered."""

from __future__ import annotations

from typing import Annotated

import typer

from fedclade import __version__
from fedclade.cli import assign, compare, data, example, ls, run, sweep
from fedclade.cli.plugged import PluggedGroup
from fedclade.cli.report import cite, export, report, tree, validate

app = typer.Typer(
    name="fedclade",
    cls=PluggedGroup,
    help="Clustered federated learning: find out from model updates alone which clients can train together.",
    epilog="Start with: fedclade demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
"""The command line, as a Typer app."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedclade {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Clustered federated learning: find out from model updates alone which clients can train together."""


app.command()(compare.demo)
app.command("example")(example.copy_example)
app.command("run")(run.run_config)
app.command()(run.resume)
app.command()(compare.compare)
app.command("sweep")(sweep.sweep_config)
app.command("assign")(assign.assign_newcomers)
app.command()(report)
app.command()(tree)
app.command()(export)
app.command()(validate)
app.command("ls")(ls.list_known)
app.command()(cite)
app.add_typer(data.app)
