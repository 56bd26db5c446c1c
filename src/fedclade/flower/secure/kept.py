"""What a client remembers of a sum between two messages: in Flower's state, that is in its SuperNode's memory."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from flwr.app import ConfigRecord, RecordDict

from fedclade.core import UpdateError
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
    others, their_masking, their_sealing
        The clients that it shares masks with, and their public keys.
    key_shares, seed_shares
        Its shares of the others' secrets, and last of its own.
    stage
        That it has answered last.
    """

    instance: str
    terms: str
    client: int
    masking: bytes
    sealing: bytes
    seed: bytes
    others: list[int] = field(default_factory=list[int])
    their_masking: list[bytes] = field(default_factory=list[bytes])
    their_sealing: list[bytes] = field(default_factory=list[bytes])
    key_shares: list[bytes] = field(default_factory=list[bytes])
    seed_shares: list[bytes] = field(default_factory=list[bytes])
    stage: str = ""

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

    def save(self, state: RecordDict | None, stage: str) -> None:
        """Note that a stage is answered; with the last, what was secret is forgotten."""
        if state is None:
            raise UpdateError("a client can take part in a sum only if Flower keeps a state for it")
        self.stage = stage
        if stage == "unmask":
            self.masking = self.sealing = self.seed = b""
            self.key_shares, self.seed_shares = [], []
        state[_STATE] = ConfigRecord(vars(self))
