"""Terms of one sum under secure aggregation, and the rules and checks of a run.

All clients of a sum agree on its terms: the model, the training, and the limits of the sum.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from flwr.app import Array, RecordDict

from fedclade.channel import Limiting, Sketch
from fedclade.core import Aggregation, ConfigError, TrainQuery, UpdateError
from fedclade.flower.kinds import SKETCH
from fedclade.flower.models_sent import anchors_of
from fedclade.flower.secure.encoding import digest
from fedclade.flower.secure.norms import NormsByRound
from fedclade.flower.secure.parameters import MOST_COMPLETE, Graph, fewest_holders, quorum, suspects
from fedclade.flower.secure.secrets import Numbers
from fedclade.flower.secure.sums_of_cluster import FEWEST_SUMS
from fedclade.flower.wire import PROTOCOL, Content, T, shown
from fedclade.flower.work_sent import stores_model

if TYPE_CHECKING:  # a client needs no settings of a run
    from fedclade.algorithms import Algorithm
    from fedclade.runs import RunSettings

STAGES = ("keys", "shares", "masked", "agree", "unmask")
"""Kinds of the five requests of a sum, in their order; clients train in the third, ``masked``."""

OF_STAGE = ("instance", "dealt", "sources", "ciphertexts", "promises", "client", "terms")
"""Names of values in the requests of a sum that are not part of the training request."""

OF_QUESTION = ("round", "query", "purpose", "seed", "spec", "replicates", "part_size", "rule")
"""Names of the values of a training request that, with the models, determine a client's update."""

NORM_RULE = (
    "set with secure_aggregation = true: the largest norm of a client's update in parameter units, "
    "to which longer updates are scaled down; use twice the largest max_norm of the first rounds "
    "of a simulation (clusters.parquet), or, without a simulation, 10 for a model that is trained "
    "from scratch"
)

PARTS_RULE = f"1, or at least {FEWEST_SUMS}: of two sums either could be the wrong one"

MOST_CLIENTS = 2**20
"""Largest number of clients in one sum: with more, an entry would have too few steps."""


@dataclass(frozen=True)
class SecureRules:
    """Rules of secure aggregation of a run.

    They are the ``secure_...`` settings of :class:`~fedclade.flower.Network`, without the prefix.
    """

    fewest: int
    colluders: int
    neighbours: int
    norm: float | None = None
    parts: int = 1

    def checks(self, clients: int | None) -> list[tuple[str, object, bool, str]]:
        """Return checks of the rules, in the form that :func:`~fedclade.core.require` takes.

        Parameters
        ----------
        clients
            Number of clients at the start of the run; None if secure aggregation is off.

        Returns
        -------
        list[tuple[str, object, bool, str]]
            For each check: the setting, its value, whether the value is valid, and the expectation.
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
                f"at most network.clients, {most}, since otherwise no sum would be possible",
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
    """Terms of one sum, on which all its clients agree.

    Every mask, share and signature of the sum is bound to the digest of all terms.

    Parameters
    ----------
    instance
        Random name of the sum.
    clients
        Number of clients that are requested to join.
    colluders
        c, the number of clients that may collude with the server.
    neighbours
        k, the number of other clients to which a client deals shares in a sum of many clients; 0
        for all.
    norm, norm_of_buffers
        C, the largest norm of an update of the parameters, and of the buffers.
    weight
        Number of examples at which a client has the largest weight, 1; more examples add no weight.
    training
        Digest of the whole training request: the run, the round, the structure of the model, the
        local training, and the sketch for comparisons (:func:`digest_of`).
    question
        Digest of the values that determine a client's update, which may be part of one unmasked sum
        only (:func:`question_of`).
    model, anchor
        Digests of the model and of the anchor; the digest of the anchor is empty if there is none.
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
        """The terms of the sum as JSON, for a message."""
        return json.dumps(asdict(self), sort_keys=True)

    @cached_property
    def context(self) -> bytes:
        """Digest ctx of the terms, which is part of all secrets and signatures of the sum."""
        return digest("terms", PROTOCOL, *(getattr(self, each.name) for each in fields(self)))

    @classmethod
    def read(cls, content: Content) -> Terms:
        """Read the terms of a sum from a request; raise an UpdateError if they are malformed."""
        told = content.json("terms")
        kinds = {
            **dict.fromkeys(("instance", "training", "question", "model", "anchor"), str),
            **dict.fromkeys(("clients", "colluders", "neighbours", "weight"), int),
            **dict.fromkeys(("norm", "norm_of_buffers"), float),
        }
        if told.keys() != kinds.keys() or any(
            type(told[name]) is not kind for name, kind in kinds.items()
        ):
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
            raise UpdateError(
                f"the terms of a sum should have the keys {expected}, got {shown(told)}"
            )
        terms = cls(**told)
        possible = 2 <= terms.clients <= MOST_CLIENTS and 0 <= terms.colluders < terms.clients
        possible = possible and 0 <= terms.neighbours <= MOST_CLIENTS and 1 <= terms.weight < 2**63
        possible = possible and all(
            0 < norm < math.inf for norm in (terms.norm, terms.norm_of_buffers)
        )
        if not possible:
            raise UpdateError(
                f"the terms of a sum should have 2 to {MOST_CLIENTS} clients, fewer colluders than "
                f"clients, 0 to {MOST_CLIENTS} neighbours, a weight of at least 1, and finite "
                f"norms above 0, got {shown(told)}"
            )
        return terms

    def numbers(self, parameters: int, entries: int) -> Numbers:
        """Return the encoding of updates as integers for the clients of the sum.

        Parameters
        ----------
        parameters
            Number D of parameters of the model.
        entries
            Number S of all entries of the model, parameters and buffers.
        """
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
        """Return the rule by which clients deal shares of their secrets.

        Parameters
        ----------
        members
            Number of clients on the list of the sum.
        insisting
            Number of these clients that insist on secure aggregation.
        """
        return Graph.of(members, suspects(members, insisting, self.colluders), self.neighbours)

    def quorum(self, members: int, insisting: int) -> int:
        """Return the number of clients that must agree to the sum before it is unmasked.

        Parameters
        ----------
        members
            Number of clients on the list of the sum.
        insisting
            Number of these clients that insist on secure aggregation.
        """
        return quorum(members, suspects(members, insisting, self.colluders))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of all values of a training request, for the terms of a sum.

    Values that belong only to the protocol of secure aggregation are left out.
    """
    left_out = (*OF_STAGE, "what")
    told = {name: value for name, value in values.items() if name not in left_out}
    return _digest_of_json("training", told)


def question_of(values: Mapping[str, Any], vectors: Mapping[str, bytes]) -> str:
    """Return a digest of the values and models of a training request that determine an update.

    Clients record this digest, since an update may be part of one unmasked sum only.
    """
    told = {name: values[name] for name in OF_QUESTION if name in values}
    return _digest_of_json("question", told | {"models": [model_of(vectors), anchor_of(vectors)]})


def model_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digest of the model in a training request."""
    return sha256(vectors.get("model", b"")).hexdigest()


def anchor_of(vectors: Mapping[str, bytes]) -> str:
    """Return the digest of the anchor, towards which a proximal term pulls, in a training request.

    The digest is empty if the request has no anchor.
    """
    if "anchor" not in vectors:
        return ""
    return sha256(vectors["anchor"]).hexdigest()


def listed(content: Content, name: str, kind: type[T]) -> list[T]:
    """Return the list ``name`` of a message, whose entries must have the type ``kind``.

    Raises
    ------
    UpdateError
        If the list is missing, or an entry has another type.
    """
    values = content.values.get(name)
    if not isinstance(values, list) or not all(
        type(value) is kind for value in cast("list[Any]", values)
    ):
        raise UpdateError(
            f"the message is malformed: {name!r} should be a list of values of type "
            f"{kind.__name__}, got {shown(values)}"
        )
    return list(cast("Sequence[T]", values))


def _digest_of_json(purpose: str, values: Mapping[str, Any]) -> str:
    """Return the digest of values in JSON form for one purpose, in hexadecimal."""
    return digest(purpose, json.dumps(values, sort_keys=True)).hex()


# Settings of secure aggregation on the server, and a check of the queries that it supports.

Value = TypeVar("Value")


class Asks(Protocol):
    """Interface of a sender of requests to clients, see :class:`~fedclade.flower.GridClients`."""

    def content(
        self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None
    ) -> RecordDict:
        """Return the content of a request of some kind, with plain values and vectors by name."""
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
        """Send requests to clients; yield each client with its parsed reply.

        See :meth:`GridClients.request <fedclade.flower.GridClients.request>`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Members:
    """Registered properties of each client: its number of training examples, and its public key."""

    sizes: Mapping[int, int]
    keys: Mapping[int, str]


@dataclass
class SecureAggregation:
    """Settings and state of secure aggregation in a run.

    Parameters
    ----------
    rules
        Rules of the run.
    compared
        Sketch by which updates are compared; clients send it unmasked.
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
    """Reason of each client that is excluded from further sums because its shares were invalid.

    No sum with such a client could be unmasked.
    """


def check(query: TrainQuery) -> None:
    """Check that the updates of a training query can be added up under secure aggregation.

    Raises
    ------
    ConfigError
        If clients reply with anything else than updates of one model, or if clients with the same
        model have different anchors.
    """
    what = ""
    if query.work.is_gradient:
        what = "gradients"
    elif query.work.mixture is not None:
        what = "the models of a mixture"
    elif stores_model(query.work):
        what = "models of clients"
    if what:
        raise ConfigError(
            "network.secure_aggregation = true supports only updates of one model for each "
            f"cluster, but the algorithm queries {what}; use another algorithm, or leave "
            "network.secure_aggregation out"
        )
    rows = query.models.start
    if len(set(zip(rows, anchors_of(query), strict=True))) > len(set(rows)):
        raise ConfigError(
            "network.secure_aggregation = true requires that all clients that train the same model "
            "have the same anchor in the proximal term, but some of them have different anchors; "
            "use another algorithm, or leave network.secure_aggregation out"
        )


# Checks that a run is possible with secure aggregation, and descriptions of the data that single
# clients disclose in addition to sums.

REVEALS = {
    SKETCH: (
        "the signs of {dim} random projections of each update that is compared: {dim} bits of it, "
        "and cosines between clients to about {error:.2f}"
    ),
    "statistics": (
        "means and squared deviations of each client's inputs, and how many examples of each label "
        "it has"
    ),
    "choice": "which of the models has the lowest loss on each client's training data, once a round",
    "descriptors": "means and directions of each client's inputs in the feature space of a model",
    "subspaces": "directions of each client's inputs, which are close to the means of inputs",
}
"""Description of the data for each name in the setting ``disclose`` of a client's policy."""


def with_signs(settings: RunSettings) -> RunSettings:
    """Return a run's settings in which clients are compared only by the signs of projections.

    Under secure aggregation the server can compare only signs of random projections of updates,
    which clients send in clear.
    """
    if settings.signature.kind != "projected":
        return settings
    return replace(settings, signature=replace(settings.signature, kind="signs"))


def disclosures_of(
    settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False
) -> dict[str, str]:
    """Return the data that single clients must disclose in a run with secure aggregation.

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
    names = list(algorithm.requires.disclosures)
    if algorithm.requires.signatures:
        names.insert(0, SKETCH)
    if statistics:
        names.append("statistics")
    dim = settings.signature.dim
    return {
        name: REVEALS.get(name, name).format(dim=dim, error=math.pi / (2 * math.sqrt(dim)))
        for name in names
    }


def announcement(settings: RunSettings, algorithm: Algorithm, *, statistics: bool = False) -> str:
    """Return the server's warning about data that clients must disclose in addition to sums.

    The warning is empty if clients need not disclose such data. The parameters are those of
    :func:`disclosures_of`.
    """
    disclosed = disclosures_of(settings, algorithm, statistics=statistics)
    if not disclosed:
        return ""
    told = "; ".join(f"{name}: {what}" for name, what in disclosed.items())
    return (
        f"this run of {type(algorithm).__name__} needs more data of each client than sums "
        f"({told}); a client with "
        f'secure-aggregation=true can join only with disclose="{" ".join(disclosed)}" in its node config'
    )


def check_sums(
    settings: RunSettings, algorithm: Algorithm, clients: int = 0, *, parts: int = 1
) -> None:
    """Check that a run is possible with secure aggregation, which gives only sums of updates.

    Parameters
    ----------
    settings
        Settings of the run.
    algorithm
        Algorithm of the run.
    clients
        Number of clients of the run.
    parts
        Number of sums for each cluster, since robust rules need several sums.

    Raises
    ------
    ConfigError
        If the run is not possible; the error has one line for each reason.
    """
    name = type(algorithm).__name__
    problems = list[str]()
    requires = algorithm.requires
    asked = requires.reports_in(clients, settings.client_fraction)
    if settings.aggregate.weights != "auto":
        problems.append(
            "aggregate.weights cannot be set with network.secure_aggregation, in which clients "
            "weigh their own updates; leave aggregate.weights out"
        )
    if requires.updates:
        problems.append(
            f"{name} needs the updates of single clients; use another algorithm, or leave "
            "network.secure_aggregation out"
        )
    elif requires.signatures and settings.signature.kind == "full":
        problems.append(
            f"{name} would compare whole updates, which clients would have to send unmasked; set "
            "signature.kind = 'projected'"
        )
    elif requires.signatures and requires.lengths:
        problems.append(
            f"{name} compares the norms of updates, but signs of sketches give only their "
            "directions; set algorithm.metric = 'cosine'"
        )
    if requires.gradients:
        problems.append(
            f"{name} queries gradients, which clients would send unmasked; configure it to use "
            "updates instead"
        )
    if asked and not requires.disclosures:
        problems.append(
            f"{name} queries {asked} of each client, which reveal its training data; use another "
            "algorithm or other settings (docs/secure-aggregation.md has a table of methods), or "
            "leave network.secure_aggregation out"
        )
    if settings.aggregate.is_robust and parts == 1:
        rule = settings.aggregate.rule
        problems.append(
            f"aggregate.rule = {rule!r} needs the updates of single clients, or several sums for "
            "each cluster; set network.secure_parts to at least 3, or leave aggregate.rule out"
        )
    if settings.aggregate.leave_out_opposed is True:
        problems.append(
            "aggregate.leave_out_opposed = true needs the updates of single clients; leave it out"
        )
    if settings.aggregate.clip_above not in ("auto", math.inf):
        problems.append(
            "the server cannot scale down single updates of a sum; leave aggregate.clip_above out"
        )
    if settings.stream is False:
        problems.append(
            "the server stores only sums of updates, as in a streaming run; leave stream = false "
            "out"
        )
    if problems:
        raise ConfigError(
            "\n".join(f"network.secure_aggregation = true: {problem}" for problem in problems)
        )


# Choice of the clients that receive shares of a client's secrets.


def draw_holders(client: int, members: Sequence[int], graph: Graph) -> list[int]:
    """Return the holders of a client's shares: the other clients to which it deals shares.

    They are all other clients, or a random selection of the size that ``graph`` states. The client
    draws them with randomness of the operating system after it has received the list. So neither
    the server nor other clients can choose the holders, or try lists until a draw suits them.

    Parameters
    ----------
    client
        Number of the client that deals shares.
    members
        All clients on the list of the sum.
    graph
        Rule for dealing shares.

    Returns
    -------
    list[int]
        Holders in ascending order.
    """
    others = [member for member in members if member != client]
    if graph.holders == 0:
        return others
    return sorted(secrets.SystemRandom().sample(others, graph.holders))
