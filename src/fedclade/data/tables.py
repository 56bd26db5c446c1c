"""Tables of a data source, split by split: from parquet files in the Hub's layout, or from the Hub itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from fedclade.core import DataError, import_extra
from fedclade.data.cache import stamps
from fedclade.data.federation import Indices

Columns = dict[str, list[Any]]

HUB_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "mnist": "ylecun/mnist",
        "cifar10": "uoft-cs/cifar10",
        "femnist": "flwrlabs/femnist",
        "ag_news": "fancyzhx/ag_news",
        "sent140": "stanfordnlp/sentiment140",
        "tiny_shakespeare": "karpathy/tiny_shakespeare",
    }
)
# On the Hub these two are scripts, which `datasets` no longer runs; this branch has the parquet files made from them.
_HUB_SCRIPTS = frozenset({"sent140", "tiny_shakespeare"})
_PARQUET_BRANCH = "refs/convert/parquet"


class Tables(Protocol):
    """Where the tables of a source come from."""

    @property
    def key(self) -> object:
        """What tells this content from any other, for the cache."""
        ...

    def has(self, split: str) -> bool:
        """Tell whether there is such a split."""
        ...

    def where(self, split: str) -> str:
        """Say where the split's table is, for messages."""
        ...

    def read(self, split: str, columns: Sequence[str]) -> Columns:
        """Return the columns of one split as lists of Python values, one entry per row.

        Raises
        ------
        DataError
            If the split or a column is missing, or the file cannot be read.
        """
        ...


def open_tables(name: str, data_dir: Path | None) -> Tables:
    """Return the tables of a source: in ``data_dir/name`` if a ``data_dir`` is given, else on the Hub."""
    return open_hub(name) if data_dir is None else FolderTables(data_dir / name)


def open_hub(name: str) -> HubTables:
    """Return the tables that a source has on the Hub."""
    return HubTables(HUB_NAMES[name], _PARQUET_BRANCH if name in _HUB_SCRIPTS else None)


@dataclass(frozen=True)
class FolderTables:
    """Parquet files ``<split>.parquet``, or shards ``<split>-*.parquet``, in one folder."""

    folder: Path

    @property
    def key(self) -> object:
        """Path, size and time of every parquet file of the folder."""
        return stamps(sorted(self.folder.glob("*.parquet")))

    def has(self, split: str) -> bool:
        """Tell whether there is a file of this split."""
        return bool(self._files(split))

    def where(self, split: str) -> str:
        """Return the path of the split's file, or the pattern of its shards."""
        whole = self.folder / f"{split}.parquet"
        return str(whole if whole.exists() else self.folder / f"{split}-*.parquet")

    def read(self, split: str, columns: Sequence[str]) -> Columns:
        """Return the columns of one split; see :meth:`Tables.read`."""
        files = self._files(split)
        if not files:
            raise DataError(
                f"no data in {self.folder}: expected the file {self.folder / split}.parquet or shards "
                f"{split}-*.parquet (columns {', '.join(columns)}); check --data-dir / FEDCLADE_DATA_DIR"
            )
        parts = [_read_parquet(file, columns) for file in files]
        whole = {column: [value for part in parts for value in part[column]] for column in columns}
        _require_rows(self.where(split), whole)
        return whole

    def _files(self, split: str) -> list[Path]:
        whole = self.folder / f"{split}.parquet"
        return [whole] if whole.exists() else sorted(self.folder.glob(f"{split}-*.parquet"))


@dataclass(frozen=True)
class HubTables:
    """A data set on the Hugging Face Hub; the package ``datasets`` downloads it and keeps its own copy."""

    hub: str
    revision: str | None = None

    @property
    def key(self) -> object:
        """The Hub's name. The public data sets read here are frozen, so a cached copy needs no look at the network."""
        return [self.hub, self.revision]

    def has(self, split: str) -> bool:
        """Tell whether the data set has such a split."""
        return split in self._splits

    def where(self, split: str) -> str:
        """Name the data set and split."""
        return f"Hub data set {self.hub} ({split})"

    def read(self, split: str, columns: Sequence[str]) -> Columns:
        """Return the columns of one split; see :meth:`Tables.read`."""
        if split not in self._splits:
            raise DataError(f"Hub data set {self.hub} has no split {split!r}, only {', '.join(self._splits)}")
        table = self._splits[split].with_format("arrow")[:]
        _require_columns(self.where(split), table.column_names, columns)
        whole = {column: table[column].to_pylist() for column in columns}
        _require_rows(self.where(split), whole)
        return whole

    @cached_property
    def _splits(self) -> Any:
        datasets = import_extra("datasets", "datasets", "data", f"loading {self.hub} from the Hub")
        try:
            return datasets.load_dataset(self.hub, revision=self.revision)
        except Exception as error:  # the network, the Hub and its client fail in too many ways to list
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise DataError(
                f"cannot load {self.hub} from the Hugging Face Hub ({type(error).__name__}: {reason}); give a folder "
                f"that has the data with --data-dir / FEDCLADE_DATA_DIR, or use the bundled data set 'digits'"
            ) from error


def to_labels(values: list[Any], outputs: int, where: str, column: str) -> Indices:
    """Return a column of labels as int64 ``[n]``.

    Raises
    ------
    DataError
        If one is missing, not a whole number, or not in ``0 .. outputs - 1``; with the row.
    """
    for row, value in enumerate(values):
        if not isinstance(value, int) or not 0 <= value < outputs:
            raise DataError(
                f"{where}: column {column!r} should hold whole numbers from 0 to {outputs - 1}, "
                f"got {value!r} in row {row}"
            )
    return np.asarray(values, dtype=np.int64)


def to_texts(values: list[Any], where: str, column: str) -> list[str]:
    """Return a column of texts.

    Raises
    ------
    DataError
        If one is missing or not a string; with the row.
    """
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"{where}: column {column!r} should hold texts, got {value!r} in row {row}")
    return values


def _read_parquet(file: Path, columns: Sequence[str]) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            _require_columns(str(file), parquet.schema_arrow.names, columns)
            table = parquet.read(columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {file}, which should be a parquet file: {error}") from error
    return {column: table[column].to_pylist() for column in columns}


def _require_columns(where: str, there: Sequence[str], needed: Sequence[str]) -> None:
    for column in needed:
        if column not in there:
            raise DataError(f"{where} has no column {column!r}, only {', '.join(there)}")


def _require_rows(where: str, columns: Columns) -> None:
    if not all(columns.values()):
        raise DataError(f"{where} has no rows")
