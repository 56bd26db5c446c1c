"""Commands that installed packages add to the command line."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import click
import typer
from typer.core import TyperGroup

from fedclade.core import ConfigError, FedcladeError, MissingExtraError, installed, loaded, shown

DISTRIBUTIONS = {"reproduce": "fedclade-papers"}
"""Commands that have a distribution of their own, and its name."""


class PluggedGroup(TyperGroup):
    """Commands of fedclade, then those that packages add by entry points of ``fedclade.commands``.

    A package is imported when its command is called, or when help is shown: all other commands
    start as fast as without it. No package replaces a command of fedclade.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._own = frozenset(self.commands)
        for name, package in DISTRIBUTIONS.items():
            missing = MissingExtraError(package, None, f"fedclade {name}")
            self.commands.setdefault(name, _failing_command(name, missing, hidden=True))
        for name in sorted(installed("commands")):
            if name not in self._own:
                self.commands[name] = click.Command(name)  # only its name counts, see get_command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported if a package adds it; None if there is none of that name."""
        point = installed("commands").get(cmd_name)
        if point is None or cmd_name in self._own:
            return super().get_command(ctx, cmd_name)
        return _import_command(point)


def _import_command(point: EntryPoint) -> click.Command:
    """Import the command that an entry point names.

    If that fails, return a command that raises the error when it is called.
    """
    try:
        return _as_command(point.name, loaded(point, "command"))
    except ConfigError as error:
        return _failing_command(point.name, error)


def _as_command(name: str, value: Any) -> click.Command:
    """Return a function, or a Typer app, as a command."""
    if isinstance(value, typer.Typer):
        command = typer.main.get_command(value)
        command.name = name
        return command
    if not callable(value):
        raise ConfigError(
            f"command {name!r} should name a function or a typer.Typer, got {shown(value)}"
        )
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(value)
    return typer.main.get_command(app)


def _failing_command(name: str, error: FedcladeError, *, hidden: bool = False) -> click.Command:
    """Return a command that raises an error whatever its arguments are, and has it as its help."""

    def fail() -> NoReturn:
        raise error

    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(
        name,
        callback=fail,
        context_settings=any_arguments,
        help=str(error),
        add_help_option=False,
        hidden=hidden,
    )
