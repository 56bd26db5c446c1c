"""The command line: thin commands over the library.

No other room imports it; each command parses what it was given, calls another room, and shows what came of it. A
package that adds a command imports from here what the commands share.
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
"""Exit status of a run that was interrupted, as shells have it: 128 + SIGINT."""

__all__ = ["DataDir", "Device", "app", "interruptible", "main", "new_console"]


def main() -> None:
    """Run the command line; an error of fedclade's own is one message, without a traceback."""
    sys.path.insert(0, "")  # a config's module:factory is looked for in the folder where the user stands
    try:
        app()
    except RunInterrupted as interrupted:
        new_console().print(Text(str(interrupted)), soft_wrap=True)
        sys.exit(INTERRUPTED)
    except FedcladeError as error:
        _refuse(str(error))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # of others a command says what it could not do
            raise
        _refuse(f"no file can have so long a name: {shown(error.filename)}")


def _refuse(why: str) -> NoReturn:
    """Print an error, of one line or of several problems, and leave."""
    lines = why.strip().split("\n")
    message = lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines])
    Terminal(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))
    sys.exit(2)
