"""Which Flower this works with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fedclade.core import (
    ConfigError,
    MissingExtraError,
)

LOWEST, BELOW = (1, 41), (2,)
"""The versions of ``flwr`` that are taken: the message API of 1.41, and no later major version."""


def check_flower() -> None:
    """Check that Flower is there, in a version that this works with.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    ConfigError
        If it is too old or too new.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise MissingExtraError("flwr", "flower", "a federation over a network") from error
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if not LOWEST <= numbers < BELOW:
        raise ConfigError(
            f"fedclade.flower works with flwr {_text(LOWEST)} or later, below {_text(BELOW)}, got {found}; install it "
            "with: pip install 'fedclade[flower]'"
        )


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
