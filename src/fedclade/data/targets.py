"""The column to predict, as targets of a task."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedclade.core import ConfigError, DataError, TaskKind
from fedclade.data.sheets import IN_WORDS, ColumnKind, Rows, is_number

MOST_LABELS = 1000
"""Whole numbers from this on are no labels, unless somebody says so."""


def targets(rows: Rows, columns: tuple[str, ...], task: TaskKind | None) -> tuple[Tensor, TaskKind, tuple[str, ...]]:
    """Return the targets, the task that they are of, and what the labels are called where they are no numbers."""
    kinds: dict[str, ColumnKind] = {column: rows.kind(column) for column in columns}
    if len(columns) > 1 or task == "multilabel":
        return _several(rows, kinds, task)
    ((column, kind),) = kinds.items()
    unsaid, task = task is None, task or ("regression" if kind == "number" else "classification")
    if task == "regression":
        if not is_number(kind):
            raise DataError(f"the target {column!r} of a regression should be numbers, got {IN_WORDS[kind]}")
        return torch.from_numpy(rows.numbers(column)).to(torch.float32), task, ()
    if task == "binary":
        return _two(rows, column, kind)
    if not is_number(kind):
        values, place = np.unique(rows.texts(column).astype(np.str_), return_inverse=True)
        return torch.from_numpy(place.astype(np.int64)), task, tuple(values.tolist())
    labels = rows.numbers(column)
    odd = np.split((labels < 0) | (labels != labels.round()), np.cumsum([*map(len, rows.tables)])[:-1])
    parts = np.split(labels, np.cumsum([*map(len, rows.tables)])[:-1])
    rows.refuse(odd, column, parts, "labels should be whole numbers from 0 on; task = 'regression' takes other numbers")
    if unsaid and labels.max() >= MOST_LABELS:
        raise ConfigError(
            f"the target {column!r} has whole numbers up to {int(labels.max()):,}; say whether these are labels "
            "or numbers, by task = 'classification' or 'regression'"
        )
    return torch.from_numpy(labels.astype(np.int64)), task, ()


def _two(rows: Rows, column: str, kind: ColumnKind) -> tuple[Tensor, TaskKind, tuple[str, ...]]:
    """Return a target of two values as 0 and 1, in sorted order."""
    held = rows.numbers(column) if is_number(kind) else rows.texts(column).astype(np.str_)
    values, place = np.unique(held, return_inverse=True)
    shown_values = [f"{value:g}" if is_number(kind) else str(value) for value in values]
    if is_number(kind) and set(values.tolist()) <= {0.0, 1.0}:
        return torch.from_numpy(held.astype(np.float32)), "binary", ("0", "1")
    if len(values) != 2:
        raise DataError(
            f"the target {column!r} of a binary task should have 2 different values, got {len(values)}: "
            f"{', '.join(shown_values[:5])}"
        )
    return torch.from_numpy(place.astype(np.float32)), "binary", tuple(shown_values)


def _several(
    rows: Rows, kinds: Mapping[str, ColumnKind], task: TaskKind | None
) -> tuple[Tensor, TaskKind, tuple[str, ...]]:
    """Return the targets of several columns: yes or no, or numbers."""
    if task is None and "number" in kinds.values():
        task = "regression"
    if task not in ("multilabel", "regression"):
        what = "left out" if task is None else task
        raise ConfigError(f"several targets ({', '.join(kinds)}) need task = 'multilabel' or 'regression', got {what}")
    if text := [
        column for column, kind in kinds.items() if kind == "text" or (kind == "bool" and task == "regression")
    ]:
        raise DataError(f"the target {text[0]!r} of a {task} task should be numbers, got {IN_WORDS[kinds[text[0]]]}")
    parts = [rows.texts(c) == "true" if kind == "bool" else rows.numbers(c) for c, kind in kinds.items()]
    y = torch.from_numpy(np.stack(parts, axis=1).astype(np.float32))
    for column, values in zip(kinds, y.T, strict=True):
        if task == "multilabel" and not bool(((values == 0) | (values == 1)).all()):
            value = float(values[(values != 0) & (values != 1)][0])
            raise DataError(f"the target {column!r} of a multilabel task should be 0 or 1, got {value:g}")
    return y, task, tuple(kinds)
