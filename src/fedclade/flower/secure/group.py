"""What the server knows of one sum, and how it takes the masks off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedclade.core import NOT_ASKED, UpdateError
from fedclade.flower.secure.adverts import Advert
from fedclade.flower.secure.graph import neighbours_of
from fedclade.flower.secure.numbers import Numbers
from fedclade.flower.secure.secrets import Masked, agreed, combined, is_key_of, is_seed_of, mask
from fedclade.flower.secure.terms import SecureRules, Terms


class BadSharesError(UpdateError):
    """One client's secret could not be put together from the shares that others hold of it."""

    def __init__(self, client: int, what: str, shares: int, needed: int) -> None:
        self.client = client
        super().__init__(
            f"the {what} of client {client} could not be put together from {shares} shares, {needed} of which should do"
        )


@dataclass
class Group:
    """The clients that were sent one model, and what they have answered so far. Who has not is no longer ``alive``.

    Parameters
    ----------
    row
        Of the model.
    alive
        The clients that have answered every question so far.
    """

    row: int
    alive: list[int]
    terms: Terms
    adverts: dict[int, Advert] = field(default_factory=dict[int, Advert])
    neighbours: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    ciphertexts: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])  # from, to
    masked: dict[int, Masked] = field(default_factory=dict[int, Masked])
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])  # of, held by

    def draw_neighbours(self, rules: SecureRules) -> None:
        """Settle who shares masks with whom, once it is known who takes part."""
        self.neighbours = neighbours_of(self.alive, rules.neighbours)

    def sources(self, client: int) -> list[int]:
        """Return those whose shares a client is given: it then shares a mask with each of them."""
        return [other for other in self.neighbours[client] if client in self.ciphertexts.get(other, {})]

    def standing(self, client: int) -> tuple[list[int], list[int]]:
        """Return of a client and those it shares masks with who has sent an update, and who has not."""
        partners = sorted([client, *self.sources(client)])
        return [c for c in partners if c in self.masked], [c for c in partners if c not in self.masked]

    def needed(self, client: int) -> int:
        """Return how many shares a client's secrets are put together from."""
        return self.terms.needed(len(self.neighbours[client]) + 1)

    def too_few(self, rules: SecureRules) -> str:
        """Say why the sum cannot go on with those that are alive; nothing if it can."""
        few, asked = len(self.alive), self.terms.clients
        if few < rules.fewest:
            return (
                f"{few} of the {asked} clients of its cluster answered, and a sum is of at least {rules.fewest} "
                "(network.secure_fewest)"
            )
        here = set(self.alive)
        for client in self.neighbours:  # also of those that are gone: their masks have to come off
            holders = here.intersection([*self.neighbours[client], client])
            if client in self.ciphertexts and 0 < len(holders) < self.needed(client):
                return (
                    f"{few} of the {asked} clients of its cluster answered, and {self.needed(client)} of those that "
                    "hold shares of a client's secrets are needed (network.secure_threshold)"
                )
        return ""

    def total(self) -> Tensor:
        """Return the sum of all updates that came, float64 ``[S]``, weighted as the terms say.

        An UpdateError says that it cannot be had: a :class:`BadSharesError` whose secret is missing.
        """
        context, trusted = self.terms.context, ()
        active, size = sorted(self.masked), len(next(iter(self.masked.values())))
        total = np.zeros(size, dtype=np.uint32)
        for client in active:
            total += self.masked[client]
        for client in active:
            seed, trusted = self._secret(client, "seed", trusted, is_seed_of(self.adverts[client].commitment, context))
            total -= mask(seed, context, size)
        for client in sorted(set(self.ciphertexts) - set(active)):
            partners = [other for other in active if client in self.sources(other)]
            if not partners:
                continue
            key, trusted = self._secret(client, "key", trusted, is_key_of(self.adverts[client].masking))
            for other in partners:  # what each has put on for the pair
                pairwise = mask(agreed(key, self.adverts[other].masking), context, size)
                total = total - pairwise if other > client else total + pairwise
        terms = self.terms
        return Numbers(terms.clip, terms.clients).decode(total, len(active)) * terms.weight

    def _secret(
        self, client: int, what: str, trusted: Sequence[int], holds: Callable[[bytes], bool]
    ) -> tuple[bytes, tuple[int, ...]]:
        shares, needed = self.shares.get(client, {}), self.needed(client)
        if len(shares) < needed:
            raise UpdateError(
                f"{len(shares)} clients have told what they hold of client {client}'s {what}, and {needed} are needed "
                "to take the masks off (network.secure_threshold)"
            )
        found = combined(shares, needed, holds, trusted)
        if found is None:
            raise BadSharesError(client, what, len(shares), needed)
        return found


def too_small(clients: int, fewest: int) -> str:
    """Say why a group is not asked at all."""
    return (
        f"{NOT_ASKED}: its cluster's {clients} clients in this round are fewer than a sum is of, {fewest} "
        "(network.secure_fewest)"
    )


def by_row(ids: Sequence[int], assignment: Sequence[int]) -> Mapping[int, list[int]]:
    """Return the clients that are sent each model."""
    groups: dict[int, list[int]] = {}
    for client, row in zip(ids, assignment, strict=True):
        groups.setdefault(row, []).append(client)
    return groups
