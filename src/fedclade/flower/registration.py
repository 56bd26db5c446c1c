"""Registration of clients: the report of a joining node, and its checks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fedclade.core import DataSpec, TaskKind, UpdateError
from fedclade.flower.replies import examples
from fedclade.flower.signing import KEY_FILE
from fedclade.flower.wire import Content, clean, shown

LARGEST_NUMBER = 2**31 - 1  # largest number of a client or a true cluster
# Largest number of inputs or outputs of a model: the server builds a model for the shape of
# examples that clients report.
LARGEST_MODEL = 2**24
# Characters of texts that are written to tables, logs and files.
LONGEST_NAME = 60
LONGEST_DESCRIPTION = 200

_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RegisteredClient:
    """Client of a node, as registered; ``clients.json`` has these fields."""

    node: int
    name: str
    size: int  # number of training examples
    true_cluster: int | None = None  # for scoring only; only experiments report it
    key: str = ""  # public key that verifies the signatures of its replies, in hexadecimal
    # whether the client stores its key in its folder; it is then identified by the key alone
    lasts: bool = False
    scores: bool = True  # whether the client reports scores of models on held-out data
    since: int = 0  # round in which it joined; 0 if it was connected when the first round began


@dataclass(frozen=True)
class Registration:
    """Report of a node on its client, and on values that all clients of a run have in common."""

    number: int | None  # number of the client; None if the server should choose it
    client: RegisteredClient
    schema: DataSpec
    description: str
    layout: str  # digest of the model's structure
    secret: str  # digest of the secret that clients share; empty if there is none
    # description of loss and metrics, compared as text; empty in folders of earlier versions
    task: str
    scaled: bool = False  # whether inputs are scaled by the statistics of all clients
    # digest of the schema that the data is encoded by; empty for numbers without names
    encoding: str = ""

    @classmethod
    def read(cls, content: Content, node: int) -> Registration:
        """Check and read a registration, and clean its texts.

        Raises
        ------
        UpdateError
            If the registration is malformed or not possible.
        """
        signer = content.signer
        if signer is None:
            raise UpdateError("nobody signed it")
        try:
            schema = read_schema(content.json("schema"))
        except (TypeError, ValueError, OverflowError) as error:
            raise UpdateError(f"its schema is malformed: {clean(str(error))}") from error
        content.has_only(())
        client = RegisteredClient(
            node=node,
            name=clean(content.get("name", str), LONGEST_NAME).strip() or f"node {node}",
            size=examples(content, "size"),
            true_cluster=_number(content, "true_cluster"),
            key=signer.key,
            lasts=signer.lasts,
            scores=content.get("scores", bool),
        )
        return cls(
            number=_number(content, "number"),
            client=client,
            schema=schema,
            description=clean(content.get("description", str), LONGEST_DESCRIPTION),
            layout=_digest(content, "layout"),
            secret=_digest(content, "secret") if content.values.get("secret") != "" else "",
            task=clean(content.get("task", str)),
            scaled=content.get("scaled", bool),
            encoding=_digest(content, "encoding") if content.values.get("encoding") != "" else "",
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Values that all clients of a run have in common."""
        return self.layout, self.shape, self.secret, self.task, self.encoding

    @property
    def shape(self) -> tuple[object, ...]:
        """Properties of the examples that a model depends on."""
        schema = self.schema
        scaled = ("scaled",) if self.scaled else ()
        return schema.input_shape, schema.outputs, schema.task, schema.vocabulary_size, *scaled


def read_client(kept: Mapping[str, Any]) -> RegisteredClient:
    """Check and read a client from the values of a JSON file; a TypeError if they are malformed."""
    client = RegisteredClient(**kept)
    cluster = 0 if client.true_cluster is None else client.true_cluster
    numbers = (client.node, client.size, cluster, client.since)
    typed = all(type(number) is int for number in numbers) and all(
        type(s) is str for s in (client.name, client.key)
    )
    if not typed or not all(type(flag) is bool for flag in (client.lasts, client.scores)):
        raise TypeError(f"{shown(kept)} is no client")
    return client


def read_schema(kept: Mapping[str, Any]) -> DataSpec:
    """Check and read a data spec from the values of a JSON object.

    Raises
    ------
    TypeError, ValueError, OverflowError
        If the values are malformed or out of range.
    """
    named = DataSpec(**kept)
    # tuples are lists in JSON
    shape = tuple(named.input_shape)
    scaled = named.scaled
    for name, numbers, lowest in (
        ("input_shape", shape, 1),
        ("outputs", (named.outputs,), 1),
        ("vocabulary_size", (named.vocabulary_size,), 0),
    ):
        whole = all(type(number) is int and number >= lowest for number in numbers)
        if not whole or math.prod(numbers) > LARGEST_MODEL:
            raise ValueError(
                f"{name} {shown(numbers)}, expected numbers from {lowest}, of product up to 2**24"
            )
    if named.task not in get_args(TaskKind):
        raise ValueError(
            f"task {shown(named.task)}, expected one of {', '.join(get_args(TaskKind))}"
        )
    if scaled is not None:
        mean, std = (float(number) for number in scaled)
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise ValueError(f"scaled {shown(scaled)}, expected two finite numbers")
        scaled = mean, std
    data = clean(str(named.data), LONGEST_NAME)
    return DataSpec(data, shape, named.outputs, named.task, named.vocabulary_size, scaled)


def _number(content: Content, name: str) -> int | None:
    """Return a number of a client or a cluster; None for a negative one: messages have no null."""
    number = content.get(name, int)
    if number > LARGEST_NUMBER:
        raise UpdateError(f"{name} {number}, expected at most {LARGEST_NUMBER}")
    return None if number < 0 else number


def _digest(content: Content, name: str) -> str:
    digest = content.get(name, str)
    if not _DIGEST.fullmatch(digest):
        raise UpdateError(f"{name!r} should be a digest in hexadecimal, got {shown(digest)}")
    return digest


# Admission of a registration: it must fit the other clients, and its identity must be right.

Identity = Literal["node", "number"]


@dataclass(frozen=True)
class Admission:
    """Rules of a run for admitting clients.

    The parameters are documented at :class:`~fedclade.flower.node_registry.NodeRegistry`.
    """

    identity: Identity
    keys: Mapping[str, int] | None

    def number_of(self, key: str, registered: Mapping[int, RegisteredClient]) -> int | None:
        """Return the client number that belongs to a key, if there is one."""
        if self.keys is not None:
            return self.keys.get(key)
        return next((client for client, one in registered.items() if one.key == key), None)

    def numbered(
        self, one: Registration, registered: Mapping[int, RegisteredClient]
    ) -> Registration:
        """Return a registration; if it has no number, with the number that belongs to its key."""
        known = self.number_of(one.client.key, registered)
        return replace(one, number=known) if one.number is None and known is not None else one

    def objection(
        self,
        one: Registration,
        client: int,
        common: Registration,
        registered: Mapping[int, RegisteredClient],
        connected: Collection[int],
    ) -> str | None:
        """Return the reason for not admitting a registration under a number; None to admit it.

        Parameters
        ----------
        one
            Registration to check.
        client
            Number that the client would have.
        common
            Registration with the values that all clients have in common.
        registered
            Registered clients by number.
        connected
            Nodes that are connected.
        """
        if one.layout != common.layout:
            return "its model is not built like the others'"
        if one.shape != common.shape:
            return f"its examples look like {shown(one.shape)}, and the others' like {shown(common.shape)}"
        if common.task and one.task != common.task:
            return f"its task is {one.task!r}, and the others' is {common.task!r}; give all clients the same"
        if one.encoding != common.encoding:
            return "its columns, labels or words are encoded otherwise than the others'"
        if one.secret != common.secret:
            return "it does not share the secret of the others; give all clients the same file, or none"
        known = self.number_of(one.client.key, registered)
        if self.keys is not None and known is None:
            return f"its key {one.client.key} is none of network.keys"
        if known is not None and known != client:
            return f"it says it is client {client}, and its key is that of client {known}"
        owner = next(
            (number for number, each in registered.items() if each.node == one.client.node), client
        )
        if owner != client:
            return f"it says it is client {client}, and its node is that of client {owner}"
        if client not in registered:
            return None
        if registered[client].node in connected:
            node = registered[client].node
            return f"it says it is client {client}, which node {node} is, and that is connected"
        return self._is_another(one.client, client, registered[client])

    def _is_another(
        self, one: RegisteredClient, client: int, before: RegisteredClient
    ) -> str | None:
        """Return why a client is not the one registered under a number before; None if it is."""
        if one.size != before.size:
            return f"it says it has {one.size} training examples, and client {client} joined with {before.size}"
        if self.keys is not None or one.key == before.key:
            return None
        if before.lasts:
            return f"it says it is client {client}, and has another key; give it the folder of that client's {KEY_FILE}"
        if self.identity == "node" and one.node != before.node:
            return (
                f"it says it is client {client}, which was node {before.node}; start it with the "
                "key of that node, or, where nodes have no keys, set network.identity = 'number'"
            )
        return None
