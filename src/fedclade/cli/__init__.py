"""Command line of fedclade.

Each command parses its arguments, calls the library, and prints the result. No other package of
fedclade imports the command line; external packages that add a command import the shared options
from here.
"""

from __future__ import annotations

import errno
import sys
from typing import NoReturn

from rich.text import Text

from fedclade.cli.app import app
from fedclade.cli.options import DataDir, Device, interruptible, new_console
from fedclade.core import FedcladeError, RunInterrupted, shown
from fedclade.report import Terminal

INTERRUPTED = 130
"""Exit status of an interrupted run, as in shells: 128 + SIGINT."""

__all__ = ["DataDir", "Device", "app", "interruptible", "main", "new_console"]


def main() -> None:
    """Run the command line, and print errors of the library as messages without a traceback."""
    sys.path.insert(0, "")  # so that names such as module:factory are found in the current folder
    try:
        app()
    except RunInterrupted as interrupted:
        new_console().print(Text(str(interrupted)), soft_wrap=True)
        sys.exit(INTERRUPTED)
    except FedcladeError as error:
        _exit_with_error(str(error))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # commands turn all others into errors of their own
            raise
        _exit_with_error(f"file name too long: {shown(error.filename)}")


def _exit_with_error(text: str) -> NoReturn:
    """Print an error message, in which each line is one problem, and exit with status 2."""
    message = text.strip()
    problems = message.split("\n")
    if len(problems) > 1:
        message = "\n  ".join([f"{len(problems)} problems:", *problems])
    Terminal(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
    sys.exit(2)
