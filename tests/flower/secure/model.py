"""The protocol in symbols: a server that lies shows clients whatever it likes, and learns what can be computed.

An honest client's vector is its update and its own mask and one for each other client in its D. A
mask is known to the server if the secret behind it is opened: enough holders have given a share of
it, colluding clients among them. Of each mask that stays unknown, one or two vectors have a part.
So a combination of vectors without unknown masks gives all clients of a component the same factor.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedclade.flower.secure.parameters import quorum

LEAST_HONEST = 3


@dataclass(frozen=True)
class Rules:
    """Which of the protocol's rules clients keep.

    Parameters
    ----------
    one_statement
        Shares are given if T clients have signed the same D and A.
    binds_list
        Shares, masks and statements belong to one list.
    same_dealt
        A client agrees if those whose shares it holds have signed the same D.
    needs_quorum
        T shares open a secret; otherwise one more than there are colluders.
    """

    one_statement: bool = True
    binds_list: bool = True
    same_dealt: bool = True
    needs_quorum: bool = True


@dataclass(frozen=True)
class View:
    """What the server shows to one honest client: the list, D, and A."""

    members: frozenset[int]
    dealt: frozenset[int]
    active: frozenset[int]


@dataclass(frozen=True)
class Model:
    """One sum: its honest clients are those with a view, the others collude."""

    views: dict[int, View]
    colluders: int
    rules: Rules

    def learned(self) -> list[set[int]]:
        """Return the sets of honest clients of which the server learns the sum of updates."""
        masked = [client for client in self.views if self._masks(client)]
        agreeing = [client for client in masked if self._agrees(client, masked)]
        giving = [client for client in agreeing if self._is_opened(client, agreeing)]
        seeds = {client for client in masked if self._has(client, masked, giving, is_seed=True)}
        keys = {client for client in masked if self._has(client, masked, giving, is_seed=False)}
        return self._components(masked, seeds, keys)

    def _n(self, client: int) -> int:
        return len(self.views[client].members)

    def _needed(self, client: int) -> int:
        return (
            quorum(self._n(client), self.colluders)
            if self.rules.needs_quorum
            else self.colluders + 1
        )

    def _masks(self, client: int) -> bool:
        view = self.views[client]
        long_enough = len(view.members) >= self.colluders + LEAST_HONEST
        return long_enough and client in view.dealt and len(view.dealt) >= self._needed(client)

    def _holds(self, holder: int, dealer: int) -> bool:
        """Return whether an honest holder can read an honest dealer's shares."""
        mine, theirs = self.views[holder], self.views[dealer]
        if self.rules.binds_list and mine.members != theirs.members:
            return False
        return holder in theirs.members and dealer in mine.dealt

    def _agrees(self, client: int, masked: Collection[int]) -> bool:
        view = self.views[client]
        least = max(quorum(self._n(client), self.colluders), self.colluders + LEAST_HONEST)
        if client not in view.active or not view.active <= view.dealt or len(view.active) < least:
            return False
        if not self.rules.same_dealt:
            return True
        honest = [other for other in view.active if other in self.views]
        held = [other for other in honest if self._holds(client, other)]
        return all(other in masked and self._are_alike(client, other) for other in held)

    def _are_alike(self, client: int, other: int) -> bool:
        mine, theirs = self.views[client], self.views[other]
        same_list = mine.members == theirs.members or not self.rules.binds_list
        return same_list and mine.dealt == theirs.dealt

    def _is_opened(self, client: int, agreeing: Collection[int]) -> bool:
        """Return whether a client is shown enough agreements; colluders sign everything."""
        if not self.rules.one_statement:
            return True
        view = self.views[client]
        signers = sum(
            self._are_alike(client, other) and self.views[other].active == view.active
            for other in agreeing
        )
        signers += sum(member not in self.views for member in view.active)
        return signers >= quorum(self._n(client), self.colluders)

    def _has(
        self, dealer: int, masked: Sequence[int], giving: Collection[int], *, is_seed: bool
    ) -> bool:
        """Return whether the server has enough shares of a client's seed or key."""
        count = sum(member not in self.views for member in self.views[dealer].members)
        for holder in giving:
            gives_seed = dealer in self.views[holder].active
            count += self._holds(holder, dealer) and gives_seed == is_seed
        return count >= self._needed(dealer)

    def _components(self, masked: Sequence[int], seeds: set[int], keys: set[int]) -> list[set[int]]:
        component = {client: {client} for client in masked}
        grounded = {client for client in masked if client not in seeds}
        for client in masked:
            for other in self.views[client].dealt - {client}:
                is_known = other not in self.views or client in keys or other in keys
                if is_known:
                    continue
                if other in masked and self._share_a_mask(client, other):
                    if component[client] is not component[other]:
                        component[client] |= component[other]
                        for each in component[other]:
                            component[each] = component[client]
                else:
                    grounded.add(client)
        whole = {id(each): each for each in component.values()}.values()
        return [each for each in whole if not each & grounded]

    def _share_a_mask(self, client: int, other: int) -> bool:
        mine, theirs = self.views[client], self.views[other]
        same_list = mine.members == theirs.members or not self.rules.binds_list
        return same_list and client in theirs.dealt


def draw_model(draw: random.Random, honest: int, colluders: int, rules: Rules) -> Model:
    """Return what a random strategy of the server comes to.

    It draws two lists, one or two sets D of each, and for each of these up to three sets A, the
    first of which is of those to which it shows that list and that D.
    """
    everybody = frozenset(range(honest + colluders))
    kept = draw.choice((0.5, 0.7, 0.9))

    def some(of: Collection[int]) -> frozenset[int]:
        return frozenset(client for client in of if client >= honest or draw.random() < kept)

    lists = [some(everybody) if draw.random() < 0.7 else everybody for _ in range(2)]
    dealt_of = {members: [members, some(members)][: draw.choice((1, 2))] for members in lists}
    choices = draw.choice((1, 2, 3))
    shown: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
    for client in range(honest):
        members = draw.choice([each for each in lists if client in each] or [everybody])
        dealt = draw.choice(
            [each for each in dealt_of.get(members, []) if client in each] or [members]
        )
        shown[client] = members, dealt
    views: dict[int, View] = {}
    active_of: dict[object, list[frozenset[int]]] = {}
    for client, (members, dealt) in shown.items():
        alike = {other for other in shown if shown[other] == (members, dealt)}
        spoilers = {member for member in dealt if member >= honest}
        options = [frozenset(alike | spoilers), some(dealt), dealt][:choices]
        options = active_of.setdefault((members, dealt), options)
        mine = [each for each in options if client in each]
        views[client] = View(members, dealt, draw.choice(mine))
    return Model(views, colluders, rules)
