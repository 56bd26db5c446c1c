"""The server's side of secure aggregation: the five questions of a sum, put to all groups of a query at once."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import MessageType
from torch import Tensor

from fedclade.core import (
    NOT_ASKED,
    REJECTED_SUM,
    ConfigError,
    Event,
    SumClipped,
    SumRejected,
    Sums,
    SumUnguarded,
    UpdateError,
    UpdateQuery,
    Updates,
    row_norms,
)
from fedclade.flower.models_sent import ModelsSent
from fedclade.flower.policy import CLEAR_SHARE
from fedclade.flower.replies import examples_trained_on, largest_of_class
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert, check_min_honest, digest_of_list
from fedclade.flower.secure.encoding import DIGEST_BYTES, bitmap
from fedclade.flower.secure.parameters import Graph, too_few_insist, without_protection
from fedclade.flower.secure.secrets import (
    BYTES_PER_ENTRY,
    LONGEST_SHARE,
    MODULUS,
    ClusterSum,
    Masked,
    RejectedSumError,
    Scope,
    agreed,
    combined,
    digest_of_numbers,
    is_key_of,
    is_promised,
    is_seed_of,
    own_mask,
    pair_mask,
    unpack,
)
from fedclade.flower.secure.statements import Statements, is_signed
from fedclade.flower.secure.sums_of_cluster import FEWEST_SUMS, combine, deal
from fedclade.flower.secure.terms import (
    Asks,
    Members,
    SecureAggregation,
    SecureRules,
    Terms,
    anchor_of,
    check,
    digest_of,
    listed,
    model_of,
    question_of,
)
from fedclade.flower.wire import Content, read_vector, shown

# What the server knows of one sum, and how it takes the masks off.


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
        return self.terms.graph(len(self.members), len(self.min_honests(self.members)))

    @property
    def quorum(self) -> int:
        """How many have to agree on the sum."""
        return self.terms.quorum(len(self.members), len(self.min_honests(self.members)))

    def min_honests(self, clients: Collection[int]) -> dict[int, int]:
        """Return how many honest ones each of some clients wants in its sum, of those that insist on sums."""
        return {client: least for client in clients if (least := self.adverts[client].min_honest)}

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

    def leave_out_unprotected(self) -> dict[int, str]:
        """Leave out those with which too few others insist on sums; return why. Nobody would go on with them."""
        reasons: dict[int, str] = {}
        while True:
            min_honests = self.min_honests(self.alive)
            lacking = without_protection(min_honests, self.terms.colluders)
            if not lacking:
                return reasons
            why = f"left out of a sum {too_few_insist(lacking, min_honests, self.terms.colluders)}"
            reasons |= dict.fromkeys(lacking, why)
            self.alive = [client for client in self.alive if client not in lacking]

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
        min_honests = self.min_honests(self.active or self.alive)
        lacking = without_protection(min_honests, self.terms.colluders)
        if lacking:
            return f"no sum can be had {too_few_insist(lacking, min_honests, self.terms.colluders)}"
        if few < self.quorum:
            return (
                f"{few} of the {asked} clients of its cluster answered, and {self.quorum} have to agree on their sum "
                f"(more than half of all and the {self.terms.colluders} of network.secure_colluders{self._bystanders})"
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

    @property
    def _bystanders(self) -> str:
        """Say how many count among those that collude, because others insist on sums and they do not."""
        insisting = len(self.min_honests(self.members))
        others = len(self.members) - insisting
        if not insisting or not others:
            return ""
        return f", and the {others} without secure-aggregation=true in their node config: set it for all clients"

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


# A client's masked update, as the server reads it.


@dataclass(frozen=True, eq=False)
class MaskedReply:
    """A client's masked numbers, and in clear the sketches that it is compared by, concatenated.

    Nothing else in the reply depends on its data.
    """

    masked: Masked
    clear: Tensor


def read_masked(
    content: Content, length: int, clear: int, dtype: torch.dtype, expected: Mapping[str, Any]
) -> MaskedReply:
    """Check and read a vector of ``length`` masked numbers and ``clear`` others; an UpdateError if it is none.

    ``expected`` is what the reply must repeat of the query.
    """
    for name, sent in expected.items():
        if (got := content.get(name, type(sent))) != sent:
            raise UpdateError(f"answer of {name} {shown(got)}, expected {sent!r}")
    content.has_only(("masked", "clear") if clear else ("masked",))
    data = content.vector("masked")
    if len(data) != BYTES_PER_ENTRY * length:
        raise UpdateError(f"masked update of {len(data)} bytes, expected {BYTES_PER_ENTRY * length}")
    sketches = torch.empty(0, dtype=dtype)
    if clear:
        sketches = read_vector(content.vector("clear"), (clear,), dtype, "signatures")
        if odd := int((~torch.isfinite(sketches)).sum()):
            raise UpdateError(f"{odd} of {clear} entries of its signatures are NaN or infinite")
    return MaskedReply(unpack(data), sketches)


LONGEST_CIPHERTEXT = 512  # bytes; two shares take some 130

T = TypeVar("T")

_log = logging.getLogger(__name__)


def secure_updates(
    of: SecureAggregation,
    asks: Asks,
    query: UpdateQuery,
    sent: ModelsSent,
    values: Mapping[str, Any],
    members: Members,
    n_parameters: int,
) -> Updates:
    """Return the sums of a query's updates, and signatures; ``values`` are what its training is told."""
    check(query)
    values = {**values, "signs": of.compared.dim > 0}
    return _Round(of, asks, query, sent, values, members, n_parameters).run()


class _Round:
    def __init__(
        self,
        of: SecureAggregation,
        asks: Asks,
        query: UpdateQuery,
        sent: ModelsSent,
        values: Mapping[str, Any],
        members: Members,
        D: int,
    ) -> None:
        self._of, self._asks, self._query, self._sent, self._values = of, asks, query, sent, values
        self._D, self._keys_of = D, members.keys
        sizes = {client: examples_trained_on(query, size) for client, size in members.sizes.items()}
        self._left_out = {client: why for client, why in of.barred.items() if client in query.ids}
        self._replies: dict[int, MaskedReply] = {}
        self._with_peers = set[int]()
        # A client may have registered with a size class; inside the sum it counts by its number of examples.
        self._weights = of.limiting.weights({client: largest_of_class(size) for client, size in sizes.items()})
        buffers = query.models[:, D:]
        norm_of_buffers = float(row_norms(buffers).max()) if buffers.numel() else 0.0
        self._norms = of.norms.in_round(query.round.number, norm_of_buffers, query.round.replicates)
        self._events: list[Event] = []
        dim, count = of.compared.dim, query.round.replicates
        self._parts = count if count > 1 and query.round.compares_parts else 0
        self._part_dim = int(values["dim"])
        self._clear = self._parts * self._part_dim + dim
        if CLEAR_SHARE * self._clear > D:
            raise ConfigError(
                f"network.secure_aggregation = true: {self._clear} numbers of each client that are sent as they are "
                f"tell too much of updates of {D} parameters; lower signature.dim ({self._part_dim or dim}), so that "
                f"they are at most {D // CLEAR_SHARE}"
            )

    def run(self) -> Updates:
        query = self._query
        ids = [client for client in query.ids if client not in self._left_out]
        row_of = dict(zip(query.ids, query.assignment, strict=True))
        groups: list[Group] = []
        for row, mine in by_row(ids, [row_of[client] for client in ids]).items():
            if len(mine) < (fewest := self._of.rules.fewest):
                self._left_out |= dict.fromkeys(mine, too_small(len(mine), fewest))
                continue
            dealt = deal(mine, self._of.rules.parts, fewest, query.round.generator(f"sums of model {row}"))
            self._note_unguarded(mine, len(dealt))
            groups += [Group(row, clients, self._terms(clients)) for clients in dealt]
        for stage in (self._keys, self._shares, self._masked, self._agree, self._unmask):
            groups = [group for group in groups if group.alive]
            if groups:
                stage({client: group for group in groups for client in group.alive})
            groups = [group for group in groups if self._goes_on(group, last=stage == self._unmask)]
        return self._collected(groups)

    def _note_unguarded(self, clients: Sequence[int], sums: int) -> None:
        """Note that one of a cluster's clients can turn its mean; if the config has one sum for each, note it once."""
        parts, fewest = self._of.rules.parts, self._of.rules.fewest
        if sums >= FEWEST_SUMS or (parts == 1 and self._of.is_unguarded_noted):
            return
        self._of.is_unguarded_noted = True
        because = "network.secure_parts = 1"
        if parts > 1:
            because = f"{len(clients)} clients are too few for {FEWEST_SUMS} sums of {fewest} (network.secure_fewest)"
        self._events.append(SumUnguarded(0, self._query.round.purpose, tuple(clients), sums, because))

    def _terms(self, clients: Sequence[int]) -> Terms:
        """Return the terms of a new sum of some clients, which are sent the same."""
        training = Content.of(self._asks.content("masked", self._values, self._sent.vectors[clients[0]]))
        return Terms(
            instance=secrets.token_hex(16),
            clients=len(clients),
            colluders=self._of.rules.colluders,
            neighbours=self._of.rules.neighbours,
            norm=self._norms.parameters,
            norm_of_buffers=self._norms.buffers,
            weight=max(self._weights[client] for client in clients),
            training=digest_of(training.values),
            question=question_of(training.values, training.vectors),
            model=model_of(training.vectors),
            anchor=anchor_of(training.vectors),
        )

    def _goes_on(self, group: Group, last: bool) -> bool:
        """Return whether a sum can still be had; if not, all its clients are left out."""
        if not (why := "" if last else group.too_few(self._of.rules)):
            return True
        self._left_out |= {client: why for client in [*group.alive, *group.masked] if client not in self._left_out}
        return False

    def _ask(
        self,
        of: Mapping[int, Group],
        kind: str,
        values: Callable[[int, Group], Mapping[str, Any]],
        read: Callable[[int, Content], T],
        largest: int = 0,
    ) -> Iterator[tuple[int, T]]:
        """Put a stage's question to clients; those that do not answer are no longer alive."""
        carries = kind == "masked"
        contents = {
            client: self._asks.content(
                kind,
                {"instance": group.terms.instance, **values(client, group)},
                self._sent.vectors[client] if carries else None,
            )
            for client, group in of.items()
        }

        def checked(client: int, content: Content) -> T:
            if content.get("instance", str) != of[client].terms.instance:
                raise UpdateError("answer about another sum than it was asked for")
            if not carries:
                content.has_only(())
            return read(client, content)

        answered = set[int]()
        number = str(self._query.round.number)
        for client, found in self._asks.request(contents, MessageType.TRAIN, number, checked, self._left_out, largest):
            answered.add(client)
            yield client, found
        for group in _groups(of):
            group.alive = [client for client in group.alive if client in answered]

    def _keys(self, of: Mapping[int, Group]) -> None:
        def read(client: int, content: Content) -> Advert:
            masking, sealing, signature = (content.get(name, bytes) for name in ("masking", "sealing", "signature"))
            min_honest = content.get("min_honest", int)
            check_min_honest(min_honest)
            advert = Advert(client, masking, sealing, self._keys_of[client], signature, min_honest)
            advert.check(of[client].terms.context)
            if content.get("has_peers", bool):
                self._with_peers.add(client)
            return advert

        for client, advert in self._ask(
            of, "keys", lambda client, group: {"client": client, "terms": group.terms.text}, read
        ):
            of[client].adverts[client] = advert
        for group in _groups(of):
            self._left_out |= dict.fromkeys(group.leave_out_copies(), "shows a key that is shown twice in the sum")
            self._left_out |= group.leave_out_unprotected()
            group.settle_list()

    def _shares(self, of: Mapping[int, Group]) -> None:
        lists = {id(group): self._list_of(group, has_signers=True) for group in _groups(of)}
        short_lists = {id(group): self._list_of(group, has_signers=False) for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            return (short_lists if client in self._with_peers else lists)[id(group)]

        def read(client: int, content: Content) -> tuple[dict[int, bytes], dict[int, bytes]]:
            group = of[client]
            holders, ciphertexts = listed(content, "clients", int), listed(content, "ciphertexts", bytes)
            promises = listed(content, "promises", bytes)
            others = [member for member in group.members if member != client]
            is_complete, count = group.graph.holders == 0, group.graph.holders or len(others)
            if sorted({*holders}) != holders or not {*holders} <= {*others} or len(holders) != count:
                raise UpdateError(f"shares for other clients than {count} of those that it was shown the keys of")
            if len(ciphertexts) != len(holders) or max(map(len, ciphertexts)) > LONGEST_CIPHERTEXT:
                raise UpdateError(
                    f"{len(ciphertexts)} sealed shares, expected {len(holders)} of at most {LONGEST_CIPHERTEXT} bytes"
                )
            if len(promises) != count + is_complete or {*map(len, promises)} != {2 * DIGEST_BYTES}:
                raise UpdateError(f"{len(promises)} promises of shares, expected {count + is_complete}")
            promise = content.get("commitment", bytes)
            if len(promise) != DIGEST_BYTES:
                raise UpdateError(f"a commitment of {len(promise)} bytes, expected {DIGEST_BYTES}")
            group.commitments[client] = promise
            promised = [*holders, client] if is_complete else holders
            return dict(zip(holders, ciphertexts, strict=True)), dict(zip(promised, promises, strict=True))

        for client, (ciphertexts, promises) in self._ask(of, "shares", values, read):
            of[client].ciphertexts[client], of[client].promises[client] = ciphertexts, promises
        for group in _groups(of):
            why = "too many of those that it has dealt shares to have dealt none themselves"
            self._left_out |= dict.fromkeys(group.settle_dealt(), why)

    def _list_of(self, group: Group, *, has_signers: bool) -> Mapping[str, Any]:
        """Return the whole list of a sum, as the values of a message; who has the clients' keys needs them not."""
        return advertising.told([group.adverts[client] for client in group.members], has_signers=has_signers)

    def _masked(self, of: Mapping[int, Group]) -> None:
        repeated = {"what": "masked", **{name: self._values[name] for name in ("round", "query", "purpose")}}
        S, dtype = self._query.models.shape[1], self._query.models.dtype
        statements = {id(group): group.statements for group in _groups(of)}
        lengths = {id(group): group.terms.numbers(self._D, S).length for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            sources = group.sources(client)
            ciphertexts = [group.ciphertexts[source][client] for source in sources]
            promises = [group.promises[source][client] for source in sources]
            dealt = {"dealt": statements[id(group)].dealt, "sources": sources}
            return {**self._values, **dealt, "ciphertexts": ciphertexts, "promises": promises}

        def read(client: int, content: Content) -> MaskedReply:
            expected = {**repeated, "model": self._sent.names[client]}
            reply = read_masked(content, lengths[id(of[client])], self._clear, dtype, expected)
            numbers, signature = digest_of_numbers(content.vector("masked")), content.get("signature", bytes)
            statement = statements[id(of[client])].masked(client, numbers)
            if not is_signed(statement, self._keys_of[client], signature):
                raise UpdateError("its masked update is not signed for this sum by its key")
            of[client].signed[client] = numbers, signature
            return reply

        largest = BYTES_PER_ENTRY * max(lengths.values()) + self._clear * dtype.itemsize
        self._replies = dict(self._ask(of, "masked", values, read, largest))
        for client, group in of.items():
            if client in self._replies:
                group.masked[client] = self._replies[client].masked
        for group in _groups(of):
            group.settle_active()

    def _agree(self, of: Mapping[int, Group]) -> None:
        statements = {id(group): group.statements for group in _groups(of)}
        active = {id(group): bitmap({*group.active}, group.members) for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            digests, signatures = group.signed_for(client)
            return {"active": active[id(group)], "digests": digests, "signatures": signatures}

        def read(client: int, content: Content) -> bytes:
            signature, key = content.get("signature", bytes), id(of[client])
            if not is_signed(statements[key].agreed(active[key]), self._keys_of[client], signature):
                raise UpdateError("its key has not signed that it agrees to the sum")
            return signature

        for client, signature in self._ask(of, "agree", values, read):
            of[client].agreements[client] = signature

    def _unmask(self, of: Mapping[int, Group]) -> None:
        agreements = {id(group): group.enough_agreements() for group in _groups(of)}

        def values(client: int, group: Group) -> Mapping[str, Any]:
            agreed = agreements[id(group)]
            return {"clients": list(agreed), "signatures": list(agreed.values())}

        def read(client: int, content: Content) -> None:
            of[client].take_shares(client, listed(content, "shares", bytes))

        for _ in self._ask(of, "unmask", values, read):
            pass

    def _collected(self, groups: Sequence[Group]) -> Updates:
        """Take the masks off, and return the sum of each cluster with what was sent in addition to it."""
        of_row = self._sums_by_row(groups)
        models = self._query.models
        totals: list[Tensor] = []
        figures: dict[int, tuple[int, ClusterSum]] = {}  # of each client: the place of its cluster's sum, and the sum
        for accepted in of_row.values():
            whole = combine([found for _, found in accepted], self._D, self._of.rule)
            for group, _ in accepted:
                figures |= dict.fromkeys(group.active, (len(totals), whole))
            totals.append(whole.total.to(models))
        ids = [client for client in self._query.ids if client in figures]
        for client in ids:  # that did not answer the last question: its update is in the sum
            self._left_out.pop(client, None)
        sums = [figures[client][1] for client in ids]
        places = [figures[client][0] for client in ids]
        stacked = torch.stack(totals) if totals else models.new_zeros(0, models.shape[1])
        replies = [self._replies[client] for client in ids]
        clear = torch.stack([each.clear for each in replies]) if replies else models.new_zeros(0, self._clear)
        clear = torch.where(clear >= 0, 1.0, -1.0).to(clear)  # signs, whatever a client sends
        split = self._parts * self._part_dim
        parts = clear[:, :split].view(len(ids), self._parts, self._part_dim) if self._parts else None
        losses = [torch.nan if self._of.withholds_losses else each.loss for each in sums]
        return Updates(
            ids=tuple(ids),
            # Every client counts with its share of its cluster's figures: of single clients there are none.
            sizes=torch.tensor([each.weight / each.clients for each in sums], dtype=torch.float64),
            losses=torch.tensor(losses, dtype=torch.float64),
            norms=torch.tensor([each.norm for each in sums], dtype=torch.float64),
            n_parameters=self._D,
            sums=Sums(stacked, torch.tensor(places, dtype=torch.int64)),
            sketches=clear[:, split:],
            parts=parts,
            left_out=self._left_out,
            events=tuple(self._events),
        )

    def _sums_by_row(self, groups: Sequence[Group]) -> Mapping[int, list[tuple[Group, ClusterSum]]]:
        """Return the sums that can be used, by the model that their clients were sent; note why others cannot."""
        size, what = self._query.models.shape[1], self._query.round.purpose
        of_row: dict[int, list[tuple[Group, ClusterSum]]] = {}
        for group in groups:
            clients = tuple(group.active)
            try:
                found = group.total(self._D, size)
            except RejectedSumError as error:
                _log.warning("round %d: a sum of %s is rejected: %s", self._query.round.number, what, error)
                self._left_out |= dict.fromkeys(clients, f"{REJECTED_SUM}: {error}")
                self._events.append(SumRejected(0, what, clients, str(error)))
            except UpdateError as error:
                if isinstance(error, BadSharesError):
                    self._of.barred[error.client] = str(error)
                self._left_out |= dict.fromkeys(clients, str(error))
            else:
                of_row.setdefault(group.row, []).append((group, found))
                if found.clipped:
                    _log.warning(
                        "round %d: %d of %d clients had their update shortened to norm %.3g (network.secure_norm)",
                        self._query.round.number,
                        found.clipped,
                        found.clients,
                        self._norms.parameters,
                    )
                    self._events.append(SumClipped(0, what, clients, found.clipped, self._norms.parameters))
        accepted = [found for sums in of_row.values() for _, found in sums]
        self._of.norms.take(self._query.round.number, self._norms, accepted, self._query.round.replicates)
        return of_row


def _groups(of: Mapping[int, Group]) -> list[Group]:
    """Return the groups of some clients, each once."""
    return list({id(group): group for group in of.values()}.values())
