"""At the client: updates clipped for a sum, and questions about them answered; see :mod:`fedclade.channel.central`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import scipy
import torch
from torch import Tensor

from fedclade.channel.accounting import share_at_random
from fedclade.channel.central import CentralPrivacy
from fedclade.channel.middleware import Middleware
from fedclade.channel.privacy import DifferentialPrivacy, Noise
from fedclade.core import Ask, Choice, Question, Round, UpdateQuery, Updates


@dataclass
class Answering(Middleware):
    """At the client: clips what goes into a sum, counts each client once, and answers questions about updates.

    Without privacy updates pass, and answers are exact. A client trains once for all questions of a round.
    """

    privacy: CentralPrivacy | None = None
    noise: Noise | None = None
    _kept: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _of: tuple[Any, ...] = ()
    _told: dict[int, int] = field(default_factory=dict[int, int])
    _choice: Choice | None = None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return clipped updates, or replies to the question."""
        if query.question is not None:
            return self._answered(query, query.question, ask)
        updates = ask(query)
        if self.privacy is None:
            return updates
        withheld = torch.full_like(updates.losses, math.nan)
        if query.kind == "train" and not query.round.sends_updates:
            return replace(updates, losses=withheld)
        clipping = DifferentialPrivacy(clip_norm=self.privacy.clip_norm)
        deltas = torch.empty_like(updates.required_deltas)
        for row, update in zip(deltas, updates.required_deltas, strict=True):
            row.copy_(clipping.released(update, torch.zeros(1)))
        return replace(updates, deltas=deltas, sizes=torch.ones_like(updates.sizes), losses=withheld)

    def _answered(self, query: UpdateQuery, question: Question, ask: Ask) -> Updates:
        of = (query.round.seed, query.round.number, query.round.purpose, question.seed, question.dim)
        if of != self._of:
            self._kept, self._of, self._choice = {}, of, None
        missing = [client for client in query.ids if client not in self._kept]
        left_out: Mapping[int, str] = {}
        if missing:
            made = ask(replace(query.select(missing), question=None, sink=None))
            signatures = question.signatures(made.required_deltas[:, : made.n_parameters])
            self._kept |= dict(zip(made.ids, signatures, strict=True))
            left_out = made.left_out
        ids = tuple(client for client in query.ids if client in self._kept)
        R = question.dim
        u = torch.stack([self._kept[c] for c in ids]) if ids else torch.zeros(0, R, dtype=torch.float64)
        answers, ones = question.answered(u), torch.ones(len(ids), dtype=torch.float64)
        choices = None
        if not question.sums:
            choices = self._reported(question, answers.cpu(), ids, query.round)
            answers = u[:, :0]
        return Updates(
            ids=ids,
            sizes=ones,
            losses=torch.full((len(ids),), math.nan if self.privacy else 0.0),
            norms=torch.zeros(len(ids), dtype=torch.float64),
            n_parameters=answers.shape[1],
            deltas=answers,
            components=choices,
            left_out=left_out,
        )

    def _reported(self, question: Question, choices: Tensor, ids: tuple[int, ...], this_round: Round) -> Tensor:
        """Return choices by randomized response; to the same question asked again, the same: that is one release."""
        assert isinstance(question, Choice)
        if self._choice is None or not question.is_same(self._choice):
            self._choice, self._told = question, {}
        new = [place for place, client in enumerate(ids) if client not in self._told]
        if new:
            some = tuple(ids[place] for place in new)
            self._told |= dict(
                zip(some, self._responded(choices[new], some, question.options, this_round).tolist(), strict=True)
            )
        return torch.tensor([self._told[client] for client in ids], dtype=torch.int64)

    def _responded(self, choices: Tensor, ids: tuple[int, ...], options: int, this_round: Round) -> Tensor:
        """Return choices by randomized response: some clients', at random, are drawn from all options."""
        epsilon = None if self.privacy is None else self.privacy.signature_epsilon
        if epsilon is None or self.noise is None:
            return choices
        share, told = share_at_random(epsilon, options), choices.clone()
        for place, client in enumerate(ids):
            noise = self.noise(2, client, this_round, "choices")
            whether, which = scipy.special.ndtr(noise.numpy())
            if whether < share:
                told[place] = min(int(which * options), options - 1)
        return told
