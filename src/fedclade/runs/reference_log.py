"""Log whose messages begin with the name of the reference run that is being trained, if any.

A reference is a simpler run (each client alone, or one model for all) that is trained for
comparison with the actual run. Modules that train runs use this log, so that a reader can tell
messages about a reference from messages about the actual run.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_name: ContextVar[str] = ContextVar("reference", default="")


@contextmanager
def log_of_reference(name: str) -> Generator[None]:
    """Prefix the messages of every :class:`RunLog` with a reference's name, in a ``with`` block."""
    before = _name.set(name)
    try:
        yield
    finally:
        _name.reset(before)


class RunLog(logging.LoggerAdapter[logging.Logger]):
    """Log of a module that trains runs, with a prefix for messages about a reference.

    Without the prefix, a warning that a reference diverges would seem to be about the run that is
    compared with the reference.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix a message with the name of the reference run that is being trained, if any."""
        name = _name.get()
        return (f"reference {name}: {msg}" if name else msg), kwargs
