"""Tables of rows and columns as a federation: from pandas and polars data frames, and whatever Arrow reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from fedclade.core import ConfigError, TaskKind, checked, shown
from fedclade.data.agreement import DataSource, Encoding, Proposal
from fedclade.data.cell_values import Notation
from fedclade.data.federation import Federation
from fedclade.data.own import Held, OwnOptions, OwnSettings, count_words, own_federation
from fedclade.data.pool import Columns
from fedclade.data.reading import rows_of
from fedclade.data.schema import DataSchema, InputColumn, SchemaError, read_declared, show_names
from fedclade.data.sheets import Rows, Sheet, arrow_table
from fedclade.data.targets import describe_targets, encode_targets
from fedclade.data.typed_columns import ColumnRoles, prepare_sheets


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
    """Make a federation of the rows of a data frame.

    Parameters
    ----------
    frame
        Of pandas or polars, a ``pyarrow.Table``, or anything else that gives Arrow data.
    client
        Column that says whose a row is.
    target
        Column to predict; several of them for ``multilabel``, and for a ``regression`` of several numbers.
    inputs
        Columns to predict it from; all others if left out. Numbers become float32. Texts and truth values are encoded
        by category: a column of 0 and 1 for each value, in sorted order, the same for all clients. The categories of a
        pandas data frame count whether rows have them or not.
    task
        What the target is. If left out: texts, truth values and whole numbers are labels (``classification``), other
        numbers those of a ``regression``. Texts are numbered in sorted order, and so are the two values of a
        ``binary`` target.
    text
        A column of texts as the only input, in place of ``inputs``: as the words of a vocabulary.
    drop
        Columns to leave out.
    decimal
        Decimal mark of numbers that are texts, ``.`` or ``,``; detected if left out.
    dates
        Format of dates that are texts, such as ``%d.%m.%Y``, in the codes of Python's ``strptime``; detected if left
        out. All dates become days since 1970-01-01.
    name
        Of the data, for people.
    true_clusters
        By the clients' names, where they are known; for scoring only.
    schema
        A :class:`DataSchema`, or the path of a JSON file with one: which columns there are, with their categories and
        the labels. By default, what the rows have. Over a network all clients then agree on one schema.
    **options
        Fields of :class:`~fedclade.data.OwnSettings`, such as ``standardize="federated"``.

    Raises
    ------
    ConfigError
        If a setting is out of range, or the target does not say what the task is.
    DataError
        If a column is missing, a value is missing, of no use or not in the schema, nearly all texts of a column differ,
        or a client has too few rows.
    """
    if not target:
        raise ConfigError(f"target should name at least 1 column, got {shown(target)}")
    sheets = [Sheet(arrow_table(frame), "the data frame", None)]
    chosen = Chosen(
        target if isinstance(target, tuple) else (target,),
        client,
        inputs,
        text=text,
        task=task,
        drop=drop,
        notation=Notation(decimal=decimal, dates=dates),
    )
    declared = read_declared(schema)
    return federation_from_sheets(sheets, chosen, name, OwnSettings(**options), true_clusters, declared)


@dataclass(frozen=True)
class Chosen:
    """Which columns are what; see :func:`federation_from_frame`."""

    target: tuple[str, ...]
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    text: str | None = None
    task: TaskKind | None = None
    drop: tuple[str, ...] = ()
    notation: Notation = field(default_factory=Notation)

    @property
    def roles(self) -> ColumnRoles:
        """Which columns are used, and how."""
        as_texts = tuple(column for column in (self.client, self.text) if column is not None)
        inputs = () if self.text is not None else self.inputs
        return ColumnRoles(self.target, inputs, as_texts, self.drop)

    def __post_init__(self) -> None:
        if self.task == "language":
            raise ConfigError(
                "the task of a table should be classification, binary, multilabel or regression, got language"
            )
        if self.text is not None and self.inputs is not None:
            raise ConfigError(f"text = {self.text!r} is the only input; leave out inputs = {shown([*self.inputs])}")
        apart = {*self.target, self.client}
        if both := [column for column in self.inputs or () if column in apart]:
            raise ConfigError(f"inputs should be other columns than target and client, got {both[0]!r}")
        needed = [column for column in self.drop if column in (*apart, *(self.inputs or ()), self.text)]
        if needed:
            raise ConfigError(f"drop should be columns that are not needed, got {needed[0]!r}")


def federation_from_sheets(
    sheets: Sequence[Sheet],
    chosen: Chosen,
    name: str,
    settings: OwnSettings,
    true_clusters: Mapping[str, int] | None = None,
    schema: DataSchema | None = None,
) -> Federation:
    """Make a federation of the rows of tables with the same columns; see :func:`federation_from_frame`."""
    return TableSource(sheets, chosen, name, settings, true_clusters, schema).federation()


@dataclass(frozen=True, eq=False)
class TableSource(DataSource):
    """Tables with the same columns, and all that says how a federation is made of them.

    ``key`` is the number of the first client for its random draws. ``schema`` is what the user declares; its inputs are
    then the inputs, unless ``chosen`` names them.
    """

    sheets: Sequence[Sheet]
    chosen: Chosen
    name: str
    settings: OwnSettings
    true_clusters: Mapping[str, int] | None = None
    schema: DataSchema | None = None
    key: int = 0

    @cached_property
    def rows(self) -> Rows:
        """The rows of all tables, with numbers and dates for texts of these."""
        roles = self.chosen.roles
        if self.schema is not None and self.schema.inputs and roles.inputs is None:
            roles = replace(roles, inputs=tuple(column.name for column in self.schema.inputs))
        return Rows(prepare_sheets(self.sheets, roles, self.chosen.notation))

    def with_key(self, key: int) -> TableSource:
        """Return the same tables with another number of the first client for its random draws."""
        source = replace(self, key=key)
        object.__setattr__(source, "rows", self.rows)  # which need not be prepared and reported again
        return source

    @property
    def client_names(self) -> list[str]:
        """The names of the clients."""
        return [held.name for held in self._held]

    def federation(self) -> Federation:
        """Return the federation, encoded by the declared schema, or else by the one that its own data comes to."""
        return self._encode(self._describe() if self.schema is None else self._completed(self.schema))

    def propose(self) -> Proposal:
        """Return the schema that fits this data alone, or the declared one."""
        if self.schema is not None:
            return Proposal(self._completed(self.schema), is_fixed=True)
        schema = self._describe(alone=True)
        if self.chosen.text is None:
            return Proposal(schema)
        texts = self.rows.texts(self.chosen.text, empty=True).tolist()
        words, counts = count_words(self._held, texts, self.settings, self.key)
        size = self.settings.vocabulary_size
        return Proposal(replace(schema, words=words), word_counts=counts, vocabulary_size=size)

    def encode(self, schema: DataSchema) -> Federation:
        """Return the federation, encoded by a schema; a SchemaError if the data does not fit it."""
        if self.chosen.text is not None and not schema.words:
            raise SchemaError(f"the schema has no words, and the only input is the text {self.chosen.text!r}")
        return self._encode(self._completed(schema))

    def _describe(self, *, alone: bool = False) -> DataSchema:
        """Return the schema of the data, but for words; ``alone`` says that other clients may have further labels."""
        chosen = self.chosen
        task, labels = describe_targets(self.rows, chosen.target, chosen.task, alone=alone)
        if chosen.text is None:
            inputs = self.rows.describe_inputs(self._input_names())
        else:
            inputs = (InputColumn(chosen.text, "text"),)
        return DataSchema(inputs, chosen.target, task, labels)

    def _completed(self, schema: DataSchema) -> DataSchema:
        """Return a schema with target, task and labels, which a declared one may leave out."""
        task = schema.task or self.chosen.task
        labels = schema.labels
        if task is None and labels is not None:
            task = "classification"
        elif task is None or (labels is None and task in ("classification", "binary")):
            task, labels = describe_targets(self.rows, self.chosen.target, task)
        return replace(schema, target=schema.target or self.chosen.target, task=task, labels=labels)

    def _encode(self, schema: DataSchema) -> Federation:
        """Return the federation, encoded by a complete schema; without words by those of the training texts."""
        rows = self.rows
        chosen = self.chosen
        self._check_target(schema)
        y = encode_targets(rows, chosen.target, schema)
        if chosen.text is None:
            self._check_inputs(schema)
            x: Tensor | list[str] = rows.encode_inputs(schema.inputs)
            names = schema.encoded_names
        else:
            x = rows.texts(chosen.text, empty=True).tolist()
            names = (chosen.text,)
        outputs = None
        if schema.task == "classification":
            outputs = schema.labels if isinstance(schema.labels, int) else len(schema.label_names)
        held = self._held
        made = own_federation(
            held,
            x,
            y,
            self.settings,
            self.true_clusters,
            name=self.name,
            task=schema.task,
            columns=Columns(names, schema.label_names),
            outputs=outputs,
            words=schema.words,
            first_key=self.key,
        )
        encoding = Encoding(
            replace(schema, words=made.pool.vocabulary),
            is_declared=self.schema is not None,
            source=self if len(held) == 1 else None,
        )
        return replace(made, encoding=encoding)

    @property
    def _held(self) -> list[Held]:
        """The clients, with the rows of each."""
        rows = self.rows
        if self.chosen.client is None:
            parts = rows_of([len(table) for table in rows.tables])
            return [Held(str(sheet.client), part) for sheet, part in zip(self.sheets, parts, strict=True)]
        owners = rows.texts(self.chosen.client)
        return [Held(owner, np.flatnonzero(owners == owner)) for owner in dict.fromkeys(owners.tolist())]

    def _input_names(self) -> Sequence[str]:
        apart = [*self.chosen.target, *([] if self.chosen.client is None else [self.chosen.client])]
        return self.chosen.inputs or self.rows.others(apart)

    def _check_inputs(self, schema: DataSchema) -> None:
        """Check that the columns are those of a schema; one that the user declares says which they are."""
        where = self.sheets[0].where
        names = [column.name for column in schema.inputs]
        if schema.words or not names:
            raise SchemaError(f"the schema is of a text, and {where} has columns {show_names(self._input_names())}")
        if self.schema is not None and self.chosen.inputs is None:
            return
        mine = self._input_names()
        lacking = [name for name in names if name not in mine]
        extra = [name for name in mine if name not in names]
        if lacking or extra:
            found = {"lacks": lacking, "has besides": extra}
            what = " and ".join(f"{verb} {show_names(odd)}" for verb, odd in found.items() if odd)
            raise SchemaError(f"{where} should have the input columns of the schema, but {what}; name 'inputs'")

    def _check_target(self, schema: DataSchema) -> None:
        chosen = self.chosen
        if schema.target != chosen.target:
            raise SchemaError(
                f"the target is {show_names(chosen.target)}, and that of the schema is {show_names(schema.target)}"
            )
        if chosen.task is not None and schema.task != chosen.task:
            raise SchemaError(f"the task is {chosen.task}, and that of the schema is {schema.task}")
