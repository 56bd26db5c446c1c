"""Initial models that clients draw from the secret that they share, so that the server does not know them."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from flwr.app import MessageType
from torch import Tensor

from fedclade.core import LARGEST_NORM, UpdateError
from fedclade.flower import wire
from fedclade.flower.grid_clients import GridClients
from fedclade.flower.wire import Content

_log = logging.getLogger(__name__)


def drawn_by_clients(clients: GridClients, count: int) -> Tensor:
    """Return the initial models ``[count, S]`` that clients draw from their secret; an UpdateError if none answers.

    All draw the same. So each is asked for a digest of what it draws, and one of those that agree with most for the
    models themselves: a client that would like others has no say.
    """
    why: dict[int, str] = {}
    contents = dict.fromkeys(clients.ids, clients.content("initial", {"models": count, "digest": True}))

    def read(client: int, content: Content) -> str:
        return content.get("digest", str)

    drawn = dict(clients.request(contents, MessageType.QUERY, "initial models", read, why))
    votes = Counter(drawn[client] for client in sorted(drawn))
    for digest, agreeing in votes.most_common():  # of as many, that of the client with the lowest number
        for client in sorted(client for client in drawn if drawn[client] == digest):
            try:
                models = _drawn_by(client, clients, count, digest)
            except UpdateError as error:
                why[client] = str(error)
                continue
            if others := sorted(other for other in drawn if drawn[other] != digest):
                _log.warning(
                    "%d of %d clients draw the same initial model, which is taken; clients %s draw another: they "
                    "run another version, or do not tell the truth",
                    *(agreeing, len(drawn), ", ".join(map(str, others))),
                )
            return models
    reasons = "; ".join(f"client {client}: {reason}" for client, reason in sorted(why.items()))
    raise UpdateError(f"no client sent the initial model: {reasons}")


def _drawn_by(client: int, clients: GridClients, count: int, digest: str) -> Tensor:
    """Return the initial models that one client draws, which must be finite, and those of the digest."""
    shape, dtype, names = (clients.layout.size,), clients.layout.dtype, [str(k) for k in range(count)]
    contents = {client: clients.content("initial", {"models": count, "digest": False})}
    largest = count * clients.layout.size * dtype.itemsize

    def read(client: int, content: Content) -> Tensor:
        content.has_only(names)
        data = [content.vector(name) for name in names]
        if (sent := wire.digest(b"".join(data))) != digest:
            raise UpdateError(f"initial models of digest {sent}, said to be {digest}")
        vectors = zip(names, data, strict=True)
        models = torch.stack([wire.read_vector(each, shape, dtype, f"model {name}") for name, each in vectors])
        if not bool((models.norm(dim=1) <= LARGEST_NORM).all()):  # as NaN is not
            raise UpdateError(f"initial models that are not finite, or of norms above {LARGEST_NORM:g}")
        return models

    why: dict[int, str] = {}
    for _, models in clients.request(contents, MessageType.QUERY, "initial models", read, why, largest):
        return models
    raise UpdateError(why[client])
