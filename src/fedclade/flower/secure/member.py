"""A client's side of secure aggregation: five questions, each answered once."""

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

# What a client remembers of a sum between two messages: in Flower's state, that is in its
# SuperNode's memory.

_STATE = "fedclade.secure"


@dataclass
class Kept:
    """A client's part in a sum.

    Parameters
    ----------
    instance, terms, client
        Of which sum it is part, by which terms (JSON), and under which number.
    masking, sealing, seed
        Its private keys and the seed of its own mask.
    listing
        λ, the digest of the list.
    members, signers, their_masking, their_sealing
        The clients on the list in ascending order, itself included, and their public keys.
    insisting, min_honests
        Those of the members whose updates leave under masks alone, and how many of these must be honest for each.
    holders
        The others to which it has dealt shares of its secrets.
    own_seed_share, own_key_share
        Its own shares of its secrets, in a complete graph.
    dealt, active
        Bitmaps of D, those that have dealt shares, and of A, those whose updates are added up.
    sources, seed_shares, key_shares
        Those that have dealt shares to it, and the shares; empty ones could not be read.
    stage
        That it has answered last.
    ticket
        A random name of this part, which the client draws itself: the server may use an instance twice.
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
    def load(cls, state: RecordDict | None, stage: str, content: Content) -> Kept:
        """Return what is kept for the stage after ``stage`` of the sum that a question names.

        An UpdateError if it is of another sum, or at another stage: each is answered once, or masks would be used
        twice.
        """
        record = {} if state is None else state.get(_STATE)
        kept = dict(record) if isinstance(record, ConfigRecord) else {}
        if kept.get("instance") != content.get("instance", str):
            raise UpdateError(f"asked for the {content.get('what', str)!r} of a sum that this client has no part in")
        if kept["stage"] != stage:
            raise UpdateError(
                f"asked for the {content.get('what', str)!r} of a sum, which comes once and after {stage!r}; the last "
                f"it answered was {kept['stage']!r}"
            )
        return cls(**{each.name: kept[each.name] for each in fields(cls)})  # pyright: ignore[reportArgumentType]

    def read_terms(self) -> Terms:
        """Return the terms of the sum."""
        return Terms.read(Content({"terms": self.terms}))

    @property
    def scope(self) -> Scope:
        """What secrets and signatures are bound to."""
        return self.read_terms().context, self.listing

    @property
    def statements(self) -> Statements:
        """What is signed in the sum."""
        return Statements(self.scope, self.dealt)

    @property
    def graph(self) -> Graph:
        """Who deals shares to whom."""
        return self.read_terms().graph(len(self.members), len(self.insisting))

    @property
    def quorum(self) -> int:
        """How many have to agree on the sum."""
        return self.read_terms().quorum(len(self.members), len(self.insisting))

    def members_of(self, bits: bytes) -> list[int]:
        """Return the clients of a bitmap."""
        return read_bitmap(bits, self.members)

    def signer(self, client: int) -> str:
        """Return the key by which a client on the list signs, in hexadecimal."""
        return self.signers[self.members.index(client)].hex()

    def save(self, state: RecordDict | None, stage: str) -> None:
        """Note that a stage is answered; what was secret is forgotten as soon as it has served."""
        if state is None:
            raise UpdateError("a client can take part in a sum only if Flower keeps a state for it")
        self.stage = stage
        if stage in ("masked", "unmask"):
            self.masking = self.sealing = self.seed = b""
        if stage == "unmask":
            self.own_seed_share = self.own_key_share = b""
            self.seed_shares, self.key_shares = [], []
        state[_STATE] = ConfigRecord(vars(self))


_log = logging.getLogger(__name__)

Train = Callable[[Content], Updates]
"""Trains as a question says: the one update ``[1, S + what leaves unmasked]``."""

MOST_SOURCES = 4
"""Others may name a client as their holder as they like; with more than 4k of them it stops."""


class Member:
    """A client's part in sums; what lasts between two questions is in the ``state`` that Flower keeps of it.

    Parameters
    ----------
    policy
        The client's: it says with how many colluding clients a sum must cope, and how many honest ones are in it.
    peers
        The number of each other client by its key, if the client knows them from elsewhere than from the server.
    folder
        Where the client keeps what must last.
    """

    def __init__(self, policy: Policy, peers: Mapping[str, int] | None = None, folder: Path | None = None) -> None:
        self._policy, self._peers = policy, peers
        self._spent = SpentQuestions(folder)

    def keys(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Stage 0: take part in a sum, with fresh keys; what was begun before is forgotten."""
        terms = Terms.read(content)
        client, instance = content.get("client", int), content.get("instance", str)
        if key is None or instance != terms.instance or not 0 <= client < 2**63:
            raise UpdateError("a client takes part in a sum under a number, by terms of that sum, and with a key")
        self._policy.check_colluders(terms.colluders)
        self._policy.check_group(terms.clients, terms.colluders)
        kept = Kept(
            instance,
            terms.text,
            client,
            masking=new_key(),
            sealing=new_key(),
            seed=new_seed(),
            ticket=secrets.token_hex(16),
        )
        min_honest = self._policy.min_honest if self._policy.secure_aggregation else 0
        mine = Advert(client, public_of(kept.masking), public_of(kept.sealing), key.public, min_honest=min_honest)
        mine = mine.signed(terms.context, key)
        self._spent.begin(terms.question, state)
        self._save(kept, state, "keys")
        shown = {name: getattr(mine, name) for name in ("masking", "sealing", "signature", "min_honest")}
        return wire.record({"instance": instance, "has_peers": self._peers is not None, **shown})

    def shares(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Stage 1: see the whole list, and give holders shares of the own secrets that only they can read."""
        kept = Kept.load(state, "keys", content)
        terms = kept.read_terms()
        everybody = advertising.read(content, self._keys_of_all(kept, key))
        self._check_list(kept, terms, everybody, key)
        kept.listing = digest_of_list(terms.context, everybody)
        kept.members = [each.client for each in everybody]
        kept.signers = [bytes.fromhex(each.signer) for each in everybody]
        kept.their_masking = [each.masking for each in everybody]
        kept.their_sealing = [each.sealing for each in everybody]
        kept.insisting = [each.client for each in everybody if each.min_honest]
        kept.min_honests = [each.min_honest for each in everybody if each.min_honest]
        graph, scope = kept.graph, kept.scope
        kept.holders = draw_holders(kept.client, kept.members, graph)
        keeps_own = graph.holders == 0
        number = len(kept.holders) + keeps_own
        of_key, of_seed = (create_shares(each, graph.needed, number) for each in (kept.masking, kept.seed))
        if keeps_own:
            kept.own_key_share, kept.own_seed_share = of_key[-1], of_seed[-1]
        sealing_of = dict(zip(kept.members, kept.their_sealing, strict=True))
        ciphertexts: list[bytes] = []
        for holder, seed_share, key_share in zip(kept.holders, of_seed, of_key, strict=False):
            shared = agreed(kept.sealing, sealing_of[holder])
            ciphertexts.append(seal(shared, scope, (kept.client, holder), shares=(seed_share, key_share)))
        holders = [*kept.holders, kept.client] if keeps_own else kept.holders
        promises = [
            promises_of(seed_share, key_share, (kept.client, holder), scope)
            for holder, seed_share, key_share in zip(holders, of_seed, of_key, strict=True)
        ]
        self._save(kept, state, "shares")
        dealt = {"clients": kept.holders, "ciphertexts": ciphertexts, "promises": promises}
        promise = commitment(kept.seed, scope, kept.client)
        return wire.record({"instance": kept.instance, **dealt, "commitment": promise})

    def masked(
        self, content: Content, state: RecordDict | None, key: Key | None, *, train: Train, shape: tuple[int, int]
    ) -> RecordDict:
        """Stage 2: train, and send the update under masks; ``shape`` is that of the model, D and S.

        The client signs the vector, and who has dealt shares. In clear leaves nothing that depends on its data, but
        sketches where the method compares clients.
        """
        kept = Kept.load(state, "shares", content)
        terms = kept.read_terms()
        check_training(content, terms)
        self._take_shares(kept, content)
        contribution, clear = self._trained(content, train, shape)
        numbers = terms.numbers(*shape).encode(contribution)
        masked = pack(add_masks(kept, numbers))
        statement = kept.statements.masked(kept.client, digest_of_numbers(masked))
        self._save(kept, state, "masked")
        repeated = {name: content.values[name] for name in ("what", "round", "query", "purpose")}
        repeated["model"] = wire.digest(content.vector("model"))
        signed = {"instance": kept.instance, "signature": _sign(statement, key)}
        vectors = {"masked": wire.raw(masked, "uint8", len(masked))}
        if len(clear):
            vectors["clear"] = wire.raw_vector(clear)
        return wire.record(repeated | signed, vectors)

    def agree(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Stage 3: sign whose updates are added up, once those whose shares it holds have masked alike.

        From here on the client answers the training question for no other sum.
        """
        kept = Kept.load(state, "masked", content)
        bits = content.get("active", bytes)
        active, dealt = kept.members_of(bits), kept.members_of(kept.dealt)
        if kept.client not in active:
            raise UpdateError("asked for shares of a sum that this client's update is not in")
        if strangers := sorted({*active} - {*dealt}):
            raise UpdateError(f"asked to agree to a sum with clients that dealt no shares: {shown(strangers)}")
        if len(active) < kept.quorum:
            raise UpdateError(f"asked to unmask a sum of {len(active)} clients, and at least {kept.quorum} are needed")
        terms = kept.read_terms()
        self._policy.check_group(len(active), terms.colluders)
        min_honests = dict(zip(kept.insisting, kept.min_honests, strict=True))
        check_protection({client: min_honests[client] for client in active if client in min_honests}, terms.colluders)
        self._check_masked_alike(kept, content, active)
        self._spent.spend(terms.question, state)
        kept.active = bits
        self._save(kept, state, "agree")
        return wire.record({"instance": kept.instance, "signature": _sign(kept.statements.agreed(bits), key)})

    def unmask(self, content: Content, state: RecordDict | None) -> RecordDict:
        """Stage 4: give shares of the seeds of those in the sum, and of the keys of the others, if enough agree."""
        kept = Kept.load(state, "agree", content)
        self._check_agreed(kept, content)
        active = {*kept.members_of(kept.active)}
        held = dict(zip(kept.sources, zip(kept.seed_shares, kept.key_shares, strict=True), strict=True))
        if kept.own_seed_share:
            held[kept.client] = kept.own_seed_share, kept.own_key_share
        shares = [seed if who in active else key for who, (seed, key) in sorted(held.items())]
        self._save(kept, state, "unmask")
        return wire.record({"instance": kept.instance, "shares": shares})

    def _save(self, kept: Kept, state: RecordDict | None, stage: str) -> None:
        """Note that a stage is answered, before the answer leaves; an UpdateError if it was answered already."""
        self._spent.advance(kept.ticket, kept.stage, stage)
        kept.save(state, stage)

    def _check_list(self, kept: Kept, terms: Terms, everybody: list[Advert], key: Key | None) -> None:
        """Check that a list is one of clients that this client knows, with its own keys among theirs."""
        self._policy.check_group(len(everybody), terms.colluders)
        check_protection({each.client: each.min_honest for each in everybody if each.min_honest}, terms.colluders)
        mine = [each for each in everybody if each.client == kept.client]
        seen = [(each.masking, each.sealing, each.signer) for each in mine]
        own = public_of(kept.masking), public_of(kept.sealing)
        if len(everybody) > terms.clients or key is None or seen != [(*own, key.public)]:
            raise UpdateError(f"the keys shown for the sum are not those of its {terms.clients} clients")
        public = [key for each in everybody for key in each.keys]
        if len(set(public)) != len(public) or len({each.signer for each in everybody}) != len(everybody):
            raise UpdateError("two clients of the sum show the same key")
        for each in everybody:
            each.check(terms.context)

    def _keys_of_all(self, kept: Kept, key: Key | None) -> Mapping[int, str] | None:
        """Return all clients' own keys by number, if this client knows them; it may be missing on its list itself."""
        if self._peers is None or key is None:
            return None
        known = {number: public for public, number in self._peers.items()}
        is_other = self._peers.get(key.public, kept.client) != kept.client
        if is_other or known.setdefault(kept.client, key.public) != key.public:
            raise UpdateError(
                f"asked as client {kept.client}, who has another key on this client's list of peers (peers-file)"
            )
        return known

    def _take_shares(self, kept: Kept, content: Content) -> None:
        """Keep who has dealt shares, and those that were made for this client.

        A client masks also with one whose shares cannot be read: both sides of a pair have to use a
        mask or neither, and others hold shares to take it off again. A share that its dealer has
        not committed to is as good as none: the server would take it for a lie of the holder's.
        """
        kept.dealt = content.get("dealt", bytes)
        dealt, graph = kept.members_of(kept.dealt), kept.graph
        sources, ciphertexts = listed(content, "sources", int), listed(content, "ciphertexts", bytes)
        promises = listed(content, "promises", bytes)
        possible = {*dealt} - {kept.client}
        all_there = len(sources) == len(ciphertexts) == len(promises) and sorted({*sources}) == sources
        all_there = all_there and {*sources} <= possible and (graph.holders > 0 or {*sources} == possible)
        if not all_there:
            raise UpdateError(
                f"got shares of {shown(sources)}, expected some of {shown(sorted(possible))}, each once and in order"
            )
        if kept.client not in dealt:
            raise UpdateError("asked to mask for a sum in which this client's own shares are not dealt")
        if graph.holders and len(sources) > MOST_SOURCES * graph.holders:
            raise UpdateError(f"{len(sources)} clients deal shares to this one, more than {MOST_SOURCES} times its own")
        there = len(dealt) if graph.holders == 0 else len({*kept.holders} & {*dealt})
        if there < graph.needed:
            raise UpdateError(
                f"{there} of those that hold this client's shares have dealt shares, and {graph.needed} are needed"
            )
        scope, sealing_of = kept.scope, dict(zip(kept.members, kept.their_sealing, strict=True))
        kept.sources = sources
        kept.seed_shares, kept.key_shares = [], []
        for other, sealed, promise in zip(sources, ciphertexts, promises, strict=True):
            opened = unseal(agreed(kept.sealing, sealing_of[other]), scope, (other, kept.client), sealed)
            if opened is None or promise != promises_of(*opened, (other, kept.client), scope):
                opened = UNREADABLE
            kept.seed_shares.append(opened[0])
            kept.key_shares.append(opened[1])

    def _check_masked_alike(self, kept: Kept, content: Content, active: Sequence[int]) -> None:
        """Check that all in the sum whose shares this client was given have signed the same list and D."""
        partners = [source for source in kept.sources if source in {*active}]
        digests, signatures = listed(content, "digests", bytes), listed(content, "signatures", bytes)
        if not len(digests) == len(signatures) == len(partners) or {*map(len, digests)} - {DIGEST_BYTES}:
            raise UpdateError(f"got what {len(signatures)} clients have signed, expected {len(partners)}")
        statements = kept.statements
        for partner, numbers, signature in zip(partners, digests, signatures, strict=True):
            statement = statements.masked(partner, numbers)
            if not is_signed(statement, kept.signer(partner), signature):
                raise UpdateError(f"client {partner} has not masked for the same clients as this one")

    def _check_agreed(self, kept: Kept, content: Content) -> None:
        """Check that T clients of the sum have signed the same sum as this client."""
        clients, signatures = listed(content, "clients", int), listed(content, "signatures", bytes)
        active = {*kept.members_of(kept.active)}
        if len(clients) != len(signatures) or len({*clients}) != len(clients) or not {*clients} <= active:
            raise UpdateError(f"clients {shown(clients)} should agree to a sum of {shown(sorted(active))}, each once")
        if len(clients) < kept.quorum:
            raise UpdateError(f"{len(clients)} clients agree to the sum, and at least {kept.quorum} have to")
        statement = kept.statements.agreed(kept.active)
        for client, signature in zip(clients, signatures, strict=True):
            if not is_signed(statement, kept.signer(client), signature):
                raise UpdateError(f"client {client} has not agreed to the same sum as this one")

    def _trained(self, content: Content, train: Train, shape: tuple[int, int]) -> tuple[Contribution, Tensor]:
        """Train; return what the client adds to the sum, and what leaves unmasked.

        A client whose training failed adds nothing, and nobody sees it: whether it fails depends on its data. Where
        sketches leave unmasked it says so instead, as an update of zeros would mislead the method.
        """
        n_parameters, size = shape
        question = training_of(content)
        try:
            updates = train(question)
        except Exception as error:
            is_hidden = isinstance(error, TrainingFailedError) or not isinstance(error, FedcladeError)
            if not is_hidden or compares(question):
                raise
            _log.warning("training failed, and this client adds nothing to the sum: %s", error)
            return Contribution.of_failed_training(size), torch.empty(0)
        update, clear = updates.required_deltas[0, :size], updates.required_deltas[0, size:]
        self._policy.check_clear(len(clear), n_parameters)
        loss = float(updates.losses[0])
        contribution = Contribution(
            update=update,
            examples=int(updates.sizes[0]),
            loss=0.0 if math.isnan(loss) else loss,  # NaN: the client withholds it
        )
        return contribution, clear


UNREADABLE = b"", b""
"""In place of shares that cannot be read, or that their dealer has not committed to."""


def check_protection(min_honests: Mapping[int, int], colluders: int) -> None:
    """Check that enough clients of a sum insist on sums, for each one that does; an UpdateError otherwise.

    All clients of the sum check this for each other. One that refuses for itself alone could be put into a sum to which
    the others agree without it.
    """
    lacking = without_protection(min_honests, colluders)
    if lacking:
        raise UpdateError(f"asked for a sum {too_few_insist(lacking, min_honests, colluders)}")


def check_training(content: Content, terms: Terms) -> None:
    """Check that a question is to train what the terms of its sum say; an UpdateError otherwise."""
    content.has_only(("model", "anchor"))
    asked = digest_of(content.values), question_of(content.values, content.vectors)
    models = model_of(content.vectors), anchor_of(content.vectors)
    if (*asked, *models) != (terms.training, terms.question, terms.model, terms.anchor):
        raise UpdateError("asked to train something else than the terms of the sum say")


def add_masks(kept: Kept, numbers: Masked) -> Masked:
    """Return numbers under the client's own mask, and one for each client that it shares shares with.

    These are its holders that have dealt shares, and all that have dealt shares to it.
    """
    scope, size = kept.scope, len(numbers)
    partners = {*kept.holders} & {*kept.members_of(kept.dealt)} | {*kept.sources}
    total = numbers + own_mask(kept.seed, scope, kept.client, size)
    for other, public in zip(kept.members, kept.their_masking, strict=True):
        if other in partners:
            pairwise = pair_mask(agreed(kept.masking, public), scope, (kept.client, other), size)
            total = total + pairwise if kept.client < other else total - pairwise
    return total


def compares(question: Content) -> bool:
    """Return whether a question for training wants to know something that clients are compared by."""
    in_parts = question.values.get("replicates", 1) > 1 and bool(question.values.get("compares_parts"))
    return in_parts or bool(question.values.get("signs"))


def training_of(content: Content) -> Content:
    """Return the question for plain training that one for a masked update contains."""
    values = {name: value for name, value in content.values.items() if name not in OF_STAGE}
    return replace(content, values={**values, "what": "train"})


def joined(updates: Updates, sketched: torch.Tensor) -> Updates:
    """Return an update with numbers behind it that leave unmasked, ``[1, R]``."""
    return replace(updates, deltas=torch.cat([updates.required_deltas, sketched.to(updates.required_deltas)], dim=1))


def _sign(statement: bytes, key: Key | None) -> bytes:
    if key is None:
        raise UpdateError("a client signs what it adds to a sum, and has no key")
    return key.private.sign(statement)
