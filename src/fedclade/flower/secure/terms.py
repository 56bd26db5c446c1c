"""What all clients of one sum have to agree on, and the rules that the run sets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, cast

from fedclade.core import UpdateError
from fedclade.flower.wire import PROTOCOL, Content, T, digest, shown

STAGES = ("keys", "shares", "masked", "unmask")
"""The questions of a sum, in their order; the third trains."""

OF_STAGE = ("instance", "sources", "ciphertexts", "promises", "client", "terms")
"""What a question of one of the stages says besides what the training is told."""

MOST_CLIENTS = 2**20
"""Of one sum: with more, a number would have too few steps."""


@dataclass(frozen=True)
class SecureRules:
    """What a run sets: see :class:`~fedclade.flower.Network`, whose ``secure_...`` these are."""

    fewest: int
    threshold: float
    neighbours: int
    clip: float

    def checks(self, clients: int | None) -> list[tuple[str, object, bool, str]]:
        """Return what :func:`~fedclade.core.require` should check, for a run that starts with so many clients."""
        few, half = self.fewest, 0.5 < self.threshold <= 1
        most = few if clients is None else clients
        near = self.neighbours == 0 or self.neighbours >= max(2, few - 1)
        return [
            ("network.secure_fewest", few, few >= 2, "at least 2"),
            ("network.secure_fewest", few, few <= most, f"at most network.clients, {most}: no sum could be had"),
            ("network.secure_threshold", self.threshold, half, "greater than 0.5 and at most 1"),
            ("network.secure_neighbours", self.neighbours, near, "0, or at least network.secure_fewest - 1"),
            ("network.secure_clip", self.clip, 0 < self.clip < math.inf, "greater than 0 and finite"),
        ]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one sum. Every mask is bound to all of them.

    Parameters
    ----------
    instance
        A random name of the sum.
    clients
        How many are asked for a part of it.
    threshold
        Share of those that hold shares of a client's secrets who are needed to put them together; above a half.
    clip
        Largest magnitude of an entry.
    weight
        So many examples have the weight 1, and more count no more.
    question
        Digest of what the training is told (:func:`digest_of`).
    vectors
        Digests of the model, and of the anchor if there is another, by name, as JSON.
    """

    instance: str
    clients: int
    threshold: float
    clip: float
    weight: int
    question: str
    vectors: str

    @property
    def text(self) -> str:
        """The terms as they travel."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def context(self) -> bytes:
        """What masks, signatures and commitments are bound to."""
        return sha256(f"fedclade secure aggregation {PROTOCOL} {self.text}".encode()).digest()

    @classmethod
    def read(cls, content: Content) -> Terms:
        """Return the terms that a question names; an UpdateError if they cannot be terms."""
        told = content.json("terms")
        kinds = {
            **dict.fromkeys(("instance", "question", "vectors"), str),
            **dict.fromkeys(("clients", "weight"), int),
            **dict.fromkeys(("threshold", "clip"), float),
        }
        if told.keys() != kinds.keys() or any(type(told[name]) is not kind for name, kind in kinds.items()):
            raise UpdateError(f"{shown(told)} are no terms of a sum")
        terms = cls(**told)
        possible = 2 <= terms.clients <= MOST_CLIENTS and 0.5 < terms.threshold <= 1 and terms.weight >= 1
        if not (possible and 0 < terms.clip < math.inf):
            raise UpdateError(f"terms of a sum out of range: {shown(told)}")
        return terms

    def needed(self, holders: int) -> int:
        """Return how many of so many holders of shares are needed: always more than half, and at least two."""
        return max(2, holders // 2 + 1, math.ceil(round(self.threshold * holders, 6)))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of what a training is told, whatever else the message says."""
    told = {name: value for name, value in values.items() if name not in (*OF_STAGE, "what", "protocol")}
    return digest(json.dumps(told, sort_keys=True).encode())


def names_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digests of a question's vectors by name, as JSON."""
    return json.dumps({name: digest(data) for name, data in vectors.items()}, sort_keys=True)


def listed(content: Content, name: str, kind: type[T]) -> list[T]:
    """Return a list of a message, which must be there and of a type; an UpdateError otherwise."""
    values = content.values.get(name)
    if not isinstance(values, list) or not all(type(value) is kind for value in cast("list[Any]", values)):
        raise UpdateError(f"{name!r} should be a list of {kind.__name__}, got {shown(values)}")
    return list(cast("Sequence[T]", values))
