"""Base classes for queries that each client answers from its own data.

A federated method that needs a new kind of query defines a subclass. The subclass declares the name
of the kind in messages and client policies, what a reply reveals, the fields that are sent to a
client, the shape of a reply, how a client computes the reply, and which replies are valid. Engines,
middleware and the network handle all kinds of queries in the same way.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch

from fedclade.core.errors import ConfigError
from fedclade.core.queries import Query, R
from fedclade.core.registry import DataSpec

if TYPE_CHECKING:
    from torch import nn

PLAIN_TYPES = (int, float, bool, str)
"""Types of query fields that are sent as plain values.

A field of type Tensor is sent as the vector of a model.
"""

ROW_TYPES = ("float32", "float64", "int64", "bool")
"""Names of the tensor types that a client's reply to a :class:`RowQuery` can have."""

KIND_RULE = re.compile(r"[a-z][a-z0-9_]*")
"""Pattern for the name of a kind of query; client policies list such names, separated by spaces."""


class LocalData(ABC):
    """Data of one client, as available to a query that the client answers.

    Each property is computed when it is first read, so that a query costs only what it uses.
    """

    @property
    @abstractmethod
    def spec(self) -> DataSpec:
        """Shape, task and other properties of examples, which are the same for all clients."""

    @property
    @abstractmethod
    def targets(self) -> torch.Tensor:
        """Targets of the client's n training examples, on the CPU.

        The shape is ``[n]``, or ``[n, T]`` for T targets per example. Positions without a target
        have the value :data:`~fedclade.core.IGNORED`.
        """

    @property
    @abstractmethod
    def inputs(self) -> torch.Tensor:
        """Training inputs ``[n, ...]``, transformed as for the model, on the model's device."""

    @property
    @abstractmethod
    def stored_inputs(self) -> torch.Tensor:
        """Training inputs ``[n, ...]`` in their stored form, such as image bytes, on the CPU."""

    @property
    @abstractmethod
    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tuple of the inputs and the targets of the client's m test examples, ``[m, ...]`` each.

        Inputs are transformed as for the model and on the model's device. Targets are on the CPU.
        """

    @property
    @abstractmethod
    def task(self) -> Any:
        """The run's task with its loss and metrics, a :class:`~fedclade.tasks.FittedTask`."""

    @abstractmethod
    def load_model(self, vector: torch.Tensor) -> nn.Module:
        """Return the client's whole model in evaluation mode, given the shared parameters.

        The module is shared by all clients of this process: the next call overwrites its
        parameters.

        Parameters
        ----------
        vector
            The shared parameters and buffers as a flat vector ``[S]``. Personal parameters, if the
            model has any, are the client's own.
        """

    @abstractmethod
    def load_own_model(self) -> nn.Module | None:
        """Return the model that the client itself stores, in evaluation mode.

        The result is None if the client stores no model. Otherwise, it is the module that
        :meth:`load_model` also uses, so the next call of either method overwrites its parameters.
        """


class LocalStore(ABC):
    """Tensors that one client stores from round to round for a class of queries.

    Stored tensors never leave the client. Their names must be listed in :attr:`DataQuery.stores`.
    """

    @abstractmethod
    def get(self, name: str) -> torch.Tensor | None:
        """Return the tensor that was stored under a name before the query's round.

        If several were stored, the result is the last one; if none was stored, the result is None.
        """

    @abstractmethod
    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor under a name, for queries of later rounds."""


class LocalClients(ABC):
    """Access to the data and stored tensors of the clients that are in this process."""

    spec: DataSpec
    """Shape, task and other properties of examples, which are the same for all clients."""

    federation: Any
    """Data of all clients, a :class:`~fedclade.Federation`, for queries about all of them."""

    @abstractmethod
    def data(self, client: int) -> LocalData:
        """Return the data of a client, given the client's id."""

    @abstractmethod
    def store(self, client: int, query: DataQuery[Any]) -> LocalStore:
        """Return the store of tensors that a client has for a class of queries."""


@dataclass(frozen=True, eq=False)
class DataQuery(Query[R]):
    """Query that each client answers from its own data and the tensors that it has stored.

    A subclass sets the class attributes below. It may have fields, which are sent to the client by
    name. If a subclass has a field ``round: int``, the reply belongs to that round: the reply is
    computed from the clients' data in that round, and clients may store tensors for later rounds.

    Attributes
    ----------
    kind
        Name of the kind of query in messages, in ``allow`` of a client's policy, and in events.
    mechanism, discloses
        See :class:`~fedclade.core.Query`. ``mechanism`` is "none", or "public" if a reply does not
        depend on the data of any client. ``discloses`` names the information in a reply. A client
        with secure aggregation sends the reply only if its policy lists this name under
        ``disclose``. Clients with differential privacy refuse all kinds that are not public.
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
        """Number of the round that the reply belongs to; 0 if the query has no field ``round``."""
        return int(getattr(self, "round", 0))

    @abstractmethod
    def answer_all(self, clients: LocalClients) -> R:
        """Return the combined reply of the queried clients, all of which are in this process.

        The queried clients are :attr:`ids`; ``clients`` gives access to their data.
        """

    @abstractmethod
    def merge(self, parts: Sequence[tuple[Sequence[int], R]]) -> R:
        """Merge the replies of several groups of clients into one reply to this query.

        A query is divided if, for example, several processes simulate the clients.

        Parameters
        ----------
        parts
            A tuple for each group: the positions of its clients in :attr:`ids`, and its reply.
        """

    def falsify(self, reply: R, keys: Sequence[int]) -> R:
        """Return the reply that simulated adversaries send in place of the honest reply.

        A subclass overrides this method to define an attack on its kind of query. By default,
        adversaries reply honestly.

        Parameters
        ----------
        reply
            The honest reply of the adversaries alone.
        keys
            Key of each adversary, from which its random draws are seeded.
        """
        return reply


class _TorchType:
    """Class attribute whose value is the type of tensors with a given name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type[Any]) -> torch.dtype:
        return getattr(torch, self._name)


def torch_type(name: str) -> torch.dtype:
    """Return a class attribute that has the value ``torch.<name>``, such as ``torch.bool``.

    Unlike the value itself, the attribute does not import torch when its class is defined.
    """
    return cast("torch.dtype", _TorchType(name))


@dataclass(frozen=True, eq=False)
class RowQuery(DataQuery["torch.Tensor"]):
    """Query to which each client replies with one row: a tensor of a shape that is known before.

    The combined reply of n clients is a tensor ``[n, *shape]``. Federated methods derive their own
    kinds of queries from this class. A client that does not reply has a row of zeros, see
    :func:`has_replied`.

    Attributes
    ----------
    dtype
        Type of the row's numbers; one of :data:`ROW_TYPES`.
    zeros_are_a_reply
        Whether a row of zeros is a valid reply. If not, clients with a row of zeros are queried
        again, and an event lists the clients that still have not replied.
    reply_name
        Name of the row in a reply over a network; by default the name of the kind.
    counts_as
        Limit of a client's policy to which a reply counts, over all runs of the client:
        ``releases``, for a reply that reveals about as much as an update, or ``evaluations``, for a
        reply that reveals only a number or a word.
    needs_min_part
        Whether a client in a network refuses the query if it has fewer training examples than
        ``min-part`` of its policy.

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

    dtype = torch_type("float32")  # without annotation, since dataclasses look up annotated values
    zeros_are_a_reply: ClassVar[bool] = False
    reply_name: ClassVar[str] = ""
    counts_as: ClassVar[Literal["releases", "evaluations"]] = "releases"
    needs_min_part: ClassVar[bool] = True

    @abstractmethod
    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        """Return the shape of one client's row; ``()`` for a single number.

        Parameters
        ----------
        spec
            Properties of the clients' examples, such as the number of labels.

        Raises
        ------
        ConfigError
            If clients cannot answer this kind of query with examples of these properties.
        """

    @abstractmethod
    def answer(self, data: LocalData, store: LocalStore) -> torch.Tensor:
        """Compute one client's row from its data and its stored tensors."""

    def is_valid(self, row: torch.Tensor) -> bool:
        """Return whether a row received over a network could come from an honest client.

        By default, all numbers must be finite. A client with an invalid row counts as a client that
        did not reply.
        """
        return not row.is_floating_point() or bool(row.isfinite().all())

    def amounts(self, spec: DataSpec) -> Mapping[str, int]:
        """Return how much a reply discloses, to be compared with the limits of a client's policy.

        The result maps the name of a limit, such as ``max_vectors``, to the amount in one reply,
        here the number of vectors. By default the result is empty: the policy then limits only how
        often the client replies.
        """
        return {}

    def false_row(self, row: torch.Tensor, key: int) -> torch.Tensor:
        """Return the row that a simulated adversary sends in place of its honest row.

        By default this is the honest row. ``key`` seeds the adversary's random draws.
        """
        return row

    def answer_all(self, clients: LocalClients) -> torch.Tensor:
        """Compute the rows ``[n, *shape]`` of the n queried clients, all in this process.

        Raises
        ------
        ConfigError
            If :meth:`answer` returns a row of another shape or type than the class declares.
        """
        shape = self.shape(clients.spec)
        rows: list[torch.Tensor] = []
        for client in self.ids:
            row = self.answer(clients.data(client), clients.store(client, self))
            if tuple(row.shape) != shape or row.dtype != self.dtype:
                raise ConfigError(
                    f"the method answer() of {type(self).__name__} should return a row of shape "
                    f"{list(shape)} and type {_name_of(self.dtype)}, as the class declares, got "
                    f"shape {list(row.shape)} and type {_name_of(row.dtype)}"
                )
            rows.append(row.cpu())
        return torch.stack(rows) if rows else self.no_rows(clients.spec)

    def no_rows(self, spec: DataSpec) -> torch.Tensor:
        """Return the combined reply for the case that no client replies: zeros ``[n, *shape]``."""
        return torch.zeros(len(self.ids), *self.shape(spec), dtype=self.dtype)

    def merge(self, parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> torch.Tensor:
        """Merge the rows of several groups of clients, in the order of :attr:`ids`.

        ``parts`` has a tuple for each group: the positions of its clients in :attr:`ids`, and its
        rows.
        """
        first = parts[0][1]
        rows = first.new_empty(len(self.ids), *first.shape[1:])
        for places, some in parts:
            rows[list(places)] = some
        return rows

    def falsify(self, reply: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
        """Return the rows that adversaries send in place of their honest rows ``reply``."""
        rows = [self.false_row(row, key) for row, key in zip(reply, keys, strict=True)]
        return torch.stack(rows)


def has_replied(rows: torch.Tensor) -> torch.Tensor:
    """Return a mask, bool ``[n]``, of the clients that have replied to a :class:`RowQuery`.

    Parameters
    ----------
    rows
        The rows ``[n, ...]`` of n clients. A row of zeros means that the client has not replied.
    """
    return rows.flatten(1).any(dim=1) if rows.dim() > 1 else rows.bool()


@dataclass(frozen=True)
class FieldTypes:
    """Fields of a class of queries that are sent to a client, in their order.

    ``plain`` has the type of each field with a plain value, by the field's name. ``models`` has the
    names of the fields that are model vectors.
    """

    plain: Mapping[str, type]
    models: tuple[str, ...]


@lru_cache(maxsize=256)
def field_types(kind: type[DataQuery[Any]]) -> FieldTypes:
    """Return the fields of a class of queries that are sent to clients, with their types.

    Raises
    ------
    ConfigError
        If the type of a field is unknown, or neither a plain type nor Tensor.
    """
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"the types of the fields of {kind.__name__} cannot be resolved ({error}); import them "
            "at the top level of the module that defines the class"
        ) from error
    inherited = {field.name for field in dataclasses.fields(DataQuery)}
    plain: dict[str, type] = {}
    models: list[str] = []
    for field in dataclasses.fields(kind):
        if field.name in inherited:
            continue
        if hints[field.name] is torch.Tensor:
            models.append(field.name)
        elif hints[field.name] in PLAIN_TYPES:
            plain[field.name] = hints[field.name]
        else:
            allowed = ", ".join(each.__name__ for each in PLAIN_TYPES)
            raise ConfigError(
                f"field {field.name!r} of {kind.__name__} cannot be sent to a client: its type "
                f"should be one of {allowed}, or Tensor for a model's vector, got "
                f"{hints[field.name]}"
            )
    return FieldTypes(plain, tuple(models))


COUNTS = ("releases", "evaluations")
"""Limits of a client's policy to which a reply to a :class:`RowQuery` can count."""


@lru_cache(maxsize=256)
def check_kind(kind: type[DataQuery[Any]]) -> None:
    """Check that the declarations of a class of data queries are valid and consistent.

    Raises
    ------
    ConfigError
        If ``kind`` is not a valid name; if ``mechanism`` is neither "none" nor "public"; if
        ``discloses`` is the reserved name "update", or the reserved name "nothing" although the
        query is not public; if ``counts_as`` is no limit of client policies; if the rows or a field
        have a type that cannot be sent; or if the class stores tensors but has no field
        ``round: int``.
    """
    name = kind.__name__
    if not KIND_RULE.fullmatch(kind.kind):
        raise ConfigError(
            f"kind of {name} should be a name of lower-case letters, digits and underscores, such "
            f"as 'label_shares', got {kind.kind!r}"
        )
    # Clients add noise only to model updates, and secure aggregation encrypts only model updates,
    # so a reply to a data query can claim neither protection.
    if kind.mechanism not in ("", "none", "public"):
        raise ConfigError(
            f"mechanism of {name} should be 'none' or 'public', got {kind.mechanism!r}: clients "
            "add no noise to replies to a data query"
        )
    if kind.discloses == "update" or (kind.discloses == "nothing" and kind.mechanism != "public"):
        raise ConfigError(
            f"discloses of {name} should be a name for the information in a reply, such as "
            f"'label_shares', got {kind.discloses!r}, which is a reserved name"
        )
    if issubclass(kind, RowQuery):
        if kind.counts_as not in COUNTS:
            allowed = " or ".join(repr(count) for count in COUNTS)
            raise ConfigError(f"counts_as of {name} should be {allowed}, got {kind.counts_as!r}")
        if kind.dtype not in [getattr(torch, each) for each in ROW_TYPES]:
            raise ConfigError(
                f"dtype of {name} should be one of {', '.join(ROW_TYPES)}, got "
                f"{_name_of(kind.dtype)}"
            )
        types = field_types(kind)
        if kind.stores and types.plain.get("round") is not int:
            raise ConfigError(
                f"{name} stores {', '.join(kind.stores)} from round to round, so each query needs "
                "the number of its round; add a field 'round: int' to the class"
            )


def models_of(query: DataQuery[Any]) -> dict[str, torch.Tensor]:
    """Return the model vectors ``[S]`` that a query sends to each client, by field name."""
    if not isinstance(query, RowQuery):
        return {}
    return {name: getattr(query, name) for name in field_types(type(query)).models}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
