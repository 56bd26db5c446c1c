"""Contents of the files of a run folder: their required structure, and how values are written."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import Event, import_extra, shown
from fedclade.tasks import read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame


# Rows of a long table are stored as columns: as dicts, those of a million clients would take
# gigabytes.

Row = dict[str, Any]

Column = NDArray[Any] | list[Any]
"""Values of equal type as an array; other values, such as names or optional ones, as a list."""

Block = Mapping[str, Column]

AT_A_TIME = 65_536
"""Number of rows that are converted to dicts at once when all rows are read."""


class RowTable(Sequence[Row]):
    """Rows that are added in blocks of columns and read like a list of dicts.

    Each dict is made when it is read.

    Parameters
    ----------
    blocks
        Columns by name, all columns of a block of one length; empty blocks are left out.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks: tuple[Block, ...] = tuple(block for block in blocks if _length(block))
        """Columns of each block by name, all of one length."""
        self._ends = list(accumulate(map(_length, self.blocks)))

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowTable:
        """Return a table of rows, with a block for each round's rows that have the same keys."""
        if isinstance(rows, RowTable):
            return rows
        together = groupby(rows, key=lambda row: (row.get("round"), *row))
        blocks = ((list(kind[1:]), list(some)) for kind, some in together)
        return cls(
            {name: _column([row[name] for row in some]) for name in names} for names, some in blocks
        )

    def with_block(self, block: Block) -> RowTable:
        """Return these rows, followed by those of a block."""
        return RowTable((*self.blocks, block))

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, one for each row."""
        return [value for block in self.blocks for value in _values(block[name])]

    @property
    def last(self) -> RowTable:
        """Rows of the last block."""
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
        within = place - (self._ends[number] - _length(block))
        return {name: _values(values[within : within + 1])[0] for name, values in block.items()}

    def __iter__(self) -> Iterator[Row]:
        for block in self.blocks:
            for start in range(0, _length(block), AT_A_TIME):
                some = [_values(values[start : start + AT_A_TIME]) for values in block.values()]
                yield from (dict(zip(block, row, strict=True)) for row in zip(*some, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast(Sequence[object], other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (like a list)

    def __repr__(self) -> str:
        return f"RowTable({list(self)!r})"


def _length(block: Block) -> int:
    return len(next(iter(block.values()), ()))


def _values(column: Column) -> list[Any]:
    return column if isinstance(column, list) else column.tolist()


def _column(values: list[Any]) -> Column:
    """Return values as an array if all are whole numbers or all are floats, or else as a list."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64) if kinds == {float} else values


# Shapes: the keys and types of a file's content, which are checked before any other code relies on
# them.

LARGEST = 2**53
"""Largest whole number that is read: a float cannot represent all larger ones exactly."""

Shape = Any
"""Structure that a value must have.

``str``, ``bool``; ``int`` for a whole number of at least 0; ``float`` for any number, and
``complex`` for one that is finite; ``object`` for anything; ``None``; a tuple of alternatives;
``[shape]`` for a list; ``{"key": shape}`` for a table, in which ``"key?"`` is optional and other
keys are allowed; ``{...: shape}`` for the shape of all other keys.
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
    """Check that a value from JSON, TOML or a table has a shape.

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
        If the value has another structure.
    """
    if isinstance(shape, dict):
        _check_table(value, cast("dict[Any, Shape]", shape), where)
    elif isinstance(shape, list):
        (each,) = cast("list[Shape]", shape)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} should be a list, got {shown(value)}")
        for i, entry in enumerate(cast("list[object]", value)):
            check_shape(entry, each, f"{where}[{i}]")
    elif not any(_is(value, each) for each in _alternatives(shape)):
        expected = " or ".join(_NAMES[each] for each in _alternatives(shape))
        raise ValueError(f"{where} should be {expected}, got {shown(value)}")


def _check_table(value: object, shape: dict[Any, Shape], where: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} should be a table, got {shown(value)}")
    table = cast("Mapping[str, object]", value)
    named = {name: each for name, each in shape.items() if name is not ...}
    for key in table if ... in shape else ():
        if key not in named and f"{key}?" not in named:
            check_shape(table[key], shape[...], f"{where}: {key}")
    for name, each in named.items():
        key = name.removesuffix("?")
        if key in table:
            check_shape(table[key], each, f"{where}: {key}")
        elif key == name:
            raise ValueError(f"{where} lacks {key}")


def _alternatives(shape: Shape) -> Sequence[Shape]:
    return cast("tuple[Shape, ...]", shape) if isinstance(shape, tuple) else (shape,)


def _is(value: object, shape: Shape) -> bool:
    if shape is object:
        return True
    if shape is None:
        return value is None
    if shape in (int, float, complex):
        # bool is a subclass of int, but true and false are no numbers in files
        if isinstance(value, int) and not isinstance(value, bool):
            return (0 if shape is int else -LARGEST) <= value <= LARGEST
        return (
            isinstance(value, float)
            and shape is not int
            and (shape is float or math.isfinite(value))
        )
    return isinstance(value, shape)


_SCORE_NUMBERS = ("mean", "std", "min", "max", "p10", "p50", "p90", "worst10_mean")
_SCORES = {**dict.fromkeys(_SCORE_NUMBERS, (float, None)), ...: (float, None)}
"""Distribution of a score over clients.

The numbers are None if the score is undefined for all clients.
"""

_OF_ROUND = {"round": int, "validation": {...: (float, None)}, "test": {...: (float, None)}}
"""Mean scores of one round."""

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
    "clusters": {
        **{"found": int, "true": (int, None), "sizes": [int]},
        **{"ari": (float, None), "nmi": (float, None), "ari_assigned?": (float, None)},
    },
    "target": {
        **{"share_of_clients": (float, None), ...: (float, None)},
        **{"rounds_to_target": (int, None), "bytes_to_target": (complex, None)},
    },
    **{"bytes_up": complex, "bytes_down": complex, "device": str},
    "seconds": dict.fromkeys(("total", "train", "evaluate", "server"), complex),
    "inputs?": {
        "shape": [int],
        "scaled": object,
        **dict.fromkeys(("columns?", "labels?", "mean?", "std?"), object),
    },
    "privacy?": {"epsilon": (float, None), "delta": float, "releases": int},
    "adversary?": {
        **{"kind": str, "ids": [int], "scores": {...: {...: (float, None)}}},
        "clusters": dict.fromkeys(("of_adversaries", "of_both", "adversaries_with_honest"), int),
        **{"ari_honest": (float, None), "attack_success": (float, None)},
    },
    **{"engine?": str, "versions?": {...: str}, "class_weights?": [complex]},
}
"""Shape of ``summary.json``, see :func:`fedclade.runs.store.contents.check_shape`."""

_SECTION = {...: object}

CONFIG = {
    "rounds?": int,
    **{
        f"{name}?": _SECTION
        for name in ("data", "local", "signature", "target", "privacy", "faults", "newcomers")
    },
    **{f"{name}?": _SECTION for name in ("network", "versions", "adversary", "stop")},
    **{f"{name}?": {"name": str} for name in ("algorithm", "model")},
}
"""Shape of ``config.toml``, as far as it does not depend on the algorithm."""

FINISHED = {name: {"name": str} for name in ("algorithm", "model")}
"""Keys that the config of a finished run has in addition.

A config that a user writes may leave them out if they have a default.
"""

TO_NOTE = {**{"rounds": int, "seed": int, "engine": str}, **FINISHED}
"""Keys that a user's config must have to be recorded, as the run's summary repeats them."""

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
"""Columns that a table must have, with their possible types.

All columns but ``true_cluster`` have a value in each row.
"""

_WORDS = ("phase", "name")
"""Columns of text."""


def read_json(path: Path, shape: Any) -> Any:
    """Read a JSON file of some shape.

    Raises
    ------
    OSError, ValueError, RecursionError
        If the file cannot be read, is no JSON, or has another shape.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON ({error})") from error
    check_shape(content, shape, path.name)
    return content


def read_summary(path: Path) -> Row:
    """Read a summary; raises the errors of :func:`read_json`."""
    summary = read_json(path, SUMMARY)
    check_shape(summary, {metric.name: _SCORES for metric in read_metrics(summary)}, path.name)
    return summary


def read_rows(path: Path, summary: Row, nodes: int) -> RowTable:
    """Read one table of a run.

    Parameters
    ----------
    path
        The file, whose name is that of the table.
    summary
        Summary of the run.
    nodes
        Number of nodes of its tree.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, a column is missing or has another type, or a number in it is
        impossible.
    """
    import pyarrow.parquet as pq

    rounds = summary["rounds"]
    columns = TABLES[path.stem]
    scores = [each["name"] for each in summary.get("metrics", ())] if path.stem == "clients" else []
    columns = {**columns, **{name: ["double"] for name in scores}}
    most = {"metrics": rounds, "clusters": rounds * nodes}.get(path.stem)
    file = pq.ParquetFile(path.absolute())
    # Checked before it is read: a small file can contain any number of equal rows.
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
        for value in (
            table[column].unique().drop_null().to_pylist() if column in schema.names else ()
        ):
            where = f"row {table[column].index(value).as_py()} of {path.name}: {column}"
            check_shape(value, int, where) if column == "round" else check_node(value, nodes, where)
    return RowTable([_columns(table, scores)])


def write_rows(path: Path, rows: Sequence[Row], scores: Collection[str] = ()) -> None:
    """Write one table into a new file.

    Parameters
    ----------
    path
        The file.
    rows
        Rows of the table.
    scores
        Names of columns with scores. In these, NaN is written as null: such clients have no score.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _table(rows)
    for name in scores:
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(
                place, name, pa.array(table[name].to_numpy(), from_pandas=True)
            )
    # Absolute, as Arrow takes a relative path such as runs:1/... for an address of scheme "runs".
    pq.write_table(table, path.absolute())


def data_frame(rows: Sequence[Row], purpose: str) -> DataFrame:
    """Return rows as the pandas data frame that their file is read as.

    Parameters
    ----------
    rows
        Rows of a table.
    purpose
        Name of the function that needs pandas, for the error message.

    Raises
    ------
    MissingExtraError
        If pandas is not installed.
    """
    import_extra("pandas", "pandas", "notebook", purpose)
    return _table(rows).to_pandas()


def _table(rows: Sequence[Row]) -> Any:
    """Return rows as an Arrow table."""
    import pyarrow as pa

    blocks = [pa.table(dict(block)) for block in RowTable.of(rows).blocks]
    return pa.concat_tables(blocks, promote_options="permissive") if blocks else pa.table({})


def _columns(table: Any, scores: Collection[str]) -> dict[str, Column]:
    """Return the columns of an Arrow table: columns of numbers as arrays, other columns as lists.

    A column with missing values is a list, unless it is one of ``scores``, where they become NaN.
    """
    numbers = {
        name: name in scores
        or (str(table[name].type) in ("int64", "double") and not table[name].null_count)
        for name in table.column_names
    }
    return {
        name: table[name].to_numpy() if numbers[name] else table[name].to_pylist()
        for name in table.column_names
    }


def check_node(node: int, nodes: int, where: str) -> None:
    """Check that a node has a number of the tree; raises ValueError."""
    if not 0 <= node < nodes:
        raise ValueError(f"{where} should be of a node from 0 to {nodes - 1}, got {node}")


def check_ids(ids: Iterable[int], where: str) -> None:
    """Check that ids of clients are at least 0 and different; raises ValueError."""
    found = list(ids)
    if any(each < 0 for each in found) or len(set(found)) < len(found):
        raise ValueError(f"{where} should be different clients, numbered from 0")


def plain(value: Any) -> Any:
    """Convert a value to types that files can store; other objects become their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        entries = [plain(entry) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


EMPTY = {("local", "options"), ("signature", "of"), ("task", "metrics")}
"""Settings that are empty by default.

Earlier versions wrote them to configs although they were not set.
"""


def without_unset(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Leave out unset values: None, as TOML has no null, and what is empty by default."""
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


# Events of a run: reading their rows, and converting rows to typed events by the types of their
# fields.

E = TypeVar("E", bound=Event)


def read_events(path: Path, nodes: int) -> list[Row]:
    """Read the events of a run.

    Parameters
    ----------
    path
        The file.
    nodes
        Number of nodes of the run's tree.

    Raises
    ------
    OSError, ValueError, RecursionError
        If the file cannot be read, or an event lacks its round, kind or node.
    """
    events: list[Row] = []
    for i, line in enumerate(path.read_text().splitlines(), start=1):
        event = json.loads(line)
        where = f"line {i} of {path.name}"
        check_shape(event, {"round": int, "kind": str, "node": int}, where)
        check_node(event["node"], nodes, where)
        events.append(event)
    return events


def events_of(rows: Sequence[Row], *types: type[E]) -> list[tuple[int, E]]:
    """Return the events of some types among the rows of a run, in order, each with its round.

    Rows whose ``kind`` is that of a type, but which lack some of its fields, are left out: a user's
    own method may report events of the same kind with fewer fields.
    """
    found = (
        (row["round"], event_of(row, each))
        for row in rows
        for each in types
        if row["kind"] == each.kind
    )
    return [(number, event) for number, event in found if event is not None]


def event_of(row: Row, event_type: type[E]) -> E | None:
    """Return the event of a type that a row describes; None if the row lacks some of its fields."""
    hints = _hints_of(event_type)
    wanted = [
        each.name for each in fields(event_type) if each.name in row or each.default is not None
    ]
    types = {name: hints[name] for name in wanted}
    try:
        check_shape(row, {name: _shape_of(each) for name, each in types.items()}, "it")
        return event_type(**{name: _value_of(each, row[name]) for name, each in types.items()})
    except ValueError:
        return None


_hints_of = cache(get_type_hints)
"""Cached type hints of an event type, as a run can have many rows."""


def _shape_of(hint: Any) -> Shape:
    """Return the shape of a value of some type in JSON, see :func:`check_shape`."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is UnionType:
        return tuple(None if each is NoneType else _shape_of(each) for each in inner)
    if origin is tuple:
        return [_shape_of(inner[0])] if inner[-1] is ... else [(int, float)]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {...: _shape_of(inner[1])}
    return hint


def _value_of(hint: Any, value: Any) -> Any:
    """Convert a value from JSON to its type."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is tuple:
        each = [inner[0]] * len(value) if inner[-1] is ... else inner
        return tuple(_value_of(part, entry) for part, entry in zip(each, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {inner[0](key): _value_of(inner[1], entry) for key, entry in value.items()}
    if hint is int and not isinstance(value, int):
        raise ValueError(f"a whole number should be one, got {value}")
    return value
