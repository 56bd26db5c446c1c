"""Messages on the terminal about the training of references.

References are models with which a run is compared: each client alone, and one model for all
clients. Their training may take as long as the run itself.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console

from fedclade.cli.options import say
from fedclade.runs import REFERENCES_LOG


class _Announcer(logging.Handler):
    """Log handler that prints messages on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a log record."""
        say(self._console, record.getMessage())


@contextmanager
def references_announced(console: Console) -> Generator[None]:
    """Print a message whenever the training of a reference begins during a ``with`` block."""
    log = logging.getLogger(REFERENCES_LOG)
    announcer = _Announcer(console)
    level = log.level
    log.addHandler(announcer)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(announcer)
