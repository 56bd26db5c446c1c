"""Data schemas in messages: proposals of clients, and the agreed schema of the server.

A client proposes a schema before round 1, and every request of the server has the agreed one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from flwr.app import RecordDict

from fedclade.core import FORBIDS, ConfigError, PolicyError, UpdateError
from fedclade.data import DataSchema, Pool, Proposal, SchemaError
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.replies import MOST_EXAMPLES
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content, clean, shown

LONGEST_PROPOSAL = 900_000
"""Largest number of characters of a proposal.

All plain values of a reply together have at most 2**20 bytes.
"""

LONGEST_SCHEMA = 2**24
"""Largest number of characters of the agreed schema."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchemaSharing:
    """Rule on whether a client discloses the categories, labels and words of its data.

    Parameters
    ----------
    policy
        Policy of the client.
    is_private
        Whether the client has differential privacy.
    by_example
        Whether each of its examples is private.
    """

    policy: Policy
    is_private: bool
    by_example: bool = False

    @property
    def is_allowed(self) -> bool:
        """Whether categories, labels and words may leave the client.

        The default is true, except with differential privacy.
        """
        if self.policy.share_schema is None:
            return not self.is_private
        return self.policy.share_schema

    def check(self, proposal: Proposal, examples: int) -> None:
        """Check that a proposal, made from ``examples`` examples, may leave the client.

        Raises
        ------
        PolicyError
            If the client's policy does not allow it.
        ConfigError
            If single examples are private, and the proposal has words of the client's texts.
        """
        if not proposal.schema.discloses_values:
            return
        if self.by_example and proposal.schema.words:
            raise ConfigError(
                "privacy.level = 'example' bounds what one example tells, and a vocabulary of "
                "this client's own texts moves with each of them; declare a schema with the words "
                "on the server (data.schema in the run config, or schema= of federate), or set "
                "privacy.level = 'client'"
            )
        if not self.is_allowed:
            why = (
                " of a client with differential privacy" if self.policy.share_schema is None else ""
            )
            raise PolicyError(
                f"{FORBIDS} to send the categories, labels and words of its data{why}; declare a "
                "schema on the server (data.schema in the run config, or schema= of federate), or "
                "set share-schema=true in its node config"
            )
        if examples < self.policy.min_part:
            raise PolicyError(
                f"{FORBIDS} to send the categories, labels and words of {examples} examples, of "
                f"which there must be at least {self.policy.min_part} (min-part in its node "
                "config); declare a schema on the server"
            )

    def encode(self, encode: Callable[[], T]) -> T:
        """Encode data by the agreed schema.

        The error if that fails has no values of the data, unless they may leave the client.
        """
        try:
            return encode()
        except SchemaError as error:
            if self.is_allowed:
                raise
            _log.warning("the data does not fit the agreed schema: %s", error)
            raise SchemaError(error.without_values) from None


class Proposer:
    """Client that waits for the agreed schema.

    It replies to a request to register with a proposal, and to no other request.
    """

    def __init__(self, proposal: Proposal, number: int | None) -> None:
        self._proposal = proposal
        self._number = number

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return the proposal; raise an UpdateError if the server requests anything else."""
        if (kind := content.get("what", str)) != "hello":
            raise UpdateError(
                f"asked for {shown(kind)} without the schema that all clients have agreed on"
            )
        text = write_proposal(self._proposal)
        return wire.record(
            {"number": -1 if self._number is None else self._number, "proposal": text}
        )


def write_proposal(proposal: Proposal) -> str:
    """Return a proposal as JSON; raise a PolicyError if it is too long for a message."""
    values = {
        "schema": proposal.schema.as_dict(),
        "is_fixed": proposal.is_fixed,
        "word_counts": list(proposal.word_counts),
        "vocabulary_size": proposal.vocabulary_size,
    }
    text = json.dumps(values)
    if len(text) > LONGEST_PROPOSAL:
        raise PolicyError(
            f"the schema of this client's data takes {len(text):,} characters, at most "
            f"{LONGEST_PROPOSAL:,}; leave columns out, lower vocabulary_size, or declare a schema "
            "on the server"
        )
    return text


def read_proposal(content: Content) -> tuple[int | None, Proposal]:
    """Check and read the number and the proposal of a client; raise an UpdateError if invalid."""
    content.has_only(())
    number = content.get("number", int)
    values = content.json("proposal", LONGEST_PROPOSAL)
    if sorted(values) != ["is_fixed", "schema", "vocabulary_size", "word_counts"]:
        raise UpdateError(
            f"its proposal should have a schema and word counts, got {shown(sorted(values))}"
        )
    try:
        schema = DataSchema.read(values["schema"])
    except ConfigError as error:
        raise UpdateError(f"its proposal is malformed: {clean(str(error))}") from error
    counts: Any = values["word_counts"]
    size: Any = values["vocabulary_size"]
    is_fixed: Any = values["is_fixed"]
    if type(is_fixed) is not bool or type(size) is not int or size < 0:
        raise UpdateError(
            f"its proposal is malformed: is_fixed {shown(is_fixed)}, vocabulary_size {shown(size)}"
        )
    if not isinstance(counts, list) or not all(
        _is_count(count) for count in cast("list[Any]", counts)
    ):
        raise UpdateError(f"its proposal is malformed: word_counts {shown(counts)}")
    word_counts = tuple(cast("list[int]", counts))
    expected = 0 if is_fixed else max(0, len(schema.words) - 2)  # the specials are not counted
    if len(word_counts) != expected:
        raise UpdateError(f"its proposal has {len(word_counts)} word counts, expected {expected}")
    return (None if number < 0 else number), Proposal(schema, is_fixed, word_counts, size)


def write_agreed(schema: DataSchema) -> str:
    """Return the agreed schema as JSON; raise an UpdateError if it is too long."""
    text = schema.to_json()
    if len(text) > LONGEST_SCHEMA:
        raise UpdateError(
            f"the agreed schema takes {len(text):,} characters, at most {LONGEST_SCHEMA:,}"
        )
    return text


def read_agreed(content: Content) -> DataSchema | None:
    """Check and read the agreed schema of a request; None if it has none."""
    if "agreed" not in content.values:
        return None
    try:
        return DataSchema.read(content.json("agreed", LONGEST_SCHEMA))
    except ConfigError as error:
        raise UpdateError(f"the agreed schema is malformed: {error}") from error


def encoding_digest(pool: Pool, agreed: DataSchema | None) -> str:
    """Return a digest of the encoding of a client's data; empty for numbers without names."""
    if agreed is not None:
        return agreed.digest
    names = () if pool.columns is None else (pool.columns.inputs, pool.columns.labels)
    if not names and not pool.vocabulary:
        return ""
    return wire.digest(json.dumps([names, pool.vocabulary]).encode())


def _is_count(count: object) -> bool:
    return type(count) is int and 1 <= count <= MOST_EXAMPLES
