"""The columns to predict, as targets of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ConfigError, DataError, TaskKind
from fedclade.data.schema import MOST_LABELS, DataSchema, Label, SchemaError, show_label
from fedclade.data.sheets import IN_WORDS, ColumnKind, Rows, is_number

Labels = tuple[Label, ...] | int | None
"""Names of labels, the number of numbered labels, or None for targets that are no labels."""


def describe_targets(
    rows: Rows, columns: tuple[str, ...], task: TaskKind | None, *, alone: bool = False
) -> tuple[TaskKind, Labels]:
    """Return the task that targets are of, and their labels.

    ``alone`` says that other clients have further labels: a binary target may then have one value.
    """
    kinds: dict[str, ColumnKind] = {column: rows.kind(column) for column in columns}
    if len(columns) > 1 or task == "multilabel":
        return _describe_several(kinds, task), None
    ((column, kind),) = kinds.items()
    is_guessed = task is None
    if task is None:
        task = "regression" if kind == "number" else "classification"
    if task == "regression":
        if not is_number(kind):
            raise DataError(f"the target {column!r} of a regression should be numbers, got {IN_WORDS[kind]}")
        return task, None
    if task == "binary":
        return task, _describe_two(rows, column, kind, alone=alone)
    if not is_number(kind):
        return task, rows.categories(column)
    most = int(_whole_numbers(rows, column).max())
    if is_guessed and most >= MOST_LABELS:
        raise ConfigError(
            f"the target {column!r} has whole numbers up to {most:,}; say whether these are labels "
            "or numbers, by task = 'classification' or 'regression'"
        )
    return task, most + 1


def encode_targets(rows: Rows, columns: tuple[str, ...], schema: DataSchema) -> Tensor:
    """Return the targets of a task, encoded by a schema; a SchemaError if a label is none of the schema's."""
    if len(columns) != 1 or schema.task == "multilabel":
        return _encode_several(rows, columns, schema.task)
    (column,) = columns
    if schema.labels is None:
        return torch.from_numpy(rows.numbers(column)).to(torch.float32)
    if isinstance(schema.labels, int):
        return _encode_numbered(rows, column, schema.labels)
    places = _label_places(rows, column, schema.labels)
    return torch.from_numpy(places.astype(np.float32 if schema.task == "binary" else np.int64))


def _describe_two(rows: Rows, column: str, kind: ColumnKind, *, alone: bool) -> tuple[Label, ...]:
    """Return the two values of a target in sorted order."""
    if is_number(kind):
        values: list[Any] = np.unique(rows.numbers(column)).tolist()
        if set(values) <= {0.0, 1.0}:
            return 0.0, 1.0
    else:
        values = list(rows.categories(column))
    if len(values) != 2 and not (alone and len(values) == 1):
        listed = ", ".join(show_label(value) for value in values[:5])
        raise DataError(
            f"the target {column!r} of a binary task should have 2 different values, got {len(values)}: {listed}"
            + ("; if other clients have the other value, declare both as the labels of a schema" * (len(values) == 1))
        )
    return tuple(values)


def _label_places(rows: Rows, column: str, labels: Sequence[Label]) -> NDArray[np.int64]:
    """Return the number of each row's label among the names of labels, int64 ``[N]``."""
    kind = rows.kind(column)
    if is_number(kind) != isinstance(labels[0], float):
        expected = "texts" if is_number(kind) else "numbers"
        raise SchemaError(
            f"{rows.sheets[0].where}: the labels of the schema are {expected}, and the target {column!r} holds "
            f"{IN_WORDS[kind]}"
        )
    if not is_number(kind):
        return rows.category_places(column, cast("Sequence[str]", labels), "label")
    numbers = rows.numbers(column)
    places = np.full(len(numbers), -1, dtype=np.int64)
    for place, label in enumerate(labels):
        places[numbers == label] = place
    rows.refuse_unknown(places < 0, column, numbers, [show_label(label) for label in labels], "label")
    return places


def _whole_numbers(rows: Rows, column: str) -> NDArray[np.float64]:
    """Return a column of labels that are whole numbers from 0."""
    labels = rows.numbers(column)
    is_odd = (labels < 0) | (labels != labels.round())
    ends = np.cumsum([len(table) for table in rows.tables])[:-1]
    rule = "labels should be whole numbers from 0 on; task = 'regression' takes other numbers"
    rows.refuse(np.split(is_odd, ends), column, np.split(labels, ends), rule)
    return labels


def _encode_numbered(rows: Rows, column: str, count: int) -> Tensor:
    """Return labels that are whole numbers below ``count``."""
    if not is_number(kind := rows.kind(column)):
        raise SchemaError(
            f"{rows.sheets[0].where}: the labels of the schema are the numbers 0 to {count - 1}, and the target "
            f"{column!r} holds {IN_WORDS[kind]}"
        )
    labels = _whole_numbers(rows, column)
    rows.refuse_unknown(labels >= count, column, labels, ["0", "...", str(count - 1)], "label")
    return torch.from_numpy(labels.astype(np.int64))


def _describe_several(kinds: Mapping[str, ColumnKind], task: TaskKind | None) -> TaskKind:
    """Return the task of several target columns: yes or no, or numbers."""
    if task is None and "number" in kinds.values():
        task = "regression"
    if task not in ("multilabel", "regression"):
        what = "left out" if task is None else task
        raise ConfigError(f"several targets ({', '.join(kinds)}) need task = 'multilabel' or 'regression', got {what}")
    for column, kind in kinds.items():
        if kind == "text" or (kind == "bool" and task == "regression"):
            raise DataError(f"the target {column!r} of a {task} task should be numbers, got {IN_WORDS[kind]}")
    return task


def _encode_several(rows: Rows, columns: tuple[str, ...], task: TaskKind | None) -> Tensor:
    parts: list[NDArray[Any]] = []
    for column in columns:
        is_bool = rows.kind(column) == "bool"
        parts.append(rows.texts(column) == "true" if is_bool else rows.numbers(column))
    y = torch.from_numpy(np.stack(parts, axis=1).astype(np.float32))
    for column, values in zip(columns, y.T, strict=True):
        if task == "multilabel" and not bool(((values == 0) | (values == 1)).all()):
            value = float(values[(values != 0) & (values != 1)][0])
            raise DataError(f"the target {column!r} of a multilabel task should be 0 or 1, got {value:g}")
    return y
