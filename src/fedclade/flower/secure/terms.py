"""What all clients of one sum have to agree on, and the rules that the run sets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import sha256
from typing import Any, cast

from fedclade.core import UpdateError
from fedclade.flower.secure.encoding import digest
from fedclade.flower.secure.numbers import Numbers
from fedclade.flower.secure.parameters import MOST_COMPLETE, Graph, fewest_holders, quorum
from fedclade.flower.secure.sums_of_cluster import FEWEST_SUMS
from fedclade.flower.wire import PROTOCOL, Content, T, shown

STAGES = ("keys", "shares", "masked", "agree", "unmask")
"""The questions of a sum, in their order; the third trains."""

OF_STAGE = ("instance", "dealt", "sources", "ciphertexts", "promises", "client", "terms")
"""What a question of one of the stages says besides what the training is told."""

OF_QUESTION = ("round", "query", "purpose", "seed", "spec", "replicates", "part_size", "rule")
"""What, with the models, decides how a client trains, and so which of its updates is added up."""

NORM_RULE = (
    "set with secure_aggregation = true: the norm that no client's update may exceed, in parameter units, since longer "
    "ones are shortened; take twice the largest max_norm of the first rounds of a simulation (clusters.jsonl), or, "
    "without one, 10 for a model that is trained from scratch"
)

PARTS_RULE = f"1, or at least {FEWEST_SUMS}: of two sums either could be the wrong one"

MOST_CLIENTS = 2**20
"""Of one sum: with more, a number would have too few steps."""


@dataclass(frozen=True)
class SecureRules:
    """What a run sets: see :class:`~fedclade.flower.Network`, whose ``secure_...`` these are."""

    fewest: int
    colluders: int
    neighbours: int
    norm: float | None = None
    parts: int = 1

    def checks(self, clients: int | None) -> list[tuple[str, object, bool, str]]:
        """Return what :func:`~fedclade.core.require` should check, for a run that starts with so many clients."""
        few, colluders, near = self.fewest, self.colluders, self.neighbours
        most = few if clients is None else clients
        found: list[tuple[str, object, bool, str]] = [
            ("network.secure_colluders", colluders, colluders >= 0, "at least 0"),
            (
                "network.secure_fewest",
                few,
                few >= colluders + 2,
                f"at least network.secure_colluders + 2, {colluders + 2}",
            ),
            ("network.secure_fewest", few, few <= most, f"at most network.clients, {most}: no sum could be had"),
            ("network.secure_neighbours", near, near >= 0, "at least 0"),
            ("network.secure_parts", self.parts, self.parts == 1 or self.parts >= FEWEST_SUMS, PARTS_RULE),
        ]
        if self.norm is not None:
            found.append(("network.secure_norm", self.norm, 0 < self.norm < math.inf, "greater than 0 and finite"))
        elif clients is not None:
            found.append(("network.secure_norm", self.norm, False, NORM_RULE))
        if near > 0 and most > MOST_COMPLETE and 0 <= colluders < most:
            least = fewest_holders(most, colluders)
            rule = f"0, or at least {least} for {most} clients of which {colluders} may collude"
            found.append(("network.secure_neighbours", near, near >= least, rule))
        return found


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one sum. Every mask, share and signature is bound to all of them.

    Parameters
    ----------
    instance
        A random name of the sum.
    clients
        How many are asked for a part of it.
    colluders
        c, how many clients may collude with the server.
    neighbours
        k, how many others a client deals shares to on a long list; 0 for all.
    norm, norm_of_buffers
        C, the longest update of the parameters, and of the buffers.
    weight
        So many examples have the weight 1, and more count no more.
    training
        Digest of all that the training is told: the run, the round, the structure of the model, how
        to train, and what is compared (:func:`digest_of`).
    question
        Digest of what decides how a client trains, which is answered for one sum
        (:func:`question_of`).
    model, anchor
        Digests of the model and of the anchor; the latter is empty if there is none.
    """

    instance: str
    clients: int
    colluders: int
    neighbours: int
    norm: float
    norm_of_buffers: float
    weight: int
    training: str
    question: str
    model: str
    anchor: str

    @property
    def text(self) -> str:
        """The terms as they travel."""
        return json.dumps(asdict(self), sort_keys=True)

    @cached_property
    def context(self) -> bytes:
        """ctx: what all secrets and signatures are bound to."""
        return digest("terms", PROTOCOL, *(getattr(self, each.name) for each in fields(self)))

    @classmethod
    def read(cls, content: Content) -> Terms:
        """Return the terms that a question names; an UpdateError if they cannot be terms."""
        told = content.json("terms")
        kinds = {
            **dict.fromkeys(("instance", "training", "question", "model", "anchor"), str),
            **dict.fromkeys(("clients", "colluders", "neighbours", "weight"), int),
            **dict.fromkeys(("norm", "norm_of_buffers"), float),
        }
        if told.keys() != kinds.keys() or any(type(told[name]) is not kind for name, kind in kinds.items()):
            raise UpdateError(f"{shown(told)} are no terms of a sum")
        terms = cls(**told)
        possible = 2 <= terms.clients <= MOST_CLIENTS and 0 <= terms.colluders < terms.clients
        possible = possible and 0 <= terms.neighbours <= MOST_CLIENTS and 1 <= terms.weight < 2**63
        possible = possible and all(0 < norm < math.inf for norm in (terms.norm, terms.norm_of_buffers))
        if not possible:
            raise UpdateError(f"terms of a sum out of range: {shown(told)}")
        return terms

    def numbers(self, parameters: int, entries: int) -> Numbers:
        """Return how updates become numbers, of a model with so many parameters and entries, S."""
        return Numbers(
            clients=self.clients,
            parameters=parameters,
            buffers=entries - parameters,
            clip=self.norm,
            clip_of_buffers=self.norm_of_buffers,
            largest_weight=self.weight,
            # All agree to the question, too; and unlike the instance it is the same when a run is repeated.
            key=self.question.encode(),
        )

    def graph(self, members: int) -> Graph:
        """Return who deals shares to whom on a list of so many."""
        return Graph.of(members, self.colluders, self.neighbours)

    def quorum(self, members: int) -> int:
        """Return how many of a list of so many have to agree on a sum before it is opened."""
        return quorum(members, self.colluders)


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of what a training is told, whatever else the message says."""
    told = {name: value for name, value in values.items() if name not in (*OF_STAGE, "what", "protocol")}
    return _digest_of_json("training", told)


def question_of(values: Mapping[str, Any], vectors: Mapping[str, bytes]) -> str:
    """Return a digest of what decides how a client trains."""
    told = {name: values[name] for name in OF_QUESTION if name in values}
    return _digest_of_json("question", told | {"models": [model_of(vectors), anchor_of(vectors)]})


def model_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digest of the model that a question sends."""
    return sha256(vectors.get("model", b"")).hexdigest()


def anchor_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digest of the anchor that a question sends; an empty text if there is none."""
    return sha256(vectors["anchor"]).hexdigest() if "anchor" in vectors else ""


def listed(content: Content, name: str, kind: type[T]) -> list[T]:
    """Return a list of a message, which must be there and of a type; an UpdateError otherwise."""
    values = content.values.get(name)
    if not isinstance(values, list) or not all(type(value) is kind for value in cast("list[Any]", values)):
        raise UpdateError(f"{name!r} should be a list of {kind.__name__}, got {shown(values)}")
    return list(cast("Sequence[T]", values))


def _digest_of_json(purpose: str, values: Mapping[str, Any]) -> str:
    return digest(purpose, json.dumps(values, sort_keys=True)).hex()
