"""Check of the installed version of Flower."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fedclade.core import ConfigError, MissingExtraError

# Minor versions of flwr with which the tests pass: fedclade uses private modules of it, see
# fedclade.flower.flwr_internals.
LOWEST = (1, 41)
BELOW = (1, 43)


def check_flower() -> None:
    """Check that a supported version of Flower is installed.

    Raises
    ------
    MissingExtraError
        If Flower is not installed.
    ConfigError
        If the version of Flower is not supported.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise MissingExtraError("flwr", "flower", "a federation over a network") from error
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if not LOWEST <= numbers < BELOW:
        lowest, below = (".".join(map(str, numbers)) for numbers in (LOWEST, BELOW))
        raise ConfigError(
            f"fedclade.flower works with flwr {lowest} or later, below {below}, got {found}; "
            "install it with: pip install 'fedclade[flower]'"
        )
