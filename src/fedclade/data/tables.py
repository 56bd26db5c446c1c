"""Reading of benchmark data sets: from the Hugging Face Hub, parquet files, and LEAF JSON files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fedclade.core import DataError, Indices, import_extra
from fedclade.data.arrays import stamp_files

# JSON files in the layout of LEAF (Caldas et al. 2018, arXiv:1812.01097).
#
# Each file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y":
# [...]}}}``.


@dataclass(frozen=True)
class LeafFiles:
    """JSON files of one data source in the layout of LEAF (Caldas et al. 2018).

    Parameters
    ----------
    train, test
        Training files, and test files; ``test`` is empty if the source has no test split.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the source, training files first."""
        return (*self.train, *self.test)


@dataclass(frozen=True)
class LeafExamples:
    """Concatenated examples of several LEAF files.

    Parameters
    ----------
    users
        Owner of each example.
    x, y
        Input and target of each example, as stored in the files.
    """

    users: list[str]
    x: list[Any]
    y: list[Any]


def find_leaf(data_dir: Path | None, name: str) -> LeafFiles | None:
    """Find the LEAF files of a source in a data folder.

    The files are ``<name>/train/*.json`` and ``<name>/test/*.json``, or ``<name>/*.json``. Returns
    None if there are no such files, or no data folder.
    """
    if data_dir is None:
        return None
    folder = data_dir / name
    train = sorted((folder / "train").glob("*.json")) or sorted(folder.glob("*.json"))
    if not train:
        return None
    test = sorted((folder / "test").glob("*.json"))
    return LeafFiles(tuple(train), tuple(test))


def read_leaf(files: tuple[Path, ...]) -> LeafExamples:
    """Read the examples of LEAF files, in the order of the files and of the users in each file.

    Raises
    ------
    DataError
        If a file cannot be read, or has another layout.
    """
    examples = LeafExamples([], [], [])
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read {file}, which should be LEAF JSON: {error}; restore the file from a "
                "copy, or make it again with LEAF"
            ) from error
        try:
            data = content["user_data"]
            of_users = [(str(user), data[user]["x"], data[user]["y"]) for user in content["users"]]
        except (KeyError, TypeError) as error:
            layout = "users, user_data -> user -> x, y"
            raise DataError(
                f"{file} should have the layout of LEAF JSON ({layout}): {error!r}"
            ) from error
        for user, x, y in of_users:
            if len(x) != len(y):
                raise DataError(
                    f"{file}: user {user!r} should have as many inputs x as targets y, got "
                    f"{len(x)} inputs and {len(y)} targets"
                )
            examples.users.extend([user] * len(x))
            examples.x.extend(x)
            examples.y.extend(y)
    return examples


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
# On the Hub these two are scripts, which `datasets` no longer runs; this branch has the parquet
# files made from them.
_HUB_SCRIPTS = frozenset({"sent140", "tiny_shakespeare"})
_PARQUET_BRANCH = "refs/convert/parquet"


class Tables(ABC):
    """Interface of a data source that consists of a table for each split (train, test, ...)."""

    @property
    @abstractmethod
    def key(self) -> object:
        """Key of the tables in the cache of decoded arrays; different for different content."""

    @abstractmethod
    def has(self, split: str) -> bool:
        """Return whether the source has a split of the given name."""

    @abstractmethod
    def where(self, split: str) -> str:
        """Return the path or name of a split's table, for messages."""

    @abstractmethod
    def shards(self, split: str, columns: Sequence[str]) -> Sequence[Any]:
        """Read one split as a sequence of Arrow tables, each of which has the given columns."""

    def read(self, split: str, columns: Sequence[str]) -> Columns:
        """Read columns of one split by name, each as a list with an entry for each row."""
        parts = self.shards(split, columns)
        whole: Columns = {}
        for column in columns:
            whole[column] = [value for part in parts for value in part[column].to_pylist()]
        if not all(whole.values()):
            raise DataError(f"{self.where(split)} should have at least 1 row, got none")
        return whole


def open_tables(name: str, data_dir: Path | None) -> Tables:
    """Return the tables of a source in a data folder, or on the Hub if no folder is given."""
    if data_dir is None:
        return open_hub(name)
    return FolderTables(data_dir / name)


def open_hub(name: str) -> HubTables:
    """Return the tables of a source on the Hugging Face Hub."""
    return HubTables(HUB_NAMES[name], _PARQUET_BRANCH if name in _HUB_SCRIPTS else None)


@dataclass(frozen=True)
class FolderTables(Tables):
    """Tables in one folder: files ``<split>.parquet``, or shards ``<split>-*.parquet``."""

    folder: Path

    @property
    def key(self) -> object:
        """Path, size and modification time of every file, as the key of the cache."""
        return stamp_files(sorted(self.folder.glob("*.parquet")))

    def has(self, split: str) -> bool:
        """Return whether the folder has a file of the split."""
        return bool(self._find_files(split))

    def where(self, split: str) -> str:
        """Return the path of the split's file, or the pattern of its shards."""
        whole = self.folder / f"{split}.parquet"
        if whole.exists():
            return str(whole)
        return str(self.folder / f"{split}-*.parquet")

    def shards(self, split: str, columns: Sequence[str]) -> Sequence[Any]:
        """Read the given columns from each file of the split."""
        if not (files := self._find_files(split)):
            raise DataError(
                f"no data in {self.folder}: expected the file {self.folder / split}.parquet or "
                f"shards {split}-*.parquet (columns {', '.join(columns)}); check --data-dir / "
                "FEDCLADE_DATA_DIR"
            )
        return [_read_parquet(file, columns) for file in files]

    def _find_files(self, split: str) -> list[Path]:
        whole = self.folder / f"{split}.parquet"
        if whole.exists():
            return [whole]
        return sorted(self.folder.glob(f"{split}-*.parquet"))


@dataclass(frozen=True)
class HubTables(Tables):
    """Tables of a data set on the Hugging Face Hub, downloaded by the package ``datasets``.

    Parameters
    ----------
    hub
        Name of the data set on the Hub.
    revision
        Branch of the data set; None for the default branch.
    """

    hub: str
    revision: str | None = None

    @property
    def key(self) -> object:
        """Name and branch on the Hub, as the key of the cache.

        These data sets no longer change, so a cached copy can be used without a network.
        """
        return [self.hub, self.revision]

    def has(self, split: str) -> bool:
        """Return whether the data set has the split."""
        return split in self._splits

    def where(self, split: str) -> str:
        """Return the names of the data set and of the split, for messages."""
        return f"Hub data set {self.hub} ({split})"

    def shards(self, split: str, columns: Sequence[str]) -> Sequence[Any]:
        """Return the whole split as a single Arrow table, which has at least the given columns."""
        if not self.has(split):
            raise DataError(
                f"Hub data set {self.hub} should have a split {split!r}, got the splits "
                f"{', '.join(self._splits)}"
            )
        table = self._splits[split].with_format("arrow")[:]
        _require_columns(self.where(split), table.column_names, columns)
        return [table]

    @cached_property
    def _splits(self) -> Any:
        datasets = import_extra("datasets", "datasets", "data", f"loading {self.hub} from the Hub")
        try:
            return datasets.load_dataset(self.hub, revision=self.revision)
        except (
            Exception
        ) as error:  # The network, the Hub and its client raise too many kinds of errors to list.
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else ""
            raise DataError(
                f"cannot load {self.hub} from the Hugging Face Hub ({type(error).__name__}: "
                f"{reason}); set a folder with the data by --data-dir or FEDCLADE_DATA_DIR, "
                "or use the bundled data set 'digits'"
            ) from error


def to_labels(values: list[Any], outputs: int, where: str, column: str) -> Indices:
    """Check that the values of a column are labels below ``outputs``, and convert them to int64."""
    rule = f"whole numbers from 0 to {outputs - 1}"

    def is_label(value: Any) -> bool:
        return isinstance(value, int) and 0 <= value < outputs

    require_values(values, is_label, where, column=column, rule=rule)
    return np.asarray(values, dtype=np.int64)


def to_texts(values: list[Any], where: str, column: str) -> list[str]:
    """Check that the values of a column are texts, and return the texts."""
    require_values(values, lambda value: isinstance(value, str), where, column=column, rule="texts")
    return values


def require_values(
    values: Sequence[Any], fits: Callable[[Any], bool], where: str, *, column: str, rule: str
) -> None:
    """Raise a DataError for the first value of a column that does not fulfil a requirement.

    Parameters
    ----------
    values
        Values of the column.
    fits
        Function of a value that returns whether the value fulfils the requirement.
    where, column
        Names of the table and of the column, for the message.
    rule
        The requirement in words.
    """
    for row, value in enumerate(values):
        if not fits(value):
            raise DataError(
                f"{where}: column {column!r} should have {rule}, got {value!r} in row {row}"
            )


def _read_parquet(file: Path, columns: Sequence[str]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            _require_columns(str(file), parquet.schema_arrow.names, columns)
            return parquet.read(columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"cannot read {file}, which should be a parquet file: {error}; restore the file from a "
            "copy, or download it again"
        ) from error


def _require_columns(where: str, there: Sequence[str], needed: Sequence[str]) -> None:
    for column in needed:
        if column not in there:
            raise DataError(
                f"{where} should have a column {column!r}, got the columns {', '.join(there)}"
            )
