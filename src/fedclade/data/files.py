"""CSV and Parquet files as a federation: one file for each client, or a column that says whose a row is."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.core import ConfigError, DataError, TaskKind, require, shown
from fedclade.data.cell_values import Notation
from fedclade.data.csv_format import DEFAULT_SEPARATORS, CsvFile, is_encoding, is_separator
from fedclade.data.federation import Federation
from fedclade.data.frames import Chosen, TableSource
from fedclade.data.own import OwnSettings
from fedclade.data.schema import DataSchema, read_declared
from fedclade.data.sheets import Sheet, Table

PARQUET = ".parquet"


@dataclass(frozen=True, kw_only=True)
class FilesSettings:
    """Which files and columns to read; see :func:`federation_from_frame`.

    Parameters
    ----------
    files
        A file, or a pattern such as ``hospitals/*.csv``: relative to the working directory, or else to the data folder.
    target
        Column to predict, or several.
    client
        Column that says whose a row is; if left out, each file is a client, by the name of the file.
    inputs, text
        Columns to predict from; all others if left out, or one column of texts.
    name
        Of the data, for people; by default the folder's, or the file's.
    drop
        Columns to leave out.
    separator, encoding
        Character between two cells of a CSV file, and its encoding, by Python's names; detected for each file if left
        out.
    decimal
        Decimal mark of numbers, ``.`` or ``,``; detected if left out.
    dates
        Format of dates, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``; detected if left out.
    schema
        The columns, with their categories, and the labels: the fields of :class:`DataSchema`, or the path of a JSON
        file that has them. By default, what the files have.
    """

    files: str
    target: str | tuple[str, ...]
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    text: str | None = None
    name: str | None = None
    drop: tuple[str, ...] = ()
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    dates: str | None = None
    schema: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        separator, encoding = self.separator, self.encoding
        is_separate = separator is None or (is_separator(separator) and separator != self.decimal)
        is_known = encoding is None or is_encoding(encoding)
        require(
            ("separator", separator, is_separate, "a character such as ';' or '\\t', and not the decimal mark"),
            ("encoding", encoding, is_known, "one that Python knows, such as 'cp1252' or 'utf-16'"),
            *Notation.checks(self.decimal, self.dates),
        )
        if Path(self.files).is_dir():
            raise ConfigError(f"files = {self.files!r} is a folder; say which files in it, as '{self.files}/*.csv'")
        self.chosen()
        if isinstance(self.schema, Mapping):
            DataSchema.read(self.schema)

    def check_clients(self) -> None:
        """Check that there are several clients, as a simulation needs them; a ConfigError if there is one file."""
        if self.client is None and not glob.has_magic(self.files):
            raise ConfigError(
                f"files = {self.files!r} is one file; say by client = ... which column says whose a row is"
            )

    def federation(
        self, settings: OwnSettings, task: TaskKind | None = None, data_dir: str | Path | None = None
    ) -> Federation:
        """Read the files; raises what :func:`federation_from_frame` raises, and a DataError if no file matches."""
        self.check_clients()
        return self.source(settings, task, data_dir).federation()

    def source(
        self, settings: OwnSettings, task: TaskKind | None = None, data_dir: str | Path | None = None
    ) -> TableSource:
        """Read the files, and encode nothing yet."""
        paths = self._paths(data_dir)
        if self.client is None and len({path.stem for path in paths}) < len(paths):
            twice = next(path for path in paths if sum(path.stem == other.stem for other in paths) > 1)
            raise DataError(
                f"files = {self.files!r} matches several files called {twice.stem!r}; a client is called as its file, "
                "so their names should differ"
            )
        sheets = [read_sheet(path, self.separator, self.encoding) for path in paths]
        schema = read_declared(self.schema)
        return TableSource(sheets, self.chosen(task), self.title, settings, schema=schema)

    def chosen(self, task: TaskKind | None = None) -> Chosen:
        """Return which columns are what."""
        target = self.target if isinstance(self.target, tuple) else (self.target,)
        return Chosen(
            target,
            self.client,
            self.inputs,
            text=self.text,
            task=task,
            drop=self.drop,
            notation=Notation(decimal=self.decimal, dates=self.dates),
        )

    @property
    def title(self) -> str:
        """The name, or what the files say."""
        path = Path(self.files)
        return self.name or (path.parent.name if glob.has_magic(path.name) else path.stem) or "files"

    def _paths(self, data_dir: str | Path | None) -> list[Path]:
        place = data_dir or os.environ.get("FEDCLADE_DATA_DIR")
        folders = [Path(), *([] if place is None else [Path(place).expanduser()])]
        for folder in folders:
            if found := matches(self.files, folder):
                return found
        where = " or ".join(str(folder.absolute()) for folder in folders)
        raise DataError(f"files = {shown(self.files)} matches no file in {where}; check the path, or --data-dir")


def matches(pattern: str, folder: Path) -> list[Path]:
    """Return the files that a pattern matches, seen from a folder, in order."""
    found = (folder / path for path in glob.glob(pattern, root_dir=folder, recursive=True))  # noqa: PTH207 -- of folders with brackets
    return sorted(path for path in found if path.is_file())


def read_sheet(path: Path, separator: str | None = None, encoding: str | None = None) -> Sheet:
    """Read a CSV, TSV or Parquet file; a text's separator and encoding are detected unless they are given.

    Raises
    ------
    DataError
        If the file is none of these, or cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in (*DEFAULT_SEPARATORS, PARQUET):
        raise DataError(f"{path} should end in {', '.join(DEFAULT_SEPARATORS)} or {PARQUET}")
    if suffix == PARQUET:
        return Sheet(_read_parquet(path), str(path), path.stem)
    file = CsvFile.detect(path, separator, encoding)
    return Sheet(file.read(), str(path), path.stem, file)


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path.absolute()) as parquet:
            return parquet.read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
