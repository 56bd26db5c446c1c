"""Removal of incomplete rows and small clients from tables, and notes for the log.

The notes state which rows and clients are left out, and how columns and empty cells are treated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedclade.core import DataError, shown
from fedclade.data.cell_values import as_strings
from fedclade.data.columns import Rows, Sheet, find_empty, is_number
from fedclade.data.missing import Missing
from fedclade.data.schema import MOST_LABELS, join_some
from fedclade.data.typed_columns import MANY_CATEGORIES, ColumnRoles, Report

IN_WORDS: dict[Missing, str] = {
    "mean": "filled by the mean of all clients",
    "median": "filled by the median of the clients' medians",
    "indicator": "filled by the mean of all clients, with an indicator column",
}
"""Treatment of the empty cells of columns of numbers, in words for the log."""


@dataclass(frozen=True)
class RowRules:
    """Rules that determine which rows of tables are left out.

    Parameters
    ----------
    roles
        Roles of the columns.
    client
        Column with the name of the client that owns a row; None if each table is a client.
    missing
        Treatment of empty cells of inputs.
    fewest_rows
        Number of rows below which a client is left out.
    """

    roles: ColumnRoles
    client: str | None
    missing: Missing
    fewest_rows: int


def leave_out_rows(sheets: Sequence[Sheet], rules: RowRules, report: Report) -> list[Sheet]:
    """Leave out rows without a target, rows with empty inputs, and clients with too few rows.

    Rows with empty inputs are left out only if ``rules.missing`` is ``drop``.

    Raises
    ------
    DataError
        If no row of a table remains and ``rules.fewest_rows`` is 0, or no client has enough rows.
    """
    targets = rules.roles.targets
    kept = _leave_out_empty(sheets, targets, "without a target", report)
    if rules.missing == "drop":
        inputs = list_inputs(kept, rules.roles)
        kept = _leave_out_empty(kept, inputs, "with an empty cell", report)
    if rules.fewest_rows > 0:
        return _leave_out_small(kept, rules, report)
    for before, after in zip(sheets, kept, strict=True):
        _check_not_empty(before, after)
    return kept


def _check_not_empty(before: Sheet, after: Sheet) -> None:
    """Check that a table has rows, both before and after incomplete rows were left out."""
    if before.table.num_rows == 0:
        raise DataError(
            f"{before.where} should have at least 1 row, got none; remove it, or leave it out by "
            "fewest_rows = 2"
        )
    if after.table.num_rows == 0:
        raise DataError(
            f"{before.where} has no rows to learn from: all rows lack a target, or have an empty "
            "input and are left out because of missing = 'drop'; fill in the cells, choose another "
            "value of missing, or set fewest_rows = 2 to leave such tables out"
        )


def list_inputs(sheets: Sequence[Sheet], roles: ColumnRoles) -> list[str]:
    """Return the names of the input columns.

    Columns that a table lacks and columns that are empty in all tables are left out.
    """
    if roles.inputs is None:
        names = _list_columns(sheets)
    else:
        names = list(roles.inputs)

    def is_input(name: str) -> bool:
        if name in roles.no_inputs:
            return False
        if any(sheet.table.column_names.count(name) != 1 for sheet in sheets):
            return False
        return any(not find_empty(sheet.table[name]).all() for sheet in sheets)

    return [name for name in names if is_input(name)]


def _list_columns(sheets: Sequence[Sheet]) -> list[str]:
    return list(dict.fromkeys(name for sheet in sheets for name in sheet.table.column_names))


def _leave_out_empty(
    sheets: Sequence[Sheet], columns: Sequence[str], what: str, report: Report
) -> list[Sheet]:
    """Leave out the rows with an empty cell in one of the given columns, and report their number.

    ``what`` describes the rows in the report, such as ``without a target``.
    """
    kept: list[Sheet] = []
    left_out = 0
    for sheet in sheets:
        is_empty = np.zeros(sheet.table.num_rows, dtype=bool)
        for column in columns:
            if sheet.table.column_names.count(column) == 1:
                is_empty |= find_empty(sheet.table[column])
        left_out += int(is_empty.sum())
        kept.append(sheet.without(is_empty))
    if left_out:
        total = sum(sheet.table.num_rows for sheet in sheets)
        report.add(f"{left_out:,} of {total:,} rows {what} are left out")
    return kept


def _leave_out_small(sheets: Sequence[Sheet], rules: RowRules, report: Report) -> list[Sheet]:
    """Leave out the clients with fewer than ``rules.fewest_rows`` rows, and report their names."""
    counts: Counter[str] = Counter()
    owners = [_list_owners(sheet, rules.client) for sheet in sheets]
    for sheet, names in zip(sheets, owners, strict=True):
        counts.update(names.tolist())
        if rules.client is None:
            counts.setdefault(str(sheet.client or sheet.where), 0)
    small = {name: count for name, count in counts.items() if count < rules.fewest_rows}
    if not small:
        return list(sheets)
    if len(small) == len(counts):
        raise DataError(
            f"fewest_rows = {rules.fewest_rows} leaves no client, as the largest client has "
            f"{max(counts.values())} rows; set a smaller number"
        )
    named = [f"{shown(name)} ({count})" for name, count in small.items()]
    report.add(f"clients with fewer than {rules.fewest_rows} rows are left out: {join_some(named)}")
    kept: list[Sheet] = []
    for sheet, names in zip(sheets, owners, strict=True):
        part = sheet.without(np.isin(names, [*small]))
        if part.table.num_rows > 0:
            kept.append(part)
    return kept


def _list_owners(sheet: Sheet, client: str | None) -> NDArray[np.str_]:
    """Return the name of the client that owns each row of a table.

    The name is empty if the cell is empty, or if the table lacks the column.
    """
    import pyarrow as pa

    if client is None:
        return np.full(sheet.table.num_rows, str(sheet.client or sheet.where))
    if sheet.table.column_names.count(client) != 1:
        return np.full(sheet.table.num_rows, "")
    names = sheet.table[client].cast(pa.string()).to_pylist()
    return np.array([name or "" for name in names], dtype=np.str_)


def report_contents(rows: Rows, roles: ColumnRoles, report: Report, missing: Missing) -> None:
    """Report columns that become categories, columns without values, and numbers of empty cells."""
    inputs = list_inputs(rows.sheets, roles)
    texts = [
        column for column in inputs if roles.is_typed(column) and not is_number(rows.kind(column))
    ]
    counts = {column: len(rows.categories(column)) for column in texts}
    # Columns of more categories are reported one by one.
    few = [f"{column!r} ({n})" for column, n in counts.items() if n <= MANY_CATEGORIES]
    if few:
        report.add(f"columns of 0 and 1 for each category of {join_some(few)}")
    if roles.inputs is None:
        for column in _list_columns(rows.sheets):
            is_other = column not in (*roles.no_inputs, *inputs)
            if is_other and all(column in sheet.table.column_names for sheet in rows.sheets):
                report.add(f"column {column!r} has no value and is left out")
    empty = {column: int(rows.gaps(column).sum()) for column in inputs}
    of_numbers = {column: n for column, n in empty.items() if n and column not in texts}
    if of_numbers:
        _report_empty_cells(of_numbers, f"are {IN_WORDS[missing]}", report)
    of_texts = {column: n for column, n in empty.items() if n and column in texts}
    if of_texts:
        what = "in columns of categories are 0 for every category"
        _report_empty_cells(of_texts, what, report)


def _report_empty_cells(counts: Mapping[str, int], what: str, report: Report) -> None:
    """Report the total number of empty cells and their treatment, with the emptiest columns.

    ``counts`` has the number of empty cells of each column, and ``what`` describes the treatment.
    """
    most = sorted(counts.items(), key=lambda item: -item[1])
    named = [f"{column!r} {count:,}" for column, count in most]
    report.add(f"{sum(counts.values()):,} empty cells {what}: {join_some(named)}")


def report_target(rows: Rows, column: str, report: Report) -> None:
    """Report that a target of whole numbers is interpreted as class labels, not as numbers."""
    if rows.kind(column) != "whole":
        return
    values = rows.numbers(column)
    if len(values) and 2 <= values.max() < MOST_LABELS and values.min() >= 0:
        report.add(
            f"target {column!r}: {int(values.max()) + 1} classes; for numbers set task.name = "
            "'regression'"
        )


def report_single_targets(
    sheets: Sequence[Sheet], column: str, client: str | None, report: Report
) -> None:
    """Report the names of the clients whose rows all have the same label."""
    if any(sheet.table.column_names.count(column) != 1 for sheet in sheets):
        return  # An error is raised later, when the column is read.
    values: dict[str, set[str]] = {}
    for sheet in sheets:
        owners = _list_owners(sheet, client).tolist()
        for owner, target in zip(owners, as_strings(sheet.table[column]).to_pylist(), strict=True):
            values.setdefault(owner, set()).add(target)
    single = [shown(owner) for owner, found in values.items() if len(found) == 1]
    if single and len(values) > 1:
        report.add(
            f"all rows of {len(single)} of {len(values)} clients have the same target: "
            f"{join_some(single)}"
        )
