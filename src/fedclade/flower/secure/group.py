"""What the server knows of one sum, and how it takes the masks off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedclade.core import NOT_ASKED, UpdateError
from fedclade.flower.secure.adverts import Advert, digest_of_list
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.numbers import MODULUS, ClusterSum, Masked
from fedclade.flower.secure.parameters import Graph
from fedclade.flower.secure.secrets import (
    LONGEST_SHARE,
    Scope,
    agreed,
    combined,
    is_key_of,
    is_promised,
    is_seed_of,
    own_mask,
    pair_mask,
)
from fedclade.flower.secure.statements import Statements
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
    members, listing
        The clients on the list, and its digest λ.
    dealt
        D, the clients that have dealt shares.
    ciphertexts, promises, commitments
        What they have dealt, by dealer and holder; and the hashes of their seeds.
    masked, signed
        The masked vectors; and the digest of each, with its client's signature.
    active
        A, the clients whose vectors are added up.
    agreements
        Their signatures that they agree to the sum.
    shares, unreadable
        What holders have told of whose secret; and who says that it cannot read its share.
    """

    row: int
    alive: list[int]
    terms: Terms
    adverts: dict[int, Advert] = field(default_factory=dict[int, Advert])
    members: list[int] = field(default_factory=list[int])
    listing: bytes = b""
    dealt: list[int] = field(default_factory=list[int])
    ciphertexts: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])
    promises: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])
    commitments: dict[int, bytes] = field(default_factory=dict[int, bytes])
    masked: dict[int, Masked] = field(default_factory=dict[int, Masked])
    signed: dict[int, tuple[bytes, bytes]] = field(default_factory=dict[int, tuple[bytes, bytes]])
    active: list[int] = field(default_factory=list[int])
    agreements: dict[int, bytes] = field(default_factory=dict[int, bytes])
    shares: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])
    unreadable: dict[int, set[int]] = field(default_factory=dict[int, set[int]])

    @property
    def graph(self) -> Graph:
        """Who deals shares to whom."""
        return self.terms.graph(len(self.members))

    @property
    def quorum(self) -> int:
        """How many have to agree on the sum."""
        return self.terms.quorum(len(self.members))

    @property
    def scope(self) -> Scope:
        """What secrets and signatures are bound to."""
        return self.terms.context, self.listing

    @property
    def statements(self) -> Statements:
        """What clients sign, once it is settled who has dealt shares."""
        return Statements(self.scope, bitmap({*self.dealt}, self.members))

    def leave_out_copies(self) -> list[int]:
        """Leave out, and return, those who show a key twice, or that of another: nobody would go on with them."""
        times = Counter(key for client in self.alive for key in self.adverts[client].keys)
        copies = [client for client in self.alive if max(times[key] for key in self.adverts[client].keys) > 1]
        self.alive = [client for client in self.alive if client not in copies]
        return copies

    def settle_list(self) -> None:
        """Settle who is on the list: those that have shown their keys."""
        self.members = sorted(self.alive)
        self.listing = digest_of_list(self.terms.context, [self.adverts[client] for client in self.members])

    def settle_dealt(self) -> list[int]:
        """Settle who is in D: those that have dealt shares; return those whose holders have not, too many of them.

        Such a client would not go on, and its secrets could not be put together.
        """
        dealt, left_out = {*self.alive}, list[int]()
        while lonely := sorted(client for client in dealt if len(self._holders_in(dealt, client)) < self.graph.needed):
            dealt -= {*lonely}
            left_out += lonely
        self.dealt = self.alive = sorted(dealt)
        return left_out

    def settle_active(self) -> None:
        """Settle who is in A: those whose vectors have come."""
        self.alive = [client for client in self.alive if client in self.masked]
        self.active = sorted(self.masked)

    def sources(self, client: int) -> list[int]:
        """Return those whose shares a client is given, in ascending order."""
        return [dealer for dealer in self.dealt if client in self.ciphertexts[dealer]]

    def signed_for(self, client: int) -> tuple[list[bytes], list[bytes]]:
        """Return digests and signatures of the vectors of those in the sum whose shares a client holds."""
        signed = [self.signed[source] for source in self.sources(client) if source in self.masked]
        return [numbers for numbers, _ in signed], [signature for _, signature in signed]

    def enough_agreements(self) -> dict[int, bytes]:
        """Return as many agreements as clients want to see."""
        return dict(sorted(self.agreements.items())[: self.quorum])

    def take_shares(self, client: int, told: Sequence[bytes]) -> None:
        """Note the shares that a client tells: of the seeds of those in the sum, and of the keys of the others.

        An UpdateError if one is another than it was dealt: when it was given it, it did not say so.
        """
        dealers = [dealer for dealer in self.dealt if client in self.promises[dealer]]
        if len(told) != len(dealers) or max(map(len, told), default=0) > LONGEST_SHARE:
            raise UpdateError(f"{len(told)} shares, expected {len(dealers)} of few bytes")
        scope = self.scope
        held = dict(zip(dealers, told, strict=True))
        for dealer, share in held.items():
            which, promises = "seed" if dealer in self.masked else "key", self.promises[dealer][client]
            if share and not is_promised(share, promises, which, (dealer, client), scope):
                raise UpdateError(f"told another share of client {dealer}'s {which} than it was dealt")
        for dealer, share in held.items():
            if share:
                self.shares.setdefault(dealer, {})[client] = share
            else:
                self.unreadable.setdefault(dealer, set()).add(client)

    def too_few(self, rules: SecureRules) -> str:
        """Say why the sum cannot go on with those that are alive; nothing if it can."""
        few, asked = len(self.alive), self.terms.clients
        added = len(self.active) if self.active else few
        if added < rules.fewest:
            return (
                f"{added} of the {asked} clients of its cluster answered, and a sum is of at least {rules.fewest} "
                "(network.secure_fewest)"
            )
        if few < self.quorum:
            return (
                f"{few} of the {asked} clients of its cluster answered, and {self.quorum} have to agree on their sum "
                f"(more than half of all and the {self.terms.colluders} of network.secure_colluders)"
            )
        here = {*self.alive}
        for client in self.dealt:  # also of those that are gone: their masks have to come off
            holders, needed = self._holders_in(here, client), self.graph.needed
            if self._is_masked_with(client) and len(holders) < needed:
                return (
                    f"{few} of the {asked} clients of its cluster answered, {len(holders)} of them hold shares of "
                    f"client {client}'s secrets, and {needed} are needed to take the masks off"
                )
        return ""

    def total(self, parameters: int, entries: int) -> ClusterSum:
        """Return the sum of all updates that came, of a model with so many parameters and entries.

        An UpdateError says that it cannot be had: a :class:`BadSharesError` whose secret is missing, and a
        :class:`RejectedSumError` that clients did not keep to the protocol.
        """
        return self.terms.numbers(parameters, entries).decode(self.unmasked(), len(self.active))

    def unmasked(self) -> Masked:
        """Return the sum of all vectors without their masks; errors are those of :meth:`total`."""
        scope, size = self.scope, len(next(iter(self.masked.values())))
        total = np.zeros(size, dtype=np.uint32)
        for client in self.active:
            total += self.masked[client]
        for client in self.active:
            seed = self._secret(client, "seed", is_seed_of(self.commitments[client], scope, client))
            total -= own_mask(seed, scope, client, size)
        for client in self.dealt:
            if client in self.masked:
                continue
            partners = [other for other in self.active if self._is_pair(client, other)]
            if not partners:
                continue
            key = self._secret(client, "key", is_key_of(self.adverts[client].masking))
            for other in partners:  # what each has put on for the pair
                pairwise = pair_mask(agreed(key, self.adverts[other].masking), scope, (client, other), size)
                total = total - pairwise if other < client else total + pairwise
        return total % np.uint32(MODULUS)

    def _holders_in(self, clients: Collection[int], dealer: int) -> set[int]:
        """Return those of some clients that hold shares of a dealer's secrets."""
        return {*self.promises[dealer]}.intersection(clients)

    def _is_pair(self, client: int, other: int) -> bool:
        """Return whether two clients that have dealt shares share a mask."""
        return other in self.ciphertexts[client] or client in self.ciphertexts[other]

    def _is_masked_with(self, client: int) -> bool:
        """Return whether a secret of a client is needed: its seed, or its key if others have masked with it."""
        if not self.active or client in self.masked:
            return True
        return any(self._is_pair(client, other) for other in self.active)

    def _secret(self, client: int, what: str, holds: Callable[[bytes], bool]) -> bytes:
        """Put a client's secret together from shares that it has committed to; any that are enough will do."""
        shares, needed = self.shares.get(client, {}), self.graph.needed
        if len(shares) < needed:
            holders = {*self.promises[client]}
            complaining = self.unreadable.get(client, set()) - {client}
            gone, spare = holders - complaining - shares.keys(), len(holders) - needed
            lies = min(self.terms.colluders, spare)  # so many may say so of an honest dealer
            # More than may be, if the dealer is honest; and no more, if it is one of those that lie or are gone.
            if len(complaining) > lies and len(complaining | gone) > spare >= len(gone | {client}):
                raise BadSharesError(
                    client, f"{len(complaining)} of {len(holders)} holders cannot read theirs, or say so"
                )
            raise UpdateError(
                f"{len(shares)} clients have told what they hold of client {client}'s {what}, and {needed} are needed "
                "to take the masks off"
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
