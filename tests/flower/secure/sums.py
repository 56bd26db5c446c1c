"""A sum without a grid: clients of the protocol alone, whose updates are given, and answers that can be spoilt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fedclade import LocalTraining
from fedclade.channel import Limiting, NoSketch, Sketch
from fedclade.core import (
    ClientWork,
    FedcladeError,
    Limits,
    Models,
    Round,
    TrainQuery,
    UpdateError,
    Updates,
)
from fedclade.flower import wire
from fedclade.flower.models_sent import ModelsSent, training_values
from fedclade.flower.policy import Policy
from fedclade.flower.secure.member import Member, SumState
from fedclade.flower.secure.norms import NormsByRound
from fedclade.flower.secure.secrets import digest_of_numbers
from fedclade.flower.secure.server import secure_updates
from fedclade.flower.secure.terms import Members, SecureAggregation, SecureRules
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content
from tests.flower.grids import with_words, words_of

D, S = 40, 42
"""Parameters, and entries with two buffers."""

LONGEST = 20.0
"""C, that no update of a test exceeds."""

RULES = SecureRules(fewest=3, colluders=1, neighbours=0, norm=LONGEST)


@dataclass
class Party:
    """A client: ``beside`` leaves unmasked behind its update."""

    client: int
    size: int = 10
    beside: int = 0
    policy: Policy = field(default_factory=lambda: Policy(min_honest=2))
    peers: Mapping[str, int] | None = None
    key: Key = field(default_factory=Key.new)
    state: RecordDict = field(default_factory=RecordDict)
    folder: Path | None = None
    loss: float = 0.5
    scale: float = 1.0
    failure: Exception | None = None
    update_seed: int | None = None

    @property
    def update(self) -> Tensor:
        seed = self.client if self.update_seed is None else self.update_seed
        return self.scale * torch.randn(S, generator=torch.Generator().manual_seed(seed))

    def answer(self, content: Content) -> RecordDict:
        member = Member(self.policy, self.peers, self.folder)
        kind = content.get("what", str)
        if kind == "masked":
            return member.masked(content, self.state, self.key, train=self._train, shape=(D, S))
        if kind == "unmask":
            return member.unmask(content, self.state)
        answers = {"keys": member.keys, "shares": member.shares, "agree": member.agree}
        return answers[kind](content, self.state, self.key)

    def _train(self, content: Content) -> Updates:
        assert content.get("what", str) == "train"
        if self.failure is not None:
            raise self.failure
        beside = torch.full((1, self.beside), float(self.client))
        one = torch.ones(1, dtype=torch.float64)
        return Updates.of(
            ids=(self.client,),
            sizes=self.size * one,
            losses=self.loss * one,
            norms=one,
            n_parameters=D,
            deltas=self.update[None],
            sketches=beside,
        )


Spoil = Callable[[RecordDict], RecordDict | None]
"""Changes an answer; None: there is none."""


@dataclass
class Room:
    """Where all clients sit, and may be asked: what comes back can be spoilt, by client and question."""

    parties: dict[int, Party]
    spoilt: dict[tuple[int, str], Spoil] = field(default_factory=dict[tuple[int, str], Spoil])
    sums: int = 0
    asked: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    seeds: dict[int, bytes] = field(default_factory=dict[int, bytes])
    questions: dict[tuple[int, str], Content] = field(
        default_factory=dict[tuple[int, str], Content]
    )
    answers: dict[tuple[int, str], Content] = field(default_factory=dict[tuple[int, str], Content])

    @classmethod
    def of(cls, count: int, **settings: Any) -> Room:
        return cls({k: Party(k, size=10 + k, **settings) for k in range(count)})

    def content(
        self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None
    ) -> RecordDict:
        return wire.record({"what": kind, **values, "layout": "l", "run": "r"}, vectors)

    def request(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        group: str,
        read: Callable[[int, Content], Any],
        left_out: dict[int, str],
        largest: int = 0,
    ) -> Iterator[tuple[int, Any]]:
        for client, record in contents.items():
            question = Content.of(record)
            what = question.get("what", str)
            self.asked.setdefault(what, []).append(client)
            self.questions[client, what] = question
            try:
                answer = self.parties[client].answer(question)
                if what == "shares":
                    self.seeds[client] = self.parties[client].state.config_records[
                        "fedclade.secure"
                    ]["seed"]  # pyright: ignore
                spoilt = self.spoilt.get((client, what), lambda honest: honest)(answer)
                if spoilt is None:
                    raise UpdateError("dropped out")
                self.answers[client, what] = Content.of(spoilt)
                with wire.untrusted():
                    found = read(client, self.answers[client, what])
            except FedcladeError as error:
                left_out[client] = str(error)
            else:
                yield client, found

    def drop(self, client: int, what: str) -> None:
        self.spoilt[client, what] = lambda honest: None

    def put(self, client: int, data: bytes) -> None:
        """Let a client sign and send another masked vector than its own."""

        def spoil(honest: RecordDict) -> RecordDict:
            party = self.parties[client]
            kept = SumState(**dict(party.state.config_records["fedclade.secure"]))  # pyright: ignore
            statement = kept.statements.masked(client, digest_of_numbers(data))
            vectors = ArrayRecord({"masked": wire.raw(data, "uint8", len(data))})
            signed = worded(honest, signature=party.key.private.sign(statement))
            return RecordDict({**signed, "vectors": vectors})

        self.spoilt[client, "masked"] = spoil

    def say(self, client: int, what: str, **values: Any) -> None:
        self.spoilt[client, what] = lambda honest: worded(honest, **values)


def worded(honest: RecordDict, **values: Any) -> RecordDict:
    """Return an answer with other plain values."""
    return with_words(honest, words_of(honest) | values)


def query_of(
    assignment: Sequence[int],
    this_round: Round | None = None,
    work: ClientWork | None = None,
    anchors: Sequence[int] | None = None,
) -> TrainQuery:
    vectors = torch.arange(float(max(assignment) + 1))[:, None] + torch.zeros(1, S)
    vectors[:, D:] += 5.0
    models = Models(vectors, list(assignment), anchors)
    this_round = this_round or Round(1, LocalTraining(lr=0.1))
    return TrainQuery(range(len(assignment)), models, this_round, work or ClientWork())


def setting_of(
    rules: SecureRules = RULES,
    compared: Sketch | None = None,
    weight: float = math.inf,
    **settings: Any,
) -> SecureAggregation:
    limiting = Limiting(Limits(weight), D, lambda: {k: 10 + k for k in range(9)})
    norms = NormsByRound(rules.norm or LONGEST)
    return SecureAggregation(rules, compared or NoSketch(), limiting, norms, **settings)


def summed(
    room: Room,
    assignment: Sequence[int],
    setting: SecureAggregation | None = None,
    query: TrainQuery | None = None,
    sketch: Sketch | None = None,
) -> Updates:
    """Return what the server gets of all clients, each with a model; each time the question is another one."""
    query = query or query_of(assignment)
    room.sums += 1
    query = replace(query, round=replace(query.round, seed=room.sums))
    setting, sent = setting or setting_of(), ModelsSent.of(query)
    sizes = {client: party.size for client, party in room.parties.items()}
    keys = {client: party.key.public for client, party in room.parties.items()}
    values = training_values(query, sketch)
    return secure_updates(setting, room, query, sent, values, Members(sizes, keys), D)


def expected(room: Room, clients: Sequence[int]) -> Tensor:
    """Return Σ |D_i| Δθ_i of some clients."""
    return torch.stack([room.parties[c].size * room.parties[c].update for c in clients]).sum(0)
