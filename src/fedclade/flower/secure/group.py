"""The server's record of one sum: its clients, what they have sent, and how their masks come off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedclade.core import UpdateError
from fedclade.flower.secure.adverts import Advert, digest_of_list
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.parameters import Graph, too_few_insist, without_protection
from fedclade.flower.secure.secrets import (
    LONGEST_SHARE,
    MODULUS,
    ClusterSum,
    Masked,
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
    """A client has dealt shares from which its secret cannot be put together."""

    def __init__(self, client: int, why: str) -> None:
        self.client = client
        super().__init__(f"client {client} has dealt wrong shares: {why}")


@dataclass(eq=False)
class Group:
    """The clients of one sum, and the messages that they have sent so far.

    All of them were sent the same model. The five messages of the protocol fill the fields from
    top to bottom; ``docs/secure-aggregation.md`` has the symbols.

    Parameters
    ----------
    row
        Row of their model in the query.
    alive
        Clients that have replied to every request so far.
    terms
        Terms of the sum.
    adverts
        Public keys of each client.
    members, listing
        Clients on the list, in ascending order, and λ, the digest of the list.
    dealt
        D, the clients that have dealt shares.
    ciphertexts, promises
        Sealed shares, and hashes of the shares, by dealer and holder.
    commitments
        Hash of each client's seed.
    masked
        Masked vector of each client.
    signed
        Digest of each masked vector, and the signature of its client.
    active
        A, the clients whose vectors are added up.
    agreements
        Signature of each client that agrees to the sum.
    shares
        Opened shares, by dealer and holder.
    unreadable
        Holders that report an unreadable share, by dealer.
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
        """Rule by which clients deal shares to one another."""
        insisting = self.min_honest_of(self.members)
        return self.terms.graph(len(self.members), len(insisting))

    @property
    def quorum(self) -> int:
        """Number of clients that have to agree on the sum."""
        insisting = self.min_honest_of(self.members)
        return self.terms.quorum(len(self.members), len(insisting))

    @property
    def scope(self) -> Scope:
        """Digests that all secrets and signatures of the sum are bound to."""
        return self.terms.context, self.listing

    @property
    def statements(self) -> Statements:
        """Statements that clients sign, once the clients that have dealt shares are settled."""
        return Statements(self.scope, bitmap({*self.dealt}, self.members))

    def min_honest_of(self, clients: Collection[int]) -> dict[int, int]:
        """Return the number of honest clients that each client demands in its sum.

        Clients that do not insist on secure aggregation are left out.
        """
        demands = {client: self.adverts[client].min_honest for client in clients}
        return {client: demand for client, demand in demands.items() if demand}

    # After the first message: which clients are on the list.

    def leave_out_copied_keys(self) -> list[int]:
        """Leave out, and return, clients with a key that is shown twice.

        No other client would go on with them.
        """
        times_shown = Counter(key for client in self.alive for key in self.adverts[client].keys)
        copied = [
            client
            for client in self.alive
            if any(times_shown[key] > 1 for key in self.adverts[client].keys)
        ]
        self.alive = [client for client in self.alive if client not in copied]
        return copied

    def leave_out_unprotected(self) -> dict[int, str]:
        """Leave out clients that demand more honest clients than there are; return the reasons.

        They would not go on. Each that leaves may leave too few for others, so this repeats until
        all that are left have enough.
        """
        reasons: dict[int, str] = {}
        while True:
            min_honest = self.min_honest_of(self.alive)
            unprotected = without_protection(min_honest, self.terms.colluders)
            if not unprotected:
                return reasons
            why = too_few_insist(unprotected, min_honest, self.terms.colluders)
            reasons |= dict.fromkeys(unprotected, f"left out of a sum {why}")
            self.alive = [client for client in self.alive if client not in unprotected]

    def settle_list(self) -> None:
        """Put the clients that have shown their keys on the list."""
        self.members = sorted(self.alive)
        adverts = [self.adverts[client] for client in self.members]
        self.listing = digest_of_list(self.terms.context, adverts)

    # After the second message: which clients have dealt shares.

    def settle_dealt(self) -> list[int]:
        """Settle D, the clients that have dealt shares; return those that are left out of it.

        A client is left out if too many of its holders have not dealt shares themselves: it would
        not go on, and its secrets could not be put together. Each that is left out may be a holder
        of others, so this repeats until nothing changes.
        """
        dealt = set(self.alive)
        left_out: list[int] = []
        needed = self.graph.needed
        while True:
            lonely = sorted(
                client for client in dealt if len(self._holders_in(dealt, client)) < needed
            )
            if not lonely:
                break
            dealt -= set(lonely)
            left_out += lonely
        self.dealt = sorted(dealt)
        self.alive = self.dealt
        return left_out

    def dealers_to(self, client: int) -> list[int]:
        """Return the clients whose sealed shares are passed to a client, in ascending order."""
        return [dealer for dealer in self.dealt if client in self.ciphertexts[dealer]]

    # After the third message: which vectors are added up.

    def settle_active(self) -> None:
        """Settle A, the clients whose masked vectors have arrived."""
        self.alive = [client for client in self.alive if client in self.masked]
        self.active = sorted(self.masked)

    def signed_vectors_for(self, client: int) -> tuple[list[bytes], list[bytes]]:
        """Return digests and signatures of the vectors of clients whose shares a client owns."""
        signed = [
            self.signed[dealer] for dealer in self.dealers_to(client) if dealer in self.masked
        ]
        digests = [digest for digest, _ in signed]
        signatures = [signature for _, signature in signed]
        return digests, signatures

    # After the fourth message: the signatures that open the sum.

    def first_agreements(self) -> dict[int, bytes]:
        """Return the agreements that each client must see before it opens shares."""
        return dict(sorted(self.agreements.items())[: self.quorum])

    # With the fifth message: the masks come off.

    def take_shares(self, client: int, opened: Sequence[bytes]) -> None:
        """Store the shares that a client opens, in ascending order of their dealers.

        They are shares of the seeds of clients in the sum, and of the masking keys of the others.
        An empty share reports one that the client cannot read.

        Raises
        ------
        UpdateError
            If there are too many or too few, or if one differs from the share that its dealer has
            promised: the client did not complain when it was given it.
        """
        dealers = [dealer for dealer in self.dealt if client in self.promises[dealer]]
        longest = max(map(len, opened), default=0)
        if len(opened) != len(dealers) or longest > LONGEST_SHARE:
            raise UpdateError(f"{len(opened)} shares, expected {len(dealers)} of few bytes")
        scope = self.scope
        share_of = dict(zip(dealers, opened, strict=True))
        for dealer, share in share_of.items():
            secret = "seed" if dealer in self.masked else "key"
            promises = self.promises[dealer][client]
            if share and not is_promised(share, promises, secret, (dealer, client), scope):
                raise UpdateError(
                    f"sent another share of client {dealer}'s {secret} than the one it was dealt"
                )
        for dealer, share in share_of.items():
            if share:
                self.shares.setdefault(dealer, {})[client] = share
            else:
                self.unreadable.setdefault(dealer, set()).add(client)

    def total(self, parameters: int, entries: int) -> ClusterSum:
        """Return the sum of all updates.

        Parameters
        ----------
        parameters, entries
            Numbers of parameters, and of all entries, of the model.

        Raises
        ------
        BadSharesError
            If the shares that a client has dealt do not open its secret.
        RejectedSumError
            If clients that keep to the protocol cannot have made the sum.
        UpdateError
            If too few shares were opened.
        """
        return self.terms.numbers(parameters, entries).decode(self.unmasked(), len(self.active))

    def unmasked(self) -> Masked:
        """Return the sum of all vectors without their masks.

        Two kinds of masks have to come off: the own mask of each client in the sum, which its seed
        gives; and the pairwise masks of clients that have dealt shares and then dropped out, which
        their masking keys give. Pairwise masks between two clients in the sum cancel.

        Raises
        ------
        BadSharesError, UpdateError
            As :meth:`total`.
        """
        scope = self.scope
        size = len(next(iter(self.masked.values())))
        total = np.zeros(size, dtype=np.uint32)
        for client in self.active:
            total += self.masked[client]
        for client in self.active:
            is_right = is_seed_of(self.commitments[client], scope, client)
            total -= own_mask(self._secret_of(client, "seed", is_right), scope, client, size)
        for client in self.dealt:
            if client not in self.masked:
                total = self._without_masks_of_pairs(total, client)
        return total % np.uint32(MODULUS)

    def _without_masks_of_pairs(self, total: Masked, gone: int) -> Masked:
        """Take off the masks that clients in the sum have added for a client that dropped out."""
        partners = [other for other in self.active if self._is_pair(gone, other)]
        if not partners:
            return total
        key = self._secret_of(gone, "key", is_key_of(self.adverts[gone].masking))
        for other in partners:
            shared = agreed(key, self.adverts[other].masking)
            mask = pair_mask(shared, self.scope, (gone, other), len(total))
            # Of a pair, the client with the lower number adds the mask, and the other subtracts it.
            total = total - mask if other < gone else total + mask
        return total

    # Whether the sum is still possible.

    def why_impossible(self, rules: SecureRules) -> str:
        """Explain why no sum is possible with the clients that are alive; empty if one is."""
        replied = len(self.alive)
        requested = self.terms.clients
        counted = self.active or self.alive
        if len(counted) < rules.fewest:
            return (
                f"{len(counted)} of the {requested} clients of its cluster answered, and a sum is "
                f"of at least {rules.fewest} (network.secure_fewest)"
            )
        min_honest = self.min_honest_of(counted)
        unprotected = without_protection(min_honest, self.terms.colluders)
        if unprotected:
            why = too_few_insist(unprotected, min_honest, self.terms.colluders)
            return f"no sum can be had {why}"
        if replied < self.quorum:
            return (
                f"{replied} of the {requested} clients of its cluster answered, and {self.quorum} "
                f"have to agree on their sum (more than half of all and the {self.terms.colluders} "
                f"of network.secure_colluders{self._clients_that_do_not_insist()})"
            )
        return self._why_masks_stay(replied, requested)

    def _clients_that_do_not_insist(self) -> str:
        """Name the clients that count as colluders because others insist on sums and they do not."""
        insisting = len(self.min_honest_of(self.members))
        others = len(self.members) - insisting
        if not insisting or not others:
            return ""
        return f", and the {others} without secure-aggregation=true in their node config: set it for all clients"

    def _why_masks_stay(self, replied: int, requested: int) -> str:
        """Explain why some mask cannot be taken off; empty if all can.

        Masks of clients that are gone have to come off too.
        """
        here = set(self.alive)
        needed = self.graph.needed
        for client in self.dealt:
            holders = self._holders_in(here, client)
            if self._is_masked_with(client) and len(holders) < needed:
                return (
                    f"{replied} of the {requested} clients of its cluster answered, {len(holders)} "
                    f"of them hold shares of client {client}'s secrets, and {needed} are needed to "
                    "take the masks off"
                )
        return ""

    def _holders_in(self, clients: Collection[int], dealer: int) -> set[int]:
        """Return the holders of a dealer's shares among some clients."""
        return set(self.promises[dealer]).intersection(clients)

    def _is_pair(self, client: int, other: int) -> bool:
        """Return whether two clients that have dealt shares share a mask."""
        return other in self.ciphertexts[client] or client in self.ciphertexts[other]

    def _is_masked_with(self, client: int) -> bool:
        """Return whether a secret of a client is needed to take masks off.

        That is its seed if it is in the sum, or its masking key if others have masked with it.
        """
        if not self.active or client in self.masked:
            return True
        return any(self._is_pair(client, other) for other in self.active)

    def _secret_of(self, client: int, what: str, is_right: Callable[[bytes], bool]) -> bytes:
        """Put a client's secret together from opened shares; any of them that are enough will do."""
        shares = self.shares.get(client, {})
        needed = self.graph.needed
        if len(shares) < needed:
            raise self._too_few_shares(client, what)
        chosen = [shares[holder] for holder in sorted(shares)[:needed]]
        secret = combined(chosen, is_right)
        if secret is None:
            raise BadSharesError(client, f"they do not give the {what} that it has committed to")
        return secret

    def _too_few_shares(self, client: int, what: str) -> UpdateError:
        """Return the error for a secret with too few opened shares, and tell whose fault that is.

        Up to c holders may complain falsely about an honest dealer. The dealer is to blame if more
        complain than its colluding holders explain, and if the holders that are gone do not
        explain the loss by themselves.
        """
        shares = self.shares.get(client, {})
        needed = self.graph.needed
        holders = set(self.promises[client])
        complaining = self.unreadable.get(client, set()) - {client}
        gone = holders - complaining - shares.keys()
        spare = len(holders) - needed
        possible_lies = min(self.terms.colluders, spare)
        is_more_than_lies = len(complaining) > possible_lies
        is_lost = len(complaining | gone) > spare
        is_lost_by_the_gone = len(gone | {client}) > spare
        if is_more_than_lies and is_lost and not is_lost_by_the_gone:
            return BadSharesError(
                client,
                f"{len(complaining)} of {len(holders)} holders report that they cannot read theirs",
            )
        return UpdateError(
            f"{len(shares)} clients have sent their shares of client {client}'s {what}, and "
            f"{needed} are needed to take the masks off"
        )
