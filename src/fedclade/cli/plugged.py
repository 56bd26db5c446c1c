"""Commands that other installed packages add to the command line by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from fedclade.core import ConfigError, FedcladeError, MissingExtraError, installed, loaded, shown

DISTRIBUTIONS = {"reproduce": "fedclade-papers"}
"""Names of commands that another distribution provides, with the name of the distribution."""


class PluggedGroup(TyperGroup):
    """Group of fedclade's commands and of commands that other packages add.

    Packages add commands by entry points in the group ``fedclade.commands``. A package is imported
    only when its command is called, or when help is displayed, so that all other commands start as
    fast as without the package. A package cannot replace a command of fedclade.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._own = frozenset(self.commands)
        for name, package in DISTRIBUTIONS.items():
            missing = MissingExtraError(package, None, f"fedclade {name}")
            self.commands.setdefault(name, _failing_command(name, missing, hidden=True))
        for name in sorted(installed("commands")):
            if name not in self._own:
                self.commands[name] = TyperCommand(name)  # replaced in get_command

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with a given name, or None if there is no such command.

        If another package adds the command, the package is imported.
        """
        point = installed("commands").get(cmd_name)
        if point is None or cmd_name in self._own:
            return super().get_command(ctx, cmd_name)
        return _import_command(point)


def _import_command(point: EntryPoint) -> Any:
    """Import the command that an entry point names.

    If that fails, return a command that raises the error when it is called.
    """
    try:
        return _as_command(point.name, loaded(point, "command"))
    except ConfigError as error:
        return _failing_command(point.name, error)


def _as_command(name: str, value: Any) -> Any:
    """Convert a function or a Typer app into a command; raise a ConfigError for other objects."""
    if isinstance(value, typer.Typer):
        command = typer.main.get_command(value)
        command.name = name
        return command
    if not callable(value):
        raise ConfigError(
            f"the entry point of command {name!r} should name a function or a typer.Typer, got "
            f"{shown(value)}"
        )
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(value)
    return typer.main.get_command(app)


def _failing_command(name: str, error: FedcladeError, *, hidden: bool = False) -> Any:
    """Return a command that accepts any arguments and always raises the given error.

    The help of the command is the text of the error.
    """

    def fail() -> NoReturn:
        raise error

    any_arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(
        name,
        callback=fail,
        context_settings=any_arguments,
        help=str(error),
        add_help_option=False,
        hidden=hidden,
    )
