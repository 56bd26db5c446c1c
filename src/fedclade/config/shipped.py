"""Place of the configs that come with fedclade."""

from __future__ import annotations

from pathlib import Path


def config_folder() -> Path:
    """Return the folder of the configs that come with fedclade.

    It is in the installed package, or at the top level of a source checkout.
    """
    packaged = Path(__file__).parents[1] / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "configs"
