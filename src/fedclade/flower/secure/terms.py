"""Terms of one sum, on which all its clients agree, and the rules that the run sets."""

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
"""Kinds of requests of a sum, in their order; the third one trains."""

OF_STAGE = ("instance", "dealt", "sources", "ciphertexts", "promises", "client", "terms")
"""Names of values in the requests of a sum that are not part of the training request."""

OF_QUESTION = ("round", "query", "purpose", "seed", "spec", "replicates", "part_size", "rule")
"""Names of the values that determine, with the models, the update that a client computes."""

NORM_RULE = (
    "set with secure_aggregation = true: the norm that no client's update may exceed, in "
    "parameter units, since longer ones are shortened; take twice the largest max_norm of the "
    "first rounds of a simulation (clusters.jsonl), or, without one, 10 for a model that is "
    "trained from scratch"
)

PARTS_RULE = f"1, or at least {FEWEST_SUMS}: of two sums either could be the wrong one"

MOST_CLIENTS = 2**20
"""Largest number of clients in one sum: with more, a number would have too few steps."""


@dataclass(frozen=True)
class SecureRules:
    """Rules of a run: the ``secure_...`` settings of :class:`~fedclade.flower.Network`."""

    fewest: int
    colluders: int
    neighbours: int
    norm: float | None = None
    parts: int = 1

    def checks(self, clients: int | None) -> list[tuple[str, object, bool, str]]:
        """Return the checks for :func:`~fedclade.core.require`.

        ``clients`` is the number of clients at the start of the run; None without secure
        aggregation.
        """
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
    """Terms of one sum. Every mask, share and signature is bound to all of them.

    Parameters
    ----------
    instance
        Random name of the sum.
    clients
        Number of clients that are requested to take part.
    colluders
        c, the number of clients that may collude with the server.
    neighbours
        k, the number of other clients to which a client on a long list deals shares; 0 for all.
    norm, norm_of_buffers
        C, the largest norm of an update of the parameters, and of the buffers.
    weight
        Number of examples with the weight 1; more examples add no weight.
    training
        Digest of the whole training request: the run, the round, the structure of the model, the
        local training, and the sketch for comparisons (:func:`digest_of`).
    question
        Digest of the values that determine a client's update, which may be part of one sum only
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
        """The terms as JSON, for a message."""
        return json.dumps(asdict(self), sort_keys=True)

    @cached_property
    def context(self) -> bytes:
        """ctx, the digest that all secrets and signatures are bound to."""
        return digest("terms", PROTOCOL, *(getattr(self, each.name) for each in fields(self)))

    @classmethod
    def read(cls, content: Content) -> Terms:
        """Return the terms in a request; raise an UpdateError if they are malformed."""
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
        """Return the encoding of updates, of a model with D ``parameters`` and S ``entries``."""
        return Numbers(
            clients=self.clients,
            parameters=parameters,
            buffers=entries - parameters,
            clip=self.norm,
            clip_of_buffers=self.norm_of_buffers,
            largest_weight=self.weight,
            # All clients agree on this digest, too, and unlike the instance it is the same when a
            # run is repeated.
            key=self.question.encode(),
        )

    def graph(self, members: int, insisting: int) -> Graph:
        """Return the rule for dealing shares on a list of clients.

        ``members`` is the number of clients on the list, and ``insisting`` of them insist on sums.
        """
        return Graph.of(members, suspects(members, insisting, self.colluders), self.neighbours)

    def quorum(self, members: int, insisting: int) -> int:
        """Return the number of listed clients that must agree on a sum before it is opened."""
        return quorum(members, suspects(members, insisting, self.colluders))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of a training request, independent of the other values of its message."""
    told = {
        name: value for name, value in values.items() if name not in (*OF_STAGE, "what", "protocol")
    }
    return _digest_of_json("training", told)


def question_of(values: Mapping[str, Any], vectors: Mapping[str, bytes]) -> str:
    """Return a digest of the values that determine a client's update."""
    told = {name: values[name] for name in OF_QUESTION if name in values}
    return _digest_of_json("question", told | {"models": [model_of(vectors), anchor_of(vectors)]})


def model_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digest of the model in a request."""
    return sha256(vectors.get("model", b"")).hexdigest()


def anchor_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digest of the anchor in a request; an empty text if there is no anchor."""
    return sha256(vectors["anchor"]).hexdigest() if "anchor" in vectors else ""


def listed(content: Content, name: str, kind: type[T]) -> list[T]:
    """Return a list of a message; raise an UpdateError if it is missing or of another type."""
    values = content.values.get(name)
    if not isinstance(values, list) or not all(
        type(value) is kind for value in cast("list[Any]", values)
    ):
        raise UpdateError(f"{name!r} should be a list of {kind.__name__}, got {shown(values)}")
    return list(cast("Sequence[T]", values))


def _digest_of_json(purpose: str, values: Mapping[str, Any]) -> str:
    return digest(purpose, json.dumps(values, sort_keys=True)).hex()


# Settings of the server's side of secure aggregation in a run, and the queries that it supports.

Value = TypeVar("Value")


class Asks(Protocol):
    """Sender of requests to clients: :class:`~fedclade.flower.GridClients`."""

    def content(
        self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None
    ) -> RecordDict:
        """Return the content of a request."""
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
        """Send requests; yield the parsed replies."""
        ...


@dataclass(frozen=True, eq=False)
class Members:
    """Registered properties of clients: number of training examples, and public key."""

    sizes: Mapping[int, int]
    keys: Mapping[int, str]


@dataclass
class SecureAggregation:
    """Settings and state of a run that receives sums of updates in place of updates.

    Parameters
    ----------
    rules
        Rules of the run.
    compared
        Sketch by which updates are compared; it leaves its client unmasked.
    limiting
        Limit on the weight of an update.
    norms
        Limits on the norm of an update, by round.
    rule
        Aggregation rule that combines several sums of a cluster into one update.
    withholds_losses
        Whether clients withhold their losses, as clients with a privacy budget do.
    """

    rules: SecureRules
    compared: Sketch
    limiting: Limiting
    norms: NormsByRound
    rule: Aggregation = field(default_factory=Aggregation)
    withholds_losses: bool = False
    is_unguarded_noted: bool = False
    barred: dict[int, str] = field(default_factory=dict[int, str])
    """Reason of each client that is excluded because its shares were wrong.

    No sum with such a client could be opened.
    """


def check(query: UpdateQuery) -> None:
    """Check that the updates of a query can be added up; raise a ConfigError if not."""
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


# Checks that secure aggregation fits a run, and the data that single clients disclose in addition
# to sums.

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
"""Description of the data that each name in a policy's ``disclose`` stands for."""


def with_signs(settings: RunSettings) -> RunSettings:
    """Return the settings with signs in place of sketches.

    Only signs of masked updates can be compared.
    """
    if settings.signature.kind != "projected":
        return settings
    return replace(settings, signature=replace(settings.signature, kind="signs"))


def disclosures_of(
    settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False
) -> dict[str, str]:
    """Return the data that single clients must disclose in a run of sums.

    Parameters
    ----------
    settings
        Settings of the run.
    algorithm
        Algorithm of the run.
    statistics
        Whether inputs are scaled, or labels weighted, by the statistics of all clients' examples.

    Returns
    -------
    dict[str, str]
        Description of the disclosed data, by its name in ``disclose``.
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
    """Return the server's warning about data that clients disclose in addition to sums.

    It is empty if clients disclose no such data.
    """
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
    """Check that a run can work with sums of updates, and with signs if it compares updates.

    Parameters
    ----------
    settings
        Settings of the run.
    algorithm
        Algorithm of the run.
    clients
        Number of clients.
    parts
        Number of sums for each cluster; robust rules need several.

    Raises
    ------
    ConfigError
        If it cannot; one line for each reason.
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


# Choice of the clients that receive shares of a client's secrets.


def draw_holders(client: int, members: Sequence[int], graph: Graph) -> list[int]:
    """Return the other clients that a client deals shares to, in ascending order.

    They are all others, or as many as the graph requires. The client draws them from the operating
    system, after it has seen the list. So neither the server nor other clients can choose them, or
    try lists until the draw suits them.
    """
    others = [member for member in members if member != client]
    if graph.holders == 0:
        return others
    return sorted(secrets.SystemRandom().sample(others, graph.holders))
