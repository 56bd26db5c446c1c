"""What a client says of itself when it joins, and whether that can be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fedclade.core import (
    DataSpec,
    Task,
    UpdateError,
)
from fedclade.flower.wire import Content, Words, clean, examples, shown

LARGEST_NUMBER = 2**31 - 1
"""Of a client, or a true cluster."""

LARGEST_MODEL = 2**24
"""Inputs or outputs of a model: the server builds one for the examples that clients say they have."""

LONGEST_NAME, LONGEST_DESCRIPTION = 60, 200
"""Characters: both go into tables, logs and files."""

_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Member:
    """A client, as it introduced itself.

    Parameters
    ----------
    node
        Flower's id of its node.
    name
        What people call it.
    size
        Training examples.
    true_cluster
        Where it says so, which only experiments do. For scoring only.
    key
        The public key that its answers are signed by, in hexadecimal.
    lasts
        Whether it keeps that key in its folder: then it is only ever recognised by it.
    """

    node: int
    name: str
    size: int
    true_cluster: int | None = None
    key: str = ""
    lasts: bool = False


@dataclass(frozen=True)
class Registration:
    """What a node says of its client.

    Parameters
    ----------
    number
        Of the client; None lets the server number it.
    member
        The client.
    schema
        What its examples look like.
    description
        What its data is, for people.
    layout
        Digest of its model's structure.
    secret
        What it tells of the secret that clients share: enough to see who has the same, and no more. Empty for none.
    """

    number: int | None
    member: Member
    schema: DataSpec
    description: str
    layout: str
    secret: str

    @classmethod
    def read(cls, content: Content, node: int) -> Registration:
        """Check and read an introduction; its texts are made fit to be shown.

        Raises
        ------
        UpdateError
            If it is malformed, or says what cannot be.
        """
        words, signer = content.words, content.signer
        if signer is None:
            raise UpdateError("nobody signed it")
        try:
            schema = read_schema(words.json("schema"))
        except (TypeError, ValueError, OverflowError) as error:
            raise UpdateError(f"its schema is malformed: {clean(str(error))}") from error
        content.has_only(())
        member = Member(
            node=node,
            name=clean(words.get("name", str), LONGEST_NAME).strip() or f"node {node}",
            size=examples(words, "size"),
            true_cluster=_number(words, "true_cluster"),
            key=signer.key,
            lasts=signer.lasts,
        )
        return cls(
            number=_number(words, "number"),
            member=member,
            schema=schema,
            description=clean(words.get("description", str), LONGEST_DESCRIPTION),
            layout=_digest(words, "layout"),
            secret=_digest(words, "secret") if words.values.get("secret") != "" else "",
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """What all clients of a run have in common."""
        return self.layout, self.shape, self.secret

    @property
    def shape(self) -> tuple[object, ...]:
        """What a model must know of the examples."""
        schema = self.schema
        return schema.input_shape, schema.outputs, schema.task, schema.vocabulary_size


def read_member(kept: Mapping[str, Any]) -> Member:
    """Check and read a client as JSON has it.

    Raises
    ------
    TypeError
        If it is none.
    """
    member = Member(**kept)
    numbers = (member.node, member.size, 0 if member.true_cluster is None else member.true_cluster)
    texts = (member.name, member.key)
    whole = all(type(number) is int for number in numbers) and all(type(text) is str for text in texts)
    if not whole or type(member.lasts) is not bool:
        raise TypeError(f"{shown(kept)} is no client")
    return member


def read_schema(kept: Mapping[str, Any]) -> DataSpec:
    """Check and read a schema as JSON has it: tuples are lists there.

    Raises
    ------
    TypeError, ValueError, OverflowError
        If it is none.
    """
    named = DataSpec(**kept)
    shape, scaled = tuple(named.input_shape), named.scaled
    for name, numbers, lowest in (
        ("input_shape", shape, 1),
        ("outputs", (named.outputs,), 1),
        ("vocabulary_size", (named.vocabulary_size,), 0),
    ):
        whole = all(type(number) is int and number >= lowest for number in numbers)
        if not whole or math.prod(numbers) > LARGEST_MODEL:
            raise ValueError(f"{name} {shown(numbers)}, expected numbers from {lowest}, of product up to 2**24")
    if named.task not in get_args(Task):
        raise ValueError(f"task {shown(named.task)}, expected one of {', '.join(get_args(Task))}")
    if scaled is not None:
        mean, std = (float(number) for number in scaled)
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise ValueError(f"scaled {shown(scaled)}, expected two finite numbers")
        scaled = mean, std
    data = clean(str(named.data), LONGEST_NAME)
    return DataSpec(data, shape, named.outputs, named.task, named.vocabulary_size, scaled)


def _number(words: Words, name: str) -> int | None:
    """Return the number of a client or a cluster, which may be none: a message has no null."""
    number = words.get(name, int)
    if number > LARGEST_NUMBER:
        raise UpdateError(f"{name} {number}, expected at most {LARGEST_NUMBER}")
    return None if number < 0 else number


def _digest(words: Words, name: str) -> str:
    digest = words.get(name, str)
    if not _DIGEST.fullmatch(digest):
        raise UpdateError(f"{name!r} should be a digest in hexadecimal, got {shown(digest)}")
    return digest
