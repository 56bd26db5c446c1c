"""Registry of the data sources of fedclade by name, and loading of a source as a pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedclade import catalogue
from fedclade.core import ConfigError, DataError, check_arguments, unknown
from fedclade.data.images import load_cifar10, load_digits, load_femnist, load_mnist, load_synthetic
from fedclade.data.pool import Pool
from fedclade.data.tables import HUB_NAMES
from fedclade.data.texts import load_ag_news, load_sent140, load_tiny_shakespeare


@dataclass(frozen=True)
class Source:
    """Definition of a data source: the function that loads it, and its description.

    Parameters
    ----------
    load
        Function ``load(data_dir, seed, **arguments)``, whose keyword-only parameters are options of
        the user.
    description
        Line for ``fedclade ls datasets``.
    hub
        Name of the data set on the Hugging Face Hub; None for bundled and synthetic data.
    """

    load: Callable[..., Pool]
    description: str
    hub: str | None = None


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "digits": Source(load_digits, catalogue.DATASETS["digits"]),
        "mnist": Source(load_mnist, catalogue.DATASETS["mnist"], HUB_NAMES["mnist"]),
        "cifar10": Source(load_cifar10, catalogue.DATASETS["cifar10"], HUB_NAMES["cifar10"]),
        "femnist": Source(load_femnist, catalogue.DATASETS["femnist"], HUB_NAMES["femnist"]),
        "ag_news": Source(load_ag_news, catalogue.DATASETS["ag_news"], HUB_NAMES["ag_news"]),
        "sent140": Source(load_sent140, catalogue.DATASETS["sent140"], HUB_NAMES["sent140"]),
        "tiny_shakespeare": Source(
            load_tiny_shakespeare,
            catalogue.DATASETS["tiny_shakespeare"],
            HUB_NAMES["tiny_shakespeare"],
        ),
        "synthetic": Source(load_synthetic, catalogue.DATASETS["synthetic"]),
    }
)
"""Data sources of fedclade by name; :func:`load_pool` loads one."""


def load_pool(
    name: str, *, data_dir: str | Path | None = None, seed: int = 0, **arguments: Any
) -> Pool:
    """Load a data source by its name.

    Parameters
    ----------
    name
        Name in :data:`SOURCES`.
    data_dir
        Folder with files ``<name>/<split>.parquet`` in the layout of the Hugging Face Hub. By
        default the environment variable ``FEDCLADE_DATA_DIR``; if this is not set either, the data
        is downloaded from the Hub.
    seed
        Seed of synthetic data. Real data and its test split do not depend on the seed.
    **arguments
        Options of the source, such as ``task="classification"`` of ``ag_news``.

    Raises
    ------
    ConfigError
        If the name or an argument is unknown, or an argument has a wrong value.
    DataError
        If the data is missing or unreadable; the message names the expected file.
    MissingExtraError
        If reading the data needs a package that is not installed.
    """
    if name not in SOURCES:
        raise ConfigError(unknown("data source", name, SOURCES))
    source = SOURCES[name]
    check_arguments(f"data source {name!r}", source.load, arguments)
    place = data_dir or os.environ.get("FEDCLADE_DATA_DIR")
    if place:
        folder = Path(place).expanduser()
    else:
        folder = None
    if folder is not None and source.hub and not folder.is_dir():
        raise DataError(
            f"the data folder {folder} does not exist; it should contain {name}/; check --data-dir "
            "/ FEDCLADE_DATA_DIR"
        )
    return source.load(folder, seed, **arguments)
