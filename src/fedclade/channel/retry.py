"""Who answered, query by query: whom a round leaves out, who is asked again, and when nobody is left to go on with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from fedclade.core import (
    DROPPED_OUT,
    NOT_ASKED,
    TOO_LATE,
    Clients,
    ClientsWrapper,
    Evaluation,
    Event,
    Round,
    Split,
    UpdateError,
    Updates,
)

RETRIES = 2
"""How often clients are asked again where nobody answered, or everybody is needed."""

T = TypeVar("T")


class AttendedClients(ClientsWrapper):
    """Clients whose answers the server counts.

    A query that nobody answers is put again, and so is, to those who did not answer, one that insists on everybody.
    Algorithms get what came, be it nothing at all; only a round in which no answer arrived to any query is an error.

    Parameters
    ----------
    clients
        Those who do the work, through all that wraps them.
    retries
        How often a query is put again.
    tells_releases
        Whether a round tells who sent how many updates, usable or not: what private clients spend.
    """

    def __init__(self, clients: Clients, retries: int = RETRIES, tells_releases: bool = False) -> None:
        super().__init__(clients)
        self._retries = retries
        self._tells_releases = tells_releases
        self._begin()

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; return the updates Δθ_i of those that answer, in the order asked."""

        def train(some: Sequence[int], this_query: Round) -> Updates:
            pulled_to = anchors and _of(some, ids, anchors)
            return self._clients.train(some, models, _of(some, ids, assignment), this_query, pulled_to)

        return self._answers(train, ids, this_round, this_round.purpose)

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients of those that answer, in the order asked."""

        def gradients(some: Sequence[int], this_query: Round) -> Updates:
            return self._clients.gradients(some, models, _of(some, ids, assignment), this_query)

        return self._answers(gradients, ids, this_round, "gradients")

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data; tell of those that do not answer."""
        evaluation = self._clients.evaluate(ids, models, assignment, split)
        if evaluation.left_out:
            self._events.append(_left_out(f"evaluate on {split} data", evaluation.left_out))
        if split == "train":  # which a round is made of; scores only tell of it
            self._evaluations += 1
            self._awaited = True
            self._heard |= {True} if evaluation.ids else set()
            self._left_out |= evaluation.left_out
        return evaluation

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs, and ask those again who do not answer; ``[n, L, d, p]``."""
        vectors = self._clients.subspaces(ids, n_vectors, per_label)
        for _ in range(self._retries):
            if not (absent := _silent(vectors)):
                break
            vectors = vectors.clone()
            vectors[absent] = self._clients.subspaces([ids[i] for i in absent], n_vectors, per_label)
        if absent := _silent(vectors):
            self._events.append(_left_out("subspaces", dict.fromkeys((ids[i] for i in absent), DROPPED_OUT)))
        return vectors

    def closed(self, number: int) -> tuple[Event, ...]:
        """End the step of a round; return what there is to tell of who was left out of it.

        Raises
        ------
        UpdateError
            If clients were asked, and none answered; names the round, the query and the reasons.
        """
        queries, left_out = self._queries + self._evaluations, self._left_out
        silent = queries > 0 and self._awaited not in self._heard
        events = self.told()
        if silent:
            raise UpdateError(f"round {number}: nobody answered, though asked {queries} times: {_told(left_out)}")
        return events

    def told(self) -> tuple[Event, ...]:
        """Return what there is to tell since the last time, as of an evaluation after the step, and begin anew."""
        events = (*self._events, *self._releases())
        self._begin()
        return events

    def _begin(self) -> None:
        self._events: list[Event] = []
        self._sent: Counter[int] = Counter()
        self._queries = self._evaluations = 0  # apart, since the number of a query keys its faults
        self._awaited = False
        self._heard: set[bool] = set()
        self._left_out: dict[int, str] = {}

    def _releases(self) -> list[Event]:
        if not (self._tells_releases and self._sent):
            return []
        return [Event("released", 0, {"clients": {str(client): self._sent[client] for client in sorted(self._sent)}})]

    def _answers(
        self, ask: Callable[[Sequence[int], Round], Updates], ids: Sequence[int], this_round: Round, query: str
    ) -> Updates:
        updates = self._asked(ask, ids, this_round)
        for _ in range(self._retries):
            absent = [client for client in ids if client in updates.left_out]
            if not absent or (updates.ids and not this_round.insists):
                break
            more = self._asked(ask, absent, this_round)
            self._events.append(
                Event("retried", 0, {"query": query, "clients": len(absent), "answered": len(more.ids)})
            )
            updates = updates.joined(more).of(ids)
        if updates.left_out:
            self._events.append(_left_out(query, updates.left_out))
        # What clients do at home is no answer to a server that awaits one; where nothing travels, it is all there is.
        travels = this_round.travels != "nothing"
        self._awaited |= travels
        self._heard |= {travels} if updates.ids else set()
        self._left_out |= updates.left_out
        return updates

    def _asked(self, ask: Callable[[Sequence[int], Round], Updates], ids: Sequence[int], this_round: Round) -> Updates:
        """Put one query; who neither answers nor is said to be left out has dropped out."""
        updates = ask(ids, replace(this_round, query=self._queries))
        self._queries += 1
        if this_round.travels != "nothing":
            self._sent.update(updates.senders * this_round.replicates)
        known = {*updates.ids, *updates.left_out}
        silent = {client: DROPPED_OUT for client in ids if client not in known}
        return replace(updates, left_out={**updates.left_out, **silent}) if silent else updates


def _left_out(query: str, why: Mapping[int, str]) -> Event:
    named = {str(client): why[client] for client in sorted(why)}  # as JSON has it
    return Event("left_out", 0, {"query": query, "clients": named})


def _silent(vectors: Tensor) -> list[int]:
    """Return whose subspaces, of ``[n, L, d, p]``, did not come: a client that answers has one vector at least."""
    return (~vectors.flatten(1).any(dim=1)).nonzero().flatten().tolist()


def _of(some: Sequence[int], ids: Sequence[int], values: Sequence[T]) -> Sequence[T]:
    """Return the values of some of the clients, given those of all."""
    if len(some) == len(ids):
        return values
    value_of = dict(zip(ids, values, strict=True))
    return [value_of[client] for client in some]


def _told(left_out: dict[int, str]) -> str:
    """Say why clients were left out: each kind of reason once, with one client's numbers and how many are like it."""
    kinds: dict[str, list[int]] = {}
    for client, why in left_out.items():
        kinds.setdefault(re.sub(r"\d[\d.e+]*", "#", why), []).append(client)
    told = [
        f"client {who[0]}: {left_out[who[0]]}" + (f" (and {len(who) - 1} more like it)" if who[1:] else "")
        for who in sorted(kinds.values(), key=len, reverse=True)
    ]
    absent = all(why.startswith((DROPPED_OUT, TOO_LATE, NOT_ASKED)) for why in left_out.values())
    advice = "raise client_fraction to ask more of them" if absent else "if training diverged, lower local.lr"
    return f"{'; '.join(told)}; {advice}"
