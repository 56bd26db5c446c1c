"""Implementation of ``fedclade data build``, which writes the clients' data to a folder.

The source of the data is a config, the name of a data set, or files with tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.config.check import check_config
from fedclade.config.data import with_files_found
from fedclade.config.settings import Config
from fedclade.config.starter import TABLES, TableFiles
from fedclade.config.toml_files import Section, apply_overrides, find_config, read_toml
from fedclade.core import ConfigError, DataError, check_arguments
from fedclade.data import (
    SOURCES,
    DataSchema,
    OnClients,
    PlantedSettings,
    write_federation,
    write_planted,
)

PLANTED = "planted"
"""Name of synthetic data with planted clusters, generated in blocks for any number of clients."""


@dataclass(frozen=True)
class Building:
    """Description of data to be written to a folder: data of a config, or synthetic data.

    The synthetic data has planted clusters, see :class:`~fedclade.data.PlantedSettings`.
    """

    source: Config | PlantedSettings
    seed: int

    @classmethod
    def read(cls, source: str, overrides: Sequence[str] = ()) -> Building:
        """Read the description of the data from a source that a user names.

        Parameters
        ----------
        source
            A TOML file or the name of a config; the name of a data set; ``planted`` for synthetic
            data; or a file, a pattern for files, or a folder of files with tables.
        overrides
            Changes to the config, in the form of the command-line option ``--set``.

        Raises
        ------
        ConfigError
            If there is no such source, or if its config is invalid; the message lists all problems.
        DataError
            If a folder has no files with tables.
        """
        raw, folder = _read_source(source)
        apply_overrides(raw, overrides)
        section: Any = raw.get("data", {})
        if not isinstance(section, dict) or section.get("name") != PLANTED:
            config = check_config(with_files_found(raw, folder))
            return cls(config, config.top.seed)
        top = check_arguments(
            "the config", _Top, {key: v for key, v in raw.items() if not isinstance(v, dict)}
        )
        given = {key: value for key, value in section.items() if key != "name"}
        return cls(
            PlantedSettings(**check_arguments("[data]", PlantedSettings, given)), top.get("seed", 0)
        )

    def build(
        self, folder: Path, data_dir: str | Path | None = None, on_clients: OnClients | None = None
    ) -> str:
        """Write the data to a folder, and return a one-line description of the data.

        Parameters
        ----------
        folder
            The folder to write, which must not exist.
        data_dir
            Folder with the files of the data set; by default the environment variable
            ``FEDCLADE_DATA_DIR``.
        on_clients
            Called with the number of clients that have been written, to report progress.

        Raises
        ------
        ConfigError, DataError
            If the data cannot be loaded, or if the folder exists or cannot be written.
        """
        if folder.exists():  # fail before any data is loaded
            raise DataError(f"folder {folder} exists already; name another folder, or remove it")
        if isinstance(self.source, PlantedSettings):
            return write_planted(folder, self.source, self.seed, on_clients)
        federation = self.source.federation(data_dir)
        write_federation(federation, folder, on_clients)
        return str(federation)


@dataclass(frozen=True, kw_only=True)
class _Top:
    seed: int = 0


def build_schema(
    source: str, overrides: Sequence[str] = (), data_dir: str | Path | None = None
) -> DataSchema:
    """Propose a schema (columns, types and categories) for the tables of clients.

    Parameters
    ----------
    source, overrides
        The config or the files with the tables, as for :meth:`Building.read`.
    data_dir
        Folder to which file names may be relative; by default the environment variable
        ``FEDCLADE_DATA_DIR``.

    Raises
    ------
    ConfigError
        If there is no such source, if its config is invalid, or if it names no files.
    DataError
        If the files do not exist or cannot be read.
    """
    raw, folder = _read_source(source)
    apply_overrides(raw, overrides)
    config = check_config(with_files_found(raw, folder), on_network=True)
    if "files" not in config.data:
        raise ConfigError(
            f"no schema can be proposed for {source!r}, which names no files with tables; set "
            "data.files, or name the files"
        )
    return config.own_files(data_dir).propose().schema_alone


def _read_source(source: str) -> tuple[Section, Path]:
    """Return a config for a source, and the folder to which file names in the config are relative.

    The parameter is as for :meth:`Building.read`.
    """
    path = Path(source)
    if source in (*SOURCES, PLANTED) or ":" in path.name:
        return {"data": {"name": source}}, Path()
    if path.is_dir():
        return {"data": {"files": TableFiles.of_folder(path).pattern}}, Path()
    if path.suffix.lower() in TABLES:
        return {"data": {"files": source}}, Path()
    found = find_config(source)
    raw = read_toml(found)
    return {
        key: raw[key] for key in ("seed", "data", "task", "newcomers") if key in raw
    }, found.parent
