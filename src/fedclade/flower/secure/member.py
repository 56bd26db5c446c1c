"""A client's side of secure aggregation: five requests, and a reply to each, once.

``docs/secure-aggregation.md`` describes the protocol and has the symbols.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from torch import Tensor

from fedclade.core import FedcladeError, UpdateError, Updates
from fedclade.flower import wire
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
"""Name of a client's part in the state that Flower keeps of it, in its SuperNode's memory."""


@dataclass
class SumState:
    """A client's part in a sum, as it is stored between two requests.

    Parameters
    ----------
    instance, terms, client
        Name of the sum, its terms (JSON), and the number of this client in it.
    masking, sealing, seed
        Private keys of this client, and the seed of its own mask.
    listing
        λ, the digest of the list.
    members, signers, their_masking, their_sealing
        Clients on the list in ascending order, this one included, and their public keys.
    insisting, min_honests
        Members that insist on secure aggregation, and the number of honest clients that each
        demands.
    holders
        Other clients that were dealt shares of this client's secrets.
    own_seed_share, own_key_share
        Shares of its own secrets that this client keeps, in a complete graph.
    dealt, active
        Bitmaps of D, the clients that have dealt shares, and of A, the clients in the sum.
    sources, seed_shares, key_shares
        Clients that have dealt shares to this one, and these shares; empty if unreadable.
    stage
        Request that was replied to last.
    ticket
        Random name of this part, drawn by the client. The server may use an instance twice.
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
        """Return the stored part in the sum of a request, which comes after another request.

        Parameters
        ----------
        state
            State that Flower keeps of the client.
        stage
            Request that must have been replied to last.
        content
            The request.

        Raises
        ------
        UpdateError
            If the request is about another sum, or comes twice or too early. A second reply would
            use the same masks again, and the difference of both would be in clear.
        """
        record = None if state is None else state.get(_STATE)
        stored = dict(record) if isinstance(record, ConfigRecord) else {}
        request = content.get("what", str)
        if stored.get("instance") != content.get("instance", str):
            raise UpdateError(f"asked for the {request!r} of a sum that this client has no part in")
        if stored["stage"] != stage:
            raise UpdateError(
                f"asked for the {request!r} of a sum, which comes once and after {stage!r}; the "
                f"last it answered was {stored['stage']!r}"
            )
        values = {each.name: stored[each.name] for each in fields(cls)}
        return cls(**values)  # pyright: ignore[reportArgumentType]

    def read_terms(self) -> Terms:
        """Return the terms of the sum."""
        return Terms.read(Content({"terms": self.terms}))

    @property
    def scope(self) -> Scope:
        """Digests that all secrets and signatures of the sum are bound to."""
        return self.read_terms().context, self.listing

    @property
    def statements(self) -> Statements:
        """Statements that clients sign."""
        return Statements(self.scope, self.dealt)

    @property
    def graph(self) -> Graph:
        """Rule by which clients deal shares to one another."""
        return self.read_terms().graph(len(self.members), len(self.insisting))

    @property
    def quorum(self) -> int:
        """Number of clients that have to agree on the sum."""
        return self.read_terms().quorum(len(self.members), len(self.insisting))

    def members_of(self, bits: bytes) -> list[int]:
        """Return the clients of a bitmap."""
        return read_bitmap(bits, self.members)

    def signer(self, client: int) -> str:
        """Return the public key that a client on the list signs with, in hexadecimal."""
        return self.signers[self.members.index(client)].hex()

    def save(self, state: RecordDict | None, stage: str) -> None:
        """Store that a request was replied to; erase each secret after its last use."""
        if state is None:
            raise UpdateError("a client can take part in a sum only if Flower keeps a state for it")
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
"""Trains as a request says; returns one update ``[1, S + R]``, of which R entries leave without a mask."""

MOST_SOURCES = 4
"""A client stops if more than this many times k others deal shares to it: they choose freely whom to deal to."""

UNREADABLE = (b"", b"")
"""In place of shares that cannot be read, or that differ from the ones their dealer has promised."""


class Member:
    """A client that takes part in sums.

    Parameters
    ----------
    policy
        Policy of the client: the number of colluding clients that a sum must withstand, and the
        number of honest clients that it must have.
    peers
        Number of each other client by its public key, if the client knows them from elsewhere than
        from the server.
    folder
        Folder of the client, for what must survive a restart.
    """

    def __init__(
        self, policy: Policy, peers: Mapping[str, int] | None = None, folder: Path | None = None
    ) -> None:
        self._policy = policy
        self._peers = peers
        self._spent = SpentQuestions(folder)

    # Message 1: public keys.

    def keys(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Take part in a new sum: draw keys, and reply with their public halves.

        A sum that was begun before is forgotten.
        """
        terms = Terms.read(content)
        client = content.get("client", int)
        instance = content.get("instance", str)
        if key is None or instance != terms.instance or not 0 <= client < 2**63:
            raise UpdateError(
                "a client takes part in a sum under a number, by terms of that sum, and with a key"
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
        advert = Advert(
            client=client,
            masking=public_of(part.masking),
            sealing=public_of(part.sealing),
            signer=key.public,
            min_honest=self._policy.min_honest if self._policy.secure_aggregation else 0,
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

    # Message 2: the list of all clients arrives, and sealed shares leave.

    def shares(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Check the list of clients, and deal shares of the own secrets that only their holders can read."""
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

    # Message 3: shares of others and the model arrive, and the masked vector leaves.

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

        Nothing that depends on the client's data leaves in clear, except sketches where the method
        compares clients.

        Parameters
        ----------
        content, state, key
            The request, the state that Flower keeps, and the client's own key.
        train
            Trains the model.
        shape
            D and S, the numbers of parameters and of entries of the model.
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

    # Message 4: the set of clients in the sum arrives, and a signature leaves.

    def agree(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Sign the set of clients in the sum, once the partners of this client have signed the same list.

        From here on the client adds its reply to this training request to no other sum.
        """
        part = SumState.load(state, "masked", content)
        terms = part.read_terms()
        bits = content.get("active", bytes)
        active = part.members_of(bits)
        if part.client not in active:
            raise UpdateError("asked for shares of a sum that this client's update is not in")
        strangers = sorted(set(active) - set(part.members_of(part.dealt)))
        if strangers:
            raise UpdateError(
                f"asked to agree to a sum with clients that dealt no shares: {shown(strangers)}"
            )
        if len(active) < part.quorum:
            raise UpdateError(
                f"asked to unmask a sum of {len(active)} clients, and at least {part.quorum} are "
                "needed"
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

    # Message 5: agreements arrive, and opened shares leave.

    def unmask(self, content: Content, state: RecordDict | None) -> RecordDict:
        """Open shares, if enough clients agree to the sum.

        They are shares of the seeds of clients in the sum, and of the masking keys of the others;
        never both of one client, or its update could be unmasked by itself.
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
        """Store that a request is replied to, before the reply leaves; an UpdateError if it was before."""
        self._spent.advance(part.ticket, part.stage, stage)
        part.save(state, stage)

    def _check_list(
        self, part: SumState, terms: Terms, adverts: Sequence[Advert], key: Key | None
    ) -> None:
        """Check that a list has known clients only, each once, and this client with its own keys."""
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
                f"the keys shown for the sum are not those of its {terms.clients} clients"
            )
        public_keys = [public for advert in adverts for public in advert.keys]
        signers = {advert.signer for advert in adverts}
        if len(set(public_keys)) != len(public_keys) or len(signers) != len(adverts):
            raise UpdateError("two clients of the sum show the same key")
        for advert in adverts:
            advert.check(terms.context)

    def _known_keys(self, part: SumState, key: Key | None) -> Mapping[int, str] | None:
        """Return the public keys of all clients by number, if this client knows them from its peers-file.

        The file may leave out this client itself.
        """
        if self._peers is None or key is None:
            return None
        known = {number: public for public, number in self._peers.items()}
        is_other = self._peers.get(key.public, part.client) != part.client
        if is_other or known.setdefault(part.client, key.public) != key.public:
            raise UpdateError(
                f"asked as client {part.client}, who has another key on this client's list of "
                "peers (peers-file)"
            )
        return known

    def _take_shares(self, part: SumState, content: Content) -> None:
        """Check and store the shares that others have dealt to this client.

        A client masks also with a partner whose shares it cannot read: both sides of a pair have to
        use a mask or neither, and other holders can take it off again. A share that differs from
        the promised one counts as unreadable, because the server would take it for a lie of its
        holder.
        """
        part.dealt = content.get("dealt", bytes)
        dealt = set(part.members_of(part.dealt))
        graph = part.graph
        sources = listed(content, "sources", int)
        ciphertexts = listed(content, "ciphertexts", bytes)
        promises = listed(content, "promises", bytes)
        possible = dealt - {part.client}
        is_complete = graph.holders == 0
        are_sources_right = set(sources) == possible if is_complete else set(sources) <= possible
        is_in_order = sorted(set(sources)) == sources
        have_shares = len(sources) == len(ciphertexts) == len(promises)
        if not (are_sources_right and is_in_order and have_shares):
            raise UpdateError(
                f"got shares of {shown(sources)}, expected some of {shown(sorted(possible))}, each "
                "once and in order"
            )
        if part.client not in dealt:
            raise UpdateError(
                "asked to mask for a sum in which this client's own shares are not dealt"
            )
        if not is_complete and len(sources) > MOST_SOURCES * graph.holders:
            raise UpdateError(
                f"{len(sources)} clients deal shares to this one, more than {MOST_SOURCES} times "
                "its own"
            )
        holders = dealt if is_complete else dealt.intersection(part.holders)
        if len(holders) < graph.needed:
            raise UpdateError(
                f"{len(holders)} of those that hold this client's shares have dealt shares, and "
                f"{graph.needed} are needed"
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
        """Check that the partners of this client in the sum have signed the same list and D."""
        partners = [dealer for dealer in part.sources if dealer in set(active)]
        digests = listed(content, "digests", bytes)
        signatures = listed(content, "signatures", bytes)
        have_all = len(digests) == len(signatures) == len(partners)
        if not have_all or any(len(digest) != DIGEST_BYTES for digest in digests):
            raise UpdateError(
                f"got what {len(signatures)} clients have signed, expected {len(partners)}"
            )
        statements = part.statements
        for partner, digest, signature in zip(partners, digests, signatures, strict=True):
            if not is_signed(statements.masked(partner, digest), part.signer(partner), signature):
                raise UpdateError(
                    f"client {partner} has not masked for the same clients as this one"
                )

    def _check_agreements(self, part: SumState, content: Content) -> None:
        """Check that T clients of the sum have signed the same sum as this client."""
        clients = listed(content, "clients", int)
        signatures = listed(content, "signatures", bytes)
        active = set(part.members_of(part.active))
        is_each_once = len(set(clients)) == len(clients)
        if len(clients) != len(signatures) or not is_each_once or not set(clients) <= active:
            raise UpdateError(
                f"clients {shown(clients)} should agree to a sum of {shown(sorted(active))}, each "
                "once"
            )
        if len(clients) < part.quorum:
            raise UpdateError(
                f"{len(clients)} clients agree to the sum, and at least {part.quorum} have to"
            )
        statement = part.statements.agreed(part.active)
        for client, signature in zip(clients, signatures, strict=True):
            if not is_signed(statement, part.signer(client), signature):
                raise UpdateError(f"client {client} has not agreed to the same sum as this one")

    def _train(
        self, content: Content, train: Train, shape: tuple[int, int]
    ) -> tuple[Contribution, Tensor]:
        """Train; return what the client adds to the sum, and the entries that leave without a mask.

        A client whose training failed adds nothing, and nobody can tell, because whether it fails
        depends on its data. Where sketches leave without a mask, the client reports the failure
        instead: a sketch of no update would mislead the method.
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
            _log.warning("training failed, and this client adds nothing to the sum: %s", error)
            return Contribution.of_failed_training(size), torch.empty(0)
        row = updates.required_deltas[0]
        clear = row[size:]
        self._policy.check_clear(len(clear), n_parameters)
        loss = float(updates.losses[0])
        if math.isnan(loss):  # The client withholds it.
            loss = 0.0
        contribution = Contribution(update=row[:size], examples=int(updates.sizes[0]), loss=loss)
        return contribution, clear


def _deal_shares(part: SumState) -> dict[str, object]:
    """Split a client's secrets into shares; return the sealed shares and the promises of them.

    In a complete graph the client keeps one share of each secret itself.
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
    receivers = [*part.holders, part.client] if keeps_own else part.holders
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
    """Check that enough clients of a sum insist on secure aggregation, for each client that does.

    All clients of the sum check this for each other. If each refused for itself alone, the server
    could put it into a sum to which the others agree without it.

    Raises
    ------
    UpdateError
        If some client has too little protection.
    """
    unprotected = without_protection(min_honests, colluders)
    if unprotected:
        raise UpdateError(f"asked for a sum {too_few_insist(unprotected, min_honests, colluders)}")


def check_training(content: Content, terms: Terms) -> None:
    """Check that a request trains as the terms of its sum state; an UpdateError otherwise."""
    content.has_only(("model", "anchor"))
    is_same_training = digest_of(content.values) == terms.training
    is_same_question = question_of(content.values, content.vectors) == terms.question
    is_same_model = model_of(content.vectors) == terms.model
    is_same_anchor = anchor_of(content.vectors) == terms.anchor
    if not (is_same_training and is_same_question and is_same_model and is_same_anchor):
        raise UpdateError("asked to train something else than the terms of the sum say")


def add_masks(part: SumState, numbers: Masked) -> Masked:
    """Add the client's own mask to its numbers, and a mask for each partner.

    Partners are its holders that have dealt shares, and all clients that have dealt shares to it.
    Of a pair, the client with the lower number adds the mask and the other subtracts it.
    """
    scope = part.scope
    size = len(numbers)
    holders = set(part.holders).intersection(part.members_of(part.dealt))
    partners = holders.union(part.sources)
    total = numbers + own_mask(part.seed, scope, part.client, size)
    for other, public in zip(part.members, part.their_masking, strict=True):
        if other in partners:
            mask = pair_mask(agreed(part.masking, public), scope, (part.client, other), size)
            total = total + mask if part.client < other else total - mask
    return total


def compares(request: Content) -> bool:
    """Return whether a training request wants signatures by which clients are compared."""
    has_parts = request.values.get("replicates", 1) > 1
    compares_parts = has_parts and bool(request.values.get("compares_parts"))
    return compares_parts or bool(request.values.get("signs"))


def training_of(content: Content) -> Content:
    """Return the plain training request that a request for a masked update contains."""
    values = {name: value for name, value in content.values.items() if name not in OF_STAGE}
    return replace(content, values={**values, "what": "train"})


def joined(updates: Updates, sketched: Tensor) -> Updates:
    """Append numbers that leave without a mask, ``[1, R]``, to an update."""
    deltas = updates.required_deltas
    return replace(updates, deltas=torch.cat([deltas, sketched.to(deltas)], dim=1))


def _sign(statement: bytes, key: Key | None) -> bytes:
    if key is None:
        raise UpdateError("a client signs what it adds to a sum, and has no key")
    return key.private.sign(statement)
