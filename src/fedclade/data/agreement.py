"""Agreement of clients on one schema, from a proposal of each client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedclade.core import DataError
from fedclade.data.schema import (
    MOST_CATEGORIES,
    MOST_LABELS,
    DataSchema,
    InputColumn,
    Label,
    SchemaError,
    show_label,
    show_some,
)
from fedclade.data.texts import SPECIALS

if TYPE_CHECKING:
    from fedclade.data.federation import Federation


@dataclass(frozen=True)
class Proposal:
    """Proposal of a client: the schema by which it would encode its own data."""

    schema: DataSchema
    is_fixed: bool = False
    word_counts: tuple[int, ...] = ()
    vocabulary_size: int = 0

    @property
    def structure(self) -> tuple[object, ...]:
        """Properties that proposals must share to be united; the order of columns is ignored."""
        columns = sorted((column.name, column.kind) for column in self.schema.inputs)
        has_words = len(self.schema.words) > 0
        return (
            tuple(columns),
            self.schema.target,
            self.schema.task,
            _name_label_kind(self.schema),
            has_words,
            self.vocabulary_size,
        )

    def structure_differences(self, other: Proposal) -> list[str]:
        """Describe how the structure of this client's data differs from another proposal."""
        mine = _remove_values(self.schema)
        theirs = _remove_values(other.schema)
        found = mine.differences(theirs)
        own_labels = _name_label_kind(self.schema)
        other_labels = _name_label_kind(other.schema)
        if self.schema.task == other.schema.task and own_labels != other_labels:
            found.append(
                f"labels are {own_labels} in its data and {other_labels} in the others' data"
            )
        if self.vocabulary_size != other.vocabulary_size:
            found.append(
                f"vocabulary_size is {self.vocabulary_size} for its data and "
                f"{other.vocabulary_size} for the others' data"
            )
        return found


@dataclass(frozen=True)
class Agreement:
    """The agreed schema.

    Parameters
    ----------
    schema
        The schema.
    refused
        Reason for each client that does not fit and is refused, by its key.
    """

    schema: DataSchema
    refused: Mapping[int, str] = field(default_factory=dict[int, str])


class DataSource(ABC):
    """One client's own data before it is encoded."""

    @abstractmethod
    def propose(self) -> Proposal:
        """Return the schema that fits this data alone."""

    @abstractmethod
    def encode(self, schema: DataSchema) -> Federation:
        """Return the federation, encoded by a schema; a SchemaError if the data does not fit it."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """Schema by which a federation was encoded, and the means to encode it by another schema.

    Parameters
    ----------
    schema
        The schema.
    is_declared
        Whether the user declared the schema, so that it reveals nothing about the data.
    source
        The data before it was encoded. None if it is no longer available, as for several clients
        together.
    """

    schema: DataSchema
    is_declared: bool = False
    source: DataSource | None = None

    @property
    def proposal(self) -> Proposal:
        """The proposal of the client to the others."""
        if self.is_declared or self.source is None:
            return Proposal(self.schema, is_fixed=True)
        return self.source.propose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}  # other processes do not encode again


def encode_federation(federation: Federation, schema: DataSchema) -> Federation:
    """Return a federation of own data, encoded by the schema that all clients agreed on.

    Raises
    ------
    SchemaError
        If the data does not fit the schema. The message names the first differences.
    """
    encoding = federation.encoding
    if encoding is None:
        raise SchemaError(
            "its data has no named columns and no texts, and the other clients' data has"
        )
    if schema.completed_by(encoding.schema) == encoding.schema:
        return federation
    if encoding.is_declared or encoding.source is None:
        raise SchemaError(
            *explain_differences(encoding.schema, schema.completed_by(encoding.schema))
        )
    encoded = encoding.source.encode(schema)
    # The rows are the same and in the same order; ids and keys may have been changed since.
    return replace(federation, pool=encoded.pool, encoding=encoded.encoding)


def explain_differences(schema: DataSchema, agreed: DataSchema) -> tuple[str, str]:
    """Return the differences from the agreed schema twice: with values of the data, and without."""
    there = "the agreed schema"
    with_values = show_some(schema.differences(agreed, there=there))
    without = show_some(_remove_values(schema).differences(_remove_values(agreed), there=there))
    rule = "its data is encoded by another schema than the agreed one"
    if not without:
        return f"{rule}: {with_values}", rule
    return f"{rule}: {with_values}", f"{rule}: {without}"


def agree(proposals: Mapping[int, Proposal]) -> Agreement:
    """Unite the proposals of clients, given in a fixed order.

    The agreed schema has the categories, labels and words of all clients. Columns, kinds, target
    and task are those of most clients. Clients with other ones are refused, so that a wrongly
    configured client excludes only itself. If at least half of the clients declare their schema,
    the most frequent declared schema is the agreed one.

    Raises
    ------
    DataError
        If all clients together have too few labels.
    """
    declared = {key: proposal.schema for key, proposal in proposals.items() if proposal.is_fixed}
    if 2 * len(declared) >= len(proposals):
        return _choose_most_frequent(declared)
    structures = Counter(proposal.structure for proposal in proposals.values())
    # Of several equally frequent structures, the one that came first.
    ((common, _),) = structures.most_common(1)
    fitting = {key: proposal for key, proposal in proposals.items() if proposal.structure == common}
    first = next(iter(fitting.values()))
    refused: dict[int, str] = {}
    for key, proposal in proposals.items():
        if key not in fitting:
            refused[key] = show_some(proposal.structure_differences(first))
    united = first.schema
    for key, proposal in fitting.items():
        try:
            united = _unite(united, proposal.schema)
        except SchemaError as error:
            refused[key] = str(error)
    if united.words:
        united = replace(united, words=_count_frequent_words(fitting, first.vocabulary_size))
    _check_binary(united, len(fitting))
    return Agreement(united, refused)


def _check_binary(schema: DataSchema, clients: int) -> None:
    """Check that the target of a binary task has two values."""
    if schema.task != "binary" or not isinstance(schema.labels, tuple):
        return
    if len(schema.labels) < 2:
        raise DataError(
            f"the target {schema.target[0]!r} of a binary task should have 2 different values, got "
            f"{schema.label_names[0]!r} alone of all {clients} clients"
        )


def sort_by_frequency(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return words and counts, the most frequent first, equal counts in alphabetical order."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _choose_most_frequent(declared: Mapping[int, DataSchema]) -> Agreement:
    ((schema, _),) = Counter(declared.values()).most_common(1)
    refused = {
        key: show_some(other.differences(schema, here="its schema", there="the others' schema"))
        for key, other in declared.items()
        if other != schema
    }
    return Agreement(schema, refused)


def _unite(one: DataSchema, other: DataSchema) -> DataSchema:
    """Add the values of another schema to the first; a SchemaError if there are too many."""
    others = {column.name: column for column in other.inputs}
    inputs = tuple(_unite_columns(column, others[column.name]) for column in one.inputs)
    labels = one.labels
    if isinstance(one.labels, tuple) and isinstance(other.labels, tuple):
        most = 2 if one.task == "binary" else MOST_LABELS
        labels = _unite_labels(one.labels, other.labels, most)
    elif isinstance(one.labels, int) and isinstance(other.labels, int):
        labels = max(one.labels, other.labels)
    return replace(one, inputs=inputs, labels=labels)


def _unite_columns(one: InputColumn, other: InputColumn) -> InputColumn:
    categories = tuple(sorted({*one.categories, *other.categories}))
    if len(categories) > MOST_CATEGORIES:
        raise SchemaError(
            f"column {one.name!r} would have {len(categories):,} categories with those of this "
            f"client, at most {MOST_CATEGORIES:,}; leave the column out of 'inputs'"
        )
    return replace(one, categories=categories)


def _unite_labels(one: tuple[Label, ...], other: tuple[Label, ...], most: int) -> tuple[Label, ...]:
    together: set[Any] = {*one, *other}  # of one type, as the structures are the same
    labels = tuple(sorted(together))
    if len(labels) > most:
        known = ", ".join(map(show_label, one))
        more = ", ".join(show_label(label) for label in other if label not in one)
        raise SchemaError(f"the target would have more than {most} labels: {more} besides {known}")
    return labels


def _count_frequent_words(proposals: Mapping[int, Proposal], size: int) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for proposal in proposals.values():
        words = proposal.schema.words[len(SPECIALS) :]
        counts.update(dict(zip(words, proposal.word_counts, strict=True)))
    words = [word for word, _ in sort_by_frequency(counts)]
    return (*SPECIALS, *words[: size - len(SPECIALS)])


def _remove_values(schema: DataSchema) -> DataSchema:
    """Return a schema without categories, labels and words; columns in alphabetical order."""
    columns = sorted(
        (replace(column, categories=()) for column in schema.inputs), key=lambda column: column.name
    )
    words = SPECIALS if schema.words else ()
    return replace(schema, inputs=tuple(columns), labels=None, words=words)


def _name_label_kind(schema: DataSchema) -> str:
    """Return the kind of a schema's labels, for people."""
    if schema.labels is None:
        return "none"
    if isinstance(schema.labels, int):
        return "whole numbers from 0"
    if isinstance(schema.labels[0], str):
        return "names"
    return "two numbers"
