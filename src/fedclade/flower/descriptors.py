"""What a model makes of clients' data, in messages: a model and how to describe in the query, numbers in the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from fedclade.core import DescriptorQuery, UpdateError
from fedclade.flower import wire
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.policy import check_allowed
from fedclade.flower.wire import Content, shown

Request = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], Tensor], dict[int, str], int],
    Iterator[tuple[int, Tensor]],
]


def as_values(query: DescriptorQuery) -> dict[str, Any]:
    """Return how to describe as plain values of a message."""
    return {"seed": query.seed, "components": query.components, "per_label": query.per_label}


def read_query(client: int, model: Tensor, content: Content) -> DescriptorQuery:
    """Return the query that a message to a client puts; an UpdateError if it cannot be."""
    seed, components = content.get("seed", int), content.get("components", int)
    if seed < 0 or components < 0:
        raise UpdateError(f"asked for {shown(components)} components of a descriptor by seed {shown(seed)}")
    return DescriptorQuery([client], model, seed, components, content.get("per_label", bool))


def asked(query: DescriptorQuery, content: RecordDict, ask: Request, registry: NodeRegistry) -> Tensor:
    """Ask clients, and return their descriptors ``[n, 2 + B, C]``: of one that does not answer, zeros.

    An UpdateError is raised if no client allows the question, of most that are connected.
    """
    shape, left_out = (
        query.shape(registry.clients.schema),
        dict[int, str](),
    )  # who is left out is queried again, and reported then

    def read(_: int, content: Content) -> Tensor:
        content.has_only(("descriptor",))
        found = wire.read_vector(content.vector("descriptor"), shape, torch.float32, "descriptor")
        if not bool(found.isfinite().all()):
            raise UpdateError("a descriptor that is not finite")
        return found

    largest = 4 * shape[0] * shape[1]
    answers = dict(ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "descriptors", read, left_out, largest))
    check_allowed("descriptors", query.ids, left_out, len(registry.connected))
    return torch.stack([answers.get(client, torch.zeros(shape)) for client in query.ids])
