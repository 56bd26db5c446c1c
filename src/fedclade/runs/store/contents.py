"""What there must be in the files of a run folder for everything that reads them, and how values are put there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedclade.core import import_extra
from fedclade.runs.store.row_table import Column, Row, RowTable
from fedclade.runs.store.shape import check_shape
from fedclade.tasks import noted_metrics

if TYPE_CHECKING:
    from pandas import DataFrame

_SCORE_NUMBERS = ("mean", "std", "min", "max", "p10", "p50", "p90", "worst10_mean")
_SCORES = {**dict.fromkeys(_SCORE_NUMBERS, (float, None)), ...: (float, None)}
"""How a score is spread over clients; without numbers if it is undefined for all of them."""

_OF_ROUND = {"round": int, "validation": {...: (float, None)}, "test": {...: (float, None)}}
"""The mean scores of one round."""

SUMMARY = {
    **{"format": object, "algorithm": str, "data": str, "model": str, "seed": int, "rounds": int, "clients": int},
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
    "inputs?": {"shape": [int], "scaled": object, **dict.fromkeys(("columns?", "labels?", "mean?", "std?"), object)},
    "privacy?": {"epsilon": (float, None), "delta": float, "releases": int},
    "adversary?": {
        **{"kind": str, "ids": [int], "scores": {...: {...: (float, None)}}},
        "clusters": dict.fromkeys(("of_adversaries", "of_both", "adversaries_with_honest"), int),
        **{"ari_honest": (float, None), "attack_success": (float, None)},
    },
    **{"engine?": str, "versions?": {...: str}, "class_weights?": [complex]},
}
"""The shape of ``summary.json``, see :func:`fedclade.runs.store.shape.check_shape`."""

_SECTION = {...: object}

CONFIG = {
    "rounds?": int,
    **{f"{name}?": _SECTION for name in ("data", "local", "signature", "target", "privacy", "faults", "newcomers")},
    **{f"{name}?": _SECTION for name in ("network", "versions", "adversary", "stop")},
    **{f"{name}?": {"name": str} for name in ("algorithm", "model")},
}
"""The shape of ``config.toml``, as far as it can be known without the algorithm."""

FINISHED = {name: {"name": str} for name in ("algorithm", "model")}
"""What the config of a finished run has besides: those that somebody wrote may leave out what has a default."""

TO_NOTE = {**{"rounds": int, "seed": int, "engine": str}, **FINISHED}
"""What a config must have that is given to be noted: the summary of the run repeats it."""

_NUMBERS = ("int64", "double", "null", "bool")
TABLES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "metrics": {"round": ["int64"], "bytes_up": ["int64", "double"], "bytes_down": ["int64", "double"]},
    "clusters": {"round": ["int64"], "node": ["int64"]},
    "clients": {
        **{"round": ["int64"], "client": ["int64"], "name": ["string"], "cluster": ["int64"]},
        **{"loss": ["double"], "true_cluster": ["int64", "null"]},
    },
}
"""The columns that a table must have, with the types that they can be of; all but the last hold a value in each row."""

_WORDS = ("phase", "name")
"""Columns that hold no numbers."""


def read_json(path: Path, shape: Any) -> Any:
    """Read a JSON file of some shape; raises OSError, ValueError or RecursionError if it is not there or another."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON ({error})") from error
    check_shape(content, shape, path.name)
    return content


def read_summary(path: Path) -> Row:
    """Read a summary; raises what :func:`read_json` raises."""
    summary = read_json(path, SUMMARY)
    check_shape(summary, {metric.name: _SCORES for metric in noted_metrics(summary)}, path.name)
    return summary


def read_rows(path: Path, summary: Row, nodes: int) -> RowTable:
    """Read one table, by its file's name, of a run of some summary and number of nodes.

    Raises
    ------
    OSError, ValueError
        If it cannot be read, a column is missing or of another type, or a number in it cannot be.
    """
    import pyarrow.parquet as pq

    rounds, columns = summary["rounds"], TABLES[path.stem]
    scores = [each["name"] for each in summary.get("metrics", ())] if path.stem == "clients" else []
    columns = {**columns, **{name: ["double"] for name in scores}}
    most = {"metrics": rounds, "clusters": rounds * nodes}.get(path.stem)
    file = pq.ParquetFile(path.absolute())
    if most is not None and file.metadata.num_rows > most:  # before it is read: equal rows take no room in a file
        raise ValueError(f"{path.name} should have at most {most} rows, got {file.metadata.num_rows}")
    schema = file.schema_arrow
    if file.metadata.num_rows == 0:
        return RowTable()
    for column, types in columns.items():
        if column not in schema.names:
            raise ValueError(f"{path.name} lacks the column {column}")
        if str(schema.field(column).type) not in types:
            raise ValueError(f"{path.name}: {column} should be {' or '.join(types)}, got {schema.field(column).type}")
    for field in schema:
        if field.name not in _WORDS and str(field.type) not in _NUMBERS:
            raise ValueError(f"{path.name}: {field.name} should be numbers, got {field.type}")
    table = file.read()
    for column in columns:
        if column not in ("true_cluster", *scores) and table[column].null_count:
            raise ValueError(f"row {table[column].is_null().index(True).as_py()} of {path.name} lacks {column}")
    for column in ("round", "node", "cluster", "served_by"):
        for value in table[column].unique().drop_null().to_pylist() if column in schema.names else ():
            where = f"row {table[column].index(value).as_py()} of {path.name}: {column}"
            check_shape(value, int, where) if column == "round" else check_node(value, nodes, where)
    return RowTable([_columns(table, scores)])


def write_rows(path: Path, rows: Sequence[Row], scores: Collection[str] = ()) -> None:
    """Write one table into a new file; in columns with ``scores``, NaN becomes null: such clients have no score."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _table(rows)
    for name in scores:
        if name in table.column_names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, pa.array(table[name].to_numpy(), from_pandas=True))
    pq.write_table(table, path.absolute())  # as Arrow takes runs:1/... for an address of the kind "runs"


def data_frame(rows: Sequence[Row], purpose: str) -> DataFrame:
    """Return rows as the pandas data frame that is read from their file; ``purpose`` is what needs pandas.

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
    """Return the columns of a table, those of numbers that are all there as arrays.

    So are those with ``scores``, in which a missing one is NaN.
    """
    numbers = {
        name: name in scores or (str(table[name].type) in ("int64", "double") and not table[name].null_count)
        for name in table.column_names
    }
    return {name: table[name].to_numpy() if numbers[name] else table[name].to_pylist() for name in table.column_names}


def check_node(node: int, nodes: int, where: str) -> None:
    """Check that there is a node of this number; raises ValueError."""
    if not 0 <= node < nodes:
        raise ValueError(f"{where} should be of a node from 0 to {nodes - 1}, got {node}")


def check_ids(ids: Iterable[int], where: str) -> None:
    """Check that numbers of clients are at least 0, and different."""
    found = list(ids)
    if any(each < 0 for each in found) or len(set(found)) < len(found):
        raise ValueError(f"{where} should be different clients, numbered from 0")


def plain(value: Any) -> Any:
    """Return a setting, or a detail of an event, as files can hold it: no numbers of NumPy, no tensors, no objects."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        entries = [plain(entry) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else str(value)


EMPTY = {("local", "options"), ("signature", "of"), ("task", "metrics")}
"""Settings that are empty where nobody has set them; earlier versions wrote that down."""


def without_unset(value: Any, path: tuple[str, ...] = ()) -> Any:
    """Leave out what is not set: what is None, since TOML has no null, and what is empty by default."""
    if isinstance(value, Mapping):
        kept = {key: each for key, each in value.items() if each or (each is not None and (*path, key) not in EMPTY)}
        return {key: without_unset(each, (*path, key)) for key, each in kept.items()}
    if isinstance(value, tuple | list):
        return [without_unset(entry, path) for entry in value]
    return value
