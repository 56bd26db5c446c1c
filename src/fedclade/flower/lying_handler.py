"""An adversary over a network: a client that lies, to try what a federation makes of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from flwr.app import RecordDict
from torch import nn

from fedclade.channel import Adversary, Lying
from fedclade.core import Round, require
from fedclade.data import Backdoor, Federation, LabelFlip, poisoned
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.keys import Key
from fedclade.flower.wire import Content
from fedclade.runs import Maker


class _LyingToServer(Lying):
    def claims(self, this_round: Round) -> int | None:
        """Return what it says; of equal parts the truth, as a server knows how many examples it has asked for."""
        return None if this_round.part_size else super().claims(this_round)


class LyingHandler(ClientHandler):
    """A :class:`ClientHandler` that is an adversary, whatever its ``share``.

    It knows no other client, so it can neither go by their updates, nor see when its cluster has gone apart; and γ of
    its backdoor is 1 by default. A ConfigError says so. Queries for scores, subspaces and descriptors name no round:
    its answers to them are false once it has trained in the round that it begins in, or from the start if that is the
    first.
    """

    def __init__(
        self, federation: Federation, model: nn.Module | str | Maker, *, adversary: Adversary, **settings: Any
    ) -> None:
        kind, rule = adversary.kind, "one that needs no other clients, where each is alone"
        is_adversary = bool(kind or adversary.lies)
        require(
            ("adversary.kind", kind, is_adversary and not adversary.knowing and adversary.cluster is None, rule),
            ("adversary.sleeper", adversary.sleeper, not adversary.sleeper, "false over a network; set from_round"),
        )
        self._adversary = adversary
        self._lying = _LyingToServer(adversary, federation.ids, federation.keys)
        self._lying.begin(1)
        super().__init__(federation, model, **settings)
        self._client_side = partial(self._client_side, lying=self._lying)
        if self._trainer.needs_all:  # its sums were those of an honest client until now
            self._sums = self._clients().ask(self._trainer.needs)

    def answer(self, content: Content, state: RecordDict | None = None, key: Key | None = None) -> RecordDict:
        """Return the answer to a query, which may be a lie from some round on; see :class:`ClientHandler`."""
        if content.get("what", str) in ("train", "gradients", "masked", "shifts"):
            self._lying.begin(content.get("round", int))
        return super().answer(content, state, key)

    def _held(self, federation: Federation) -> Federation:
        """Return its data, with what it holds poisoned."""
        if self._adversary.kind == "label_flip":
            return poisoned(federation, federation.ids, LabelFlip.of(federation.pool), 0)
        if self._adversary.kind == "backdoor":
            options = (self._adversary.option(name) for name in ("target", "patch", "poisoned"))
            return poisoned(federation, federation.ids, Backdoor.of(federation.pool, *options), 0)
        return federation
