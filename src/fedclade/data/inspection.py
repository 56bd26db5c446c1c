"""Inspection of users' tables: their clients, columns and problems, and a role for each column.

The *role* of a column is target, client, category, input or excluded. Roles are guessed from the
names and values of columns, and a config that is generated from an inspection lists them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.core import ConfigError, DataError, TaskKind, shown, unknown
from fedclade.data.cell_values import as_strings, first_other_text
from fedclade.data.columns import Sheet, find_empty, read_sheet
from fedclade.data.csv_format import TextFormat
from fedclade.data.schema import MOST_CATEGORIES, join_some
from fedclade.data.standardize import FAR_APART
from fedclade.data.typed_columns import (
    FEW_TEXTS,
    ColumnRoles,
    Report,
    is_id_name,
    is_text,
    looks_like_id,
    numbers_rows,
    prepare_reported,
)

FEW_ROWS = 10
"""Number of rows below which a client is reported, as it has too few for training and testing."""

MOST_CODES = 5
"""Largest number of different whole numbers of a column that is guessed to be categories."""

MOST_LABELS_GUESSED = 10
"""Largest number of different whole numbers of a target that is guessed to be labels."""

MANY_EMPTY = 0.5
"""Share of empty cells from which on a column is reported."""

CLIENT_WORDS = (
    *("client", "site", "hospital", "clinic", "center", "centre", "institution", "school", "bank"),
    *("store", "shop", "station", "plant", "farm", "branch", "region", "city", "state", "country"),
    *("patient", "subject", "participant", "user", "person", "household", "speaker", "writer"),
    *("device", "sensor", "machine", "vehicle", "field", "team", "group", "owner"),
)
"""Words in the names of columns that may name the client of a row, the likeliest first."""

TARGET_WORDS = (
    *("target", "label", "labels", "class", "y", "outcome", "output", "response", "diagnosis"),
    *("readmitted", "event", "disease", "death", "died", "survived", "status", "result"),
    *("score", "grade", "mark", "exam", "rating", "price", "sales", "risk"),
)
"""Words in the names of columns that may be the target, the likeliest first."""

PARTS_OF_TARGETS = ("target", "label", "outcome", "exam", "score", "grade")
"""Parts of names of target columns, used if no column name has one of the target words."""

SPLIT_WORDS = ("fold", "split", "partition")
"""Words in the names of columns that assign rows to training and test data."""


@dataclass(frozen=True)
class ColumnInfo:
    """Description of a column of the inspected tables, with its guessed role.

    Parameters
    ----------
    name
        Name of the column.
    kind
        Kind of the values in words, such as ``whole number``.
    empty
        Share of the rows without a value.
    different
        Number of different values.
    values
        Range of numbers, or the most frequent texts with their shares, in words.
    role
        ``target``, ``client``, ``category``, ``input`` or ``excluded``.
    why
        Reason for the role; empty for inputs.
    """

    name: str
    kind: str
    empty: float
    different: int
    values: str
    role: str
    why: str = ""


@dataclass(frozen=True)
class ClientInfo:
    """Description of a client in the inspected tables: its rows, empty cells and target.

    Parameters
    ----------
    name
        Name of the client.
    rows
        Number of rows of the client.
    empty
        Share of empty cells in the client's input columns.
    without_target
        Number of the client's rows without a target.
    shares
        Share of each label among the client's rows; empty for a target of numbers.
    mean, std
        Mean and standard deviation of a target of numbers; None for labels.
    """

    name: str
    rows: int
    empty: float
    without_target: int
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection of tables: clients, columns, guessed roles and problems.

    Parameters
    ----------
    paths
        The inspected files.
    clients
        The clients in the order of the files and rows.
    columns
        The columns in the order of the first file.
    client, target, task
        The column with the client of a row (None if each file is a client), the column to predict,
        and the task.
    reasons
        Reasons for the choices of client, target and task, by these three names.
    assumptions
        Assumptions under which the files were read, in words.
    problems
        Problems of the data, in words.
    """

    paths: tuple[Path, ...]
    clients: tuple[ClientInfo, ...]
    columns: tuple[ColumnInfo, ...]
    client: str | None
    target: str
    task: TaskKind
    reasons: Mapping[str, str]
    assumptions: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Number of rows of all clients."""
        return sum(client.rows for client in self.clients)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all clients in sorted order; empty for a target of numbers."""
        return tuple(sorted({label for client in self.clients for label in client.shares}))

    def columns_with(self, role: str) -> list[ColumnInfo]:
        """Return the columns that have the given role, such as ``input``."""
        return [column for column in self.columns if column.role == role]

    @property
    def has_empty_inputs(self) -> bool:
        """Whether an input column (of numbers or categories) has an empty cell."""
        used = self.columns_with("input") + self.columns_with("category")
        return any(column.empty > 0 for column in used)


@dataclass(frozen=True, eq=False)
class _Column:
    """A column of all inspected tables.

    Parameters
    ----------
    name
        Name of the column.
    parts
        Arrow column of each table; None for a table that lacks the column.
    """

    name: str
    parts: Sequence[Any]

    @cached_property
    def is_empty(self) -> NDArray[np.bool_]:
        return np.concatenate([find_empty(part) for part in self.present])

    @cached_property
    def present(self) -> list[Any]:
        return [part for part in self.parts if part is not None]

    @cached_property
    def are_numbers(self) -> bool:
        import pyarrow.types as types

        kinds = [part.type for part in self.present if not find_empty(part).all()]
        return len(kinds) > 0 and all(
            types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
            for kind in kinds
        )

    @cached_property
    def is_mixed(self) -> bool:
        """Whether the column has numbers in one table and texts in another table."""
        with_values = [part for part in self.present if not find_empty(part).all()]
        texts = [is_text(part) for part in with_values]
        return any(texts) and not all(texts)

    @cached_property
    def values(self) -> NDArray[Any]:
        """Values of all non-empty cells of the column, as numbers or texts."""
        import pyarrow as pa

        if self.are_numbers:
            parts = [
                part.cast(pa.float64()).to_numpy(zero_copy_only=False) for part in self.present
            ]
        else:
            parts = [np.array(as_strings(part).to_pylist(), dtype=np.str_) for part in self.present]
        return np.concatenate(parts)[~self.is_empty]

    @cached_property
    def are_whole(self) -> bool:
        return self.are_numbers and bool((self.values == np.round(self.values)).all())

    @cached_property
    def unique(self) -> NDArray[Any]:
        return np.unique(self.values)

    @property
    def kind(self) -> str:
        if len(self.values) == 0:
            return "empty"
        if self.is_mixed:
            return "numbers and texts"
        if not self.are_numbers:
            return "text"
        return "whole number" if self.are_whole else "number"

    @property
    def in_words(self) -> str:
        """Range and mean of numbers, or the most frequent texts, in words; empty without values."""
        if len(self.values) == 0:
            return ""
        if self.are_numbers:
            low = self.values.min()
            high = self.values.max()
            return f"{low:.5g} to {high:.5g}, mean {self.values.mean():.5g}"
        most = Counter(self.values.tolist()).most_common(3)
        named = [f"{text} {count / len(self.values):.0%}" for text, count in most]
        if len(self.unique) > len(most):
            named.append("...")
        return ", ".join(named)


def inspect_files(
    paths: Sequence[Path],
    client: str | None = None,
    target: str | None = None,
    text_format: TextFormat | None = None,
) -> Inspection:
    """Inspect tables: describe their clients and columns, guess roles, and find problems.

    Parameters
    ----------
    paths
        CSV, TSV or Parquet files.
    client, target
        Column with the client of a row, and column to predict; guessed if None. If there are
        several files and no client column is given, each file is a client.
    text_format
        Format of text files; detected if None.

    Raises
    ------
    ConfigError
        If no column of a single file seems to state the client that owns a row, or no column can be
        the target.
    DataError
        If no file can be read, or a named column is missing.
    """
    problems: list[str] = []
    text_format = text_format or TextFormat()
    sheets = _read_all(paths, text_format, problems)
    report = Report(len(sheets))
    as_texts = () if client is None else (client,)
    roles = ColumnRoles(as_texts=as_texts)
    try:
        sheets = prepare_reported(
            sheets, roles, text_format.notation, report, are_roles_known=False
        )
    except DataError as error:
        problems.append(str(error))
    all_names = [name for sheet in sheets for name in sheet.table.column_names]
    names = list(dict.fromkeys(all_names))
    for what, name in (("client", client), ("target", target)):
        if name is not None and name not in names:
            raise DataError(unknown(f"{what} column of {sheets[0].where}:", name, names))
        if name is not None:
            _check_in_all(sheets, name)
    columns: list[_Column] = []
    for name in names:
        parts = [_find_part(sheet, name) for sheet in sheets]
        columns.append(_Column(name, parts))
    guesses = _TableGuesses(sheets, columns, client is None and len(paths) > 1)
    return guesses.inspect(
        tuple(paths), client, target, problems=problems, assumptions=tuple(report.in_words())
    )


def _check_in_all(sheets: Sequence[Sheet], name: str) -> None:
    """Check that each table has exactly one column with the given name."""
    for sheet in sheets:
        found = sheet.table.column_names.count(name)
        if found != 1:
            raise DataError(
                f"{sheet.where} should have exactly 1 column {name!r}, got {found or 'none'}"
            )


def _read_all(paths: Sequence[Path], text_format: TextFormat, problems: list[str]) -> list[Sheet]:
    """Read the readable files, and append the errors of all other files to ``problems``."""
    sheets: list[Sheet] = []
    for path in paths:
        try:
            sheet = read_sheet(path, text_format.separator, text_format.encoding)
        except DataError as error:
            problems.append(str(error))
            continue
        if sheet.table.num_rows == 0:
            problems.append(f"{path} has no rows")
        else:
            sheets.append(sheet)
    if not sheets:
        raise DataError("\n".join(problems) or "no files to inspect; name at least 1 file")
    return sheets


def _find_part(sheet: Sheet, name: str) -> Any:
    """Return a table's column of the given name; None unless exactly one column has the name."""
    if sheet.table.column_names.count(name) != 1:
        return None
    return sheet.table[name]


class _TableGuesses:
    """Inspected tables, with methods that guess the roles of their columns and find problems.

    Parameters
    ----------
    sheets
        The tables.
    columns
        The columns of all tables.
    are_clients
        Whether each table is a client.
    """

    def __init__(
        self, sheets: Sequence[Sheet], columns: Sequence[_Column], are_clients: bool
    ) -> None:
        self.sheets = sheets
        self.columns = {column.name: column for column in columns}
        self.rows = sum(sheet.table.num_rows for sheet in sheets)
        self.are_clients = are_clients

    def inspect(
        self,
        paths: tuple[Path, ...],
        client: str | None,
        target: str | None,
        problems: list[str],
        assumptions: tuple[str, ...],
    ) -> Inspection:
        """Guess the roles that are not given, and describe columns, clients and problems.

        ``problems`` and ``assumptions`` were found when the files ``paths`` were read.
        """
        reasons: dict[str, str] = {"client": "as given", "target": "as given"}
        if client is None:
            client, reasons["client"] = self._guess_client(target)
        owners = self._list_owners(client)
        excluded: dict[str, str] = {}
        for name, column in self.columns.items():
            if name in (client, target):
                continue
            why = self._why_excluded(column, owners)
            if why:
                excluded[name] = why
        if target is None:
            target, reasons["target"] = self._guess_target(client, excluded, owners)
        excluded.update(self._find_companions(target, excluded))
        task, reasons["task"] = self._guess_task(self.columns[target])
        infos = [
            self._describe_column(column, client, target, excluded)
            for column in self.columns.values()
        ]
        inputs = [info for info in infos if info.role in ("input", "category")]
        clients = self._describe_clients(owners, self.columns[target], task, inputs)
        found = [*problems, *self._find_problems(infos, clients, owners, task)]
        return Inspection(
            paths=paths,
            clients=clients,
            columns=tuple(infos),
            client=client,
            target=target,
            task=task,
            reasons=reasons,
            assumptions=assumptions,
            problems=tuple(found),
        )

    # Roles.

    def _guess_client(self, target: str | None) -> tuple[str | None, str]:
        """Guess the column with the client of a row, and return its name and the reason.

        The name is None if each file is a client.
        """
        if self.are_clients:
            return None, "each file is a client"
        for word in CLIENT_WORDS:
            for name, column in self.columns.items():
                if name == target or not _has_word(name, word):
                    continue
                may_name = column.are_whole or not column.are_numbers
                count = len(column.unique)
                if may_name and count >= 2 and count * FEW_TEXTS <= 2 * self.rows:
                    return name, f"its name has the word {word!r}, and it has {count} values"
        raise ConfigError(
            f"no column of {self.sheets[0].where} seems to state the client that owns a row; name "
            f"the column by --client, one of {', '.join(list(self.columns)[:FEW_TEXTS])}"
        )

    def _why_excluded(self, column: _Column, owners: NDArray[np.str_]) -> str:
        """Return the reason why a column is excluded; empty if the column may be an input."""
        lacking = [
            Path(sheet.where).name
            for sheet, part in zip(self.sheets, column.parts, strict=True)
            if part is None
        ]
        if lacking:
            return f"{len(lacking)} files lack it, such as {lacking[0]}"
        return (
            self._why_values_exclude(column)
            or self._why_texts_exclude(column)
            or self._why_codes_exclude(column, owners)
        )

    def _why_values_exclude(self, column: _Column) -> str:
        """Return the reason to exclude a column of any kind; empty if there is none.

        The reasons are: fewer than two different values, numbers and texts in one column, or a name
        that marks the split into training and test rows.
        """
        count = len(column.unique)
        if count == 0:
            return "it has no value"
        if count == 1:
            return f"it has only one value, {shown(column.unique[0].item())}"
        if column.is_mixed:
            return f"it has numbers in one file and texts in another{_show_odd(column)}"
        if any(_has_word(column.name, word) for word in SPLIT_WORDS):
            return "it states which rows are for training and which for testing"
        return ""

    def _why_texts_exclude(self, column: _Column) -> str:
        """Return the reason to exclude a column of texts; empty if there is none.

        The reason is a large number of different texts, as in a column of ids or free texts.
        """
        if column.are_numbers:
            return ""
        count = len(column.unique)
        many = count > FEW_TEXTS and 2 * count > self.rows
        if many or count > MOST_CATEGORIES:
            return f"it has {count:,} different texts: an id, a name or a free text"
        return ""

    def _why_codes_exclude(self, column: _Column, owners: NDArray[np.str_]) -> str:
        """Return the reason to exclude a column of whole numbers; empty if there is none.

        The reasons are that the numbers look like ids, such as numbers of persons, or number the
        rows.
        """
        if not column.are_numbers or not column.are_whole:
            return ""
        if looks_like_id(self.sheets, column.name):
            return "it looks like an id"
        if all(numbers_rows(sheet.table, column.name) for sheet in self.sheets):
            return "it numbers the rows"
        if is_id_name(column.name) and len(column.unique) > MOST_CODES:
            return "it has the name of an id"
        if self._differs_in_clients(column, owners):
            return "its values differ in nearly all rows of each client, as ids of persons do"
        return ""

    def _differs_in_clients(self, column: _Column, owners: NDArray[np.str_]) -> bool:
        """Return whether a column looks like the numbers by which each client numbers its persons.

        This is the case if nearly all values of a client differ, and the values of all clients lie
        in a range that is not much wider than the number of rows of the largest client.
        """
        of_values = owners[~column.is_empty]
        pairs = len(set(zip(of_values.tolist(), column.values.tolist(), strict=True)))
        clients, rows = np.unique(of_values, return_counts=True)
        are_many = len(of_values) >= 2 * FEW_ROWS * len(clients)
        is_dense = column.unique[-1] - column.unique[0] < 3 * rows.max()
        return are_many and is_dense and pairs > 0.98 * len(of_values)

    def _guess_target(
        self, client: str | None, excluded: Mapping[str, str], owners: NDArray[np.str_]
    ) -> tuple[str, str]:
        """Guess the column to predict, and return its name and the reason."""
        possible = [name for name in self.columns if name != client and name not in excluded]
        if len(possible) < 2:
            usable = "no column"
            advice = "add columns"
            if possible:
                usable = f"only {possible[0]!r}"
                advice = "name another column as the target by --target, or add columns"
            others = [f"{name!r} ({why})" for name, why in excluded.items()]
            unusable = ""
            if others:
                unusable = f", as these columns are excluded: {join_some(others)}"
            raise ConfigError(
                f"{self.sheets[0].where} should have a target column and an input column, got "
                f"{usable} for these two roles{unusable}; {advice}"
            )
        if {"E", "T"} <= {*possible} and len(self.columns["E"].unique) == 2:
            return "E", "together with column 'T' it is the event of survival data"
        for word in TARGET_WORDS:
            for name in reversed(possible):
                if _has_word(name, word):
                    return name, f"its name has the word {word!r}"
        for word in PARTS_OF_TARGETS:
            for name in reversed(possible):
                if word in name.lower():
                    return name, f"its name contains {word!r}"
        varied = [name for name in possible if not self._names_clients(name, owners)]
        last = (varied or possible)[-1]
        return last, "it is the last possible column; --target chooses another column"

    def _names_clients(self, name: str, owners: NDArray[np.str_]) -> bool:
        """Return whether a column has a single value within each client, like a client's name."""
        column = self.columns[name]
        of_values = owners[~column.is_empty]
        pairs = set(zip(of_values.tolist(), column.values.tolist(), strict=True))
        return len(pairs) == len(np.unique(of_values))

    def _find_companions(self, target: str, excluded: Mapping[str, str]) -> dict[str, str]:
        """Return columns that reveal the target, with the reason why each is excluded."""
        if target == "E" and "T" in self.columns and "T" not in excluded:
            return {"T": "it is the time of the event in survival data, which reveals the target"}
        return {}

    def _guess_task(self, column: _Column) -> tuple[TaskKind, str]:
        """Guess the task of a target column, and return the task and the reason."""
        count = len(column.unique)
        if count == 2:
            low, high = (_show_value(value) for value in column.unique)
            return "binary", f"the target has two values, {low} and {high}"
        if not column.are_numbers:
            return "classification", f"the target has {count} different texts"
        if column.are_whole and count <= MOST_LABELS_GUESSED and column.unique[0] >= 0:
            return "classification", f"the target has {count} different whole numbers"
        return "regression", f"the target has {count} different numbers"

    def _describe_column(
        self, column: _Column, client: str | None, target: str, excluded: Mapping[str, str]
    ) -> ColumnInfo:
        role = "input"
        why = ""
        if column.name == target:
            role = "target"
        elif column.name == client:
            role = "client"
        elif column.name in excluded:
            role = "excluded"
            why = excluded[column.name]
        elif column.are_whole and 3 <= len(column.unique) <= MOST_CODES:
            role = "category"
            why = f"{len(column.unique)} different whole numbers"
        missing = self.rows - len(column.values)
        return ColumnInfo(
            column.name,
            column.kind,
            missing / self.rows,
            different=len(column.unique),
            values=column.in_words,
            role=role,
            why=why,
        )

    # Clients.

    def _list_owners(self, client: str | None) -> NDArray[np.str_]:
        """Return the name of the client that owns each row of all tables, empty if unknown."""
        if client is None:
            names = [np.full(sheet.table.num_rows, str(sheet.client)) for sheet in self.sheets]
            return np.concatenate(names)
        column = self.columns[client]
        owners = np.full(len(column.is_empty), "", dtype=object)
        owners[~column.is_empty] = [_show_value(value) for value in column.values]
        return owners.astype(np.str_)

    def _describe_clients(
        self,
        owners: NDArray[np.str_],
        target: _Column,
        task: TaskKind,
        inputs: Sequence[ColumnInfo],
    ) -> tuple[ClientInfo, ...]:
        empty = np.zeros(len(owners))
        for info in inputs:
            empty += self.columns[info.name].is_empty
        described: list[ClientInfo] = []
        for name in dict.fromkeys(owners.tolist()):
            is_own = owners == name
            values = target.values[is_own[~target.is_empty]]
            rows = int(is_own.sum())
            shares: dict[str, float] = {}
            mean = std = None
            if task == "regression" and len(values):
                mean = float(values.mean())
                std = float(values.std())
            elif task != "regression":
                counts = Counter(_show_value(value) for value in values)
                shares = {label: count / len(values) for label, count in counts.items()}
            described.append(
                ClientInfo(
                    name,
                    rows,
                    float(empty[is_own].mean()) / max(1, len(inputs)),
                    without_target=rows - len(values),
                    shares=shares,
                    mean=mean,
                    std=std,
                )
            )
        return tuple(described)

    # Problems.

    def _find_problems(
        self,
        infos: Sequence[ColumnInfo],
        clients: Sequence[ClientInfo],
        owners: NDArray[np.str_],
        task: TaskKind,
    ) -> list[str]:
        """Describe problems of the input columns, of small clients, of targets and of rows.

        ``owners`` has the name of the client of each row.
        """
        used = [info for info in infos if info.role in ("input", "category")]
        found = [*self._find_empty_columns(used), *self._find_scales(used)]
        small = [client.name for client in clients if client.rows < FEW_ROWS]
        if small:
            found.append(f"fewer than {FEW_ROWS} rows at {join_some(small)}")
        found += self._find_target_problems(clients, task)
        repeated = self._count_repeated(owners)
        if repeated:
            found.append(f"{repeated:,} of {self.rows:,} rows repeat an earlier row")
        return found

    def _find_target_problems(self, clients: Sequence[ClientInfo], task: TaskKind) -> list[str]:
        """Describe rows without a target, and clients whose targets are all equal."""
        found: list[str] = []
        without = sum(client.without_target for client in clients)
        if without:
            found.append(f"{without:,} of {self.rows:,} rows have no target")
        single = [client.name for client in clients if len(client.shares) == 1]
        if single and task != "regression":
            found.append(f"only one label at {join_some(single)}")
        return found

    def _find_empty_columns(self, used: Sequence[ColumnInfo]) -> list[str]:
        """Describe the input columns that are empty in most rows, or in all rows of a client."""
        found: list[str] = []
        for info in used:
            if info.empty >= MANY_EMPTY:
                found.append(f"column {info.name!r} is empty in {info.empty:.0%} of the rows")
            if not self.are_clients:
                continue
            parts = self.columns[info.name].parts
            lacking = [
                str(sheet.client)
                for sheet, part in zip(self.sheets, parts, strict=True)
                if part is not None and find_empty(part).all()
            ]
            if lacking:
                found.append(f"column {info.name!r} has no value at {join_some(lacking)}")
        return found

    def _find_scales(self, used: Sequence[ColumnInfo]) -> list[str]:
        """Report as a problem that the scales of numeric input columns differ much.

        The scale of a column is its largest absolute value. The list is empty unless the largest
        and the smallest scale differ by a factor of at least :data:`FAR_APART`.
        """
        sizes: dict[str, float] = {}
        for info in used:
            column = self.columns[info.name]
            if column.are_numbers and np.abs(column.values).max() > 0:
                sizes[info.name] = float(np.abs(column.values).max())
        if not sizes or max(sizes.values()) < FAR_APART * min(sizes.values()):
            return []
        large = max(sizes, key=lambda name: sizes[name])
        small = min(sizes, key=lambda name: sizes[name])
        return [
            f"scales differ much: up to {sizes[large]:.3g} in {large!r}, and up to "
            f"{sizes[small]:.3g} in {small!r}"
        ]

    def _count_repeated(self, owners: NDArray[np.str_]) -> int:
        """Count the rows that repeat all cells of an earlier row of the same client."""
        seen: set[tuple[Any, ...]] = set()
        start = 0
        for sheet in self.sheets:
            cells = [as_strings(column).to_pylist() for column in sheet.table.columns]
            own = owners[start : start + sheet.table.num_rows].tolist()
            seen.update(zip(own, *cells, strict=True))
            start += sheet.table.num_rows
        return self.rows - len(seen)


def _show_odd(column: _Column) -> str:
    """Describe the first text in a column of numbers, as a part of a message; empty if none."""
    for part in column.present:
        if is_text(part):
            odd = first_other_text(part)
        else:
            odd = None
        if odd is not None:
            return f", such as {shown(odd[1])} in row {odd[0]}"
    return ""


def _show_value(value: Any) -> str:
    """Format a value of a column as text, with whole numbers without a fraction."""
    if isinstance(value, str):
        return str(value)
    return f"{float(value):.10g}"


def _has_word(name: str, word: str) -> bool:
    """Return whether a column name such as ``hospital_id`` or ``hospitalId`` contains a word."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return word in re.split(r"[^a-z]+", spaced.lower())
