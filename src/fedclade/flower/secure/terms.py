"""What all clients of one sum have to agree on, and the rules that the run sets."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol, TypeVar, cast

from flwr.app import Array, RecordDict

from fedclade.algorithms import Algorithm
from fedclade.channel import Limiting, Sketch
from fedclade.core import Aggregation, ConfigError, UpdateError, UpdateQuery
from fedclade.flower.kinds import SKETCH
from fedclade.flower.secure.encoding import digest
from fedclade.flower.secure.norms import NormsByRound
from fedclade.flower.secure.parameters import MOST_COMPLETE, Graph, fewest_holders, quorum, suspects
from fedclade.flower.secure.secrets import Numbers
from fedclade.flower.secure.sums_of_cluster import FEWEST_SUMS
from fedclade.flower.wire import PROTOCOL, Content, T, shown
from fedclade.runs import RunSettings

STAGES = ("keys", "shares", "masked", "agree", "unmask")
"""The questions of a sum, in their order; the third trains."""

OF_STAGE = ("instance", "dealt", "sources", "ciphertexts", "promises", "client", "terms")
"""What a question of one of the stages says besides what the training is told."""

OF_QUESTION = ("round", "query", "purpose", "seed", "spec", "replicates", "part_size", "rule")
"""What, with the models, decides how a client trains, and so which of its updates is added up."""

NORM_RULE = (
    "set with secure_aggregation = true: the norm that no client's update may exceed, in "
    "parameter units, since longer ones are shortened; take twice the largest max_norm of the "
    "first rounds of a simulation (clusters.jsonl), or, without one, 10 for a model that is "
    "trained from scratch"
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
        few = self.fewest
        colluders = self.colluders
        near = self.neighbours
        most = few if clients is None else clients
        found: list[tuple[str, object, bool, str]] = [
            ("network.secure_colluders", colluders, colluders >= 0, "at least 0"),
            (
                "network.secure_fewest",
                few,
                few >= colluders + 2,
                f"at least network.secure_colluders + 2, {colluders + 2}",
            ),
            (
                "network.secure_fewest",
                few,
                few <= most,
                f"at most network.clients, {most}: no sum could be had",
            ),
            ("network.secure_neighbours", near, near >= 0, "at least 0"),
            (
                "network.secure_parts",
                self.parts,
                self.parts == 1 or self.parts >= FEWEST_SUMS,
                PARTS_RULE,
            ),
        ]
        if self.norm is not None:
            found.append(
                (
                    "network.secure_norm",
                    self.norm,
                    0 < self.norm < math.inf,
                    "greater than 0 and finite",
                )
            )
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
        if told.keys() != kinds.keys() or any(
            type(told[name]) is not kind for name, kind in kinds.items()
        ):
            raise UpdateError(f"{shown(told)} are no terms of a sum")
        terms = cls(**told)
        possible = 2 <= terms.clients <= MOST_CLIENTS and 0 <= terms.colluders < terms.clients
        possible = possible and 0 <= terms.neighbours <= MOST_CLIENTS and 1 <= terms.weight < 2**63
        possible = possible and all(
            0 < norm < math.inf for norm in (terms.norm, terms.norm_of_buffers)
        )
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
            # All agree to the question, too; and unlike the instance it is the same when a run is
            # repeated.
            key=self.question.encode(),
        )

    def graph(self, members: int, insisting: int) -> Graph:
        """Return who deals shares to whom on a list of so many, of which some insist on sums."""
        return Graph.of(members, suspects(members, insisting, self.colluders), self.neighbours)

    def quorum(self, members: int, insisting: int) -> int:
        """Return how many of a list of so many have to agree on a sum before it is opened."""
        return quorum(members, suspects(members, insisting, self.colluders))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of what a training is told, whatever else the message says."""
    told = {
        name: value for name, value in values.items() if name not in (*OF_STAGE, "what", "protocol")
    }
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
    if not isinstance(values, list) or not all(
        type(value) is kind for value in cast("list[Any]", values)
    ):
        raise UpdateError(f"{name!r} should be a list of {kind.__name__}, got {shown(values)}")
    return list(cast("Sequence[T]", values))


def _digest_of_json(purpose: str, values: Mapping[str, Any]) -> str:
    return digest(purpose, json.dumps(values, sort_keys=True)).hex()


# What the server's side of secure aggregation goes by in a run, and which queries it can take.

Value = TypeVar("Value")


class Asks(Protocol):
    """What puts questions to clients: :class:`~fedclade.flower.GridClients`."""

    def content(
        self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None
    ) -> RecordDict:
        """Return the content of a question."""
        ...

    def request(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        group: str,
        read: Callable[[int, Content], Value],
        left_out: dict[int, str],
        largest: int = 0,
    ) -> Iterator[tuple[int, Value]]:
        """Send questions; yield what is read of the answers."""
        ...


@dataclass(frozen=True, eq=False)
class Members:
    """What is known of clients: the examples that each registered with, and its public key."""

    sizes: Mapping[int, int]
    keys: Mapping[int, str]


@dataclass
class SecureAggregation:
    """Gets sums of updates, and signatures, in place of updates.

    Parameters
    ----------
    rules
        The run's.
    compared
        What an update is compared by; that leaves its client unmasked.
    limiting
        How much an update may weigh.
    norms
        How long an update may be.
    rule
        How one update is made of several sums of a cluster.
    withholds_losses
        Whether clients withhold their losses, as those with a privacy budget do.
    """

    rules: SecureRules
    compared: Sketch
    limiting: Limiting
    norms: NormsByRound
    rule: Aggregation = field(default_factory=Aggregation)
    withholds_losses: bool = False
    is_unguarded_noted: bool = False
    barred: dict[int, str] = field(default_factory=dict[int, str])
    """Clients whose shares were wrong, and why they take no further part: with them no sum would be had."""


def check(query: UpdateQuery) -> None:
    """Check that a query is one whose updates can be added up; a ConfigError otherwise."""
    what = ""
    if query.kind != "train":
        what = "gradients"
    elif query.mixture is not None:
        what = "the models of a mixture"
    elif query.own:
        what = "models of clients"
    if what:
        raise ConfigError(
            "network.secure_aggregation = true adds up updates of one model for each cluster, and "
            f"is asked for {what}; take another algorithm, or leave it out"
        )
    anchors = query.assignment if query.anchors is None else query.anchors
    if query.round.uses_anchors and len(set(zip(query.assignment, anchors, strict=True))) > len(
        set(query.assignment)
    ):
        raise ConfigError(
            "network.secure_aggregation = true adds up updates of clients that train alike, and "
            "some that train the same model are drawn to different ones; take another algorithm, "
            "or leave it out"
        )


# Which runs secure aggregation fits, and what single clients disclose in them beside sums.

REVEALS = {
    SKETCH: (
        "the signs of {dim} random projections of each update that is compared: {dim} bits of it, and cosines between "
        "clients to about {error:.2f}"
    ),
    "statistics": "means and squares of each client's inputs, and how many examples of each label it has",
    "choice": "which of the models that it is sent has the lowest loss on each client's training data, once a round",
    "descriptors": "means and directions of each client's inputs, as a model sees them",
    "subspaces": "directions of each client's inputs, which are close to their means",
}
"""What a name of a policy's ``disclose`` stands for."""


def with_signs(settings: RunSettings) -> RunSettings:
    """Return the settings with signs in place of sketches: of masked updates nothing else is compared."""
    if settings.signature.kind != "projected":
        return settings
    return replace(settings, signature=replace(settings.signature, kind="signs"))


def disclosures_of(
    settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False
) -> dict[str, str]:
    """Return what single clients must disclose in a run of sums: what it reveals, by its name in ``disclose``.

    With ``statistics`` inputs are scaled, or labels weighted, by what all clients' examples come
    to.
    """
    names = [
        *([SKETCH] if algorithm.compares else []),
        *algorithm.discloses,
        *(["statistics"] if statistics else []),
    ]
    dim = settings.signature.dim
    return {
        name: REVEALS.get(name, name).format(dim=dim, error=math.pi / (2 * math.sqrt(dim)))
        for name in names
    }


def announcement(settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False) -> str:
    """Return what the server says at the start of a run whose clients disclose something beside sums, or nothing."""
    disclosed = disclosures_of(settings, algorithm, statistics=statistics)
    if not disclosed:
        return ""
    told = "; ".join(f"{name}: {what}" for name, what in disclosed.items())
    return (
        f"this run of {type(algorithm).__name__} needs more of each client than sums ({told}); a client with "
        f'secure-aggregation=true takes part only with disclose="{" ".join(disclosed)}" in its node config'
    )


def check_sums(
    settings: RunSettings, algorithm: Algorithm, clients: int = 0, *, parts: int = 1
) -> None:
    """Check that a run of so many clients can do with sums of updates, and with signs where it compares.

    ``parts`` is the number of sums for each cluster, if these are enough for robust rules.

    Raises
    ------
    ConfigError
        If it cannot; a line for each reason.
    """
    name = type(algorithm).__name__
    problems = list[str]()
    asked = algorithm.asks(clients, settings.client_fraction)
    if algorithm.needs_updates:
        problems.append(
            f"{name} needs the updates of single clients; take another algorithm, or leave it out"
        )
    elif algorithm.compares and settings.signature.kind == "full":
        problems.append(
            f"{name} compares whole updates, which would be sent; set signature.kind = 'projected'"
        )
    elif algorithm.compares and algorithm.compares_lengths:
        problems.append(
            f"{name} compares how long updates are, and signs of sketches tell their directions "
            "alone; set algorithm.metric = 'cosine'"
        )
    if algorithm.asks_for_gradients:
        problems.append(
            f"{name} asks for gradients, which leave without masks; take updates in place of them"
        )
    if asked and not algorithm.discloses:
        problems.append(
            f"{name} asks each client for {asked}, from which its training data can be read; take "
            "another algorithm, or settings with which it does not (docs/secure-aggregation.md "
            "has a table of methods), or leave it out"
        )
    if settings.aggregate.is_robust and parts == 1:
        rule = settings.aggregate.rule
        problems.append(
            f"aggregate.rule = {rule!r} needs the updates of single clients, or several sums for "
            "each cluster; set network.secure_parts to at least 3, or leave it out"
        )
    if settings.aggregate.leave_out_opposed is True:
        problems.append(
            "aggregate.leave_out_opposed = true needs the updates of single clients; leave it out"
        )
    if settings.aggregate.clip_above not in ("auto", math.inf):
        problems.append(
            "nobody can shorten an update that is part of a sum; leave aggregate.clip_above out"
        )
    if settings.stream is False:
        problems.append(
            "the server has sums alone, as a run that streams; leave out stream = false"
        )
    if problems:
        raise ConfigError(
            "\n".join(f"network.secure_aggregation = true: {problem}" for problem in problems)
        )


# Whom a client deals shares of its secrets to.


def draw_holders(client: int, members: Sequence[int], graph: Graph) -> list[int]:
    """Return the others that a client deals shares to, ascending: all, or so many as the graph says.

    The client draws them from the operating system, after it has seen the list. So neither the
    server nor other clients can choose them, nor try lists until the draw suits them.
    """
    others = [member for member in members if member != client]
    if graph.holders == 0:
        return others
    return sorted(secrets.SystemRandom().sample(others, graph.holders))
