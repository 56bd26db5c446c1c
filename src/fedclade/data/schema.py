"""Schemas: the encoding of tables and texts as numbers, the same for all clients."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from fedclade.core import ConfigError, DataError, TaskKind, shown, unknown
from fedclade.data.texts import SPECIALS

MOST_CATEGORIES = 1000
"""Largest number of categories of a column that is encoded by category."""

MOST_LABELS = 1000
"""Largest number of label names. Whole numbers from this on are labels only if the user says so."""

MOST_COLUMNS = 10_000
MOST_WORDS = 1_000_000
LONGEST_NAME = 1000
"""Characters of the name of a column, and of a category, a label or a word."""

SHOWN = 3
"""Number of differences that a message names."""

NUMBER = "number"
TEXT = "text"

Label = str | float
"""A value of the target column: a text, or a number of a binary target."""


class SchemaError(DataError):
    """Data that cannot be encoded by a schema.

    Parameters
    ----------
    message
        The reason, with the value.
    without_values
        The same reason without any value of the data, for a client that does not disclose them.
    """

    def __init__(self, message: str, without_values: str | None = None) -> None:
        super().__init__(message)
        self.without_values = without_values or message


@dataclass(frozen=True)
class InputColumn:
    """Input column of a table: a number, categories (a column of 0 and 1 for each), or a text."""

    name: str
    kind: Literal["number", "category", "text"] = NUMBER
    categories: tuple[str, ...] = ()

    @property
    def encoded_names(self) -> list[str]:
        """Names of the columns that it is encoded as."""
        if self.kind != "category":
            return [self.name]
        return [f"{self.name}={category}" for category in self.categories]


@dataclass(frozen=True)
class DataSchema:
    """The encoding of a table or of texts.

    All clients of a run should encode their data by the same schema. Otherwise the same input of a
    model means something else for each client.

    Parameters
    ----------
    inputs
        The input columns, in the order in which a model gets them. Empty for texts that are in no
        table.
    target
        Names of the target columns. Empty for texts that are in no table.
    task
        What the target is; None if the data decides.
    labels
        Names of the labels, in the order of their numbers; or how many numbered labels there are;
        or None for targets that are no labels.
    words
        The vocabulary of a text, which begins with ``<pad>`` and ``<unk>``. Other words become
        ``<unk>``.
    """

    inputs: tuple[InputColumn, ...] = ()
    target: tuple[str, ...] = ()
    task: TaskKind | None = None
    labels: tuple[Label, ...] | int | None = None
    words: tuple[str, ...] = ()

    @property
    def discloses_values(self) -> bool:
        """Whether it has values of the data: categories, names of labels, or words."""
        has_categories = any(column.categories for column in self.inputs)
        has_names = isinstance(self.labels, tuple) and not set(self.labels) <= {0, 1}
        return has_categories or has_names or len(self.words) > 0

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels as texts; of several targets, their names."""
        if isinstance(self.labels, tuple):
            return tuple(show_label(label) for label in self.labels)
        if len(self.target) > 1 or self.task == "multilabel":
            return self.target
        return ()

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Names of the columns that a model gets."""
        return tuple(name for column in self.inputs for name in column.encoded_names)

    @property
    def digest(self) -> str:
        """Digest of the schema; equal schemas have equal digests."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the schema as plain values, without what is not set; see :meth:`read`."""
        inputs: dict[str, Any] = {}
        for column in self.inputs:
            if column.kind == "category":
                inputs[column.name] = list(column.categories)
            else:
                inputs[column.name] = column.kind
        labels = list(self.labels) if isinstance(self.labels, tuple) else self.labels
        values = {
            "inputs": inputs,
            "target": list(self.target),
            "task": self.task,
            "labels": labels,
            "words": list(self.words),
        }
        return {name: value for name, value in values.items() if value not in (None, [], {})}

    def to_json(self) -> str:
        """Return the schema as JSON."""
        return json.dumps(self.as_dict())

    def save(self, path: str | Path) -> None:
        """Write the schema to a JSON file, one that ``[data] schema`` may name."""
        Path(path).write_text(
            json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: str | Path) -> DataSchema:
        """Read a schema from a JSON file; a ConfigError if it cannot be read, or is none."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"cannot read the schema {path}, which should be a JSON file: {error}"
            ) from error
        try:
            return cls.read(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def read(cls, values: Any) -> DataSchema:
        """Read a schema from plain values, as :meth:`as_dict` returns them, and check it."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"a schema should be a table of inputs, labels and so on, got {shown(values)}"
            )
        values = cast("Mapping[str, Any]", values)
        known = ("inputs", "target", "task", "labels", "words")
        for key in values:
            if key not in known:
                raise ConfigError(unknown("key of a schema:", str(key), known))
        task = values.get("task")
        if task is not None and task not in get_args(TaskKind):
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
            raise ConfigError("a text should be the only input of a schema, got other inputs, too")
        if not schema.inputs and not schema.words:
            raise ConfigError("a schema should have inputs, or words of texts, got neither")
        return schema

    def completed_by(self, other: DataSchema) -> DataSchema:
        """Return this schema; a missing target, task or labels are those of another schema."""
        labels = other.labels if self.labels is None else self.labels
        return replace(
            self, target=self.target or other.target, task=self.task or other.task, labels=labels
        )

    def differences(
        self, other: DataSchema, here: str = "its data", there: str = "the others' data"
    ) -> list[str]:
        """Return in words how another schema differs from this one; empty if they are the same."""
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
    """Return a schema that a user declares: an object, plain values, or the path of a JSON file."""
    if declared is None or isinstance(declared, DataSchema):
        return declared
    if isinstance(declared, str | Path):
        return DataSchema.load(declared)
    return DataSchema.read(declared)


def show_label(label: Label) -> str:
    """Return a label for people, and for files."""
    if isinstance(label, str):
        return label
    return f"{label:g}"


def show_names(names: Sequence[str]) -> str:
    """Return names for people, quoted."""
    return ", ".join(map(repr, names)) or "none"


def show_some(found: Sequence[str]) -> str:
    """Return the first few differences in one line."""
    text = "; ".join(found[:SHOWN])
    if len(found) > SHOWN:
        text += f"; and {len(found) - SHOWN} more"
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
    """Return the differences of two lists of names in words.

    These are the names that are in one list only; if there are none, the first difference in order.
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
            f"inputs of a schema should be a table of column names, got {shown(values)}"
        )
    values = cast("Mapping[str, Any]", values)
    names = _read_names("inputs", list(values), MOST_COLUMNS)
    return tuple(_read_input(name, values[name]) for name in names)


def _read_input(name: str, kind: Any) -> InputColumn:
    if isinstance(kind, list | tuple):
        categories = _read_names(f"column {name!r}", cast("Sequence[Any]", kind), MOST_CATEGORIES)
        if not categories:
            raise ConfigError(
                f"column {name!r} of a schema should have at least 1 category, got none"
            )
        return InputColumn(name, "category", categories)
    if kind not in (NUMBER, TEXT):
        raise ConfigError(
            f"column {name!r} of a schema should be 'number', 'text' or a list of categories, got "
            f"{shown(kind)}"
        )
    return InputColumn(name, kind)


def _read_labels(labels: Any) -> tuple[Label, ...] | int | None:
    if labels is None:
        return None
    if type(labels) is int:
        if labels < 1:
            raise ConfigError(f"labels of a schema should be at least 1, got {labels}")
        return labels
    if not isinstance(labels, list | tuple):
        raise ConfigError(
            "labels of a schema should be a list of names, or how many there are, got "
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
    """Return a label; truth values have the names that Arrow gives them."""
    return str(label).lower() if isinstance(label, bool) else label


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
    """Check and read a list of different texts."""
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
