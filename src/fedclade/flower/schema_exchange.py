"""Data schemas in messages: proposals of clients, and the schema that all clients agree on.

A schema describes how tables or texts are encoded: columns, categories, labels and words. Each
client proposes a schema before round 1. The server combines the proposals into the agreed schema,
which is part of every later request.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, get_args

from flwr.app import RecordDict

from fedclade.core import FORBIDS, ConfigError, PolicyError, UpdateError
from fedclade.data import MISSING, ColumnSummary, DataSchema, Missing, Pool, Proposal, SchemaError
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.replies import MOST_EXAMPLES
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content, clean, shown

LONGEST_PROPOSAL = 900_000
"""Largest number of characters of a proposed schema.

It must fit into a reply, whose plain values have at most 2**20 bytes in total.
"""

LONGEST_SCHEMA = 2**24
"""Largest number of characters of the agreed schema."""

PROPOSAL_KEYS = ["is_fixed", "missing", "schema", "summaries", "vocabulary_size", "word_counts"]
"""JSON keys of a proposed schema in a message, in alphabetical order."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchemaSharing:
    """Rule that decides whether a client discloses the categories, labels and words of its data.

    Parameters
    ----------
    policy
        Policy of the client.
    is_private
        Whether the client has differential privacy.
    by_example
        Whether differential privacy protects single examples, and not the client as a whole.
    """

    policy: Policy
    is_private: bool
    by_example: bool = False

    @property
    def is_allowed(self) -> bool:
        """Whether the client may disclose the categories, labels and words of its data.

        If the policy does not decide this, only clients without differential privacy disclose them.
        """
        if self.policy.share_schema is None:
            return not self.is_private
        return self.policy.share_schema

    def check(self, proposal: Proposal, examples: int) -> None:
        """Check that the client may send a proposed schema, made from ``examples`` examples.

        Raises
        ------
        PolicyError
            If the client's policy does not allow the proposal.
        ConfigError
            If differential privacy protects single examples, and the proposal contains words of the
            client's texts.
        """
        if not proposal.schema.discloses_values:
            return
        if self.by_example and proposal.schema.words:
            raise ConfigError(
                "privacy.level = 'example' is not possible with a vocabulary from this client's "
                "own texts, since single examples change the vocabulary; declare a schema with the "
                "words on the server (data.schema in the run config, or schema= of federate), or "
                "set privacy.level = 'client'"
            )
        if not self.is_allowed:
            why = (
                " of a client with differential privacy" if self.policy.share_schema is None else ""
            )
            raise PolicyError(
                f"{FORBIDS} disclosing the categories, labels and words of its data{why}; declare "
                "a schema on the server (data.schema in the run config, or schema= of federate), "
                "or set share-schema=true in its node config"
            )
        if examples < self.policy.min_part:
            raise PolicyError(
                f"{FORBIDS} disclosing the categories, labels and words of {examples} examples, "
                f"since there must be at least {self.policy.min_part} examples (min-part in its "
                "node config); declare a schema on the server"
            )

    def limit(self, proposal: Proposal, examples: int) -> Proposal:
        """Return a proposed schema without the column summaries that the client may not disclose.

        A summary, such as a mean, determines the values by which empty cells of a column are
        filled. Without this client's summary the values of other clients are used.

        Parameters
        ----------
        proposal
            Schema that the client would propose.
        examples
            Number of examples of the client.
        """
        if not self.is_allowed or self.by_example:
            return replace(proposal, summaries={})
        least = self.policy.min_part
        told = {
            name: summary
            for name, summary in proposal.summaries.items()
            if summary.count >= least or (summary.count == 0 and examples >= least)
        }
        return replace(proposal, summaries=told)

    def encode(self, encode: Callable[[], T]) -> T:
        """Call a function that encodes the client's data by a schema, and return its result.

        If encoding fails, the raised SchemaError quotes values of the data only if the client may
        disclose them.
        """
        try:
            return encode()
        except SchemaError as error:
            if self.is_allowed:
                raise
            _log.warning("the data does not fit the agreed schema: %s", error)
            raise SchemaError(error.without_values) from None


class Proposer:
    """Client that has proposed a data schema and does not know the agreed schema yet.

    It replies to a request to register with the proposal, and refuses all other requests.

    Parameters
    ----------
    proposal
        Schema that the client proposes.
    number
        Number that the client reports; None if the server should choose a number.
    """

    def __init__(self, proposal: Proposal, number: int | None) -> None:
        self._proposal = proposal
        self._number = number

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return a reply with the proposed schema to a request to register.

        Raises
        ------
        UpdateError
            If the server requests anything else.
        """
        if (kind := content.get("what", str)) != "hello":
            raise UpdateError(
                f"the query {shown(kind)} does not contain the schema that all clients agree on, "
                "by which this client must encode its data; the server does not follow the protocol"
            )
        text = write_proposal(self._proposal)
        return wire.record(
            {"number": -1 if self._number is None else self._number, "proposal": text}
        )


def write_proposal(proposal: Proposal) -> str:
    """Return a proposed schema as JSON; raise a PolicyError if it is too long for a message."""
    values = {
        "schema": proposal.schema.as_dict(),
        "is_fixed": proposal.is_fixed,
        "word_counts": list(proposal.word_counts),
        "vocabulary_size": proposal.vocabulary_size,
        "missing": proposal.missing,
        "summaries": {
            name: [summary.count, summary.empty, summary.value]
            for name, summary in proposal.summaries.items()
        },
    }
    text = json.dumps(values)
    if len(text) > LONGEST_PROPOSAL:
        raise PolicyError(
            f"the schema of this client's data has {len(text):,} characters, expected at most "
            f"{LONGEST_PROPOSAL:,}; leave columns out, lower vocabulary_size, or declare a schema "
            "on the server"
        )
    return text


def read_proposal(content: Content) -> tuple[int | None, Proposal]:
    """Check and read a client's reply with a proposed schema.

    Returns
    -------
    tuple[int | None, Proposal]
        Number of the client, None if the server should choose the number; and the proposal.

    Raises
    ------
    UpdateError
        If the reply is malformed.
    """
    content.has_only(())
    number = content.get("number", int)
    told = content.json("proposal", LONGEST_PROPOSAL)
    # Clients of earlier versions have no summaries of columns.
    values: dict[str, Any] = {"missing": MISSING, "summaries": {}, **told}
    if sorted(values) != PROPOSAL_KEYS:
        raise UpdateError(
            "the schema that the server proposes should have the keys schema, is_fixed, word_counts and "
            f"vocabulary_size, got {shown(sorted(told))}"
        )
    try:
        schema = DataSchema.read(values["schema"])
    except ConfigError as error:
        raise UpdateError(
            f"the schema that the server proposes is malformed: {clean(str(error))}"
        ) from error
    counts: Any = values["word_counts"]
    size: Any = values["vocabulary_size"]
    is_fixed: Any = values["is_fixed"]
    if type(is_fixed) is not bool or type(size) is not int or size < 0:
        raise UpdateError(
            "the schema that the server proposes is malformed: is_fixed should be true or false, and "
            "vocabulary_size a whole number of at least 0, got "
            f"{shown(is_fixed)} and {shown(size)}"
        )
    if not isinstance(counts, list) or not all(
        _is_count(count) for count in cast("list[Any]", counts)
    ):
        raise UpdateError(
            "the schema that the server proposes is malformed: word_counts should be a list of whole numbers of at "
            f"least 1 and at most {MOST_EXAMPLES}, got {shown(counts)}"
        )
    word_counts = tuple(cast("list[int]", counts))
    # The two special words, for padding and for unknown words, have no counts.
    expected = 0 if is_fixed else max(0, len(schema.words) - 2)
    if len(word_counts) != expected:
        raise UpdateError(
            f"the proposed schema has {len(word_counts)} word counts, expected {expected}"
        )
    missing: Any = values["missing"]
    if missing not in get_args(Missing):
        raise UpdateError(
            "the schema that the server proposes is malformed: missing should be one of "
            f"{', '.join(get_args(Missing))}, got {shown(missing)}"
        )
    proposal = Proposal(
        schema,
        is_fixed,
        word_counts,
        vocabulary_size=size,
        missing=missing,
        summaries=_read_summaries(values["summaries"], schema),
    )
    return (None if number < 0 else number), proposal


def _read_summaries(values: Any, schema: DataSchema) -> dict[str, ColumnSummary]:
    """Check and read the summaries of input columns in a proposed schema, by column name.

    Raises
    ------
    UpdateError
        If a summary is malformed, or belongs to an unknown column.
    """
    names = {column.name for column in schema.inputs}
    if not isinstance(values, Mapping) or not names.issuperset(cast("Mapping[str, Any]", values)):
        raise UpdateError(
            "the schema that the server proposes is malformed: summaries should be a JSON object with the names of "
            f"input columns as keys, got {shown(values)}"
        )
    values = cast("Mapping[str, Any]", values)
    return {name: _read_summary(name, value) for name, value in values.items()}


def _read_summary(name: str, value: Any) -> ColumnSummary:
    """Check and read a column's summary: the counts of filled and empty cells, and the centre.

    The centre is the mean or the median of the column's values.
    """
    entries = cast("list[Any]", value if isinstance(value, list) else [])
    if len(entries) == 3:
        count, empty, centre = entries
        are_counts = all(
            type(each) is int and 0 <= each <= MOST_EXAMPLES for each in (count, empty)
        )
        is_number = type(centre) in (int, float) and math.isfinite(centre)
        if are_counts and is_number:
            return ColumnSummary(count, empty, float(centre))
    raise UpdateError(
        f"the schema that the server proposes is malformed: the summary of column {shown(name)} should be a list "
        "of three numbers: the counts of filled and of empty cells, and the mean or median, got "
        f"{shown(value)}"
    )


def write_agreed(schema: DataSchema) -> str:
    """Return the agreed schema as JSON; raise an UpdateError if it is too long."""
    text = schema.to_json()
    if len(text) > LONGEST_SCHEMA:
        raise UpdateError(
            f"the agreed schema has {len(text):,} characters, expected at most {LONGEST_SCHEMA:,}; "
            "leave columns out, lower vocabulary_size, or declare a smaller schema on the server"
        )
    return text


def read_agreed(content: Content) -> DataSchema | None:
    """Check and read the agreed schema in a request; return None if the request has no schema."""
    if "agreed" not in content.values:
        return None
    try:
        return DataSchema.read(content.json("agreed", LONGEST_SCHEMA))
    except ConfigError as error:
        raise UpdateError(f"the agreed schema is malformed: {error}") from error


def encoding_digest(pool: Pool, agreed: DataSchema | None) -> str:
    """Return a digest of the encoding of a client's data, by which the server compares clients.

    It is the digest of the agreed schema or, if there is none, of the vocabulary and the names of
    columns and labels. It is empty if the data consists of numbers without names.
    """
    if agreed is not None:
        return agreed.digest
    names = () if pool.columns is None else (pool.columns.inputs, pool.columns.labels)
    if not names and not pool.vocabulary:
        return ""
    return wire.digest(json.dumps([names, pool.vocabulary]).encode())


def _is_count(count: object) -> bool:
    """Return whether a value is a possible number of occurrences of a word."""
    return type(count) is int and 1 <= count <= MOST_EXAMPLES
