"""Agreement of clients with tables or texts on one data schema.

A *schema* lists input columns, categories, labels and words, and determines how raw data is encoded
as tensors. Each client sends a *proposal*, which is the schema of its own data, and the server
unites all proposals in one schema, so that all clients have the same inputs and outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedclade.core import DataError
from fedclade.data.missing import MISSING, ColumnSummary, Missing, Summaries, fill_columns
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
    """Proposal of a client: the schema by which the client would encode its own data.

    Parameters
    ----------
    schema
        Schema that fits the client's own data.
    is_fixed
        Whether the user declared the schema, so that it cannot be extended by the values of other
        clients.
    word_counts
        Number of occurrences of each word of the schema's vocabulary, without special tokens.
    vocabulary_size
        Largest number of words of the vocabulary that all clients will share; 0 if the inputs are
        not texts.
    missing
        Treatment of empty cells of a table.
    summaries
        Summary of each input column by its name. The summaries of all clients determine the values
        that fill empty cells. Empty if the client does not report summaries.
    """

    schema: DataSchema
    is_fixed: bool = False
    word_counts: tuple[int, ...] = ()
    vocabulary_size: int = 0
    missing: Missing = MISSING
    summaries: Summaries = field(default_factory=dict[str, ColumnSummary])

    @property
    def structure(self) -> tuple[object, ...]:
        """Properties that must be equal in two proposals so that their schemas can be united.

        The order of columns is ignored.
        """
        columns = sorted((column.name, column.kind) for column in self.schema.inputs)
        has_words = len(self.schema.words) > 0
        return (
            tuple(columns),
            self.schema.target,
            self.schema.task,
            _name_label_kind(self.schema),
            has_words,
            self.vocabulary_size,
            self.missing,
        )

    @property
    def schema_alone(self) -> DataSchema:
        """Schema by which the client encodes its data if it does not agree with other clients.

        Columns without values are left out, and empty cells are filled by values that are computed
        from this client's data.
        """
        inputs = tuple(column for column in self.schema.inputs if column.kind != "empty")
        if any(summary.empty for summary in self.summaries.values()):
            inputs = fill_columns(inputs, [self.summaries], self.missing)
        return replace(self.schema, inputs=inputs)

    def structure_differences(self, other: Proposal) -> list[str]:
        """Describe each difference between this proposal and another proposal, for error messages.

        Values of the data, such as categories, are not compared.
        """
        mine = _remove_values(self.schema)
        theirs = _remove_values(other.schema)
        found = mine.differences(theirs)
        own_labels = _name_label_kind(self.schema)
        other_labels = _name_label_kind(other.schema)
        if self.schema.task == other.schema.task and own_labels != other_labels:
            found.append(
                f"labels are {own_labels} in this client's data and {other_labels} in the other "
                "clients' data"
            )
        if self.vocabulary_size != other.vocabulary_size:
            found.append(
                f"vocabulary_size is {self.vocabulary_size} for this client's data and "
                f"{other.vocabulary_size} for the other clients' data"
            )
        if self.missing != other.missing:
            found.append(
                f"missing is {self.missing!r} for this client's data and {other.missing!r} for the "
                "other clients' data"
            )
        return found


@dataclass(frozen=True)
class Agreement:
    """Schema on which clients agreed, and the clients that do not fit the schema.

    Parameters
    ----------
    schema
        The agreed schema.
    refused
        Reason of the refusal of each client whose data does not fit, by the key under which
        :func:`agree` got the client's proposal.
    """

    schema: DataSchema
    refused: Mapping[int, str] = field(default_factory=dict[int, str])


class DataSource(ABC):
    """Raw data of one client (tables or texts), which can be encoded as tensors by a schema."""

    @abstractmethod
    def propose(self) -> Proposal:
        """Return the client's proposal, whose schema fits the client's own data."""

    @abstractmethod
    def encode(self, schema: DataSchema) -> Federation:
        """Return a federation of the raw data, encoded by a schema.

        Raises
        ------
        SchemaError
            If the data does not fit the schema.
        """


@dataclass(frozen=True, eq=False)
class Encoding:
    """Schema by which a federation was encoded, and the means to encode it by another schema.

    Parameters
    ----------
    schema
        The schema.
    is_declared
        Whether the user declared the schema, so that the schema reveals nothing about the data.
    source
        The raw data before encoding, for encoding it again by another schema. None if this is not
        possible: if the federation has several clients, and in worker processes, which receive only
        encoded data.
    fills_by
        Treatment of empty cells, if the values that fill them were computed from this data. None if
        the filling values are declared or agreed, or if no cell is empty.
    """

    schema: DataSchema
    is_declared: bool = False
    source: DataSource | None = None
    fills_by: Missing | None = None

    @property
    def proposal(self) -> Proposal:
        """Proposal of the client, from which the server computes the schema of all clients."""
        if self.source is None:
            return Proposal(self.schema, is_fixed=True)
        proposal = self.source.propose()
        if self.is_declared:
            return replace(proposal, schema=self.schema)
        return proposal

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes receive encoded data and never encode again, so the raw data stays here.
        return {**self.__dict__, "source": None}


def encode_federation(federation: Federation, schema: DataSchema) -> Federation:
    """Return a client's federation, encoded by the schema on which all clients agreed.

    Raises
    ------
    SchemaError
        If the data does not fit the schema. The message names the first differences.
    """
    encoding = federation.encoding
    if encoding is None:
        raise SchemaError(
            "this client's data has no named columns and no texts, but the other clients' data has "
            "columns or texts; give this client the same kind of data as the other clients"
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
    """Describe the differences between a schema and the agreed schema.

    Returns
    -------
    tuple
        A text for the client's own log, which contains values of the data (such as categories), and
        a text for the server, which contains none.
    """
    there = "the agreed schema"
    with_values = show_some(schema.differences(agreed, there=there))
    without = show_some(_remove_values(schema).differences(_remove_values(agreed), there=there))
    rule = "this client's data is encoded by another schema than the agreed schema"
    if not without:
        return f"{rule}: {with_values}", rule
    return f"{rule}: {with_values}", f"{rule}: {without}"


def agree(proposals: Mapping[int, Proposal]) -> Agreement:
    """Compute the schema that all clients use from the proposal of each client.

    The agreed schema has the categories, labels and words of all clients. The most frequent
    columns, kinds of columns, target and task are chosen. Clients with other columns, kinds, target
    or task are refused, so that a wrongly configured client excludes only itself. If at least half
    of the clients declare their schema, the most frequent declared schema is the agreed schema.
    Ties are resolved by the order of the proposals, so this order should be deterministic.

    Raises
    ------
    DataError
        If the task is binary and the target has fewer than two different values over all clients.
    """
    declared = {key: proposal.schema for key, proposal in proposals.items() if proposal.is_fixed}
    if 2 * len(declared) >= len(proposals):
        return _choose_most_frequent(declared)
    proposals = _settle_kinds(proposals)
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
            united = _unite_schemas(united, proposal.schema)
        except SchemaError as error:
            refused[key] = str(error)
    inputs = tuple(column for column in united.inputs if column.kind != "empty")
    summaries = [proposal.summaries for key, proposal in fitting.items() if key not in refused]
    united = replace(united, inputs=inputs)
    # Clients without an empty cell need no values to fill any; those that report nothing may.
    if any(_may_have_gaps(each) for each in summaries):
        united = replace(united, inputs=fill_columns(inputs, summaries, first.missing))
    if united.words:
        united = replace(united, words=_count_frequent_words(fitting, first.vocabulary_size))
    _check_binary(united, len(fitting))
    return Agreement(united, refused)


def _may_have_gaps(summaries: Summaries) -> bool:
    """Return whether a client has empty cells, or may have empty cells as it sends no summaries."""
    return not summaries or any(summary.empty for summary in summaries.values())


def _settle_kinds(proposals: Mapping[int, Proposal]) -> dict[int, Proposal]:
    """Assign a kind to each column that is empty in a client's data, and return all proposals.

    The kind (number or category) is the most frequent kind of the column among the other clients.
    """
    kinds: dict[str, Counter[str]] = {}
    for proposal in proposals.values():
        for column in proposal.schema.inputs:
            if column.kind != "empty":
                kinds.setdefault(column.name, Counter())[column.kind] += 1

    def settle_column(column: InputColumn) -> InputColumn:
        if column.kind != "empty" or column.name not in kinds:
            return column
        ((kind, _),) = kinds[column.name].most_common(1)
        return InputColumn(column.name, "category" if kind == "category" else "number")

    def settle(proposal: Proposal) -> Proposal:
        inputs = tuple(settle_column(column) for column in proposal.schema.inputs)
        return replace(proposal, schema=replace(proposal.schema, inputs=inputs))

    return {key: settle(proposal) for key, proposal in proposals.items()}


def _check_binary(schema: DataSchema, clients: int) -> None:
    """Check that the target of a binary task has two different values over all clients."""
    if schema.task != "binary" or not isinstance(schema.labels, tuple):
        return
    if len(schema.labels) < 2:
        raise DataError(
            f"the target {schema.target[0]!r} of a binary task should have 2 different values, got "
            f"only {schema.label_names[0]!r} in the data of all {clients} clients; choose another "
            "target, or include data with another value"
        )


def sort_by_frequency(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return pairs of word and count, sorted by descending count.

    Words of equal count are in alphabetical order.
    """
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _choose_most_frequent(declared: Mapping[int, DataSchema]) -> Agreement:
    ((schema, _),) = Counter(declared.values()).most_common(1)
    refused = {
        key: show_some(
            other.differences(
                schema, here="this client's schema", there="the other clients' schema"
            )
        )
        for key, other in declared.items()
        if other != schema
    }
    return Agreement(schema, refused)


def _unite_schemas(one: DataSchema, other: DataSchema) -> DataSchema:
    """Return the first schema with the categories and labels of the other schema added.

    Raises
    ------
    SchemaError
        If a column has too many categories, or the target too many labels.
    """
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
            f"column {one.name!r} should have at most {MOST_CATEGORIES:,} categories over all "
            f"clients, got {len(categories):,} with the categories of this client; leave the "
            "column out: remove it from 'inputs' if set, or add it to 'exclude'"
        )
    fill = other.fill if one.fill is None else one.fill
    indicator = one.indicator or other.indicator
    return replace(one, categories=categories, fill=fill, indicator=indicator)


def _unite_labels(one: tuple[Label, ...], other: tuple[Label, ...], most: int) -> tuple[Label, ...]:
    together: set[Any] = {*one, *other}  # of one type, as the structures are the same
    labels = tuple(sorted(together))
    if len(labels) > most:
        known = ", ".join(map(show_label, one))
        more = ", ".join(show_label(label) for label in other if label not in one)
        raise SchemaError(
            f"the target should have at most {most} labels over all clients, got the labels {more} "
            f"in addition to the labels {known} of other clients; correct the target, or leave "
            "this client out"
        )
    return labels


def _count_frequent_words(proposals: Mapping[int, Proposal], size: int) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for proposal in proposals.values():
        words = proposal.schema.words[len(SPECIALS) :]
        counts.update(dict(zip(words, proposal.word_counts, strict=True)))
    words = [word for word, _ in sort_by_frequency(counts)]
    return (*SPECIALS, *words[: size - len(SPECIALS)])


def _remove_values(schema: DataSchema) -> DataSchema:
    """Return a schema without values of the data, to compare the structures of two schemas.

    Categories, filling values, labels and words are removed, and columns are sorted by name.
    """
    columns = sorted(
        (InputColumn(column.name, column.kind) for column in schema.inputs),
        key=lambda column: column.name,
    )
    words = SPECIALS if schema.words else ()
    return replace(schema, inputs=tuple(columns), labels=None, words=words)


def _name_label_kind(schema: DataSchema) -> str:
    """Describe the type of a schema's labels in words, for error messages."""
    if schema.labels is None:
        return "none"
    if isinstance(schema.labels, int):
        return "whole numbers from 0"
    if isinstance(schema.labels[0], str):
        return "names"
    return "two numbers"
