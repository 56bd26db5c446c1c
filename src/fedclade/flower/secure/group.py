"""What the server knows of one sum, and how it takes the masks off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedclade.core import NOT_ASKED, UpdateError
from fedclade.flower.secure.adverts import Advert
from fedclade.flower.secure.graph import neighbours_of
from fedclade.flower.secure.numbers import Numbers
from fedclade.flower.secure.secrets import (
    LONGEST_SHARE,
    Masked,
    agreed,
    combined,
    is_key_of,
    is_promised,
    is_seed_of,
    mask,
)
from fedclade.flower.secure.terms import SecureRules, Terms


class BadSharesError(UpdateError):
    """What one client has dealt to the others as shares of its secrets is none."""

    def __init__(self, client: int, why: str) -> None:
        self.client = client
        super().__init__(f"client {client} has dealt wrong shares: {why}")


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
    promises: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])  # from, to
    masked: dict[int, Masked] = field(default_factory=dict[int, Masked])
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])  # of, held by
    unreadable: dict[int, set[int]] = field(default_factory=dict[int, set[int]])  # of: who say so of their share

    def leave_out_copies(self) -> list[int]:
        """Leave out, and return, those who show a key twice, or that of another: nobody would go on with them."""
        times = Counter(key for client in self.alive for key in self.adverts[client].keys)
        copies = [client for client in self.alive if max(times[key] for key in self.adverts[client].keys) > 1]
        self.alive = [client for client in self.alive if client not in copies]
        return copies

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

    def take_shares(self, client: int, told: Sequence[bytes]) -> None:
        """Note the shares that a client tells, of the seeds and then of the keys of those it shares masks with.

        An UpdateError if one is another than it was dealt: when it was given it, it did not say so.
        """
        active, dead = self.standing(client)
        if len(told) != len(active) + len(dead) or max(map(len, told)) > LONGEST_SHARE:
            raise UpdateError(f"{len(told)} shares, expected {len(active) + len(dead)} of few bytes")
        context, held = self.terms.context, dict[int, bytes]()
        for whose, share in zip([*active, *dead], told, strict=True):
            what, promises = "seed" if whose in self.masked else "key", self.promises[whose][client]
            if share and not is_promised(share, promises, what, whose, client, context):
                raise UpdateError(f"told another share of client {whose}'s {what} than it was dealt")
            held[whose] = share
        for whose, share in held.items():
            if share:
                self.shares.setdefault(whose, {})[client] = share
            else:
                self.unreadable.setdefault(whose, set()).add(client)

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
        context = self.terms.context
        active, size = sorted(self.masked), len(next(iter(self.masked.values())))
        total = np.zeros(size, dtype=np.uint32)
        for client in active:
            total += self.masked[client]
        for client in active:
            seed = self._secret(client, "seed", is_seed_of(self.adverts[client].commitment, context))
            total -= mask(seed, context, size)
        for client in sorted(set(self.ciphertexts) - set(active)):
            partners = [other for other in active if client in self.sources(other)]
            if not partners:
                continue
            key = self._secret(client, "key", is_key_of(self.adverts[client].masking))
            for other in partners:  # what each has put on for the pair
                pairwise = mask(agreed(key, self.adverts[other].masking), context, size)
                total = total - pairwise if other > client else total + pairwise
        terms = self.terms
        return Numbers(terms.clip, terms.clients).decode(total, len(active)) * terms.weight

    def _secret(self, client: int, what: str, holds: Callable[[bytes], bool]) -> bytes:
        """Put a client's secret together from shares that it has committed to; any that are enough will do."""
        shares, needed = self.shares.get(client, {}), self.needed(client)
        if len(shares) < needed:
            holders = {*self.neighbours[client], client}
            complaining = self.unreadable.get(client, set()) - {client}
            gone, spare = holders - complaining - shares.keys(), len(holders) - needed
            # More than may be, if the dealer is honest; and no more, if it is one of those that lie or are gone.
            if len(complaining | gone) > spare >= len(gone | {client}):
                raise BadSharesError(
                    client, f"{len(complaining)} of {len(holders)} holders cannot read theirs, or say so"
                )
            raise UpdateError(
                f"{len(shares)} clients have told what they hold of client {client}'s {what}, and {needed} are needed "
                "to take the masks off (network.secure_threshold)"
            )
        secret = combined([shares[holder] for holder in sorted(shares)[:needed]], holds)
        if secret is None:
            raise BadSharesError(client, f"they are not of the {what} that it has committed to")
        return secret


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
