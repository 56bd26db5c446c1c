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
    only when its command is called, so that all other commands, and the list of commands in the
    help, are as fast as without the package. A package cannot replace a command of fedclade.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._own = frozenset(self.commands)
        for name, package in DISTRIBUTIONS.items():
            missing = MissingExtraError(package, None, f"fedclade {name}")
            self.commands.setdefault(name, _failing_command(name, missing, hidden=True))
        for name in sorted(installed("commands")):
            if name not in self._own:
                self.commands[name] = TyperCommand(name)  # replaced in the methods below

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with a given name, or None if there is no such command.

        A command that another package adds is returned without its options, and with the summary
        of the package as its help, since the package is not imported.
        """
        point = self._find_added(cmd_name)
        if point is None:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=_summarize_package(point))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command to call, and import its package if another package adds it."""
        name, command, rest = super().resolve_command(ctx, args)
        point = None if name is None else self._find_added(name)
        return name, command if point is None else _import_command(point), rest

    def _find_added(self, name: str) -> EntryPoint | None:
        """Return the entry point of a command that another package adds; None for all others."""
        return None if name in self._own else installed("commands").get(name)


def _summarize_package(point: EntryPoint) -> str:
    """Return the summary of the package that provides an entry point."""
    if point.dist is None:
        return f"Command of {point.module}."
    summary = point.dist.metadata.json.get("summary", "Command of another package")
    return f"{summary} (package {point.dist.name})."


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
