"""Federations of CSV and Parquet files, and of data frames.

Each file belongs to one client, or a column names the client of each row.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ConfigError, DataError, TaskKind, checked, require, shown
from fedclade.data.agreement import DataSource, Encoding, Proposal
from fedclade.data.cell_values import Notation
from fedclade.data.columns import IN_WORDS, ColumnKind, Rows, Sheet, Table, arrow_table, is_number
from fedclade.data.csv_format import DEFAULT_SEPARATORS, CsvFile, is_encoding, is_separator
from fedclade.data.federation import Federation
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
from fedclade.data.typed_columns import ColumnRoles, prepare_sheets
from fedclade.data.user_data import (
    ClientRows,
    OwnOptions,
    OwnSettings,
    build_federation,
    count_words,
)

# Targets: the columns to predict.

Labels = tuple[Label, ...] | int | None
"""Names of labels; the number of labels if they are numbered; None for targets without labels."""


def describe_targets(
    rows: Rows, columns: tuple[str, ...], task: TaskKind | None, *, alone: bool = False
) -> tuple[TaskKind, Labels]:
    """Determine the task and the labels of target columns.

    Parameters
    ----------
    rows
        The rows of all tables.
    columns
        Names of the target columns.
    task
        The task that the user states, if any.
    alone
        Whether other clients may have further labels. A binary target may then have one value.

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
            f"the target {column!r} has whole numbers up to {most:,}; say whether these are labels "
            "or numbers, by task = 'classification' or 'regression'"
        )
    return task, most + 1


def encode_targets(rows: Rows, columns: tuple[str, ...], schema: DataSchema) -> Tensor:
    """Encode target columns by a schema.

    Returns
    -------
    Tensor
        Labels, int64 ``[N]``; targets of all other tasks, float32 ``[N]`` or ``[N, L]``.

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
    """Return the two values of a binary target in sorted order."""
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
            hint = "; if other clients have the other value, declare both as the labels of a schema"
        raise DataError(
            f"the target {column!r} of a binary task should have 2 different values, got "
            f"{len(values)}: {listed}{hint}"
        )
    return tuple(values)


def _label_places(rows: Rows, column: str, labels: Sequence[Label]) -> NDArray[np.int64]:
    """Return the position of each row's label among the names of labels, int64 ``[N]``."""
    kind = rows.kind(column)
    if is_number(kind) != isinstance(labels[0], float):
        expected = "texts" if is_number(kind) else "numbers"
        raise SchemaError(
            f"{rows.sheets[0].where}: the labels of the schema are {expected}, and the target "
            f"{column!r} holds {IN_WORDS[kind]}"
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
    """Return a column of labels; a DataError unless they are whole numbers from 0."""
    labels = rows.numbers(column)
    is_odd = (labels < 0) | (labels != labels.round())
    ends = np.cumsum([len(table) for table in rows.tables])[:-1]
    rule = "labels should be whole numbers from 0 on; task = 'regression' takes other numbers"
    rows.refuse(np.split(is_odd, ends), column, np.split(labels, ends), rule)
    return labels


def _encode_numbered(rows: Rows, column: str, count: int) -> Tensor:
    """Return labels that are whole numbers below ``count``."""
    kind = rows.kind(column)
    if not is_number(kind):
        raise SchemaError(
            f"{rows.sheets[0].where}: the labels of the schema are the numbers 0 to {count - 1}, "
            f"and the target {column!r} holds {IN_WORDS[kind]}"
        )
    labels = _whole_numbers(rows, column)
    known = ["0", "...", str(count - 1)]
    rows.refuse_unknown(labels >= count, column, labels, known=known, what="label")
    return torch.from_numpy(labels.astype(np.int64))


def _describe_several(kinds: Mapping[str, ColumnKind], task: TaskKind | None) -> TaskKind:
    """Return the task of several target columns: ``multilabel`` or ``regression``."""
    if task is None and "number" in kinds.values():
        task = "regression"
    if task not in ("multilabel", "regression"):
        what = "left out" if task is None else task
        raise ConfigError(
            f"several targets ({', '.join(kinds)}) need task = 'multilabel' or 'regression', got "
            f"{what}"
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


@checked("frame")
def federation_from_frame(
    frame: Any,
    client: str,
    target: str | tuple[str, ...],
    inputs: tuple[str, ...] | None = None,
    task: TaskKind | None = None,
    *,
    text: str | None = None,
    drop: tuple[str, ...] = (),
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
        Columns to predict it from; all others if left out. Numbers become float32. Texts and truth
        values are encoded by category: a column of 0 and 1 for each value, in sorted order, the
        same for all clients. The categories of a pandas data frame count whether rows have them or
        not.
    task
        The task. If left out: texts, truth values and whole numbers are labels
        (``classification``), other numbers those of a ``regression``. Texts are numbered in sorted
        order, and so are the two values of a ``binary`` target.
    text
        A column of texts as the only input, in place of ``inputs``: as the words of a vocabulary.
    drop
        Columns to leave out.
    decimal
        Decimal mark of numbers that are texts, ``.`` or ``,``; detected if left out.
    dates
        Format of dates that are texts, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``;
        detected if left out. All dates become days since 1970-01-01.
    name
        Name of the data, for people.
    true_clusters
        True cluster of each client by its name, if known; for scoring only.
    schema
        A :class:`DataSchema`, or the path of a JSON file with one: which columns there are, with
        their categories and the labels. By default, what the rows have. Over a network all clients
        then agree on one schema.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the target does not say what the task is.
    DataError
        If a column is missing, a value is missing, of no use or not in the schema, nearly all texts
        of a column differ, or a client has too few rows.
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
        drop=drop,
        notation=Notation(decimal=decimal, dates=dates),
    )
    declared = read_declared(schema)
    return federation_from_sheets(
        sheets, choice, name, OwnSettings(**options), true_clusters=true_clusters, schema=declared
    )


@dataclass(frozen=True)
class ColumnChoice:
    """Roles of the columns that the user chooses; see :func:`federation_from_frame`."""

    target: tuple[str, ...]
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    text: str | None = None
    task: TaskKind | None = None
    drop: tuple[str, ...] = ()
    notation: Notation = field(default_factory=Notation)

    @property
    def roles(self) -> ColumnRoles:
        """Roles of all columns."""
        as_texts = tuple(column for column in (self.client, self.text) if column is not None)
        inputs = self.inputs
        if self.text is not None:
            inputs = ()
        return ColumnRoles(self.target, inputs, as_texts, self.drop)

    def __post_init__(self) -> None:
        if self.task == "language":
            raise ConfigError(
                "the task of a table should be classification, binary, multilabel or regression, "
                "got language"
            )
        if self.text is not None and self.inputs is not None:
            raise ConfigError(
                f"text = {self.text!r} is the only input; leave out inputs = "
                f"{shown([*self.inputs])}"
            )
        reserved = {*self.target, self.client}
        both = [column for column in self.inputs or () if column in reserved]
        if both:
            raise ConfigError(
                f"inputs should be other columns than target and client, got {both[0]!r}"
            )
        used = {*reserved, *(self.inputs or ()), self.text}
        needed = [column for column in self.drop if column in used]
        if needed:
            raise ConfigError(f"drop should be columns that are not needed, got {needed[0]!r}")


def federation_from_sheets(
    sheets: Sequence[Sheet],
    choice: ColumnChoice,
    name: str,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None = None,
    schema: DataSchema | None = None,
) -> Federation:
    """Build a federation from the rows of tables with the same columns.

    :func:`federation_from_frame` describes the parameters and the errors.
    """
    source = TableSource(sheets, choice, name, settings, true_clusters=true_clusters, schema=schema)
    return source.federation()


@dataclass(frozen=True, eq=False)
class TableSource(DataSource):
    """Tables with the same columns, and the settings to build a federation from them.

    Parameters
    ----------
    sheets
        The tables.
    choice
        Roles of the columns.
    name
        Name of the data, for people.
    settings
        Settings of users' own data.
    true_clusters
        True cluster of each client by its name, if known.
    schema
        The schema that the user declares, if any. Its inputs are used unless ``choice`` names
        inputs.
    key
        Number of the first client for its random draws.
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
        """The rows of all tables, with texts of numbers and dates converted to numbers."""
        roles = self.choice.roles
        if self.schema is not None and self.schema.inputs and roles.inputs is None:
            roles = replace(roles, inputs=tuple(column.name for column in self.schema.inputs))
        return Rows(prepare_sheets(self.sheets, roles, self.choice.notation))

    def with_key(self, key: int) -> TableSource:
        """Return the same tables with another number of the first client for its random draws."""
        source = replace(self, key=key)
        # Share the prepared rows: assumptions about them should be reported once only.
        object.__setattr__(source, "rows", self.rows)
        return source

    @property
    def client_names(self) -> list[str]:
        """The names of the clients."""
        return [client.name for client in self._clients]

    def federation(self) -> Federation:
        """Build the federation, encoded by the declared schema, or by that of its own data."""
        if self.schema is None:
            return self._encode(self._describe())
        return self._encode(self._complete(self.schema))

    def propose(self) -> Proposal:
        """Return the schema that fits this data alone, or the declared one."""
        if self.schema is not None:
            return Proposal(self._complete(self.schema), is_fixed=True)
        schema = self._describe(alone=True)
        if self.choice.text is None:
            return Proposal(schema)
        texts = self.rows.texts(self.choice.text, empty=True).tolist()
        words, counts = count_words(self._clients, texts, self.settings, self.key)
        size = self.settings.vocabulary_size
        return Proposal(replace(schema, words=words), word_counts=counts, vocabulary_size=size)

    def encode(self, schema: DataSchema) -> Federation:
        """Build the federation, encoded by a schema; a SchemaError if the data does not fit it."""
        if self.choice.text is not None and not schema.words:
            raise SchemaError(
                f"the schema has no words, and the only input is the text {self.choice.text!r}"
            )
        return self._encode(self._complete(schema))

    def _describe(self, *, alone: bool = False) -> DataSchema:
        """Return the schema of the data without words; ``alone`` as in :func:`describe_targets`."""
        choice = self.choice
        task, labels = describe_targets(self.rows, choice.target, choice.task, alone=alone)
        if choice.text is None:
            inputs = self.rows.describe_inputs(self._input_names())
        else:
            inputs = (InputColumn(choice.text, "text"),)
        return DataSchema(inputs, choice.target, task, labels)

    def _complete(self, schema: DataSchema) -> DataSchema:
        """Return a schema with target, task and labels, which a declared schema may leave out."""
        task = schema.task or self.choice.task
        labels = schema.labels
        if task is None and labels is not None:
            task = "classification"
        elif task is None or (labels is None and task in ("classification", "binary")):
            task, labels = describe_targets(self.rows, self.choice.target, task)
        return replace(schema, target=schema.target or self.choice.target, task=task, labels=labels)

    def _encode(self, schema: DataSchema) -> Federation:
        """Build the federation, encoded by a complete schema.

        If the schema has no words, texts are encoded by the words of the training texts.
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
        outputs = None
        if schema.task == "classification":
            is_numbered = isinstance(schema.labels, int)
            outputs = schema.labels if is_numbered else len(schema.label_names)
        clients = self._clients
        federation = build_federation(
            clients,
            x,
            y,
            settings=self.settings,
            true_clusters=self.true_clusters,
            name=self.name,
            task=schema.task,
            columns=Columns(names, schema.label_names),
            outputs=outputs,
            words=schema.words,
            first_key=self.key,
        )
        encoding = Encoding(
            replace(schema, words=federation.pool.vocabulary),
            is_declared=self.schema is not None,
            source=self if len(clients) == 1 else None,
        )
        return replace(federation, encoding=encoding)

    @property
    def _clients(self) -> list[ClientRows]:
        """The clients, with the rows of each."""
        if self.choice.client is None:
            parts = number_rows([len(table) for table in self.rows.tables])
            names = [str(sheet.client) for sheet in self.sheets]
            return [ClientRows(name, part) for name, part in zip(names, parts, strict=True)]
        owners = self.rows.texts(self.choice.client)
        names = list(dict.fromkeys(owners.tolist()))
        return [ClientRows(name, np.flatnonzero(owners == name)) for name in names]

    def _input_names(self) -> Sequence[str]:
        """Return the names of the input columns."""
        if self.choice.inputs:
            return self.choice.inputs
        reserved = list(self.choice.target)
        if self.choice.client is not None:
            reserved.append(self.choice.client)
        return self.rows.list_other_columns(reserved)

    def _check_inputs(self, schema: DataSchema) -> None:
        """Check that the data has the columns of a schema.

        The columns of a schema that the user declares are the inputs, if no others are named.
        """
        where = self.sheets[0].where
        names = [column.name for column in schema.inputs]
        if schema.words or not names:
            raise SchemaError(
                f"the schema is of a text, and {where} has columns "
                f"{show_names(self._input_names())}"
            )
        if self.schema is not None and self.choice.inputs is None:
            return
        present = self._input_names()
        problems: list[str] = []
        if missing := [name for name in names if name not in present]:
            problems.append(f"lacks {show_names(missing)}")
        if extra := [name for name in present if name not in names]:
            problems.append(f"has besides {show_names(extra)}")
        if problems:
            raise SchemaError(
                f"{where} should have the input columns of the schema, but "
                f"{' and '.join(problems)}; name 'inputs'"
            )

    def _check_target(self, schema: DataSchema) -> None:
        choice = self.choice
        if schema.target != choice.target:
            raise SchemaError(
                f"the target is {show_names(choice.target)}, and that of the schema is "
                f"{show_names(schema.target)}"
            )
        if choice.task is not None and schema.task != choice.task:
            raise SchemaError(f"the task is {choice.task}, and that of the schema is {schema.task}")


PARQUET = ".parquet"


@dataclass(frozen=True, kw_only=True)
class FilesSettings:
    """Files to read, and roles of their columns; see :func:`federation_from_frame`.

    Parameters
    ----------
    files
        A file, or a pattern such as ``hospitals/*.csv``: relative to the working directory, or else
        to the data folder.
    target
        Column to predict, or several.
    client
        Column with the name of the client that owns a row. If left out, each file is a client with
        the name of the file.
    inputs, text
        Columns to predict from; all others if left out, or one column of texts.
    name
        Name of the data, for people; by default that of the folder, or of the file.
    drop
        Columns to leave out.
    separator, encoding
        Character between two cells of a CSV file, and its encoding, by Python's names; detected for
        each file if left out.
    decimal
        Decimal mark of numbers, ``.`` or ``,``; detected if left out.
    dates
        Format of dates, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``; detected if
        left out.
    schema
        The columns, with their categories, and the labels: the fields of :class:`DataSchema`, or
        the path of a JSON file that has them. By default, what the files have.
    """

    files: str
    target: str | tuple[str, ...]
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    text: str | None = None
    name: str | None = None
    drop: tuple[str, ...] = ()
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    dates: str | None = None
    schema: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        separator = self.separator
        encoding = self.encoding
        is_separate = separator is None or (is_separator(separator) and separator != self.decimal)
        is_known = encoding is None or is_encoding(encoding)
        require(
            (
                "separator",
                separator,
                is_separate,
                "a character such as ';' or '\\t', and not the decimal mark",
            ),
            ("encoding", encoding, is_known, "one that Python knows, such as 'cp1252' or 'utf-16'"),
            *Notation.checks(self.decimal, self.dates),
        )
        if Path(self.files).is_dir():
            raise ConfigError(
                f"files = {self.files!r} is a folder; say which files in it, as "
                f"'{self.files}/*.csv'"
            )
        self.choice()
        if isinstance(self.schema, Mapping):
            DataSchema.read(self.schema)

    def check_clients(self) -> None:
        """Check that there are several clients, as for a simulation; a ConfigError for one file."""
        if self.client is None and not glob.has_magic(self.files):
            raise ConfigError(
                f"files = {self.files!r} is one file; say by client = ... which column says whose "
                "a row is"
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
            As :func:`federation_from_frame`; also a DataError if no file matches.
        """
        self.check_clients()
        return self.source(settings, task, data_dir).federation()

    def source(
        self,
        settings: OwnSettings,
        task: TaskKind | None = None,
        data_dir: str | Path | None = None,
    ) -> TableSource:
        """Read the files without encoding them."""
        paths = self._find_paths(data_dir)
        stems = [path.stem for path in paths]
        if self.client is None and len(set(stems)) < len(stems):
            repeated = next(stem for stem in stems if stems.count(stem) > 1)
            raise DataError(
                f"files = {self.files!r} matches several files called {repeated!r}; a client is "
                "called as its file, so their names should differ"
            )
        sheets = [read_sheet(path, self.separator, self.encoding) for path in paths]
        schema = read_declared(self.schema)
        return TableSource(sheets, self.choice(task), self.title, settings, schema=schema)

    def choice(self, task: TaskKind | None = None) -> ColumnChoice:
        """Return the roles of the columns."""
        target = self.target if isinstance(self.target, tuple) else (self.target,)
        return ColumnChoice(
            target,
            self.client,
            self.inputs,
            text=self.text,
            task=task,
            drop=self.drop,
            notation=Notation(decimal=self.decimal, dates=self.dates),
        )

    @property
    def title(self) -> str:
        """The name; by default that of the folder of a pattern, or of the file."""
        if self.name:
            return self.name
        path = Path(self.files)
        if glob.has_magic(path.name):
            return path.parent.name or "files"
        return path.stem or "files"

    def _find_paths(self, data_dir: str | Path | None) -> list[Path]:
        """Return the files that match, in the working directory or else in the data folder."""
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
    """Return the files that a pattern matches, relative to a folder, in alphabetical order."""
    # Path.glob() would read brackets in the folder's own name as a pattern.
    names = glob.glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207
    paths = [folder / name for name in names]
    return sorted(path for path in paths if path.is_file())


def read_sheet(path: Path, separator: str | None = None, encoding: str | None = None) -> Sheet:
    """Read a CSV, TSV or Parquet file.

    Parameters
    ----------
    path
        The file.
    separator, encoding
        Separator of cells and encoding of a text file; detected if left out.

    Raises
    ------
    DataError
        If the file has another ending, or cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in (*DEFAULT_SEPARATORS, PARQUET):
        raise DataError(f"{path} should end in {', '.join(DEFAULT_SEPARATORS)} or {PARQUET}")
    if suffix == PARQUET:
        return Sheet(_read_parquet(path), str(path), path.stem)
    file = CsvFile.detect(path, separator, encoding)
    return Sheet(file.read(), str(path), path.stem, file)


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path.absolute()) as parquet:
            return parquet.read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
