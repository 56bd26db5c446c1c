"""Client's side of secure aggregation: replies to the five requests of a sum, each at most once.

The requests are named ``keys``, ``shares``, ``masked``, ``agree`` and ``unmask``. A client splits
its secrets (a seed and a private masking key) into shares and deals them to other clients, the
holders. The requests are the rounds of Bonawitz et al. 2017: clients advertise keys, share keys,
send masked inputs, check their consistency, and send the shares for unmasking.
``docs/secure-aggregation.md`` describes the protocol and explains the symbols.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedclade.core import FedcladeError, UpdateError, Updates
from fedclade.flower import wire
from fedclade.flower.flwr_internals import create_shares
from fedclade.flower.policy import Policy
from fedclade.flower.secure import adverts as advertising
from fedclade.flower.secure.adverts import Advert, digest_of_list
from fedclade.flower.secure.encoding import DIGEST_BYTES, read_bitmap
from fedclade.flower.secure.parameters import Graph, too_few_insist, without_protection
from fedclade.flower.secure.secrets import (
    Contribution,
    Masked,
    Scope,
    agreed,
    commitment,
    digest_of_numbers,
    new_key,
    new_seed,
    own_mask,
    pack,
    pair_mask,
    promises_of,
    public_of,
    seal,
    unseal,
)
from fedclade.flower.secure.spent import SpentQuestions
from fedclade.flower.secure.statements import Statements, is_signed
from fedclade.flower.secure.terms import (
    OF_STAGE,
    Terms,
    anchor_of,
    digest_of,
    draw_holders,
    listed,
    model_of,
    question_of,
)
from fedclade.flower.signing import Key
from fedclade.flower.training_asked import TrainingFailedError
from fedclade.flower.wire import Content, shown

_STATE = "fedclade.secure"
"""Name under which a client's :class:`SumState` is stored in the state that Flower keeps for it.

This state is in the memory of the client's SuperNode.
"""


@dataclass
class SumState:
    """State of one client in one sum, which is stored between two requests of the server.

    Parameters
    ----------
    instance, terms, client
        Name of the sum, its terms (JSON), and the number of this client in it.
    masking, sealing, seed
        Private keys of this client for masks and for encrypting shares, and the seed of its own
        mask.
    listing
        λ, the digest of the list of the sum's clients.
    members, signers, their_masking, their_sealing
        Clients on the list in ascending order, this client included, and their public keys.
    insisting, min_honests
        Members that insist on secure aggregation, and the number of honest clients that each
        demands.
    holders
        Other clients to which this client has dealt shares of its secrets.
    own_seed_share, own_key_share
        Shares of its own secrets that this client keeps; empty unless all clients deal to all.
    dealt, active
        Bitmaps of D, the clients that have dealt shares, and of A, the clients in the sum.
    sources, seed_shares, key_shares
        Clients that have dealt shares to this client, and these shares; empty if unreadable.
    stage
        Last request that this client has replied to.
    ticket
        Random name of this state, drawn by the client. The name ``instance`` is not sufficient,
        since the server chooses it and may use it twice.
    """

    instance: str
    terms: str
    client: int
    masking: bytes
    sealing: bytes
    seed: bytes
    listing: bytes = b""
    members: list[int] = field(default_factory=list[int])
    signers: list[bytes] = field(default_factory=list[bytes])
    their_masking: list[bytes] = field(default_factory=list[bytes])
    their_sealing: list[bytes] = field(default_factory=list[bytes])
    insisting: list[int] = field(default_factory=list[int])
    min_honests: list[int] = field(default_factory=list[int])
    holders: list[int] = field(default_factory=list[int])
    own_seed_share: bytes = b""
    own_key_share: bytes = b""
    dealt: bytes = b""
    active: bytes = b""
    sources: list[int] = field(default_factory=list[int])
    seed_shares: list[bytes] = field(default_factory=list[bytes])
    key_shares: list[bytes] = field(default_factory=list[bytes])
    stage: str = ""
    ticket: str = ""

    @classmethod
    def load(cls, state: RecordDict | None, stage: str, content: Content) -> SumState:
        """Return the client's stored state in the sum of a request.

        Parameters
        ----------
        state
            State that Flower keeps for the client.
        stage
            Last request that the client must have replied to.
        content
            Content of the new request.

        Raises
        ------
        UpdateError
            If the request belongs to another sum, or is repeated or too early. A second reply would
            use the same masks, which would cancel in the difference of both replies.
        """
        stored: dict[str, Any] = {}
        if state is not None and isinstance(record := state.get(_STATE), ConfigRecord):
            stored = dict(record)
        request = content.get("what", str)
        if stored.get("instance") != content.get("instance", str):
            raise UpdateError(
                f"the request {request!r} is about a sum that this client has not joined, or has "
                "forgotten in a restart of its SuperNode, so it sends no reply"
            )
        if stored["stage"] != stage:
            raise UpdateError(
                f"the request {request!r} of a sum is possible once, and only after {stage!r}; the "
                f"last request that this client replied to was {stored['stage']!r}"
            )
        values = {each.name: stored[each.name] for each in fields(cls)}
        return cls(**values)  # pyright: ignore[reportArgumentType]

    def read_terms(self) -> Terms:
        """Return the terms of the sum."""
        return Terms.read(Content({"terms": self.terms}))

    @property
    def scope(self) -> Scope:
        """Digests of the terms and of the list of clients, part of all secrets and signatures."""
        return self.read_terms().context, self.listing

    @property
    def statements(self) -> Statements:
        """Statements that the clients of the sum sign."""
        return Statements(self.scope, self.dealt)

    @property
    def graph(self) -> Graph:
        """Rule that determines how many holders receive shares of a client's secrets."""
        return self.read_terms().graph(len(self.members), len(self.insisting))

    @property
    def quorum(self) -> int:
        """Number of clients that have to agree to the sum before this client sends its shares."""
        return self.read_terms().quorum(len(self.members), len(self.insisting))

    def members_of(self, bits: bytes) -> list[int]:
        """Return the clients of the sum that a bitmap encodes."""
        return read_bitmap(bits, self.members)

    def signer(self, client: int) -> str:
        """Return the public signature key of a client of the sum, in hexadecimal."""
        return self.signers[self.members.index(client)].hex()

    def save(self, state: RecordDict | None, stage: str) -> None:
        """Store the state after the reply to the request ``stage``; erase secrets after last use.

        Raises
        ------
        UpdateError
            If Flower keeps no state for the client.
        """
        if state is None:
            raise UpdateError(
                "a client can join a sum only if Flower keeps a state for the client; run the client "
                "as a Flower ClientApp"
            )
        self.stage = stage
        if stage in ("masked", "unmask"):
            self.masking = b""
            self.sealing = b""
            self.seed = b""
        if stage == "unmask":
            self.own_seed_share = b""
            self.own_key_share = b""
            self.seed_shares = []
            self.key_shares = []
        state[_STATE] = ConfigRecord(vars(self))


_log = logging.getLogger(__name__)

Train = Callable[[Content], Updates]
"""Function that trains as a request specifies and returns the client's update.

The update may have signatures and sketches, which the client sends without a mask.
"""

MOST_SOURCES = 4
"""Limit on the clients that deal shares to one client, as a multiple of k, its number of holders.

Each client chooses its holders itself, so without a limit a client could receive any number of
shares.
"""

UNREADABLE = (b"", b"")
"""Value for two shares that cannot be read, or whose hashes differ from those of their dealer."""


class Member:
    """Client's side of secure aggregation: checks requests, masks updates and deals shares.

    Parameters
    ----------
    policy
        Policy of the client, with the number of colluding clients that a sum must tolerate and the
        number of honest clients that it must have.
    peers
        Number of each other client by its public key, from a list that does not come from the
        server; None if the client has no such list.
    folder
        Folder of the client, for records that must survive a restart; None if there is none.
    """

    def __init__(
        self, policy: Policy, peers: Mapping[str, int] | None = None, folder: Path | None = None
    ) -> None:
        self._policy = policy
        self._peers = peers
        self._spent = SpentQuestions(folder)

    # Message 1: public keys.

    def keys(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Join a new sum: draw private keys, and reply with the signed public keys.

        This is the first request of a sum. The state of an earlier sum is discarded.

        Parameters
        ----------
        content
            Content of the request, with the terms of the sum.
        state
            State that Flower keeps for the client.
        key
            Signature key of the client.

        Raises
        ------
        FedcladeError
            If the policy forbids the sum, or the request is malformed.
        """
        terms = Terms.read(content)
        client = content.get("client", int)
        instance = content.get("instance", str)
        if key is None or instance != terms.instance or not 0 <= client < 2**63:
            raise UpdateError(
                "to join a sum, a client needs a signature key, a number of at least 0, and terms "
                f"with the name {shown(instance)} of this sum, got "
                f"{'no key' if key is None else 'a key'}, {client} and {shown(terms.instance)}"
            )
        self._policy.check_colluders(terms.colluders)
        self._policy.check_group(terms.clients, terms.colluders)
        part = SumState(
            instance,
            terms.text,
            client,
            masking=new_key(),
            sealing=new_key(),
            seed=new_seed(),
            ticket=secrets.token_hex(16),
        )
        min_honest = 0  # the client does not insist on secure aggregation
        if self._policy.secure_aggregation:
            min_honest = self._policy.min_honest
        advert = Advert(
            client=client,
            masking=public_of(part.masking),
            sealing=public_of(part.sealing),
            signer=key.public,
            min_honest=min_honest,
        ).signed(terms.context, key)
        self._spent.begin(terms.question, state)
        self._save(part, state, "keys")
        return wire.record(
            {
                "instance": instance,
                "has_peers": self._peers is not None,
                "masking": advert.masking,
                "sealing": advert.sealing,
                "signature": advert.signature,
                "min_honest": advert.min_honest,
            }
        )

    # Message 2: the client receives the list of all clients, and sends encrypted shares.

    def shares(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Check the list of the sum's clients; reply with encrypted shares of the client's secrets.

        This is the second request of a sum. Only the holder of a share can decrypt the share.
        """
        part = SumState.load(state, "keys", content)
        terms = part.read_terms()
        adverts = advertising.read(content, self._known_keys(part, key))
        self._check_list(part, terms, adverts, key)
        part.listing = digest_of_list(terms.context, adverts)
        part.members = [advert.client for advert in adverts]
        part.signers = [bytes.fromhex(advert.signer) for advert in adverts]
        part.their_masking = [advert.masking for advert in adverts]
        part.their_sealing = [advert.sealing for advert in adverts]
        insisting = [advert for advert in adverts if advert.min_honest]
        part.insisting = [advert.client for advert in insisting]
        part.min_honests = [advert.min_honest for advert in insisting]
        part.holders = draw_holders(part.client, part.members, part.graph)
        dealt = _deal_shares(part)
        self._save(part, state, "shares")
        return wire.record({"instance": part.instance, **dealt})

    # Message 3: the client receives shares and the model, and sends its masked vector.

    def masked(
        self,
        content: Content,
        state: RecordDict | None,
        key: Key | None,
        *,
        train: Train,
        shape: tuple[int, int],
    ) -> RecordDict:
        """Train, and reply with the masked update and a signature.

        This is the third request of a sum. The reply contains no values in clear that depend on the
        client's data, except sketches for methods that compare clients.

        Parameters
        ----------
        content, state, key
            Content of the request, state that Flower keeps for the client, and the client's
            signature key.
        train
            Function that trains the model.
        shape
            Numbers of parameters D and of entries S (parameters and buffers) of the model.
        """
        part = SumState.load(state, "shares", content)
        terms = part.read_terms()
        check_training(content, terms)
        self._take_shares(part, content)
        contribution, clear = self._train(content, train, shape)
        numbers = terms.numbers(*shape).encode(contribution)
        masked = pack(add_masks(part, numbers))
        statement = part.statements.masked(part.client, digest_of_numbers(masked))
        self._save(part, state, "masked")
        values = {name: content.values[name] for name in ("what", "round", "query", "purpose")}
        values["model"] = wire.digest(content.vector("model"))
        values["instance"] = part.instance
        values["signature"] = _sign(statement, key)
        vectors = {"masked": wire.raw(masked, "uint8", len(masked))}
        if len(clear):
            vectors["clear"] = wire.raw_vector(clear)
        return wire.record(values, vectors)

    # Message 4: the client receives the set of clients in the sum, and signs it.

    def agree(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Check and sign the set of clients whose updates are added up.

        This is the fourth request of a sum. The client first checks that its partners, with which
        it shares pairwise masks, have signed the same list of clients. After its reply the client
        agrees to no other sum for the same training request.
        """
        part = SumState.load(state, "masked", content)
        terms = part.read_terms()
        bits = content.get("active", bytes)
        active = part.members_of(bits)
        if part.client not in active:
            raise UpdateError(
                "the request is about a sum without this client's update, to which the client "
                "cannot agree"
            )
        strangers = sorted(set(active) - set(part.members_of(part.dealt)))
        if strangers:
            raise UpdateError(
                f"the requested sum contains clients that have dealt no shares: {shown(strangers)}; "
                "the server does not follow the protocol"
            )
        if len(active) < part.quorum:
            raise UpdateError(
                f"the requested sum has {len(active)} clients, expected at least {part.quorum}, so "
                "this client does not agree to it"
            )
        self._policy.check_group(len(active), terms.colluders)
        min_honest_of = dict(zip(part.insisting, part.min_honests, strict=True))
        check_protection(
            {client: min_honest_of[client] for client in active if client in min_honest_of},
            terms.colluders,
        )
        self._check_masked_alike(part, content, active)
        self._spent.spend(terms.question, state)
        part.active = bits
        self._save(part, state, "agree")
        signature = _sign(part.statements.agreed(bits), key)
        return wire.record({"instance": part.instance, "signature": signature})

    # Message 5: the client receives signatures of agreement, and sends decrypted shares.

    def unmask(self, content: Content, state: RecordDict | None) -> RecordDict:
        """Reply with decrypted shares, if enough clients have agreed to the sum.

        This is the fifth request of a sum. The reply contains a share of the seed of each client in
        the sum, and a share of the masking key of each client that dropped out. It never contains
        both shares of one client, since the server could then unmask this client's update alone.
        """
        part = SumState.load(state, "agree", content)
        self._check_agreements(part, content)
        active = set(part.members_of(part.active))
        both_shares = zip(part.seed_shares, part.key_shares, strict=True)
        shares_of = dict(zip(part.sources, both_shares, strict=True))
        if part.own_seed_share:
            shares_of[part.client] = (part.own_seed_share, part.own_key_share)
        opened: list[bytes] = []
        for dealer, (seed_share, key_share) in sorted(shares_of.items()):
            opened.append(seed_share if dealer in active else key_share)
        self._save(part, state, "unmask")
        return wire.record({"instance": part.instance, "shares": opened})

    def _save(self, part: SumState, state: RecordDict | None, stage: str) -> None:
        """Record the reply to the request ``stage`` before it is sent.

        Raises
        ------
        UpdateError
            If the client has replied to this request before.
        """
        self._spent.advance(part.ticket, part.stage, stage)
        part.save(state, stage)

    def _check_list(
        self, part: SumState, terms: Terms, adverts: Sequence[Advert], key: Key | None
    ) -> None:
        """Check the list of a sum's clients and their signed keys.

        Parameters
        ----------
        part
            State of this client in the sum.
        terms
            Terms of the sum.
        adverts
            Public keys of all clients on the list.
        key
            Signature key of this client.

        Raises
        ------
        FedcladeError
            If this client's own keys are wrong, a key occurs twice, a signature is invalid, or the
            policy demands more honest clients.
        """
        self._policy.check_group(len(adverts), terms.colluders)
        check_protection(
            {advert.client: advert.min_honest for advert in adverts if advert.min_honest},
            terms.colluders,
        )
        listed_as = [
            (advert.masking, advert.sealing, advert.signer)
            for advert in adverts
            if advert.client == part.client
        ]
        is_listed = key is not None and listed_as == [
            (public_of(part.masking), public_of(part.sealing), key.public)
        ]
        if len(adverts) > terms.clients or not is_listed:
            raise UpdateError(
                "the list of the clients' keys that the server has sent should have at most "
                f"{terms.clients} clients, and contain this client with its own keys, got keys of "
                f"clients {shown([advert.client for advert in adverts])}; the server does not follow "
                "the protocol, so this client refuses the sum"
            )
        public_keys = [public for advert in adverts for public in advert.keys]
        signers = {advert.signer for advert in adverts}
        if len(set(public_keys)) != len(public_keys) or len(signers) != len(adverts):
            raise UpdateError(
                "two clients of the sum have the same public key, so this client refuses the sum; "
                "give each client a key of its own"
            )
        for advert in adverts:
            advert.check(terms.context)

    def _known_keys(self, part: SumState, key: Key | None) -> Mapping[int, str] | None:
        """Return the public keys of all clients by number, from this client's peers-file.

        The result is None if the client has no such file. The file need not list this client
        itself.

        Raises
        ------
        UpdateError
            If the server addresses this client by the number of another client.
        """
        if self._peers is None or key is None:
            return None
        known = {number: public for public, number in self._peers.items()}
        is_other = self._peers.get(key.public, part.client) != part.client
        if is_other or known.setdefault(part.client, key.public) != key.public:
            raise UpdateError(
                f"the request addresses this client as client {part.client}, but in this client's "
                f"peers-file client {part.client} has another key, or this client's key belongs to "
                "another number; correct the peers-file, or network.keys of the server"
            )
        return known

    def _take_shares(self, part: SumState, content: Content) -> None:
        """Check, decrypt and store the shares that other clients have dealt to this client.

        A share that cannot be decrypted, or does not have the hash that its dealer has sent, is
        stored as unreadable. If this client sent such a share to the server, the server would take
        this client, and not the dealer, for malicious. This client still uses its pairwise mask
        with the dealer of an unreadable share, since the dealer uses the mask, too, and the mask
        cancels only if both clients use it.

        Raises
        ------
        UpdateError
            If the list of dealers is wrong, or if too few holders of this client's shares have
            dealt shares themselves.
        """
        part.dealt = content.get("dealt", bytes)
        dealt = set(part.members_of(part.dealt))
        graph = part.graph
        sources = listed(content, "sources", int)
        ciphertexts = listed(content, "ciphertexts", bytes)
        promises = listed(content, "promises", bytes)
        possible = dealt - {part.client}
        is_complete = graph.holders == 0
        are_sources_right = set(sources) <= possible
        if is_complete:
            are_sources_right = set(sources) == possible
        is_in_order = sorted(set(sources)) == sources
        have_shares = len(sources) == len(ciphertexts) == len(promises)
        if not (are_sources_right and is_in_order and have_shares):
            raise UpdateError(
                f"the request has shares of clients {shown(sources)}, expected clients out of "
                f"{shown(sorted(possible))}, each once, in ascending order; for each client it "
                "should contain the encrypted shares and their hashes"
            )
        if part.client not in dealt:
            raise UpdateError(
                "the request is about a sum in which this client has not dealt shares, so this client "
                "sends no update; the server does not follow the protocol"
            )
        if not is_complete and len(sources) > MOST_SOURCES * graph.holders:
            raise UpdateError(
                f"{len(sources)} clients have dealt shares to this client, expected at most "
                f"{MOST_SOURCES * graph.holders}, which is {MOST_SOURCES} times the number of "
                f"clients to which each client deals shares ({graph.holders})"
            )
        holders = dealt
        if not is_complete:
            holders = dealt.intersection(part.holders)
        if len(holders) < graph.needed:
            raise UpdateError(
                f"only {len(holders)} of the clients that hold shares of this client's secrets are "
                f"still in the sum, and {graph.needed} are needed to remove its masks later, so "
                "this client sends no update"
            )
        part.sources = sources
        part.seed_shares = []
        part.key_shares = []
        scope = part.scope
        sealing_key_of = dict(zip(part.members, part.their_sealing, strict=True))
        for dealer, sealed, promise in zip(sources, ciphertexts, promises, strict=True):
            way = (dealer, part.client)
            shares = unseal(agreed(part.sealing, sealing_key_of[dealer]), scope, way, sealed)
            if shares is None or promise != promises_of(*shares, way, scope):
                shares = UNREADABLE
            part.seed_shares.append(shares[0])
            part.key_shares.append(shares[1])

    def _check_masked_alike(self, part: SumState, content: Content, active: Sequence[int]) -> None:
        """Check that this client's partners in the sum have masked with the same list of clients.

        Partners are the clients in the sum that have dealt shares to this client. Each must have
        signed its masked vector together with the list of clients and the set D of dealers.

        Raises
        ------
        UpdateError
            If a signature is missing or invalid.
        """
        partners = [dealer for dealer in part.sources if dealer in set(active)]
        digests = listed(content, "digests", bytes)
        signatures = listed(content, "signatures", bytes)
        have_all = len(digests) == len(signatures) == len(partners)
        if not have_all or any(len(digest) != DIGEST_BYTES for digest in digests):
            raise UpdateError(
                f"the request has {len(signatures)} signatures and {len(digests)} digests of "
                f"masked vectors, expected {len(partners)} each, and digests of {DIGEST_BYTES} "
                "bytes"
            )
        statements = part.statements
        for partner, digest, signature in zip(partners, digests, signatures, strict=True):
            if not is_signed(statements.masked(partner, digest), part.signer(partner), signature):
                raise UpdateError(
                    f"client {partner} has not signed that it has masked its update with the same "
                    "clients as this client, so this client refuses the sum; the server may have "
                    "shown the clients different lists"
                )

    def _check_agreements(self, part: SumState, content: Content) -> None:
        """Check that enough clients have signed the same set of clients in the sum as this client.

        Raises
        ------
        UpdateError
            If there are fewer signatures than the quorum, or a signature is invalid.
        """
        clients = listed(content, "clients", int)
        signatures = listed(content, "signatures", bytes)
        active = set(part.members_of(part.active))
        is_each_once = len(set(clients)) == len(clients)
        if len(clients) != len(signatures) or not is_each_once or not set(clients) <= active:
            raise UpdateError(
                f"signatures of clients {shown(clients)} should come from clients of the sum, "
                f"{shown(sorted(active))}, each once"
            )
        if len(clients) < part.quorum:
            raise UpdateError(
                f"{len(clients)} clients have agreed to the sum, expected at least {part.quorum}, so "
                "this client sends no shares to unmask it"
            )
        statement = part.statements.agreed(part.active)
        for client, signature in zip(clients, signatures, strict=True):
            if not is_signed(statement, part.signer(client), signature):
                raise UpdateError(
                    f"client {client} has not signed the same sum as this client; the server may "
                    "have shown the clients different sums"
                )

    def _train(
        self, content: Content, train: Train, shape: tuple[int, int]
    ) -> tuple[Contribution, Tensor]:
        """Train, and return what the client sends masked and what it sends in clear.

        If training fails, the client adds zeros to the sum, and its masked vector looks like any
        other vector. This hides that training failed, which depends on the client's data. If the
        client has to send sketches in clear, it reports the failure instead, since a sketch without
        an update would falsify the comparison of clients.

        Returns
        -------
        tuple[Contribution, Tensor]
            Contribution of the client to the sum, and entries that are sent without a mask.
        """
        n_parameters, size = shape
        request = training_of(content)
        try:
            updates = train(request)
        except Exception as error:
            depends_on_data = isinstance(error, TrainingFailedError) or not isinstance(
                error, FedcladeError
            )
            if not depends_on_data or compares(request):
                raise
            _log.warning("training failed, so this client adds zeros to the sum: %s", error)
            return Contribution.of_failed_training(size), torch.empty(0)
        clear = sent_in_clear(updates)
        self._policy.check_clear(len(clear), n_parameters)
        loss = float(updates.losses[0])
        if math.isnan(loss):  # NaN means that the client withholds its loss.
            loss = 0.0
        contribution = Contribution(
            update=updates.required_deltas[0], examples=int(updates.sizes[0]), loss=loss
        )
        return contribution, clear


def _deal_shares(part: SumState) -> dict[str, object]:
    """Split a client's secrets into shares for its holders, and return the values of the reply.

    The values are the holders, the encrypted shares, the hashes of the shares (promises), and the
    hash of the seed. If all clients deal to all, the client also keeps one share of each secret.
    """
    graph = part.graph
    scope = part.scope
    keeps_own = graph.holders == 0
    count = len(part.holders) + keeps_own
    key_shares = create_shares(part.masking, graph.needed, count)
    seed_shares = create_shares(part.seed, graph.needed, count)
    if keeps_own:
        part.own_key_share = key_shares[-1]
        part.own_seed_share = seed_shares[-1]
    sealing_key_of = dict(zip(part.members, part.their_sealing, strict=True))
    ciphertexts: list[bytes] = []
    promises: list[bytes] = []
    receivers = list(part.holders)
    if keeps_own:
        receivers.append(part.client)
    for receiver, seed_share, key_share in zip(receivers, seed_shares, key_shares, strict=True):
        way = (part.client, receiver)
        promises.append(promises_of(seed_share, key_share, way, scope))
        if receiver != part.client:
            shared = agreed(part.sealing, sealing_key_of[receiver])
            ciphertexts.append(seal(shared, scope, way, shares=(seed_share, key_share)))
    return {
        "clients": part.holders,
        "ciphertexts": ciphertexts,
        "promises": promises,
        "commitment": commitment(part.seed, scope, part.client),
    }


def check_protection(min_honests: Mapping[int, int], colluders: int) -> None:
    """Check that a sum has as many honest clients as each of its clients demands.

    Only clients that insist on secure aggregation count as honest. Each client checks the demands
    of all clients. If each client checked only its own demand, a client with an unmet demand would
    be the only one to refuse, and with the agreement of all other clients the server could still
    unmask the update of the client that refused.

    Parameters
    ----------
    min_honests
        Number of honest clients that each client demands, for clients that insist on secure
        aggregation.
    colluders
        Number of clients that may collude with the server.

    Raises
    ------
    UpdateError
        If the demand of a client is not met.
    """
    unprotected = without_protection(min_honests, colluders)
    if unprotected:
        raise UpdateError(
            "this client refuses a sum of too few honest clients, "
            f"{too_few_insist(unprotected, min_honests, colluders)}"
        )


def check_training(content: Content, terms: Terms) -> None:
    """Raise an UpdateError unless a training request agrees with the terms of its sum."""
    content.has_only(("model", "anchor"))
    is_same_training = digest_of(content.values) == terms.training
    is_same_question = question_of(content.values, content.vectors) == terms.question
    is_same_model = model_of(content.vectors) == terms.model
    is_same_anchor = anchor_of(content.vectors) == terms.anchor
    if not (is_same_training and is_same_question and is_same_model and is_same_anchor):
        raise UpdateError(
            "the training request differs from the training in the terms of the sum that this client "
            "has joined, so it sends no update; the server does not follow the protocol"
        )


def add_masks(part: SumState, numbers: Masked) -> Masked:
    """Add the client's own mask, and a pairwise mask for each partner, to the client's vector.

    Partners are the client's holders that have dealt shares, and all clients that have dealt shares
    to the client. In each pair, the client with the lower number adds the mask and the other client
    subtracts the mask, so pairwise masks cancel in the sum.
    """
    scope = part.scope
    size = len(numbers)
    holders = set(part.holders).intersection(part.members_of(part.dealt))
    partners = holders.union(part.sources)
    total = numbers + own_mask(part.seed, scope, part.client, size)
    for other, public in zip(part.members, part.their_masking, strict=True):
        if other in partners:
            mask = pair_mask(agreed(part.masking, public), scope, (part.client, other), size)
            if part.client < other:
                total = total + mask
            else:
                total = total - mask
    return total


def compares(request: Content) -> bool:
    """Return whether a training request requires sketches, by which the server compares updates."""
    has_parts = request.values.get("replicates", 1) > 1
    compares_parts = has_parts and bool(request.values.get("compares_parts"))
    return compares_parts or bool(request.values.get("signs"))


def training_of(content: Content) -> Content:
    """Return the plain training request that a request for a masked update contains."""
    values = {name: value for name, value in content.values.items() if name not in OF_STAGE}
    return replace(content, values={**values, "what": "train"})


def sent_in_clear(updates: Updates) -> Tensor:
    """Return the entries that a client sends without a mask, concatenated to a vector ``[R]``.

    The entries are the sketches of the updates from disjoint parts of the client's data, if the
    query requests such updates, followed by the sketch of the client's whole update. R is 0 if the
    query compares no updates.
    """
    update = updates.required_deltas[0]
    in_clear = [
        column[0].flatten() for column in (updates.parts, updates.sketches) if column is not None
    ]
    return torch.cat([update[:0], *in_clear]).to(update)


def _sign(statement: bytes, key: Key | None) -> bytes:
    """Sign a statement with the client's key; raise an UpdateError if the client has no key."""
    if key is None:
        raise UpdateError(
            "a client needs a signature key to join a sum, and this client has none; run the client "
            "as a fedclade.flower.client_app, which makes the key"
        )
    return key.private.sign(statement)
