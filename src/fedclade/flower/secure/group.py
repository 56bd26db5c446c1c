"""State of one sum on the server: its clients, their messages, and the removal of masks.

In secure aggregation a client's secrets are a seed and a private masking key. Each client (the
dealer) splits its secrets into shares and deals them to other clients (the holders). The server
removes the masks of a sum with secrets that it reconstructs from shares.
"""

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
    """Error for a client that has dealt shares from which its secret cannot be reconstructed."""

    def __init__(self, client: int, why: str) -> None:
        self.client = client
        super().__init__(f"client {client} has dealt invalid shares of its secret: {why}")


@dataclass(eq=False)
class Group:
    """Clients of one sum under secure aggregation, and the messages that they have sent so far.

    The server has sent the same model to all clients of a group. The five messages of the protocol
    fill the fields from top to bottom. ``docs/secure-aggregation.md`` explains the symbols.

    Parameters
    ----------
    row
        Row of the clients' model in the query.
    alive
        Clients that have replied to every request so far.
    terms
        Terms of the sum.
    adverts
        Public keys of each client.
    members, listing
        Clients of the sum, in ascending order, and λ, the digest of the list of their public keys.
    dealt
        D, the clients that have dealt shares of their secrets.
    ciphertexts, promises
        Encrypted shares, and hashes of the shares, by dealer and holder.
    commitments
        Hash of each client's seed.
    masked
        Masked vector of each client.
    signed
        Digest of each masked vector, and the signature of its client.
    active
        A, the clients whose masked vectors are added up.
    agreements
        Signature of each client that agrees to the set A.
    shares
        Decrypted shares that holders have sent, by dealer and holder.
    unreadable
        Holders that report that they cannot read a share, by dealer.
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
        """Rule that determines how many holders receive shares of a client's secrets."""
        insisting = self.min_honest_of(self.members)
        return self.terms.graph(len(self.members), len(insisting))

    @property
    def quorum(self) -> int:
        """Number of clients that have to sign the set A of clients before the sum is unmasked."""
        insisting = self.min_honest_of(self.members)
        return self.terms.quorum(len(self.members), len(insisting))

    @property
    def scope(self) -> Scope:
        """Digests of the terms and of the list of clients, part of all secrets and signatures."""
        return self.terms.context, self.listing

    @property
    def statements(self) -> Statements:
        """Statements that clients sign once D, the set of clients with dealt shares, is fixed."""
        return Statements(self.scope, bitmap({*self.dealt}, self.members))

    def min_honest_of(self, clients: Collection[int]) -> dict[int, int]:
        """Return the number of honest clients that each of some clients demands in its sum.

        Clients that do not insist on secure aggregation demand none, and are left out of the
        result.
        """
        demands = {client: self.adverts[client].min_honest for client in clients}
        return {client: demand for client, demand in demands.items() if demand}

    # After the first message: which clients are on the list.

    def leave_out_copied_keys(self) -> list[int]:
        """Leave out all clients with a public key that occurs twice in the sum, and return them.

        All other clients would refuse a list with such a key.
        """
        times_shown = Counter(key for client in self.alive for key in self.adverts[client].keys)

        def is_copied(client: int) -> bool:
            return any(times_shown[key] > 1 for key in self.adverts[client].keys)

        copied = [client for client in self.alive if is_copied(client)]
        self.alive = [client for client in self.alive if client not in copied]
        return copied

    def leave_out_unprotected(self) -> dict[int, str]:
        """Leave out all clients that demand more honest clients than the sum has.

        These clients would refuse the sum. Each client that is left out reduces the number of
        honest clients for the remaining clients, so the check is repeated until the demands of all
        remaining clients are met.

        Returns
        -------
        dict[int, str]
            Reason of each client that is left out.
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
        """Fix the list of clients of the sum: all clients that have sent valid public keys."""
        self.members = sorted(self.alive)
        adverts = [self.adverts[client] for client in self.members]
        self.listing = digest_of_list(self.terms.context, adverts)

    # After the second message: D, the clients that have dealt shares of their secrets.

    def settle_dealt(self) -> list[int]:
        """Fix D, the clients that have dealt shares; return the clients that are left out of D.

        A client is left out if too many holders of its shares have not dealt shares themselves: the
        client would refuse the sum, and its secrets could not be reconstructed. A client that is
        left out may be a holder for other clients, so this is repeated until nothing changes.
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
        """Return the dealers of the shares that a client holds, in ascending order."""
        return [dealer for dealer in self.dealt if client in self.ciphertexts[dealer]]

    # After the third message: A, the clients whose masked vectors are added up.

    def settle_active(self) -> None:
        """Fix A, the clients whose masked vectors are added up: all whose vectors have arrived."""
        self.alive = [client for client in self.alive if client in self.masked]
        self.active = sorted(self.masked)

    def signed_vectors_for(self, client: int) -> tuple[list[bytes], list[bytes]]:
        """Return the digests and signatures of masked vectors that a client must check.

        They belong to the clients whose shares this client holds and whose masked vectors have
        arrived.

        Returns
        -------
        tuple[list[bytes], list[bytes]]
            Digests, and signatures, in ascending order of the vectors' clients.
        """
        signed = [
            self.signed[dealer] for dealer in self.dealers_to(client) if dealer in self.masked
        ]
        digests = [digest for digest, _ in signed]
        signatures = [signature for _, signature in signed]
        return digests, signatures

    # After the fourth message: the signatures without which no client sends its shares.

    def first_agreements(self) -> dict[int, bytes]:
        """Return signatures of as many clients as must agree to the sum, by client.

        The clients with the lowest numbers that have agreed to the sum are chosen. Every client
        checks these signatures before it sends decrypted shares to the server.
        """
        return dict(sorted(self.agreements.items())[: self.quorum])

    # With the fifth message: the masks are removed from the sum.

    def take_shares(self, client: int, opened: Sequence[bytes]) -> None:
        """Check and store the decrypted shares that a holder has sent.

        The holder sends a share of the seed of each client in the sum, and a share of the masking
        key of each client that has dealt shares and then dropped out. An empty share reports that
        the holder cannot read the share.

        Parameters
        ----------
        client
            Holder of the shares.
        opened
            Shares in ascending order of their dealers.

        Raises
        ------
        UpdateError
            If the number of shares is wrong, or if a share does not have the hash that its dealer
            has sent. An honest holder would have reported such a share as unreadable.
        """
        dealers = [dealer for dealer in self.dealt if client in self.promises[dealer]]
        longest = max(map(len, opened), default=0)
        if len(opened) != len(dealers) or longest > LONGEST_SHARE:
            raise UpdateError(
                f"the client has sent {len(opened)} shares of at most {longest} bytes, expected "
                f"{len(dealers)} shares of at most {LONGEST_SHARE} bytes"
            )
        scope = self.scope
        share_of = dict(zip(dealers, opened, strict=True))
        for dealer, share in share_of.items():
            secret = "seed" if dealer in self.masked else "key"
            promises = self.promises[dealer][client]
            way = (dealer, client)
            if share and not is_promised(share, promises, secret, way=way, scope=scope):
                raise UpdateError(
                    f"the client has sent a share of client {dealer}'s {secret} that is not the "
                    f"one to which client {dealer} has committed by a hash"
                )
        for dealer, share in share_of.items():
            if share:
                self.shares.setdefault(dealer, {})[client] = share
            else:
                self.unreadable.setdefault(dealer, set()).add(client)

    def total(self, parameters: int, entries: int) -> ClusterSum:
        """Remove the masks, and return the sum of the clients' updates.

        Parameters
        ----------
        parameters, entries
            Numbers of parameters, and of all entries (parameters and buffers), of the model.

        Raises
        ------
        BadSharesError
            If the shares that a client has dealt do not give its secret.
        RejectedSumError
            If the sum is impossible for clients that follow the protocol.
        UpdateError
            If too few holders have sent shares of a needed secret.
        """
        return self.terms.numbers(parameters, entries).decode(self.unmasked(), len(self.active))

    def unmasked(self) -> Masked:
        """Return the sum of all masked vectors with all masks removed, modulo 2²⁴.

        Two kinds of masks have to be removed: the own mask of each client in the sum, which is
        computed from its seed; and the pairwise masks of clients that have dealt shares and then
        dropped out, which are computed from their masking keys. Pairwise masks between two clients
        in the sum cancel.

        Raises
        ------
        BadSharesError, UpdateError
            If a secret cannot be reconstructed, see :meth:`total`.
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
        """Remove the pairwise masks between the clients in the sum and a client that dropped out.

        Parameters
        ----------
        total
            Sum of vectors.
        gone
            Client that has dealt shares and then dropped out.
        """
        partners = [other for other in self.active if self._is_pair(gone, other)]
        if not partners:
            return total
        key = self._secret_of(gone, "key", is_key_of(self.adverts[gone].masking))
        for other in partners:
            shared = agreed(key, self.adverts[other].masking)
            mask = pair_mask(shared, self.scope, (gone, other), len(total))
            # Of a pair, the client with the lower number adds the mask, and the other subtracts it.
            if other < gone:
                total = total - mask
            else:
                total = total + mask
        return total

    # Whether the sum is still possible.

    def why_impossible(self, rules: SecureRules) -> str:
        """Explain why the clients that still reply can form no sum; empty if a sum is possible.

        Parameters
        ----------
        rules
            Rules of the run, such as the smallest number of clients in a sum.
        """
        replied = len(self.alive)
        requested = self.terms.clients
        counted = self.active or self.alive
        if len(counted) < rules.fewest:
            return (
                f"{len(counted)} of the {requested} clients of its cluster replied, and a sum "
                f"needs at least {rules.fewest} (network.secure_fewest)"
            )
        min_honest = self.min_honest_of(counted)
        unprotected = without_protection(min_honest, self.terms.colluders)
        if unprotected:
            why = too_few_insist(unprotected, min_honest, self.terms.colluders)
            return f"no sum is possible {why}"
        if replied < self.quorum:
            return (
                f"{replied} of the {requested} clients of its cluster replied, and {self.quorum} "
                "have to agree on their sum (more than half of all clients, if those that may "
                f"collude count twice: the {self.terms.colluders} of network.secure_colluders"
                f"{self._clients_that_do_not_insist()})"
            )
        return self._why_masks_stay(replied, requested)

    def _clients_that_do_not_insist(self) -> str:
        """Return a part of an error text: how many clients do not insist on secure aggregation.

        Clients that do not insist also reply without masks. So they count as colluders if other
        clients of the sum insist. The text is empty if all clients insist, or no client does.
        """
        insisting = len(self.min_honest_of(self.members))
        others = len(self.members) - insisting
        if not insisting or not others:
            return ""
        return f", and the {others} without secure-aggregation=true in their node config: set it for all clients"

    def _why_masks_stay(self, replied: int, requested: int) -> str:
        """Explain why the mask of some client cannot be removed; empty if all masks can be removed.

        The pairwise masks with clients that have dropped out have to be removed, too.

        Parameters
        ----------
        replied
            Number of clients that still reply.
        requested
            Number of clients that were requested to join the sum.
        """
        here = set(self.alive)
        needed = self.graph.needed
        for client in self.dealt:
            holders = self._holders_in(here, client)
            if self._is_masked_with(client) and len(holders) < needed:
                return (
                    f"{replied} of the {requested} clients of its cluster replied, {len(holders)} "
                    f"of them have shares of client {client}'s secrets, and {needed} are needed to "
                    "remove the masks"
                )
        return ""

    def _holders_in(self, clients: Collection[int], dealer: int) -> set[int]:
        """Return which of some clients hold shares of a dealer's secrets."""
        return set(self.promises[dealer]).intersection(clients)

    def _is_pair(self, client: int, other: int) -> bool:
        """Return whether two clients that have dealt shares use a pairwise mask.

        They do if either client has dealt shares to the other.
        """
        return other in self.ciphertexts[client] or client in self.ciphertexts[other]

    def _is_masked_with(self, client: int) -> bool:
        """Return whether a secret of a client is needed to remove masks from the sum.

        The secret is the seed of a client in the sum, or the masking key of a client that dropped
        out after clients in the sum have masked with it.
        """
        if not self.active or client in self.masked:
            return True
        return any(self._is_pair(client, other) for other in self.active)

    def _secret_of(self, client: int, what: str, is_right: Callable[[bytes], bool]) -> bytes:
        """Reconstruct a secret of a client from any sufficient number of its shares.

        Parameters
        ----------
        client
            Client whose secret is reconstructed.
        what
            Name of the secret, ``seed`` or ``key``, for errors.
        is_right
            Function that checks whether bytes are the secret.

        Raises
        ------
        BadSharesError
            If the shares give another secret than the client has committed to.
        UpdateError
            If too few holders have sent their shares.
        """
        shares = self.shares.get(client, {})
        needed = self.graph.needed
        if len(shares) < needed:
            raise self._too_few_shares(client, what)
        chosen = [shares[holder] for holder in sorted(shares)[:needed]]
        secret = combined(chosen, is_right)
        if secret is None:
            raise BadSharesError(
                client,
                f"together, the shares do not give the {what} that the client has committed to; the "
                "client does not follow the protocol, and is left out of further sums",
            )
        return secret

    def _too_few_shares(self, client: int, what: str) -> UpdateError:
        """Return the error for a secret of which too few holders have sent shares.

        The error is a BadSharesError if the dealer is to blame that too few shares are readable.
        Two other explanations are excluded first: colluding holders may have reported readable
        shares as unreadable, and holders may have dropped out. So more holders must have reported
        unreadable shares than are assumed to collude: the c of the terms, but at most the number of
        holders without which the secret can still be reconstructed. (If this number is below c,
        colluding holders alone can have an honest client left out.) In addition, the holders that
        have replied must be enough to reconstruct the secret if all their shares were readable.
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
            f"{needed} are needed to remove the masks"
        )
