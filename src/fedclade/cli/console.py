"""Where commands print."""

from __future__ import annotations

import os

from rich.console import Console

from fedclade.report import Terminal

WIDTH_OF_FILES = 100


def new_console() -> Terminal:
    """Return the console: as wide as the terminal; what goes to a file or a pipe is not cut to a terminal's 80."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Terminal(width=WIDTH_OF_FILES)
    return console


def say(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, since it may hold a path to copy, and not read as markup."""
    console.print(line, soft_wrap=True, markup=False)
