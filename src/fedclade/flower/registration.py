"""Registration of clients: the reply of a node to the request ``hello``, and its checks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

from fedclade.channel import ENCODINGS
from fedclade.core import DataSpec, Structure, TaskKind, UpdateError
from fedclade.flower.replies import examples
from fedclade.flower.signing import KEY_FILE
from fedclade.flower.wire import Content, clean, first_difference, shown

LARGEST_NUMBER = 2**31 - 1  # largest number of a client or a true cluster
# Largest number of inputs or outputs of a model: the server builds a model for the shape of
# examples that clients report.
LARGEST_MODEL = 2**24
# Largest number of characters of texts that are written to tables, logs and files.
LONGEST_NAME = 60
LONGEST_DESCRIPTION = 200

K = TypeVar("K", int, str)

_DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RegisteredClient:
    """Registered properties of a client and its node; ``clients.json`` has these fields."""

    node: int
    name: str
    size: int  # number of training examples
    true_cluster: int | None = None  # for scoring only; only experiments report it
    key: str = ""  # public key that verifies the signatures of its replies, in hexadecimal
    # whether the client stores its key in its folder; then the key alone identifies the client
    lasts: bool = False
    scores: bool = True  # whether the client reports scores of models on held-out data
    since: int = 0  # round in which it joined; 0 if it was connected when the first round began
    sends: str = "float32"  # encoding of its updates; clients of earlier versions do not report it


@dataclass(frozen=True)
class Registration:
    """Reply of a node to a request to register: properties of its client, model, task and data.

    All clients of a run must have the same model structure, shape of examples, secret, task and
    encoding.
    """

    number: int | None  # number of the client; None if the server should choose it
    client: RegisteredClient
    schema: DataSpec
    description: str
    layout: str  # digest of the model's structure
    secret: str  # digest of the secret that clients share; empty if there is none
    # description of loss and metrics, compared as text; empty in folders of earlier versions
    task: str
    scaled: bool = False  # whether inputs are scaled by the statistics of all clients
    # whether targets are scaled by these statistics; clients of earlier versions do not report this
    scaled_targets: bool = False
    # digest of the schema that the data is encoded by; empty for numbers without names
    encoding: str = ""
    # shape and type of the model's tensors by name, for messages; clients of earlier versions
    # report none
    arrays: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(cls, content: Content, node: int) -> Registration:
        """Check and read a registration, and remove control characters from its texts.

        Parameters
        ----------
        content
            Content of the verified reply.
        node
            Id of the node that has sent the reply.

        Raises
        ------
        UpdateError
            If the registration is malformed, or a value is out of range.
        """
        signer = content.signer
        if signer is None:
            raise UpdateError(
                "the registration is not signed by the client's key, so the client cannot join; run "
                "the client as a fedclade.flower.client_app, which signs every reply"
            )
        try:
            schema = read_schema(content.json("schema"))
        except (TypeError, ValueError, OverflowError) as error:
            raise UpdateError(
                f"the data schema in the registration is malformed: {clean(str(error))}"
            ) from error
        content.has_only(())
        client = RegisteredClient(
            node=node,
            name=clean(content.get("name", str), LONGEST_NAME).strip() or f"node {node}",
            size=examples(content, "size"),
            true_cluster=_number(content, "true_cluster"),
            key=signer.key,
            lasts=signer.lasts,
            scores=content.get("scores", bool),
            sends=_encoding(content),
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
            scaled_targets=content.values.get("scaled_targets") is True,
            encoding=_digest(content, "encoding") if content.values.get("encoding") != "" else "",
            arrays=_arrays(content),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Values that must be the same for all clients of a run, for comparison."""
        return self.layout, self.shape, self.secret, self.task, self.encoding

    @property
    def shape(self) -> tuple[object, ...]:
        """Properties of the client's examples on which the structure of a model depends."""
        schema = self.schema
        scaled = ("scaled",) if self.scaled else ()
        if self.scaled_targets:
            scaled = (*scaled, "scaled targets")
        structures = schema.structure, schema.target_structure
        described = tuple(each.described for each in structures if each is not None)
        return (
            schema.input_shape,
            schema.outputs,
            schema.task,
            schema.vocabulary_size,
            *scaled,
            *described,
        )

    @property
    def targets(self) -> int:
        """Number of targets that are scaled by the statistics of all clients; 0 without scaling."""
        return self.schema.outputs if self.scaled_targets else 0


def read_client(kept: Mapping[str, Any]) -> RegisteredClient:
    """Check and read a registered client from the values of a JSON object.

    Raises
    ------
    TypeError
        If a value is missing, unknown or of another type.
    """
    client = RegisteredClient(**kept)
    cluster = 0 if client.true_cluster is None else client.true_cluster
    numbers = (client.node, client.size, cluster, client.since)
    typed = all(type(number) is int for number in numbers) and all(
        type(s) is str for s in (client.name, client.key, client.sends)
    )
    if not typed or not all(type(flag) is bool for flag in (client.lasts, client.scores)):
        raise TypeError(
            "a registered client should have whole numbers node, size, true_cluster and since, "
            f"texts name, key and sends, and truth values lasts and scores, got {shown(kept)}"
        )
    return client


def read_schema(kept: Mapping[str, Any]) -> DataSpec:
    """Check and read the specification of a client's data from the values of a JSON object.

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
                f"{name!r} of a client's data is {shown(numbers)}, expected whole numbers of at "
                f"least {lowest} with a product of at most 2**24"
            )
    if named.task not in get_args(TaskKind):
        raise ValueError(
            f"'task' of a client's data is {shown(named.task)}, expected one of "
            f"{', '.join(get_args(TaskKind))}"
        )
    if scaled is not None:
        mean, std = (float(number) for number in scaled)
        if not (math.isfinite(mean) and math.isfinite(std)):
            raise ValueError(
                "'scaled' of a client's data, the mean and standard deviation of pixels, is "
                f"{shown(scaled)}, expected two finite numbers"
            )
        scaled = mean, std
    data = clean(str(named.data), LONGEST_NAME)
    return DataSpec(
        data,
        shape,
        named.outputs,
        named.task,
        named.vocabulary_size,
        scaled,
        structure=_read_structure(named.structure, shape),
        target_structure=_read_structure(named.target_structure, (named.outputs,)),
    )


def schema_values(schema: DataSpec) -> dict[str, Any]:
    """Return the values of a specification for a JSON object, which :func:`read_schema` reads.

    Structures are left out for examples of single tensors, for peers that do not know them.
    """
    values = asdict(schema)
    for name in ("structure", "target_structure"):
        if values[name] is None:
            del values[name]
    return values


def _read_structure(stated: Any, shape: tuple[int, ...]) -> Structure | None:
    """Read the structure of rows of a given shape from the values of a JSON object.

    Raises
    ------
    TypeError, ValueError
        If the values are malformed, or have another width than the rows.
    """
    if stated is None:
        return None
    try:
        structure = Structure.read(stated)
    except (KeyError, AttributeError) as error:
        raise ValueError(f"the structure of a client's data is {shown(stated)}") from error
    if shape != (structure.width,):
        raise ValueError(
            f"the structure of a client's data has {structure.width} numbers, but its rows have "
            f"the shape {shown(shape)}"
        )
    return structure


def _number(content: Content, name: str) -> int | None:
    """Return the number of a client or of a cluster in a message; None if it is negative.

    Messages cannot contain None, so a negative number stands for an unknown number.
    """
    number = content.get(name, int)
    if number > LARGEST_NUMBER:
        raise UpdateError(
            f"the registration is malformed: {name!r} should be at most {LARGEST_NUMBER}, got {number}"
        )
    return None if number < 0 else number


def _arrays(content: Content) -> dict[str, str]:
    """Return the shape and type of a model's tensors by name; empty if the client reports none."""
    if "arrays" not in content.values:
        return {}
    return {
        clean(name, LONGEST_NAME): clean(str(described), LONGEST_NAME)
        for name, described in content.json("arrays").items()
    }


def _encoding(content: Content) -> str:
    """Return the encoding in which a client sends updates; float32 if it reports none."""
    encoding = content.get("sends", str) if "sends" in content.values else "float32"
    if encoding not in ENCODINGS:
        raise UpdateError(
            f"the registration is malformed: 'sends' should be one of {', '.join(ENCODINGS)}, got "
            f"{shown(encoding)}"
        )
    return encoding


def _digest(content: Content, name: str) -> str:
    """Return a digest in a message; raise an UpdateError if the value is no digest."""
    digest = content.get(name, str)
    if not _DIGEST.fullmatch(digest):
        raise UpdateError(
            f"the registration is malformed: {name!r} should be a digest in hexadecimal, got "
            f"{shown(digest)}"
        )
    return digest


class KnownClients(Mapping[int, RegisteredClient]):
    """Registered clients by number, in the order of numbers, with look-ups by key and by node.

    Adding a client and looking one up take the same time for any number of clients.
    """

    def __init__(self) -> None:
        self._clients: dict[int, RegisteredClient] = {}
        self._number_of_key: dict[str, int] = {}
        self._number_of_node: dict[int, int] = {}
        self._highest = -1
        self._is_sorted = True

    @property
    def free_number(self) -> int:
        """Smallest number above the numbers of all clients."""
        return self._highest + 1

    def add(self, number: int, client: RegisteredClient) -> None:
        """Add a client under a number, or replace the registration of the client with it."""
        before = self._clients.get(number)
        if before is not None:
            _forget(self._number_of_key, before.key, number)
            _forget(self._number_of_node, before.node, number)
        elif number < self._highest:
            self._is_sorted = False  # sorted once before the next iteration
        self._clients[number] = client
        self._number_of_key.setdefault(client.key, number)
        self._number_of_node.setdefault(client.node, number)
        self._highest = max(self._highest, number)

    def number_of_key(self, key: str) -> int | None:
        """Return the number of the client with a public key; None if no client has the key."""
        return self._number_of_key.get(key)

    def number_of_node(self, node: int) -> int | None:
        """Return the number of the client of a node; None if no client has registered from it."""
        return self._number_of_node.get(node)

    def __getitem__(self, number: int) -> RegisteredClient:
        return self._clients[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sort())

    def __len__(self) -> int:
        return len(self._clients)

    def items(self) -> ItemsView[int, RegisteredClient]:
        """Return the clients with their numbers; a view of a dictionary is read faster."""
        return self._sort().items()

    def values(self) -> ValuesView[RegisteredClient]:
        """Return the clients in the order of their numbers."""
        return self._sort().values()

    def _sort(self) -> dict[int, RegisteredClient]:
        """Sort the clients by their numbers if necessary, and return them."""
        if not self._is_sorted:
            self._clients = dict(sorted(self._clients.items()))
            self._is_sorted = True
        return self._clients


def _forget(numbers: dict[K, int], key: K, number: int) -> None:
    """Remove a client's number from an index, unless the entry belongs to another client."""
    if numbers.get(key) == number:
        del numbers[key]


# Admission: a registration must fit the other clients of the run, and the client's identity must
# agree with its key and its node.

Identity = Literal["node", "number"]


@dataclass(frozen=True)
class Admission:
    """Rules by which a run admits registered clients.

    Parameters
    ----------
    identity
        Identity of a client that reconnects: its ``node``, or the ``number`` that it reports.
    keys
        Number of each admissible client by its public key; None to admit clients with any key.
    """

    identity: Identity
    keys: Mapping[str, int] | None

    def number_of(self, key: str, registered: KnownClients) -> int | None:
        """Return the number of the client with a public key; None if the key is unknown.

        The key is looked up in the operator's list of keys, or without a list among the registered
        clients.
        """
        if self.keys is not None:
            return self.keys.get(key)
        return registered.number_of_key(key)

    def numbered(self, one: Registration, registered: KnownClients) -> Registration:
        """Return a registration with the client's number filled in, if the client's key is known.

        A registration that already has a number is returned unchanged.
        """
        if one.number is not None:
            return one
        known = self.number_of(one.client.key, registered)
        return one if known is None else replace(one, number=known)

    def objection(
        self,
        one: Registration,
        client: int,
        common: Registration,
        registered: KnownClients,
        connected: Collection[int],
    ) -> str | None:
        """Return the reason why a client may not join under a number; None if it may.

        Parameters
        ----------
        one
            Registration of the client.
        client
            Number under which the client would join.
        common
            Registration with the values that all clients have in common.
        registered
            Clients that are registered already.
        connected
            Ids of the connected nodes.
        """
        if one.layout != common.layout:
            named = ""
            if one.arrays and common.arrays:
                named = first_difference(one.arrays, common.arrays)
            named = f": {named}" if named else ""
            return f"its model differs in structure from the model of the other clients{named}"
        if one.shape != common.shape:
            return (
                f"its examples have the properties {shown(one.shape)}, but those of the other "
                f"clients have {shown(common.shape)}"
            )
        if common.task and one.task != common.task:
            return (
                f"its task is {one.task!r}, but the task of the other clients is {common.task!r}; "
                "configure the same task for all clients"
            )
        if one.encoding != common.encoding:
            return (
                "its columns, labels or words are encoded differently than the other clients' data"
            )
        if one.secret != common.secret:
            return (
                "it does not share the secret of the other clients; set the same secret-file for "
                "all clients, or for none"
            )
        known = self.number_of(one.client.key, registered)
        if self.keys is not None and known is None:
            return f"its key {one.client.key} is not in the list of keys, network.keys"
        if known is not None and known != client:
            return f"it registers as client {client}, but its key belongs to client {known}"
        owner = registered.number_of_node(one.client.node)
        if owner not in (None, client):
            return f"it registers as client {client}, but its node belongs to client {owner}"
        if client not in registered:
            return None
        if registered[client].node in connected:
            node = registered[client].node
            return f"it registers as client {client}, which is already connected as node {node}"
        return self._is_another(one.client, client, registered[client])

    def _is_another(
        self, one: RegisteredClient, client: int, before: RegisteredClient
    ) -> str | None:
        """Return the reason why a client is not the client that registered under its number before.

        The result is None if it may be the same client, which reconnects.
        """
        if one.size != before.size:
            return (
                f"it reports {one.size} training examples, but client {client} registered with "
                f"{before.size}"
            )
        if self.keys is not None or one.key == before.key:
            return None
        if before.lasts:
            return (
                f"it registers as client {client}, but has another key; start it with the folder "
                f"that contains this client's {KEY_FILE}"
            )
        if self.identity == "node" and one.node != before.node:
            return (
                f"it registers as client {client}, which was node {before.node} before; start it "
                "with the key of that node, or, if nodes have no keys, set network.identity = "
                "'number'"
            )
        return None
