"""Data schemas: the encoding of tables and texts as tensors, equal for all clients.

A *schema* lists the input columns with their categories and filling values, the target columns, the
task, the labels, and the words of a vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from fedclade.core import ConfigError, DataError, TaskKind, is_choice, shown, unknown
from fedclade.data.texts import SPECIALS

MOST_CATEGORIES = 1000
"""Largest number of categories of a column that is encoded by category."""

MOST_LABELS = 1000
"""Largest number of label names.

If a target has whole numbers of at least this size, the user must set the task.
"""

MOST_COLUMNS = 10_000
MOST_WORDS = 1_000_000
LONGEST_NAME = 1000
"""Largest number of characters of a column name, a category, a label name or a word."""

SHOWN = 3
"""Largest number of differences, columns or clients that a message lists."""

NUMBER = "number"
CATEGORY = "category"
TEXT = "text"
EMPTY = "empty"

Label = str | float
"""Label of a target column: a text, or a number of a binary target with numeric values."""


class SchemaError(DataError):
    """Error that data does not fit a schema.

    Parameters
    ----------
    message
        The reason, which may contain values of the data.
    without_values
        The reason without values of the data, for a server that should not learn them; None if
        ``message`` contains no values.
    """

    def __init__(self, message: str, without_values: str | None = None) -> None:
        super().__init__(message)
        self.without_values = without_values or message


@dataclass(frozen=True)
class InputColumn:
    """Input column of a table: its name, and its encoding as one or more inputs of a model.

    Parameters
    ----------
    name
        Name of the column.
    kind
        ``number``, ``category`` (a column of 0 and 1 for each category) or ``text``. Proposals of
        clients may also have the kind ``empty``: the column has no value in the client's data, and
        other clients may have numbers or categories in this column.
    categories
        The known categories; empty for other kinds.
    fill
        Number that fills empty cells of a column of numbers; None if no number is known. An empty
        cell of a column of categories is 0 for all categories.
    indicator
        Whether a further column is 1 where a cell is empty, and 0 elsewhere.
    """

    name: str
    kind: Literal["number", "category", "text", "empty"] = NUMBER
    categories: tuple[str, ...] = ()
    fill: float | None = None
    indicator: bool = False

    @property
    def encoded_names(self) -> list[str]:
        """Names of the encoded columns: one, or one for each category, and the indicator, if any."""
        names = [self.name]
        if self.kind == CATEGORY:
            names = [f"{self.name}={category}" for category in self.categories]
        if self.indicator:
            names.append(f"{self.name} is empty")
        return names

    @property
    def fills(self) -> list[float | None]:
        """Number that fills empty cells of each encoded column; None if no number fills them."""
        return [self.fill] + [None] * (len(self.encoded_names) - 1)

    @property
    def in_words(self) -> str:
        """Treatment of the column's empty cells in words, to describe how two schemas differ."""
        if self.fill is None:
            filled = "not filled"
        else:
            filled = f"filled by {self.fill:g}"
        if self.indicator:
            return f"{filled}, with an indicator"
        return filled

    def as_value(self) -> Any:
        """Return the description of the column, without its name, as the shortest JSON value.

        The value is the kind, the list of categories, or a mapping of several fields.
        """
        described: dict[str, Any] = {"kind": self.kind}
        if self.categories:
            described = {"categories": list(self.categories)}
        if self.fill is not None:
            described["fill"] = self.fill
        if self.indicator:
            described["indicator"] = True
        if len(described) > 1:
            return described
        (short,) = described.values()
        return short


@dataclass(frozen=True)
class DataSchema:
    """Encoding of a table or of texts as tensors.

    All clients of a run should encode their data by the same schema. Otherwise an input of the
    model would have another meaning for each client.

    Parameters
    ----------
    inputs
        The input columns, in the order in which a model gets them. Empty for texts that do not come
        from a table.
    target
        Names of the target columns. Empty for texts that do not come from a table.
    task
        The task; None if the task is determined from the data.
    labels
        Names of the labels, in the order of their numbers; or the number of labels if labels are
        whole numbers; or None if targets are not labels.
    words
        Vocabulary of texts, which begins with ``<pad>`` and ``<unk>``. Unknown words become
        ``<unk>``.
    """

    inputs: tuple[InputColumn, ...] = ()
    target: tuple[str, ...] = ()
    task: TaskKind | None = None
    labels: tuple[Label, ...] | int | None = None
    words: tuple[str, ...] = ()

    @property
    def discloses_values(self) -> bool:
        """Whether the schema discloses categories, filling values, label names or words."""
        has_categories = any(column.categories or column.fill is not None for column in self.inputs)
        has_names = isinstance(self.labels, tuple) and not set(self.labels) <= {0, 1}
        return has_categories or has_names or len(self.words) > 0

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the model's outputs as texts; empty if the outputs have no names.

        These are the names of the labels, or, for several targets, the names of the target columns.
        """
        if isinstance(self.labels, tuple):
            return tuple(show_label(label) for label in self.labels)
        if len(self.target) > 1 or self.task == "multilabel":
            return self.target
        return ()

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Names of the model's inputs, after the encoding of categories and indicators."""
        return tuple(name for column in self.inputs for name in column.encoded_names)

    @property
    def encoded_fills(self) -> tuple[float | None, ...]:
        """Number that fills empty cells of each model input; None for inputs without filling.

        The tuple is empty if no input has a filling number.
        """
        fills = tuple(fill for column in self.inputs for fill in column.fills)
        return fills if any(fill is not None for fill in fills) else ()

    @property
    def digest(self) -> str:
        """Hexadecimal BLAKE2b hash of the schema, by which clients and server compare schemas."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the schema as a mapping of JSON values, without empty fields, for :meth:`read`."""
        inputs = {column.name: column.as_value() for column in self.inputs}
        if isinstance(self.labels, tuple):
            labels = list(self.labels)
        else:
            labels = self.labels
        values = {
            "inputs": inputs,
            "target": list(self.target),
            "task": self.task,
            "labels": labels,
            "words": list(self.words),
        }
        return {name: value for name, value in values.items() if value not in (None, [], {})}

    def to_json(self) -> str:
        """Return the schema as JSON text."""
        return json.dumps(self.as_dict())

    def save(self, path: str | Path) -> None:
        """Write the schema to a JSON file, which the setting ``schema`` of ``[data]`` can name."""
        Path(path).write_text(
            json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: str | Path) -> DataSchema:
        """Read a schema from a JSON file.

        Raises
        ------
        ConfigError
            If the file cannot be read, or its content is not a valid schema.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"cannot read the schema {path}, which should be a JSON file: {error}"
            ) from error
        try:
            return cls.read(values)
        except ConfigError as error:
            raise ConfigError(f"the schema in {path} is invalid: {error}") from error

    @classmethod
    def read(cls, values: Any) -> DataSchema:
        """Read a schema from JSON values, as :meth:`as_dict` returns them, and check the schema.

        Raises
        ------
        ConfigError
            If the values are not a valid schema.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"a schema should be a table with keys such as inputs and labels, got "
                f"{shown(values)}"
            )
        values = cast("Mapping[str, Any]", values)
        known = ("inputs", "target", "task", "labels", "words")
        for key in values:
            if key not in known:
                raise ConfigError(unknown("key of a schema:", str(key), known))
        task = values.get("task")
        if task is not None and not is_choice(task, TaskKind):
            raise ConfigError(unknown("task of a schema:", str(task), get_args(TaskKind)))
        target = values.get("target", [])
        if isinstance(target, str):
            target = [target]
        schema = cls(
            inputs=_read_inputs(values.get("inputs", {})),
            target=_read_names("target", target, MOST_COLUMNS),
            task=task,
            labels=_read_labels(values.get("labels")),
            words=_read_words(values.get("words", [])),
        )
        has_text = any(column.kind == TEXT for column in schema.inputs)
        if has_text and len(schema.inputs) > 1:
            names = [column.name for column in schema.inputs]
            raise ConfigError(
                "a column of kind 'text' should be the only input of a schema, got the inputs "
                f"{show_names(names)}; leave the other inputs out"
            )
        if not schema.inputs and not schema.words:
            raise ConfigError("a schema should have inputs or words, got neither")
        return schema

    def completed_by(self, other: DataSchema) -> DataSchema:
        """Return this schema with a missing target, task or labels taken from another schema."""
        labels = other.labels if self.labels is None else self.labels
        return replace(
            self, target=self.target or other.target, task=self.task or other.task, labels=labels
        )

    def differences(
        self,
        other: DataSchema,
        here: str = "this client's data",
        there: str = "the other clients' data",
    ) -> list[str]:
        """Describe in words how another schema differs from this schema; empty if both are equal.

        ``here`` and ``there`` name the data of this schema and of the other schema.
        """
        found: list[str] = []
        names = [column.name for column in self.inputs]
        other_names = [column.name for column in other.inputs]
        found += name_differences("column", names, other_names, here=here, there=there)
        other_columns = {column.name: column for column in other.inputs}
        for column in self.inputs:
            if (opposite := other_columns.get(column.name)) is None:
                continue
            if column.kind != opposite.kind:
                found.append(
                    f"column {column.name!r} is a {column.kind} in {here} and a {opposite.kind} in "
                    f"{there}"
                )
                continue
            what = f"category of column {column.name!r}"
            found += name_differences(
                what, column.categories, opposite.categories, here=here, there=there
            )
            if column.fill != opposite.fill or column.indicator != opposite.indicator:
                found.append(
                    f"empty cells of column {column.name!r} are {column.in_words} in {here} and "
                    f"{opposite.in_words} in {there}"
                )
        if self.target != other.target:
            found.append(
                f"the target is {show_names(self.target)} in {here} and {show_names(other.target)} "
                f"in {there}"
            )
        if self.task != other.task:
            found.append(f"the task is {self.task} in {here} and {other.task} in {there}")
        found += self._label_differences(other, here, there)
        found += name_differences("word", self.words, other.words, here=here, there=there)
        return found

    def _label_differences(self, other: DataSchema, here: str, there: str) -> list[str]:
        if isinstance(self.labels, tuple) and isinstance(other.labels, tuple):
            return name_differences(
                "label", self.label_names, other.label_names, here=here, there=there
            )
        if self.labels == other.labels:
            return []
        return [
            f"labels are {_show_labels(self.labels)} in {here} and {_show_labels(other.labels)} in "
            f"{there}"
        ]


def read_declared(
    declared: DataSchema | Mapping[str, Any] | str | Path | None,
) -> DataSchema | None:
    """Return the schema that a user declares, given as an object, a mapping or a path.

    Returns None if ``declared`` is None. A path should name a JSON file.

    Raises
    ------
    ConfigError
        If the value is not a schema, or a column has the kind ``empty``, which only the proposals
        of clients may have.
    """
    if declared is None:
        return None
    if isinstance(declared, DataSchema):
        schema = declared
    elif isinstance(declared, str | Path):
        schema = DataSchema.load(declared)
    else:
        schema = DataSchema.read(declared)
    for column in schema.inputs:
        if column.kind == EMPTY:
            raise _refuse_kind(column.name, column.kind)
    return schema


def show_label(label: Label) -> str:
    """Format a label as text for reports and files."""
    if isinstance(label, str):
        return label
    return f"{label:g}"


def show_names(names: Sequence[str]) -> str:
    """Format a list of names for a message, quoted and separated by commas."""
    return ", ".join(map(repr, names)) or "none"


def show_some(found: Sequence[str]) -> str:
    """Join the first few differences in one line, and count the remaining differences."""
    text = "; ".join(found[:SHOWN])
    if len(found) > SHOWN:
        text += f"; and {len(found) - SHOWN} more"
    return text


def join_some(names: Sequence[str]) -> str:
    """Join the first few names in one line, and count the remaining names."""
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f" and {len(names) - SHOWN} more"
    return text


def _show_labels(labels: tuple[Label, ...] | int | None) -> str:
    if isinstance(labels, tuple):
        return "names"
    if labels is None:
        return "no labels"
    return f"the numbers 0 to {labels - 1}"


def name_differences(
    what: str, names: Sequence[str], others: Sequence[str], *, here: str, there: str
) -> list[str]:
    """Describe in words how two lists of names differ.

    The result has one text for each name that is in only one of the lists. If both lists have the
    same names in another order, the only text states the first position that differs.

    Parameters
    ----------
    what
        Kind of the names in the texts, such as ``"column"``.
    names, others
        The two lists.
    here, there
        Origins of ``names`` and of ``others`` in the texts, such as ``"this client's data"``.
    """
    own = set(names)
    foreign = set(others)
    found = [f"{what} {name!r} is only in {here}" for name in names if name not in foreign]
    found += [f"{what} {name!r} is only in {there}" for name in others if name not in own]
    if found or tuple(names) == tuple(others):
        return found
    for place, (name, other) in enumerate(zip(names, others, strict=True), start=1):
        if name != other:
            return [f"{what} {place} is {name!r} in {here} and {other!r} in {there}"]
    return []


def _read_inputs(values: Any) -> tuple[InputColumn, ...]:
    if not isinstance(values, Mapping):
        raise ConfigError(
            "inputs of a schema should be a table with the type of each input column by its name, "
            f'such as {{ age = "number", city = ["bern", "oslo"] }}, got {shown(values)}'
        )
    values = cast("Mapping[str, Any]", values)
    names = _read_names("inputs", list(values), MOST_COLUMNS)
    return tuple(_read_input(name, values[name]) for name in names)


def _read_input(name: str, described: Any) -> InputColumn:
    if not isinstance(described, Mapping):
        return _read_kind(name, described)
    described = cast("Mapping[str, Any]", described)
    known = ("kind", "categories", "fill", "indicator")
    for key in described:
        if key not in known:
            raise ConfigError(unknown(f"key of column {name!r} of a schema:", str(key), known))
    column = _read_kind(name, described.get("categories", described.get("kind", NUMBER)))
    if "categories" in described and described.get("kind", CATEGORY) != column.kind:
        raise ConfigError(
            f"column {name!r} of a schema has categories, so its kind should be 'category', got "
            f"{shown(described['kind'])}"
        )
    fill = described.get("fill")
    indicator = described.get("indicator", False)
    is_number = type(fill) in (int, float) and math.isfinite(fill)
    if fill is not None and (column.kind != NUMBER or not is_number):
        raise ConfigError(
            f"fill of column {name!r} of a schema should be a finite number in a column of kind "
            f"'number', and left out in other columns, got fill = {shown(fill)} in a column of "
            f"kind {column.kind!r}"
        )
    if type(indicator) is not bool or (indicator and column.kind == TEXT):
        raise ConfigError(
            f"indicator of column {name!r} of a schema should be true or false, and left out in a "
            f"column of kind 'text', got indicator = {shown(indicator)} in a column of kind "
            f"{column.kind!r}"
        )
    if fill is not None:
        fill = float(fill)
    return replace(column, fill=fill, indicator=indicator)


def _read_kind(name: str, kind: Any) -> InputColumn:
    """Read a column of a declared schema from its kind or from the list of its categories."""
    if isinstance(kind, list | tuple):
        categories = _read_names(
            f"categories of column {name!r}", cast("Sequence[Any]", kind), MOST_CATEGORIES
        )
        if not categories:
            raise ConfigError(
                f"column {name!r} of a schema should have at least 1 category, got none"
            )
        return InputColumn(name, "category", categories)
    if kind not in (NUMBER, TEXT, EMPTY):
        raise _refuse_kind(name, kind)
    return InputColumn(name, kind)


def _refuse_kind(name: str, kind: object) -> ConfigError:
    """Return the error that a column of a declared schema has an unknown kind."""
    return ConfigError(
        f"column {name!r} of a schema should be 'number', 'text' or a list of categories, got "
        f"{shown(kind)}"
    )


def _read_labels(labels: Any) -> tuple[Label, ...] | int | None:
    if labels is None:
        return None
    if type(labels) is int:
        if labels < 1:
            raise ConfigError(f"labels of a schema should be at least 1, got {labels}")
        return labels
    if not isinstance(labels, list | tuple):
        raise ConfigError(
            "labels of a schema should be a list of names, or the number of labels, got "
            f"{shown(labels)}"
        )
    values = cast("Sequence[Any]", labels)
    are_numbers = all(type(label) in (int, float) and math.isfinite(label) for label in values)
    names: tuple[Label, ...]
    if are_numbers:
        names = tuple(float(label) for label in values)
    else:
        names = _read_names("labels", [_name_truth_value(label) for label in values], MOST_LABELS)
    if not names or len(names) > MOST_LABELS or len(set(names)) < len(names):
        raise ConfigError(
            f"labels of a schema should be 1 to {MOST_LABELS} different names, got {shown(labels)}"
        )
    return names


def _name_truth_value(label: Any) -> Any:
    """Replace the label True or False by the text that Arrow writes; keep other labels."""
    if isinstance(label, bool):
        return str(label).lower()
    return label


def _read_words(words: Any) -> tuple[str, ...]:
    if not isinstance(words, list | tuple):
        raise ConfigError(f"words of a schema should be a list, got {shown(words)}")
    found = _read_names("words", cast("Sequence[Any]", words), MOST_WORDS)
    if found and found[: len(SPECIALS)] != SPECIALS:
        raise ConfigError(
            f"words of a schema should begin with {show_names(SPECIALS)}, got "
            f"{shown(list(found[:2]))}"
        )
    return found


def _read_names(what: str, names: Any, most: int) -> tuple[str, ...]:
    """Read and check a list of distinct names of a declared schema.

    ``what`` names the list in errors, and ``most`` is the largest number of names.
    """
    if not isinstance(names, list | tuple):
        raise ConfigError(f"{what} of a schema should be a list of names, got {shown(names)}")
    names = cast("Sequence[Any]", names)
    if len(names) > most:
        raise ConfigError(
            f"{what} of a schema should be at most {most:,} names, got {len(names):,}"
        )
    for name in names:
        if not isinstance(name, str) or not name or len(name) > LONGEST_NAME:
            raise ConfigError(
                f"{what} of a schema should be names of 1 to {LONGEST_NAME:,} characters, got "
                f"{shown(name)}"
            )
    if len(set(names)) < len(names):
        ((twice, _),) = Counter(names).most_common(1)
        raise ConfigError(
            f"{what} of a schema should be different names, got {shown(twice)} more than once"
        )
    return tuple(names)
