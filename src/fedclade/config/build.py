"""Sources that ``fedclade data build`` accepts, and the folders that it writes.

A source is a config, the name of a data set, or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.config.check import check_config
from fedclade.config.data import with_files_found
from fedclade.config.settings import Config
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

TABLES = (".parquet", ".csv", ".tsv")


@dataclass(frozen=True)
class Building:
    """Data to be written to a folder: that of a config, or synthetic planted clusters."""

    source: Config | PlantedSettings
    seed: int

    @classmethod
    def read(cls, source: str, overrides: Sequence[str] = ()) -> Building:
        """Read a source.

        Parameters
        ----------
        source
            A TOML file or the name of a config; a data set's name; ``planted``; or files: a file, a
            pattern, or a folder of files.
        overrides
            Changes of the config, as after ``--set``.

        Raises
        ------
        ConfigError
            If there is no such source, or with all problems of its config.
        """
        raw, folder = _raw(source)
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
        """Write the data to a folder, and return a description of it.

        Parameters
        ----------
        folder
            The folder, which must not exist.
        data_dir
            Folder with the data; by default ``FEDCLADE_DATA_DIR``.
        on_clients
            Called with the number of clients that have been written.

        Raises
        ------
        ConfigError, DataError
            As when the data is loaded; or if the folder exists or cannot be written.
        """
        if folder.exists():  # fail before any data is loaded
            raise DataError(f"{folder} exists already; name another folder, or remove it")
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
    """Propose the schema of the tables that a config or files name.

    Raises
    ------
    ConfigError
        If there is no such source, with all problems of its config, or if it names no files.
    DataError
        If the files cannot be read.
    """
    raw, folder = _raw(source)
    apply_overrides(raw, overrides)
    config = check_config(with_files_found(raw, folder), on_network=True)
    if "files" not in config.data:
        raise ConfigError(
            f"a schema is of tables in files, and {source!r} names none by data.files"
        )
    return config.own_files(data_dir).propose().schema


def _raw(source: str) -> tuple[Section, Path]:
    """Return a source as a config, and the folder to which its file names may be relative."""
    path = Path(source)
    if source in (*SOURCES, PLANTED) or ":" in path.name:
        return {"data": {"name": source}}, Path()
    if path.is_dir():
        for suffix in TABLES:
            if any(path.glob(f"*{suffix}")):
                return {"data": {"files": str(path / f"*{suffix}")}}, Path()
        raise ConfigError(f"{source} holds no file that ends in {', '.join(TABLES)}")
    if path.suffix.lower() in TABLES:
        return {"data": {"files": source}}, Path()
    found = find_config(source)
    raw = read_toml(found)
    return {
        key: raw[key] for key in ("seed", "data", "task", "newcomers") if key in raw
    }, found.parent
