"""Which versions of Flower this works with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from fedclade.core import ConfigError, MissingExtraError

# the versions of flwr that work: the message API of 1.41, and no later major version
LOWEST = (1, 41)
BELOW = (2,)


def check_flower() -> None:
    """Check that Flower is installed (else a MissingExtraError), in a version that works (else a ConfigError)."""
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
