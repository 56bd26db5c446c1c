"""Where commands print."""

from __future__ import annotations

import os

from fedclade.report import Terminal

WIDTH_OF_FILES = 100


def new_console() -> Terminal:
    """Return the console: as wide as the terminal; what goes to a file or a pipe is not cut to a terminal's 80."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Terminal(width=WIDTH_OF_FILES)
    return console
