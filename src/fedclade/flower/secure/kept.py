"""What a client remembers of a sum between two messages: in Flower's state, that is in its SuperNode's memory."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import UpdateError
from fedclade.flower.secure.encoding import read_bitmap
from fedclade.flower.secure.parameters import Graph
from fedclade.flower.secure.secrets import Scope
from fedclade.flower.secure.statements import Statements
from fedclade.flower.secure.terms import Terms
from fedclade.flower.wire import Content

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
    insisting
        Those of the members whose updates leave under masks alone.
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
        return self.read_terms().graph(len(self.members))

    @property
    def quorum(self) -> int:
        """How many have to agree on the sum."""
        return self.read_terms().quorum(len(self.members))

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
