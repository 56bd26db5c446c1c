"""Encoding of new rows for a trained model, as the rows of the run's clients were encoded.

The schema of the run determines columns, categories and words; the record of the run's inputs has
the mean and standard deviation by which numbers are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedclade.core import DataError, shown
from fedclade.data.arrays import as_inputs
from fedclade.data.cell_values import Notation
from fedclade.data.columns import Rows, Sheet, arrow_table, read_sheet
from fedclade.data.schema import DataSchema, show_names
from fedclade.data.texts import encode, pad, split_words
from fedclade.data.typed_columns import ColumnRoles, Report, prepare_reported


@dataclass(frozen=True)
class InputEncoding:
    """Encoding of a run's inputs: schema, scaling, and the notation of its files.

    Parameters
    ----------
    inputs
        Record of the inputs in the summary of the run; see ``Columns.described``.
    schema
        Schema of the run's tables or texts; None if its inputs are arrays.
    notation
        Decimal mark and format of dates of the run's files.
    separator, encoding
        Separator and text encoding of the run's CSV files; detected if None.
    """

    inputs: Mapping[str, Any]
    schema: DataSchema | None = None
    notation: Notation = field(default_factory=Notation)
    separator: str | None = None
    encoding: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input of the model."""
        return tuple(self.inputs["shape"])


@dataclass(frozen=True, eq=False)
class NewRows:
    """Encoded rows, in the form that a run's models take.

    Parameters
    ----------
    x
        Inputs ``[N, ...]``.
    table
        The Arrow table from which the rows were encoded; None for other rows.
    """

    x: Tensor
    table: Any = None


def encode_new_rows(rows: Any, by: InputEncoding) -> NewRows:
    """Encode new rows as the rows of a run's clients were encoded.

    Parameters
    ----------
    rows
        The path of a CSV, TSV or Parquet file; a data frame of pandas, polars or Arrow, a mapping of
        columns, or a list of mappings; a list of N texts; or an array ``[N, ...]`` of inputs, as
        they were before scaling.
    by
        Encoding of the run's inputs.

    Raises
    ------
    DataError
        If the rows do not have the columns or the shape of the run's inputs, or a cell cannot be
        encoded; the message names the cell.
    """
    if by.inputs.get("scaled_by_client"):
        raise DataError(
            "each client of this run scales its inputs by the mean and standard deviation of its "
            "own examples (standardize = 'client'), which the run does not store, so new rows "
            "cannot be scaled; scale them as the client did, and apply the exported model to them"
        )
    if _are_texts(rows):
        return NewRows(_encode_texts(list(rows), by))
    sheet = _as_sheet(rows, by)
    if sheet is not None:
        return NewRows(_encode_sheet(sheet, by), sheet.table)
    return NewRows(_scale_arrays(rows, by))


def _are_texts(rows: Any) -> bool:
    return isinstance(rows, list | tuple) and bool(rows) and isinstance(rows[0], str)


def _as_sheet(rows: Any, by: InputEncoding) -> Sheet | None:
    """Return rows of a table as a sheet; None if the rows are an array."""
    if isinstance(rows, str | Path):
        path = Path(rows)
        if not path.is_file():
            raise DataError(f"{path} is not a file; name a CSV, TSV or Parquet file with the rows")
        return read_sheet(path, by.separator, by.encoding)
    is_list = isinstance(rows, list | tuple)
    if is_list and rows and isinstance(rows[0], Mapping):
        import pyarrow as pa

        mappings = [dict(cast("Mapping[str, Any]", row)) for row in rows]
        return Sheet(pa.Table.from_pylist(mappings), "the rows", None)
    if is_list or isinstance(rows, Tensor | np.ndarray):
        return None
    return Sheet(arrow_table(rows), "the rows", None)


def _encode_sheet(sheet: Sheet, by: InputEncoding) -> Tensor:
    """Encode the rows of a table by the schema of a run, and scale them, ``[N, F]``."""
    schema = by.schema
    if schema is None or not schema.inputs:
        raise DataError(
            f"{sheet.where} is a table, but the inputs of the run are not the columns of a table; "
            f"pass an array of inputs of shape [N, {', '.join(map(str, by.shape))}]"
            + ("" if schema is None else ", or a list of texts")
        )
    names = [column.name for column in schema.inputs]
    if missing := [name for name in names if name not in sheet.table.column_names]:
        raise DataError(
            f"{sheet.where} should have the input columns of the run, but lacks "
            f"{show_names(missing)}; it has {show_names(sheet.table.column_names)}"
        )
    texts = tuple(column.name for column in schema.inputs if column.kind == "text")
    categories = tuple(column.name for column in schema.inputs if column.kind == "category")
    inputs = tuple(name for name in names if name not in texts)
    roles = ColumnRoles(inputs=inputs, as_texts=texts, categorical=categories)
    with Report(1).written() as report:
        # Columns are not checked for ids: they were inputs in the run.
        (prepared,) = prepare_reported([sheet], roles, by.notation, report, are_roles_known=False)
    rows = Rows([prepared])
    if texts:
        return _encode_texts(rows.texts(texts[0], empty=True).tolist(), by)
    return _scale_columns(rows.encode_inputs(schema.inputs), by)


def _encode_texts(texts: Sequence[str], by: InputEncoding) -> Tensor:
    """Encode N texts as tokens ``[N, max_words]`` by the vocabulary of a run."""
    if by.schema is None or not by.schema.words:
        raise DataError(
            f"the rows are texts, such as {shown(texts[0])}, but the inputs of the run are not "
            "texts; pass a table, the path of a file, or an array"
        )
    (length,) = by.shape
    tokens = encode([split_words(text) for text in texts], by.schema.words)
    return torch.from_numpy(pad(tokens, length))


def _scale_arrays(rows: Any, by: InputEncoding) -> Tensor:
    """Return inputs that are given as an array ``[N, ...]``, scaled as in the run."""
    x = as_inputs(rows, "the rows")
    if x.dim() == 0 or tuple(x.shape[1:]) != by.shape:
        raise DataError(
            f"the rows should be an array of shape [N, {', '.join(map(str, by.shape))}], as the "
            f"inputs of the run, got shape {list(x.shape)}"
        )
    if len(x) == 0:
        raise DataError("the rows should be at least 1 row, got none")
    scaled = by.inputs.get("scaled")
    if scaled is None:
        return _scale_columns(x, by)
    if x.dtype != torch.uint8:
        raise DataError(
            "the rows should be images of type uint8 with values 0 to 255, as in the run, which "
            f"scales them itself, got {str(x.dtype).removeprefix('torch.')}"
        )
    mean, std = scaled
    return x.to(torch.float32).div_(255).sub_(mean).div_(std)


def _scale_columns(x: Tensor, by: InputEncoding) -> Tensor:
    """Scale columns by the run's means and deviations, and return them as models take them."""
    if not x.is_floating_point():
        if "mean" not in by.inputs:
            return x
        x = x.to(torch.float64)
    if "mean" in by.inputs:
        mean = torch.tensor(by.inputs["mean"], dtype=torch.float64)
        std = torch.tensor(by.inputs["std"], dtype=torch.float64)
        x = (x.to(torch.float64) - mean) / std
    return x.to(torch.float32)
