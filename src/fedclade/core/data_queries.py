"""Base classes for queries that each client answers from its own data.

A method that needs a kind of query of its own writes a subclass. The subclass has everything that
belongs to the kind: its name in messages and client policies, what a reply reveals, the fields that
are sent to a client, the shape of a reply, how a client computes it, and which replies are valid.
Engines, middleware and the network treat all kinds in the same way.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedclade.core.errors import ConfigError
from fedclade.core.queries import Query, R
from fedclade.core.registry import DataSpec

PLAIN_TYPES = (int, float, bool, str)
"""Types of the query fields that are sent as plain values; a field of type Tensor is a model."""

ROW_TYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
"""Types that the numbers of a row can have."""

KIND_RULE = re.compile(r"[a-z][a-z0-9_]*")
"""Form of a kind's name: policies list such names, separated by spaces."""


class LocalData(ABC):
    """Training data of one client, as the client itself sees it.

    Each property is computed when it is first read, so a query pays only for what it uses.
    """

    @property
    @abstractmethod
    def spec(self) -> DataSpec:
        """Properties of the examples that all clients share."""

    @property
    @abstractmethod
    def targets(self) -> Tensor:
        """Targets ``[n]`` or ``[n, T]`` of the training examples, on the CPU.

        Positions without a target have :data:`~fedclade.core.IGNORED`.
        """

    @property
    @abstractmethod
    def inputs(self) -> Tensor:
        """Training inputs ``[n, ...]`` as the model gets them, on the device of the model."""

    @property
    @abstractmethod
    def stored_inputs(self) -> Tensor:
        """Training inputs ``[n, ...]`` as they are stored, on the CPU, such as images in bytes."""

    @abstractmethod
    def load_model(self, vector: Tensor) -> nn.Module:
        """Return the client's whole model, in evaluation mode, given a shared one ``[S]``.

        Personal parameters, if the model has any, are the client's own. The module is shared by all
        clients of this process: read what is needed of it before the next call.
        """


class LocalStore(ABC):
    """Tensors that one client stores for a class of queries, from round to round.

    They never leave the client. Names must be listed in :attr:`DataQuery.stores`.
    """

    @abstractmethod
    def get(self, name: str) -> Tensor | None:
        """Return a tensor as it was before the round of the query; None if it is not stored."""

    @abstractmethod
    def keep(self, name: str, tensor: Tensor) -> None:
        """Store a tensor, beginning with the round of the query."""


class LocalClients(ABC):
    """Clients whose data is in this process."""

    spec: DataSpec
    """Properties of the examples that all clients share."""

    federation: Any
    """The clients' data, a :class:`~fedclade.Federation`, for queries about all clients at once."""

    @abstractmethod
    def data(self, client: int) -> LocalData:
        """Return the data of a client."""

    @abstractmethod
    def store(self, client: int, query: DataQuery[Any]) -> LocalStore:
        """Return the tensors that a client stores for a query."""


@dataclass(frozen=True, eq=False)
class DataQuery(Query[R]):
    """Query that each client answers by itself, from its data and the tensors it has stored.

    A subclass declares the following in its class. It may have fields, which are sent to the client
    by name. If one of them is ``round``, an int, the reply belongs to that round: it is about the
    clients' data in that round, and clients may store tensors for later rounds.

    Attributes
    ----------
    kind
        Name in messages, in ``allow`` of a client's policy, and in events.
    mechanism, discloses
        See :class:`~fedclade.core.Query`. ``mechanism`` is "none", or "public" if a reply does not
        depend on the data of any client. ``discloses`` is the name by which ``disclose`` of a
        policy allows it to leave a client with secure aggregation. Clients with differential
        privacy refuse all kinds that are not public.
    reveals
        Description of what a reply reveals, such as "subspaces of their data".
    stores
        Names of the tensors that a client stores for queries of this class.
    """

    kind: ClassVar[str] = ""
    reveals: ClassVar[str] = ""
    stores: ClassVar[tuple[str, ...]] = ()

    @property
    def round_number(self) -> int:
        """Number of the round that the reply belongs to; 0 if it belongs to none."""
        return int(getattr(self, "round", 0))

    @abstractmethod
    def answer_all(self, clients: LocalClients) -> R:
        """Return the reply of the clients :attr:`ids`, all of which are in this process."""

    @abstractmethod
    def merge(self, parts: Sequence[tuple[Sequence[int], R]]) -> R:
        """Merge the replies to parts of this query.

        Parameters
        ----------
        parts
            For each part, the positions of its clients in :attr:`ids`, and the reply.
        """

    def falsify(self, reply: R, keys: Sequence[int]) -> R:
        """Return the false reply of adversaries that reply falsely to this kind of query.

        By default it is the honest reply.

        Parameters
        ----------
        reply
            The honest reply of the adversaries alone.
        keys
            Keys of the adversaries, for random draws.
        """
        return reply


@dataclass(frozen=True, eq=False)
class RowQuery(DataQuery[Tensor]):
    """Query to which each client replies with one row of numbers.

    The merged reply is ``[n, *shape]``. Methods derive their own kinds of queries from this class.
    A client that does not reply has a row of zeros, see :func:`has_replied`.

    Attributes
    ----------
    dtype
        Type of the numbers; one of :data:`ROW_TYPES`.
    zeros_are_a_reply
        Whether zeros are a reply like any other. If not, clients with a row of zeros are queried
        again, and an event names those that remain silent.
    reply_name
        Name of the row in a reply over a network; by default that of the kind.
    counts_as
        Limit of a client's policy that counts the replies over the client's whole life:
        ``releases``, for replies that are something like an update, or ``evaluations``, for replies
        that reveal a number or a word.
    needs_min_part
        Whether clients in a network refuse if they have fewer training examples than ``min-part``
        of their policy.

    Examples
    --------
    A query for the shares of labels in each client's data:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from fedclade import RowQuery
    >>> @dataclass(frozen=True, eq=False)
    ... class LabelShares(RowQuery):
    ...     kind = "label_shares"
    ...     mechanism = "none"
    ...     discloses = "label_shares"
    ...     reveals = "shares of their labels"
    ...
    ...     def shape(self, spec):
    ...         return (spec.labels,)
    ...
    ...     def answer(self, data, store):
    ...         counts = torch.bincount(data.targets.long(), minlength=data.spec.labels)
    ...         return counts / counts.sum()
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    zeros_are_a_reply: ClassVar[bool] = False
    reply_name: ClassVar[str] = ""
    counts_as: ClassVar[Literal["releases", "evaluations"]] = "releases"
    needs_min_part: ClassVar[bool] = True

    @abstractmethod
    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        """Return the shape of a row, given the properties of examples; ``()`` for a single number.

        Raises
        ------
        ConfigError
            If clients with such examples cannot reply.
        """

    @abstractmethod
    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Compute the row of one client."""

    def is_valid(self, row: Tensor) -> bool:
        """Return whether an honest client could have sent a row that was received over a network.

        By default, all numbers must be finite. A row that is not valid counts as no reply.
        """
        return not row.is_floating_point() or bool(row.isfinite().all())

    def amounts(self, spec: DataSpec) -> Mapping[str, int]:
        """Return the amounts that a client's policy limits, by the name of the limit.

        By default there are none.
        """
        return {}

    def false_row(self, row: Tensor, key: int) -> Tensor:
        """Return an adversary's false row, given its honest row and its key.

        By default it is the honest row.
        """
        return row

    def answer_all(self, clients: LocalClients) -> Tensor:
        """Return a row for each client, ``[n, *shape]``."""
        shape = self.shape(clients.spec)
        rows: list[Tensor] = []
        for client in self.ids:
            row = self.answer(clients.data(client), clients.store(client, self))
            if tuple(row.shape) != shape or row.dtype != self.dtype:
                raise ConfigError(
                    f"the answer of a {type(self).__name__} should be a row of shape {list(shape)} "
                    f"and type {_name_of(self.dtype)}, as its class says, got shape "
                    f"{list(row.shape)} and type {_name_of(row.dtype)}"
                )
            rows.append(row.cpu())
        return torch.stack(rows) if rows else self.no_rows(clients.spec)

    def no_rows(self, spec: DataSpec) -> Tensor:
        """Return the reply if no client replies.

        This is a row of zeros for each client, ``[n, *shape]``.
        """
        return torch.zeros(len(self.ids), *self.shape(spec), dtype=self.dtype)

    def merge(self, parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
        """Return the rows of all parts, each at its client's position."""
        first = parts[0][1]
        rows = first.new_empty(len(self.ids), *first.shape[1:])
        for places, some in parts:
            rows[list(places)] = some
        return rows

    def falsify(self, reply: Tensor, keys: Sequence[int]) -> Tensor:
        """Return the false row of each adversary."""
        rows = [self.false_row(row, key) for row, key in zip(reply, keys, strict=True)]
        return torch.stack(rows)


def has_replied(rows: Tensor) -> Tensor:
    """Find the clients that have replied, bool ``[n]``, given their rows ``[n, ...]``.

    A row of zeros means that the client has not replied.
    """
    return rows.flatten(1).any(dim=1) if rows.dim() > 1 else rows.bool()


@dataclass(frozen=True)
class FieldTypes:
    """Fields of a class of queries that are sent to a client, in their order."""

    plain: Mapping[str, type]
    models: tuple[str, ...]


@lru_cache(maxsize=256)
def field_types(kind: type[DataQuery[Any]]) -> FieldTypes:
    """Return the fields of a class of queries that are sent: plain values, and models ``[S]``.

    Raises
    ------
    ConfigError
        If a field has another type.
    """
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the types of the fields of {kind.__name__} are not known where it is used ({error}); "
            "import them in its module"
        ) from error
    inherited = {field.name for field in dataclasses.fields(DataQuery)}
    plain: dict[str, type] = {}
    models: list[str] = []
    for field in dataclasses.fields(kind):
        if field.name in inherited:
            continue
        if hints[field.name] is Tensor:
            models.append(field.name)
        elif hints[field.name] in PLAIN_TYPES:
            plain[field.name] = hints[field.name]
        else:
            allowed = ", ".join(each.__name__ for each in PLAIN_TYPES)
            raise ConfigError(
                f"field {field.name!r} of {kind.__name__} cannot travel to a client: its type "
                f"should be one of {allowed}, or Tensor for a model's vector, got "
                f"{hints[field.name]}"
            )
    return FieldTypes(plain, tuple(models))


COUNTS = ("releases", "evaluations")
"""Counts of a client's policy that a reply to a row query can add to."""


@lru_cache(maxsize=256)
def check_kind(kind: type[DataQuery[Any]]) -> None:
    """Check the declarations of a class of queries.

    Raises
    ------
    ConfigError
        If its name cannot be one; if its mechanism puts noise on replies, or it claims to disclose
        an update or nothing; if it counts as something that no policy counts; if its rows or a
        field are of a type that does not travel; or if it stores something and its queries belong
        to no round.
    """
    name = kind.__name__
    if not KIND_RULE.fullmatch(kind.kind):
        raise ConfigError(
            f"kind of {name} should be a name of lower-case letters, digits and underscores, such "
            f"as 'label_shares', got {kind.kind!r}"
        )
    # An answer about data gets no noise, and is never one of the updates that leave under masks.
    if kind.mechanism not in ("", "none", "public"):
        raise ConfigError(
            f"mechanism of {name} should be 'none' or 'public', got {kind.mechanism!r}: fedclade "
            "puts no noise on its replies"
        )
    if kind.discloses == "update" or (kind.discloses == "nothing" and kind.mechanism != "public"):
        raise ConfigError(
            f"discloses of {name} should name what its replies disclose, got {kind.discloses!r}, "
            "which no policy has to name"
        )
    if issubclass(kind, RowQuery):
        if kind.counts_as not in COUNTS:
            allowed = " or ".join(repr(count) for count in COUNTS)
            raise ConfigError(f"counts_as of {name} should be {allowed}, got {kind.counts_as!r}")
        if kind.dtype not in ROW_TYPES:
            allowed = ", ".join(_name_of(each) for each in ROW_TYPES)
            raise ConfigError(
                f"dtype of {name} should be one of {allowed}, got {_name_of(kind.dtype)}"
            )
        types = field_types(kind)
        if kind.stores and types.plain.get("round") is not int:
            raise ConfigError(
                f"{name} stores {', '.join(kind.stores)}, so its queries belong to rounds; give it "
                "a field 'round: int'"
            )


def models_of(query: DataQuery[Any]) -> dict[str, Tensor]:
    """Return the models ``[S]`` that a query sends to each client, by field."""
    if not isinstance(query, RowQuery):
        return {}
    return {name: getattr(query, name) for name in field_types(type(query)).models}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
