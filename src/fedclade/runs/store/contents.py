"""Contents of the files of a run folder: their required structure, and the types of their values.

The module reads and writes tables of rows, and checks the structure of JSON and TOML files (their
"shape").
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import import_extra, shown
from fedclade.tasks import read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame


# The rows of a long table are stored as columns: the rows of a million clients as dicts would take
# gigabytes.

Row = dict[str, Any]

Column = NDArray[Any] | list[Any]
"""Values of a column: an array for numbers, a list for other values, such as names or None."""

Block = Mapping[str, Column]

AT_A_TIME = 65_536
"""Number of rows that are converted to dicts at once when all rows are read."""


class RowTable(Sequence[Row]):
    """Table of rows that stores blocks of columns, and can be read like a list of dicts.

    A row's dict is created when the row is read. This takes less memory than a list of dicts.

    Parameters
    ----------
    blocks
        Blocks of consecutive rows, each as a mapping from column names to columns of equal length.
        Empty blocks are left out.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks: tuple[Block, ...] = tuple(block for block in blocks if _count_rows(block))
        """Blocks of consecutive rows, as columns of equal length by name."""
        self._ends = list(accumulate(map(_count_rows, self.blocks)))

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowTable:
        """Convert rows to a table.

        Consecutive rows of the same round with the same keys form a block.
        """
        if isinstance(rows, RowTable):
            return rows
        together = groupby(rows, key=lambda row: (row.get("round"), *row))
        return cls(_read_block(kind[1:], list(some)) for kind, some in together)

    def with_block(self, block: Block) -> RowTable:
        """Return a new table with the rows of a block added at the end."""
        return RowTable((*self.blocks, block))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column as a list, with one value for each row."""
        return [value for block in self.blocks for value in _to_list(block[name])]

    @property
    def last(self) -> RowTable:
        """Table with the rows of the last block only, such as the last evaluation's rows."""
        return RowTable(self.blocks[-1:])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        place = range(len(self))[at]
        number = bisect_right(self._ends, place)
        block = self.blocks[number]
        within = place - (self._ends[number] - _count_rows(block))
        return {name: _to_list(values[within : within + 1])[0] for name, values in block.items()}

    def __iter__(self) -> Iterator[Row]:
        for block in self.blocks:
            for start in range(0, _count_rows(block), AT_A_TIME):
                some = [_to_list(values[start : start + AT_A_TIME]) for values in block.values()]
                yield from (dict(zip(block, row, strict=True)) for row in zip(*some, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast(Sequence[object], other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (like a list)

    def __repr__(self) -> str:
        return f"RowTable({list(self)!r})"


def _read_block(names: Iterable[str], rows: Sequence[Row]) -> Block:
    """Convert rows with the same keys to a block of columns."""
    return {name: _to_column([row[name] for row in rows]) for name in names}


def _count_rows(block: Block) -> int:
    return len(next(iter(block.values()), ()))


def _to_list(column: Column) -> list[Any]:
    if isinstance(column, list):
        return column
    return column.tolist()


def _to_column(values: list[Any]) -> Column:
    """Return values as an array if all are integers or all are floats, otherwise as a list."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return np.array(values, dtype=np.int64)
    if kinds == {float}:
        return np.array(values, dtype=np.float64)
    return values


# Shapes: descriptions of the keys and types of a file's content. The content is checked against its
# shape before any other code relies on it.

LARGEST = 2**53
"""Largest integer that is accepted: a float cannot represent all larger integers exactly."""

Shape = Any
"""Description of the structure that a value must have.

A shape is one of: ``str``, ``bool``; ``int`` for an integer of at least 0; ``float`` for any
number, ``complex`` for a finite number; ``object`` for any value; ``None``; a tuple of
alternatives; ``[shape]`` for a list of values with this shape; ``{"key": shape}`` for a table, in
which a key ``"key?"`` is optional and further keys are allowed; ``{...: shape}`` for the values of
all keys that are not named.
"""

_NAMES = {
    **{
        int: "a whole number of at least 0",
        float: "a number",
        complex: "a finite number",
        str: "a text",
    },
    **{bool: "true or false", None: "nothing"},
}


def check_shape(value: object, shape: Shape, where: str) -> None:
    """Check that a value from JSON, TOML or a table has a required structure.

    See :data:`Shape` for the description of a structure.

    Parameters
    ----------
    value
        The value.
    shape
        Its required structure.
    where
        Name of the value, for the error message.

    Raises
    ------
    ValueError
        If the value has another structure; the message names the first difference.
    """
    if isinstance(shape, dict):
        _check_table(value, cast("dict[Any, Shape]", shape), where)
    elif isinstance(shape, list):
        (each,) = cast("list[Shape]", shape)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} should be a list, got {shown(value)}")
        for i, entry in enumerate(cast("list[object]", value)):
            check_shape(entry, each, f"{where}[{i}]")
    elif not any(_has_type(value, each) for each in _alternatives(shape)):
        expected = " or ".join(_NAMES[each] for each in _alternatives(shape))
        raise ValueError(f"{where} should be {expected}, got {shown(value)}")


def _check_table(value: object, shape: dict[Any, Shape], where: str) -> None:
    """Check that a value is a table whose entries have their required shapes."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} should be a table, got {shown(value)}")
    table = cast("Mapping[str, object]", value)
    named = {name: each for name, each in shape.items() if name is not ...}
    if ... in shape:  # the shape of all entries whose keys are not named
        for key in table:
            if key not in named and f"{key}?" not in named:
                check_shape(table[key], shape[...], f"{where}: {key}")
    for name, each in named.items():
        key = name.removesuffix("?")
        if key in table:
            check_shape(table[key], each, f"{where}: {key}")
        elif key == name:
            raise ValueError(f"{where} lacks {key}")


def _alternatives(shape: Shape) -> Sequence[Shape]:
    """Return the alternatives of a shape as a sequence; a single shape is the only alternative."""
    if isinstance(shape, tuple):
        return cast("tuple[Shape, ...]", shape)
    return (shape,)


def _has_type(value: object, shape: Shape) -> bool:
    """Return whether a value has a type that a shape names; see :data:`Shape`."""
    if shape is object:
        return True
    if shape is None:
        return value is None
    if shape in (int, float, complex):
        # In Python bool is a subclass of int, but true and false are not numbers in files.
        if isinstance(value, int) and not isinstance(value, bool):
            smallest = 0 if shape is int else -LARGEST
            return smallest <= value <= LARGEST
        return (
            isinstance(value, float)
            and shape is not int
            and (shape is float or math.isfinite(value))
        )
    return isinstance(value, shape)


_SCORE_NUMBERS = ("mean", "std", "min", "max", "p10", "p50", "p90", "worst10_mean")
_SCORES = {**dict.fromkeys(_SCORE_NUMBERS, (float, None)), ...: (float, None)}
"""Shape of the distribution of a score over clients.

The numbers are None if the score is undefined for all clients.
"""

_OF_ROUND = {"round": int, "validation": {...: (float, None)}, "test": {...: (float, None)}}
"""Shape of the mean scores of one round."""

SUMMARY = {
    **{
        "format": object,
        "algorithm": str,
        "data": str,
        "model": str,
        "seed": int,
        "rounds": int,
        "clients": int,
    },
    "task?": str,
    "metrics?": [{"name": str, "higher_is_better": bool, "share": bool}],
    "chosen?": {**_OF_ROUND, "metric": str, "kept?": bool},
    "last?": _OF_ROUND,
    "stopped?": {"round": int, "by": str, "why": str},
    "unfinished?": {"round": int, "of": int},
    "diverged?": {"round": int, "clients": int, "of": int},
    "clusters": {
        **{"found": int, "true": (int, None), "sizes": [int]},
        **{"ari": (float, None), "nmi": (float, None), "ari_assigned?": (float, None)},
        **{"stability?": float, "stable_sizes?": [int]},
    },
    "target": {
        **{"share_of_clients": (float, None), ...: (float, None)},
        **{"rounds_to_target": (int, None), "bytes_to_target": (complex, None)},
    },
    **{"bytes_up": complex, "bytes_down": complex, "device": str},
    "steps?": {"total": int, "of_cohorts": int, "ratio": (float, None)},
    "seconds": dict.fromkeys(("total", "train", "evaluate", "server"), complex),
    "inputs?": {
        "shape": [int],
        "scaled": object,
        "structure?": str,
        **dict.fromkeys(("columns?", "labels?", "mean?", "std?"), object),
        **dict.fromkeys(("target_mean?", "target_std?"), object),
    },
    "privacy?": {"epsilon": (float, None), "delta": float, "releases": int},
    "adversary?": {
        **{"kind": str, "ids": [int], "scores": {...: {...: (float, None)}}},
        "clusters": dict.fromkeys(("of_adversaries", "of_both", "adversaries_with_honest"), int),
        **{"ari_honest": (float, None), "attack_success": (float, None)},
    },
    **{
        "engine?": str,
        "engine_fallback?": str,
        "warnings?": [str],
        "versions?": {...: str},
        "class_weights?": [complex],
    },
}
"""Shape of ``summary.json``, see :func:`fedclade.runs.store.contents.check_shape`."""

_SECTION = {...: object}

CONFIG = {
    "rounds?": int,
    **{
        f"{name}?": _SECTION
        for name in ("data", "local", "signature", "target", "privacy", "faults", "newcomers")
    },
    **{
        f"{name}?": _SECTION
        for name in ("network", "server", "versions", "adversary", "stop", "report")
    },
    **{f"{name}?": {"name": str} for name in ("algorithm", "model")},
}
"""Shape of ``config.toml``, without settings that depend on the algorithm."""

FINISHED = {name: {"name": str} for name in ("algorithm", "model")}
"""Shape of the keys that the config of a finished run must have in addition.

A config that a user writes may leave them out if they have a default.
"""

TO_NOTE = {**{"rounds": int, "seed": int, "engine": str}, **FINISHED}
"""Shape of a config that a user passes to be recorded; the summary repeats these settings."""

_NUMBERS = ("int64", "double", "null", "bool")
TABLES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "metrics": {
        "round": ["int64"],
        "bytes_up": ["int64", "double"],
        "bytes_down": ["int64", "double"],
    },
    "clusters": {"round": ["int64"], "node": ["int64"]},
    "clients": {
        **{"round": ["int64"], "client": ["int64"], "name": ["string"], "cluster": ["int64"]},
        **{"loss": ["double"], "true_cluster": ["int64", "null"]},
    },
}
"""Columns that each table must have, with their possible Arrow types.

All of these columns but ``true_cluster`` must have a value in each row.
"""

_WORDS = ("phase", "name")
"""Columns of text."""


def read_json(path: Path, shape: Any) -> Any:
    """Read a JSON file, and check that its content has a required shape.

    Raises
    ------
    OSError, ValueError, RecursionError
        If the file cannot be read, is not valid JSON, or has another shape.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid JSON ({error})") from error
    check_shape(content, shape, path.name)
    return content


def read_summary(path: Path) -> Row:
    """Read the summary of a run, and check its shape.

    Raises
    ------
    OSError, ValueError, RecursionError
        If the file cannot be read or is damaged.
    """
    summary = read_json(path, SUMMARY)
    check_shape(summary, {metric.name: _SCORES for metric in read_metrics(summary)}, path.name)
    return summary


def read_rows(path: Path, summary: Row, nodes: int) -> RowTable:
    """Read one table of a run, after checking its columns and the values in them.

    Parameters
    ----------
    path
        The Parquet file, whose name without suffix is the name of the table.
    summary
        Summary of the run.
    nodes
        Number of nodes of the run's parameter tree.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, a column is missing or has another type, or the column contains
        an impossible number.
    """
    import pyarrow.parquet as pq

    rounds = max(1, summary["rounds"])  # a run without rounds has one row, of round 0
    columns = TABLES[path.stem]
    scores: list[str] = []
    if path.stem == "clients":
        scores = [each["name"] for each in summary.get("metrics", ())]
    columns = {**columns, **{name: ["double"] for name in scores}}
    most = {"metrics": rounds, "clusters": rounds * nodes}.get(path.stem)
    file = pq.ParquetFile(path.absolute())
    # Checked before reading: a small compressed file can contain any number of equal rows.
    if most is not None and file.metadata.num_rows > most:
        raise ValueError(
            f"{path.name} should have at most {most} rows, got {file.metadata.num_rows}"
        )
    schema = file.schema_arrow
    if file.metadata.num_rows == 0:
        return RowTable()
    for column, types in columns.items():
        if column not in schema.names:
            raise ValueError(f"{path.name} lacks the column {column}")
        if str(schema.field(column).type) not in types:
            raise ValueError(
                f"{path.name}: {column} should be {' or '.join(types)}, got "
                f"{schema.field(column).type}"
            )
    for field in schema:
        if field.name not in _WORDS and str(field.type) not in _NUMBERS:
            raise ValueError(f"{path.name}: {field.name} should be numbers, got {field.type}")
    table = file.read()
    for column in columns:
        if column not in ("true_cluster", *scores) and table[column].null_count:
            raise ValueError(
                f"row {table[column].is_null().index(True).as_py()} of {path.name} lacks {column}"
            )
    for column in ("round", "node", "cluster", "served_by"):
        if column not in schema.names:
            continue
        for value in table[column].unique().drop_null().to_pylist():
            where = f"row {table[column].index(value).as_py()} of {path.name}: {column}"
            if column == "round":
                check_shape(value, int, where)
            else:
                check_node(value, nodes, where)
    return RowTable([_from_arrow(table, scores)])


def write_rows(path: Path, rows: Sequence[Row], scores: Collection[str] = ()) -> None:
    """Write one table of a run into a new Parquet file.

    Parameters
    ----------
    path
        The file.
    rows
        Rows of the table.
    scores
        Names of columns with scores. NaN in these columns is written as null: the client has no
        score.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _to_arrow(rows)
    for name in scores:
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(
                place, name, pa.array(table[name].to_numpy(), from_pandas=True)
            )
    # Absolute, since Arrow reads a relative path such as runs:1/... as a URI with the scheme runs.
    pq.write_table(table, path.absolute())


def data_frame(rows: Sequence[Row], purpose: str) -> DataFrame:
    """Return rows as a pandas data frame, with the types that the rows' file would have.

    Parameters
    ----------
    rows
        Rows of a table.
    purpose
        Name of the function or property that needs pandas, for the error message.

    Raises
    ------
    MissingExtraError
        If pandas is not installed.
    """
    import_extra("pandas", "pandas", "notebook", purpose)
    return _to_arrow(rows).to_pandas()


def _to_arrow(rows: Sequence[Row]) -> Any:
    """Convert rows to an Arrow table."""
    import pyarrow as pa

    blocks = [pa.table(dict(block)) for block in RowTable.of(rows).blocks]
    if not blocks:
        return pa.table({})
    return pa.concat_tables(blocks, promote_options="permissive")


def _from_arrow(table: Any, scores: Collection[str]) -> dict[str, Column]:
    """Convert an Arrow table to columns: columns of numbers to arrays, other columns to lists.

    A column with missing values becomes a list, unless it is one of ``scores``, where missing
    values become NaN.
    """
    columns: dict[str, Column] = {}
    for name in table.column_names:
        column = table[name]
        are_known = str(column.type) in ("int64", "double") and not column.null_count
        if name in scores or are_known:
            columns[name] = column.to_numpy()
        else:
            columns[name] = column.to_pylist()
    return columns


def check_node(node: int, nodes: int, where: str) -> None:
    """Check that a number is the id of a node of a tree with ``nodes`` nodes.

    Raises
    ------
    ValueError
        If the number is not the id of a node; the message begins with ``where``.
    """
    if not 0 <= node < nodes:
        raise ValueError(f"{where} should be the id of a node, from 0 to {nodes - 1}, got {node}")


def check_ids(ids: Iterable[int], where: str) -> None:
    """Check that the ids of clients are at least 0 and distinct.

    Raises
    ------
    ValueError
        If an id is negative or occurs twice; the message begins with ``where``.
    """
    found = list(ids)
    if any(each < 0 for each in found) or len(set(found)) < len(found):
        raise ValueError(f"{where} should have distinct ids of at least 0, got {shown(found)}")


def plain(value: Any) -> Any:
    """Convert a value to types that JSON and TOML can store; unknown objects become their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        entries = [plain(entry) for entry in value]
        if isinstance(value, tuple):
            return tuple(entries)
        return entries
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, bool | int | float | str | None):
        return value
    return str(value)


def without_nan(value: Any) -> Any:
    """Return a value with None for numbers that JSON cannot express: NaN and infinite ones."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {key: without_nan(entry) for key, entry in entries.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in cast("Sequence[Any]", value)]
    return value


EMPTY = {("local", "options"), ("signature", "of"), ("task", "metrics")}
"""Settings that are empty by default, by section and name.

Earlier versions wrote them to configs although they were not set.
"""


def without_unset(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Return a config without values that mean the same as leaving the setting out.

    These are None, which TOML cannot represent, and empty values of the settings in :data:`EMPTY`.

    Parameters
    ----------
    value
        The config, or a value inside it.
    path
        Names of the section and the setting that contain the value; empty for a whole config.
    """
    if isinstance(value, Mapping):
        kept = {
            key: each
            for key, each in value.items()
            if each or (each is not None and (*path, key) not in EMPTY)
        }
        return {key: without_unset(each, (*path, key)) for key, each in kept.items()}
    if isinstance(value, tuple | list):
        return [without_unset(entry, path) for entry in value]
    return value
