"""Federations from the rows of CSV and Parquet files, and of data frames.

Each file belongs to one client, or a column has the name of the client that owns each row.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import (
    ConfigError,
    DataError,
    Field,
    Indices,
    Structure,
    TaskKind,
    checked,
    is_choice,
    require,
    shown,
    unknown,
)
from fedclade.data.agreement import DataSource, Encoding, Proposal
from fedclade.data.cell_values import Notation
from fedclade.data.columns import (
    IN_WORDS,
    ColumnKind,
    Rows,
    Sheet,
    arrow_table,
    is_number,
    read_sheet,
)
from fedclade.data.csv_format import TextFormat
from fedclade.data.federation import Federation
from fedclade.data.hold_out import HoldOut, number_values
from fedclade.data.incomplete_rows import (
    RowRules,
    leave_out_rows,
    report_contents,
    report_single_targets,
    report_target,
)
from fedclade.data.missing import (
    MISSING,
    ColumnSummary,
    Missing,
    Summaries,
    fill_columns,
    summarize_column,
)
from fedclade.data.pool import Columns
from fedclade.data.reading import number_rows
from fedclade.data.schema import (
    MOST_LABELS,
    DataSchema,
    InputColumn,
    Label,
    SchemaError,
    read_declared,
    show_label,
    show_names,
)
from fedclade.data.typed_columns import ColumnRoles, Report, prepare_reported
from fedclade.data.user_data import (
    LABELLED,
    ClientRows,
    OwnOptions,
    OwnSettings,
    build_federation,
    count_words,
    prepare_clients,
    strata_of,
)

if TYPE_CHECKING:
    from torch import Tensor

# Targets: the columns to predict.

Labels = tuple[Label, ...] | int | None
"""Labels of a target: their names, or their number if labels are 0, 1, ...; None for no labels."""


def describe_targets(
    rows: Rows, columns: tuple[str, ...], task: TaskKind | None, *, alone: bool = False
) -> tuple[TaskKind, Labels]:
    """Determine the task and the labels from the values of the target columns.

    Parameters
    ----------
    rows
        The rows of all tables.
    columns
        Names of the target columns.
    task
        The task that the user specifies; None if the task is determined by the values.
    alone
        Whether the rows are of one client and other clients may have further labels. A binary
        target may then have a single value.

    Returns
    -------
    tuple
        The task, and the labels.

    Raises
    ------
    ConfigError
        If the targets allow more than one task.
    DataError
        If the values do not fit the task.
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
            raise DataError(
                f"the target {column!r} of a regression should be numbers, got {IN_WORDS[kind]}"
            )
        return task, None
    if task == "binary":
        return task, _describe_two(rows, column, kind, alone=alone)
    if not is_number(kind):
        return task, rows.categories(column)
    most = int(_whole_numbers(rows, column).max())
    if is_guessed and most >= MOST_LABELS:
        raise ConfigError(
            f"the target {column!r} has whole numbers up to {most:,}, which may be labels or "
            "numbers; set task = 'classification' or 'regression'"
        )
    return task, most + 1


def encode_targets(rows: Rows, columns: tuple[str, ...], schema: DataSchema) -> Tensor:
    """Encode target columns as a tensor by a schema.

    Returns
    -------
    Tensor
        Label numbers, int64 ``[N]``, for the task ``classification``; targets of other tasks,
        float32 ``[N]`` or ``[N, L]`` with L target columns. N is the number of rows.

    Raises
    ------
    SchemaError
        If the schema lacks a label of the data.
    """
    if len(columns) != 1 or schema.task == "multilabel":
        return _encode_several(rows, columns, schema.task)
    (column,) = columns
    if schema.labels is None:
        return torch.from_numpy(rows.numbers(column)).to(torch.float32)
    if isinstance(schema.labels, int):
        return _encode_numbered(rows, column, schema.labels)
    places = _label_places(rows, column, schema.labels)
    target_type = np.float32 if schema.task == "binary" else np.int64
    return torch.from_numpy(places.astype(target_type))


def _describe_two(rows: Rows, column: str, kind: ColumnKind, *, alone: bool) -> tuple[Label, ...]:
    """Return the two different values of a binary target column in sorted order.

    A single value is returned if the column has only one value and ``alone`` is true, as other
    clients may have the other value.
    """
    if is_number(kind):
        values: list[Any] = np.unique(rows.numbers(column)).tolist()
        if set(values) <= {0.0, 1.0}:
            return 0.0, 1.0
    else:
        values = list(rows.categories(column))
    if len(values) != 2 and not (alone and len(values) == 1):
        listed = ", ".join(show_label(value) for value in values[:5])
        hint = ""
        if len(values) == 1:
            hint = (
                "; if other clients have the other value, declare both values as labels of a schema"
            )
        raise DataError(
            f"the target {column!r} of a binary task should have 2 different values, got "
            f"{len(values)}: {listed}{hint}"
        )
    return tuple(values)


def _label_places(rows: Rows, column: str, labels: Sequence[Label]) -> NDArray[np.int64]:
    """Return the position of each row's target value in a list of labels, int64 ``[N]``.

    The labels of the schema are texts, or the two numbers of a binary target.
    """
    kind = rows.kind(column)
    if is_number(kind) != isinstance(labels[0], float):
        expected = "texts" if is_number(kind) else "numbers"
        raise SchemaError(
            f"{rows.sheets[0].where}: the labels of the schema are {expected}, but the target "
            f"{column!r} has {IN_WORDS[kind]}; correct the target or the schema"
        )
    if not is_number(kind):
        return rows.category_places(column, cast("Sequence[str]", labels), "label")
    numbers = rows.numbers(column)
    places = np.full(len(numbers), -1, dtype=np.int64)
    for place, label in enumerate(labels):
        places[numbers == label] = place
    known = [show_label(label) for label in labels]
    rows.refuse_unknown(places < 0, column, numbers, known=known, what="label")
    return places


def _whole_numbers(rows: Rows, column: str) -> NDArray[np.float64]:
    """Return a column of numeric labels; raise a DataError for other values than 0, 1, 2, ..."""
    labels = rows.numbers(column)
    is_odd = (labels < 0) | (labels != labels.round())
    ends = np.cumsum([len(table) for table in rows.tables])[:-1]
    rule = "labels should be whole numbers from 0 on; task = 'regression' takes other numbers"
    rows.refuse(np.split(is_odd, ends), column, np.split(labels, ends), rule)
    return labels


def _encode_numbered(rows: Rows, column: str, count: int) -> Tensor:
    """Encode a target column whose labels are the whole numbers below ``count``."""
    kind = rows.kind(column)
    if not is_number(kind):
        raise SchemaError(
            f"{rows.sheets[0].where}: the labels of the schema are the numbers 0 to {count - 1}, "
            f"but the target {column!r} has {IN_WORDS[kind]}; correct the target or the schema"
        )
    labels = _whole_numbers(rows, column)
    known = ["0", "...", str(count - 1)]
    rows.refuse_unknown(labels >= count, column, labels, known=known, what="label")
    return torch.from_numpy(labels.astype(np.int64))


def _describe_several(kinds: Mapping[str, ColumnKind], task: TaskKind | None) -> TaskKind:
    """Determine the task of several target columns: ``multilabel`` or ``regression``.

    ``kinds`` has the kind of each column, and ``task`` the user's choice, if any.
    """
    if task is None and "number" in kinds.values():
        task = "regression"
    if task not in ("multilabel", "regression"):
        what = "no task" if task is None else task
        raise ConfigError(
            f"the task of several target columns ({', '.join(kinds)}) should be 'multilabel' or "
            f"'regression', got {what}"
        )
    for column, kind in kinds.items():
        if kind == "text" or (kind == "bool" and task == "regression"):
            raise DataError(
                f"the target {column!r} of a {task} task should be numbers, got {IN_WORDS[kind]}"
            )
    return task


def _encode_several(rows: Rows, columns: tuple[str, ...], task: TaskKind | None) -> Tensor:
    parts: list[NDArray[Any]] = []
    for column in columns:
        if rows.kind(column) == "bool":
            parts.append(rows.texts(column) == "true")
        else:
            parts.append(rows.numbers(column))
    y = torch.from_numpy(np.stack(parts, axis=1).astype(np.float32))
    for column, values in zip(columns, y.T, strict=True):
        if task == "multilabel" and not bool(((values == 0) | (values == 1)).all()):
            value = float(values[(values != 0) & (values != 1)][0])
            raise DataError(
                f"the target {column!r} of a multilabel task should be 0 or 1, got {value:g}"
            )
    return y


# Federations of tables: pandas and polars data frames, and all other data that Arrow reads.


InputColumns = tuple[str, ...] | Mapping[str, str | tuple[str, ...]]
"""Columns from which a model predicts, or the columns of each of its inputs by the input's name."""


@checked("frame")
def federation_from_frame(
    frame: Any,
    client: str,
    target: str | tuple[str, ...],
    inputs: InputColumns | None = None,
    task: TaskKind | None = None,
    *,
    text: str | None = None,
    drop: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    missing: Missing = MISSING,
    fewest_rows: int = 0,
    decimal: str | None = None,
    dates: str | None = None,
    name: str = "table",
    true_clusters: Mapping[str, int] | None = None,
    schema: DataSchema | str | Path | None = None,
    **options: Unpack[OwnOptions],
) -> Federation:
    """Build a federation from the rows of a data frame.

    Parameters
    ----------
    frame
        A data frame of pandas or polars, a ``pyarrow.Table``, or an object that exports Arrow data.
    client
        Column with the name of the client that owns a row.
    target
        Column to predict; several columns for ``multilabel``, and for a ``regression`` of several
        numbers.
    inputs
        Columns from which the target is predicted; all other columns if left out. Numbers become
        float32. Texts and truth values are encoded by category: a column of 0 and 1 for each value,
        in sorted order. All clients have the same encoded columns. Categories that a pandas data
        frame declares are included even if no row has them. For a model with several inputs, a
        mapping of the names of the inputs to their columns, such as ``{"body": ("age", "weight"),
        "blood": ("sodium", "iron")}``; the model gets a tensor ``[n, columns]`` for each name.
    task
        The task. If left out: texts, truth values and whole numbers are labels
        (``classification``), and other numbers are targets of a ``regression``. Texts are numbered
        in sorted order, and so are the two values of a ``binary`` target.
    text
        A column of texts as the only input, in place of ``inputs``. Texts are encoded by the words
        of a vocabulary.
    exclude, drop
        Columns to leave out; both names mean the same, and one of them may be given.
    categorical
        Inputs whose values are categories, also if they are numbers.
    missing
        Treatment of empty cells of inputs. ``mean`` fills a number by the mean of all clients'
        training rows with a value, ``median`` by the weighted median of the clients' medians.
        ``indicator`` fills as ``mean`` does, and adds a column of 0 and 1 that states whether the
        cell is empty, for each column in which a client has an empty cell. ``drop`` leaves out
        rows with an empty cell. An empty cell of a column of categories is 0 for all categories.
        Rows without a target are always left out.
    fewest_rows
        Clients with fewer rows are left out.
    decimal
        Decimal mark of numbers that are texts, ``.`` or ``,``; detected if left out.
    dates
        Format of dates that are texts, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``;
        detected if left out. All dates become days since 1970-01-01.
    name
        Name of the data in descriptions and reports.
    true_clusters
        True cluster of each client by its name, if known; for scoring only.
    schema
        A :class:`DataSchema`, or the path of a JSON file with a schema, which lists the input
        columns, their categories and the labels. By default, these are determined from the rows,
        and over a network all clients then agree on one schema.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the task is neither given nor clear from the target.
    DataError
        If a column is missing, a value is unusable or not in the schema, nearly all texts of a
        column differ, or a client has too few rows.
    """
    if not target:
        raise ConfigError(f"target should name at least 1 column, got {shown(target)}")
    sheets = [Sheet(arrow_table(frame), "the data frame", None)]
    choice = ColumnChoice(
        target if isinstance(target, tuple) else (target,),
        client,
        inputs,
        text=text,
        task=task,
        drop=choose_excluded(exclude, drop),
        categorical=categorical,
        missing=missing,
        fewest_rows=fewest_rows,
        notation=Notation(decimal=decimal, dates=dates),
    )
    declared = read_declared(schema)
    return federation_from_sheets(
        sheets, choice, name, OwnSettings(**options), true_clusters=true_clusters, schema=declared
    )


@dataclass(frozen=True)
class ColumnChoice:
    """Roles of the columns of a table as chosen by the user, and the treatment of empty cells.

    :func:`federation_from_frame` describes the fields.
    """

    target: tuple[str, ...]
    client: str | None = None
    inputs: InputColumns | None = None
    text: str | None = None
    task: TaskKind | None = None
    drop: tuple[str, ...] = ()
    notation: Notation = field(default_factory=Notation)
    categorical: tuple[str, ...] = ()
    missing: Missing = MISSING
    fewest_rows: int = 0

    @property
    def by_input(self) -> Mapping[str, tuple[str, ...]]:
        """Columns of each input of a model with several inputs; empty for a model with one."""
        if not isinstance(self.inputs, Mapping):
            return {}
        return {
            name: (columns,) if isinstance(columns, str) else tuple(columns)
            for name, columns in self.inputs.items()
        }

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """All columns that are inputs; None if the user names no columns."""
        if not isinstance(self.inputs, Mapping):
            return self.inputs
        return tuple(column for columns in self.by_input.values() for column in columns)

    @property
    def roles(self) -> ColumnRoles:
        """Roles of the columns as :class:`ColumnRoles`, by which text columns are converted."""
        as_texts = tuple(column for column in (self.client, self.text) if column is not None)
        inputs = self.input_columns
        if self.text is not None:
            inputs = ()
        return ColumnRoles(
            targets=self.target,
            inputs=inputs,
            as_texts=as_texts,
            drop=self.drop,
            categorical=self.categorical,
        )

    def __post_init__(self) -> None:
        if not is_choice(self.missing, Missing):
            raise ConfigError(unknown("value of missing:", self.missing, get_args(Missing)))
        require(("fewest_rows", self.fewest_rows, self.fewest_rows >= 0, "at least 0"))
        if self.task == "language":
            raise ConfigError(
                "the task of a table should be classification, binary, multilabel or regression, "
                "got language"
            )
        if self.text is not None and self.input_columns is not None:
            raise ConfigError(
                f"text should be the only input, got text = {self.text!r} and inputs = "
                f"{shown([*self.input_columns])}; leave out one of them"
            )
        columns = self.input_columns or ()
        repeated = next((column for column in columns if columns.count(column) > 1), None)
        if self.by_input and repeated is not None:
            raise ConfigError(f"each column should belong to one input, got {repeated!r} twice")
        empty = next((name for name, each in self.by_input.items() if not each), None)
        if empty is not None:
            raise ConfigError(f"the input {empty!r} should have at least 1 column, got none")
        reserved = {*self.target, self.client}
        both = [column for column in self.input_columns or () if column in reserved]
        if both:
            raise ConfigError(
                f"inputs should name other columns than target and client, got {both[0]!r}"
            )
        used = {*reserved, *(self.input_columns or ()), self.text}
        needed = [column for column in self.drop if column in used]
        if needed:
            raise ConfigError(
                f"exclude (or drop) should name columns that have no other role, got {needed[0]!r}"
            )
        no_inputs = {*reserved, *self.drop, self.text}
        if self.input_columns is not None:
            no_inputs |= {column for column in self.categorical if column not in self.input_columns}
        odd = [column for column in self.categorical if column in no_inputs]
        if odd:
            raise ConfigError(f"categorical should name input columns, got {odd[0]!r}")


def choose_excluded(exclude: tuple[str, ...], drop: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns to leave out, given as ``exclude`` or by the other name ``drop``."""
    if exclude and drop:
        raise ConfigError(
            f"exclude and drop are two names of one setting; list all columns in exclude, got "
            f"exclude = {shown([*exclude])} and drop = {shown([*drop])}"
        )
    return exclude or drop


def federation_from_sheets(
    sheets: Sequence[Sheet],
    choice: ColumnChoice,
    name: str,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None = None,
    schema: DataSchema | None = None,
) -> Federation:
    """Build a federation from the rows of several tables with equal columns.

    :func:`federation_from_frame` describes the parameters and the errors.
    """
    source = TableSource(sheets, choice, name, settings, true_clusters=true_clusters, schema=schema)
    return source.federation()


@dataclass(frozen=True, eq=False)
class TableSource(DataSource):
    """Tables with equal columns, and the settings to build a federation from their rows.

    Parameters
    ----------
    sheets
        The tables with their origins.
    choice
        Roles of the columns.
    name
        Name of the data in descriptions and reports.
    settings
        Settings of users' own data.
    true_clusters
        True cluster of each client by its name, if known.
    schema
        The schema that the user declares, if any. The input columns are those of the schema unless
        ``choice`` lists inputs.
    key
        Key of the first client. A client's key seeds its random draws; the keys of the following
        clients are ``key + 1``, ``key + 2`` and so on.
    """

    sheets: Sequence[Sheet]
    choice: ColumnChoice
    name: str
    settings: OwnSettings
    true_clusters: Mapping[str, int] | None = None
    schema: DataSchema | None = None
    key: int = 0

    @cached_property
    def rows(self) -> Rows:
        """Rows of all tables; numbers and dates that are stored as texts are converted to numbers.

        Rows without a target and clients with fewer than ``fewest_rows`` rows are left out. All
        assumptions about the data are logged in one line.
        """
        choice = self.choice
        roles = choice.roles
        if self.settings.groups is not None:
            roles = replace(roles, as_texts=(*roles.as_texts, self.settings.groups))
        if self.settings.order is not None:
            roles = replace(roles, typed=(self.settings.order,))
        if self.schema is not None and self.schema.inputs:
            categories = [column.name for column in self.schema.inputs if column.categories]
            roles = replace(
                roles, categorical=tuple(dict.fromkeys([*roles.categorical, *categories]))
            )
            if roles.inputs is None:
                inputs = tuple(column.name for column in self.schema.inputs)
                roles = replace(roles, inputs=inputs)
        with Report(len(self.sheets)).written() as report:
            prepared = prepare_reported(self.sheets, roles, choice.notation, report)
            rules = RowRules(roles, choice.client, choice.missing, choice.fewest_rows)
            rows = Rows(leave_out_rows(prepared, rules, report))
            if len(choice.target) == 1 and self._guesses_task:
                report_target(rows, choice.target[0], report)
            if len(choice.target) == 1 and choice.task != "regression":
                report_single_targets(rows.sheets, choice.target[0], choice.client, report)
            report_contents(rows, roles, report, choice.missing)
        return rows

    @property
    def _guesses_task(self) -> bool:
        """Whether the task is determined from the values of the target.

        This is the case if the user specifies neither the task nor labels.
        """
        if self.choice.task is not None:
            return False
        return self.schema is None or (self.schema.task is None and self.schema.labels is None)

    def with_key(self, key: int) -> TableSource:
        """Return the source with another key for its first client.

        The key of a client seeds its random draws. The keys of the following clients are
        ``key + 1``, ``key + 2`` and so on.
        """
        source = replace(self, key=key)
        # Share the prepared rows, so that assumptions about them are logged only once.
        object.__setattr__(source, "rows", self.rows)
        return source

    @property
    def client_names(self) -> list[str]:
        """Names of the clients, in the order of the rows."""
        return [client.name for client in self._client_rows]

    def federation(self) -> Federation:
        """Build the federation, encoded by the declared schema, or else by a schema of the data."""
        if self.schema is None:
            schema = self._describe_schema()
        else:
            schema = self._complete_schema(self.schema)
        gaps = [column for column in schema.inputs if self._has_gaps(column)]
        if not gaps:
            return self._build_encoded(schema)
        missing = self.choice.missing
        needed = any(column.kind == "number" and column.fill is None for column in gaps)
        if self.schema is not None and missing == "indicator":
            missing = "mean"  # The declared schema determines which columns have an indicator.
        inputs = schema.inputs
        if needed or self.schema is None:
            summaries = [*self._summarize_inputs(inputs, schema.task).values()]
            inputs = fill_columns(inputs, summaries, missing)
        if needed:
            fills_by = self.choice.missing
        else:
            fills_by = None
        return self._build_encoded(replace(schema, inputs=inputs), fills_by)

    def propose(self) -> Proposal:
        """Return the client's proposal: the declared schema, or the schema that fits its data."""
        if self.schema is not None:
            schema = self._complete_schema(self.schema)
            return Proposal(schema, is_fixed=True, missing=self.choice.missing)
        schema = self._describe_schema(alone=True)
        if self.choice.text is None:
            missing = self.choice.missing
            if missing == "drop":
                return Proposal(schema, missing=missing)
            found = [*self._summarize_inputs(schema.inputs, schema.task).values()]
            if len(found) == 1:
                return Proposal(schema, missing=missing, summaries=found[0])
            # With the data of several clients, the values that fill empty cells are computed here.
            if any(self._has_gaps(column) for column in schema.inputs):
                schema = replace(schema, inputs=fill_columns(schema.inputs, found, missing))
            return Proposal(schema, missing=missing)
        texts = self.rows.texts(self.choice.text, empty=True).tolist()
        words, counts = count_words(
            self._client_rows, texts, self.settings, self.key, hold_out=self._hold_out(schema.task)
        )
        size = self.settings.vocabulary_size
        return Proposal(replace(schema, words=words), word_counts=counts, vocabulary_size=size)

    def encode(self, schema: DataSchema) -> Federation:
        """Build the federation, encoded by an agreed schema.

        Raises
        ------
        SchemaError
            If the data does not fit the schema.
        """
        if self.choice.text is not None and not schema.words:
            raise SchemaError(
                f"the schema should have the words of a vocabulary, as the only input is the text "
                f"column {self.choice.text!r}, got no words; use a schema for texts, or set "
                "'inputs' in place of 'text'"
            )
        return self._build_encoded(self._complete_schema(schema))

    def _describe_schema(self, *, alone: bool = False) -> DataSchema:
        """Determine the schema of the data, without the words of texts.

        ``alone`` states that the data is only one client's data. Other clients may have further
        labels, and values in columns that are empty here.
        """
        choice = self.choice
        task, labels = describe_targets(self.rows, choice.target, choice.task, alone=alone)
        if choice.text is None:
            inputs = self.rows.describe_inputs(self._input_names())
            if not alone:
                inputs = tuple(column for column in inputs if column.kind != "empty")
        else:
            inputs = (InputColumn(choice.text, "text"),)
        return DataSchema(inputs, choice.target, task, labels)

    def _complete_schema(self, schema: DataSchema) -> DataSchema:
        """Return a schema with the target, task and labels that a declared schema may leave out.

        Missing parts come from the settings, or else from the values of the target.
        """
        task = schema.task or self.choice.task
        labels = schema.labels
        if task is None and labels is not None:
            task = "classification"
        elif task is None or (labels is None and task in ("classification", "binary")):
            task, labels = describe_targets(self.rows, self.choice.target, task)
        return replace(schema, target=schema.target or self.choice.target, task=task, labels=labels)

    def _build_encoded(self, schema: DataSchema, fills_by: Missing | None = None) -> Federation:
        """Build the federation, encoded by a complete schema.

        If the schema has no words, texts are encoded by the words of the training texts.
        ``fills_by`` is the treatment of empty cells if the filling values were computed from this
        data, otherwise None.
        """
        rows = self.rows
        choice = self.choice
        self._check_target(schema)
        y = encode_targets(rows, choice.target, schema)
        if choice.text is None:
            self._check_inputs(schema)
            x: Tensor | list[str] = rows.encode_inputs(schema.inputs)
            names = schema.encoded_names
        else:
            x = rows.texts(choice.text, empty=True).tolist()
            names = (choice.text,)
        structure = None
        if choice.by_input:
            structure = self._structure_of(schema)
        outputs = None
        if schema.task == "classification":
            is_numbered = isinstance(schema.labels, int)
            if is_numbered:
                outputs = schema.labels
            else:
                outputs = len(schema.label_names)
        clients = self._client_rows
        federation = build_federation(
            clients,
            x,
            y,
            settings=self._scaling_settings(schema),
            true_clusters=self.true_clusters,
            name=self.name,
            task=schema.task,
            columns=Columns(names, schema.label_names, fill=schema.encoded_fills),
            outputs=outputs,
            words=schema.words,
            first_key=self.key,
            is_table=True,
            hold_out=self._hold_out(schema.task),
            structure=structure,
        )
        encoding = Encoding(
            replace(schema, words=federation.pool.vocabulary),
            is_declared=self.schema is not None,
            source=self if len(clients) == 1 else None,
            fills_by=fills_by,
        )
        return replace(federation, encoding=encoding)

    def _structure_of(self, schema: DataSchema) -> Structure:
        """Return the structure of rows of a table for a model with several inputs.

        Raises
        ------
        SchemaError
            If the columns of an input are not adjacent in the schema, or all of them are empty.
        """
        of_column = {
            column: name for name, columns in self.choice.by_input.items() for column in columns
        }
        sizes: dict[str, int] = {}
        last = ""
        for column in schema.inputs:
            name = of_column.get(column.name, "")
            if not name or (name in sizes and name != last):
                raise SchemaError(
                    f"the schema should list the columns of each input together, got "
                    f"{column.name!r} after columns of {last!r}; use a schema in this order"
                )
            sizes[name] = sizes.get(name, 0) + len(column.encoded_names)
            last = name
        lacking = [name for name in self.choice.by_input if name not in sizes]
        if lacking:
            raise SchemaError(
                f"all columns of the input {lacking[0]!r} are empty; leave this input out"
            )
        return Structure(tuple(Field(name, "float", (size,)) for name, size in sizes.items()))

    def _scaling_settings(self, schema: DataSchema) -> OwnSettings:
        """Return the user's settings, with scaling turned off if the schema has no numeric input.

        A scaling that the user chose is not turned off. The schema is the same for all clients of a
        network, so that either all of them scale their inputs or none does.
        """
        has_numbers = any(column.kind == "number" for column in schema.inputs)
        if has_numbers or self.settings.standardize != "auto":
            return self.settings
        return replace(self.settings, standardize="none")

    def _hold_out(self, task: TaskKind | None) -> HoldOut:
        """Return the rule by which clients hold out test rows, with the columns that it needs.

        These columns are the order, the groups and the labels of the rows.
        """
        settings = self.settings
        labels = self._target_values if task in LABELLED else None
        return HoldOut(
            settings.test,
            self._order_values,
            self._group_numbers,
            labels=strata_of(settings, labels, by_default=True),
            group_name=settings.groups or "",
        )

    @cached_property
    def _target_values(self) -> NDArray[Any]:
        """Values of the target column, ``[N]``, as in the file.

        Rows with equal values form a stratum of the hold-out. The values are not encoded as label
        numbers: these depend on the schema, and the choice of held-out rows must not depend on it.
        """
        (target,) = self.choice.target
        if is_number(self.rows.kind(target)):
            return self.rows.numbers(target)
        return self.rows.texts(target).astype(str)

    @cached_property
    def _group_numbers(self) -> Indices | None:
        """Group number of each row, int64 ``[N]``; None if the setting ``groups`` is unset."""
        if self.settings.groups is None:
            return None
        return number_values(self.rows.texts(self.settings.groups).astype(str))

    @cached_property
    def _order_values(self) -> NDArray[np.float64] | None:
        """Value (such as a time) by which each row is ordered, ``[N]``.

        None if the setting ``order`` names no column.
        """
        column = self.settings.order
        if column is None:
            return None
        kind = self.rows.kind(column)
        if not is_number(kind):
            raise DataError(
                f"order should name a column of numbers or dates, got {column!r}, a column of "
                f"{IN_WORDS[kind]}"
            )
        return self.rows.numbers(column)

    def _has_gaps(self, column: InputColumn) -> bool:
        """Return whether an input column has an empty cell; false for a column of kind ``text``."""
        return column.kind != "text" and bool(self.rows.gaps(column.name).any())

    def _summarize_inputs(
        self, columns: Sequence[InputColumn], task: TaskKind | None
    ) -> Mapping[str, Summaries]:
        """Summarize the input columns of each client that trains.

        The result has the summary of each column by the name of the client, then of the column.
        """
        members, trained = prepare_clients(
            self._client_rows, self.settings, self.key, hold_out=self._hold_out(task)
        )
        found: dict[str, dict[str, ColumnSummary]] = {
            client.name: {} for client in members[:trained]
        }
        for column in columns:
            gaps = self.rows.gaps(column.name)
            values = np.where(gaps, np.nan, 0.0)
            if column.kind == "number":
                values = self.rows.numbers(column.name, gaps=True)
            for client in members[:trained]:
                own = np.concatenate([client.train, client.validation, client.test])
                is_training = np.arange(len(own)) < len(client.train)
                summary = summarize_column(values[own], is_training, self.choice.missing)
                found[client.name][column.name] = summary
        return found

    @cached_property
    def _client_rows(self) -> list[ClientRows]:
        """Name and row numbers of each client, before rows are held out."""
        if self.choice.client is None:
            parts = number_rows([len(table) for table in self.rows.tables])
            names = [str(sheet.client) for sheet in self.rows.sheets]
            return [ClientRows(name, part) for name, part in zip(names, parts, strict=True)]
        owners = self.rows.texts(self.choice.client)
        names = list(dict.fromkeys(owners.tolist()))
        return [ClientRows(name, np.flatnonzero(owners == name)) for name in names]

    def _input_names(self) -> Sequence[str]:
        """Return the input columns that the user lists, or all columns without another role."""
        if self.choice.input_columns:
            return self.choice.input_columns
        reserved = list(self.choice.target)
        if self.choice.client is not None:
            reserved.append(self.choice.client)
        # Columns of order and groups determine the held-out rows. They are inputs only if the user
        # lists them as inputs.
        reserved += [
            column for column in (self.settings.order, self.settings.groups) if column is not None
        ]
        return self.rows.list_other_columns(reserved)

    def _check_inputs(self, schema: DataSchema) -> None:
        """Check that the tables have exactly the input columns of a schema.

        Nothing is checked if the user declares the schema and lists no inputs, since the columns of
        the schema are then the inputs.
        """
        where = self.sheets[0].where
        names = [column.name for column in schema.inputs]
        if schema.words or not names:
            raise SchemaError(
                f"the schema is for texts, but {where} has the input columns "
                f"{show_names(self._input_names())}; use a schema that lists these columns as "
                "inputs"
            )
        if self.schema is not None and self.choice.inputs is None:
            return
        present = self._input_names()
        problems: list[str] = []
        if missing := [name for name in names if name not in present]:
            problems.append(f"lacks {show_names(missing)}")
        others = [name for name in present if name not in names]
        # A column without any value is no input.
        if extra := [name for name in others if not self.rows.is_empty(name)]:
            problems.append(f"also has {show_names(extra)}")
        if problems:
            raise SchemaError(
                f"{where} should have the input columns of the schema, but "
                f"{' and '.join(problems)}; list the input columns as 'inputs'"
            )

    def _check_target(self, schema: DataSchema) -> None:
        choice = self.choice
        if schema.target != choice.target:
            raise SchemaError(
                f"the target is {show_names(choice.target)}, but the target of the schema is "
                f"{show_names(schema.target)}; set both to the same columns"
            )
        if choice.task is not None and schema.task != choice.task:
            raise SchemaError(
                f"the task is {choice.task}, but the task of the schema is {schema.task}; set both "
                "to the same task"
            )


@dataclass(frozen=True, kw_only=True)
class FilesSettings:
    """Settings of a federation from CSV or Parquet files: the files and the roles of their columns.

    :func:`federation_from_frame` describes the roles in detail.

    Parameters
    ----------
    files
        A file, or a pattern such as ``hospitals/*.csv``, relative to the working directory, or else
        to the data folder.
    target
        Column to predict, or several columns.
    client
        Column with the name of the client that owns a row. If left out, each file is a client with
        the name of the file.
    inputs, text
        Columns from which the target is predicted (all other columns if left out), or the columns
        of each input of a model with several inputs; or one column of texts as the only input.
    name
        Name of the data in reports; by default the name of the folder, or of the single file.
    exclude, drop
        Columns to leave out; both names mean the same, and one of them may be given.
    categorical, missing, fewest_rows
        Inputs that are categories, the treatment of empty cells, and the number of rows below which
        a client is left out.
    separator, encoding
        Character between two cells of a CSV file, and its encoding, by Python's names; detected for
        each file if left out.
    decimal
        Decimal mark of numbers, ``.`` or ``,``; detected if left out.
    dates
        Format of dates, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``; detected if
        left out.
    schema
        Input columns, their categories, and the labels: the fields of :class:`DataSchema`, or the
        path of a JSON file with these fields. By default, determined from the files.
    """

    files: str
    target: str | tuple[str, ...]
    client: str | None = None
    inputs: InputColumns | None = None
    text: str | None = None
    name: str | None = None
    drop: tuple[str, ...] = ()
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    dates: str | None = None
    schema: Mapping[str, Any] | str | None = None
    exclude: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    missing: Missing = MISSING
    fewest_rows: int = 0

    def __post_init__(self) -> None:
        _ = self.text_format  # Raises a ConfigError if a part of the format is invalid.
        if Path(self.files).is_dir():
            raise ConfigError(
                f"files should be a file or a pattern, got the folder {self.files!r}; set a "
                f"pattern such as '{self.files}/*.csv'"
            )
        self.choice()
        if isinstance(self.schema, Mapping):
            read_declared(self.schema)

    def check_clients(self) -> None:
        """Check that the files can belong to several clients, as a simulation needs.

        Raises
        ------
        ConfigError
            If there is a single file, and no column with the client of each row.
        """
        if self.client is None and not glob.has_magic(self.files):
            raise ConfigError(
                f"files = {self.files!r} is a single file, so client should be the name of the "
                "column with the client of each row, got none"
            )

    def federation(
        self,
        settings: OwnSettings,
        task: TaskKind | None = None,
        data_dir: str | Path | None = None,
    ) -> Federation:
        """Read the files and build a federation.

        Raises
        ------
        ConfigError, DataError
            For the reasons of :func:`federation_from_frame`. Also a DataError if no file matches.
        """
        self.check_clients()
        return self.source(settings, task, data_dir).federation()

    def source(
        self,
        settings: OwnSettings,
        task: TaskKind | None = None,
        data_dir: str | Path | None = None,
    ) -> TableSource:
        """Read the files as tables that are not encoded yet.

        Clients in a network first agree on a schema, and then encode their tables.
        """
        paths = self._find_paths(data_dir)
        stems = [path.stem for path in paths]
        if self.client is None and len(set(stems)) < len(stems):
            repeated = next(stem for stem in stems if stems.count(stem) > 1)
            raise DataError(
                f"files = {self.files!r} matches several files named {repeated!r}; each client has "
                "the name of its file, so file names should differ"
            )
        sheets = [read_sheet(path, self.separator, self.encoding) for path in paths]
        schema = read_declared(self.schema)
        return TableSource(sheets, self.choice(task), self.title, settings, schema=schema)

    def choice(self, task: TaskKind | None = None) -> ColumnChoice:
        """Return the roles of the columns, with a task if the user specifies one."""
        target = self.target if isinstance(self.target, tuple) else (self.target,)
        return ColumnChoice(
            target,
            self.client,
            self.inputs,
            text=self.text,
            task=task,
            drop=choose_excluded(self.exclude, self.drop),
            categorical=self.categorical,
            missing=self.missing,
            fewest_rows=self.fewest_rows,
            notation=self.text_format.notation,
        )

    @property
    def text_format(self) -> TextFormat:
        """Format of the files: encoding, separator, decimal mark and dates.

        Raises
        ------
        ConfigError
            If a part of the format is invalid.
        """
        return TextFormat(
            encoding=self.encoding, separator=self.separator, decimal=self.decimal, dates=self.dates
        )

    @property
    def title(self) -> str:
        """Name of the data in reports; by default the folder of a pattern, or the file name."""
        if self.name:
            return self.name
        path = Path(self.files)
        if glob.has_magic(path.name):
            return path.parent.name or "files"
        return path.stem or "files"

    def _find_paths(self, data_dir: str | Path | None) -> list[Path]:
        """Find the matching files in the working directory, or else in the data folder."""
        folders = [Path()]
        data_folder = data_dir or os.environ.get("FEDCLADE_DATA_DIR")
        if data_folder is not None:
            folders.append(Path(data_folder).expanduser())
        for folder in folders:
            paths = match_files(self.files, folder)
            if paths:
                return paths
        where = " or ".join(str(folder.absolute()) for folder in folders)
        raise DataError(
            f"files = {shown(self.files)} matches no file in {where}; check the path, or --data-dir"
        )


def match_files(pattern: str, folder: Path) -> list[Path]:
    """Return the files in a folder that match a pattern, in alphabetical order.

    The pattern is relative to the folder.
    """
    # Path.glob() would read brackets in the folder's own name as a pattern.
    names = glob.glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207
    paths = [folder / name for name in names]
    return sorted(path for path in paths if path.is_file())
