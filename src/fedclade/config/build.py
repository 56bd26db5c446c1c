"""What ``fedclade data build`` takes: a config, a data set's name, or files; and the folder that it makes of it."""

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
"""Name of data that is made up block by block, for any number of clients."""

TABLES = (".parquet", ".csv", ".tsv")


@dataclass(frozen=True)
class Building:
    """Data to be written to a folder: what a config names, or planted clusters that are made up."""

    source: Config | PlantedSettings
    seed: int

    @classmethod
    def read(cls, source: str, overrides: Sequence[str] = ()) -> Building:
        """Read a source: a TOML file or the name of a config, a data set's name, ``planted``, or files.

        Files are named one by one, by a pattern, or by their folder. ``overrides`` are those of a
        config.

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
        """Write the folder, which must not exist; return what is in it.

        Raises
        ------
        ConfigError, DataError
            As loading the data does; or if the folder exists, or cannot be written.
        """
        if folder.exists():  # before any data is loaded
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
    """Return the schema of the tables that a config or files name.

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
    """Return a source as a config, and the folder that its files may be relative to."""
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
