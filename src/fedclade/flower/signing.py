"""Signatures: a client signs every answer with its own key, by which the server recognises it.

A SuperNode that Flower lets in can answer in the name of another. So every request carries a nonce that nobody else
can know, and every answer returns it, signed together with all of its content by an Ed25519 key of the client's.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import ConfigRecord, Message, RecordDict

from fedclade.core import UpdateError
from fedclade.flower.keys import Key
from fedclade.flower.wire import PROTOCOL, Content, Signer, clean, shown, typed

NONCE_BYTES = 16

_REQUEST, _SIGNATURE = "asked", "signed"  # records of a request, and of an answer


@dataclass(frozen=True)
class Request:
    """A message that was sent, as far as its answer is checked against it: Flower's metadata and the nonce.

    ``largest`` is how many bytes the vectors of its answer take at most.
    """

    run: int
    node: int
    kind: str
    nonce: str
    largest: int = 0

    @classmethod
    def of(cls, message: Message, nonce: str, largest: int = 0) -> Request:
        """Return the request that a message makes."""
        data = message.metadata
        return cls(data.run_id, data.dst_node_id, data.message_type, nonce, largest)


def with_nonce(content: RecordDict) -> tuple[RecordDict, str]:
    """Return the content of a request with a fresh nonce, and the nonce; what it carries is not copied."""
    nonce = secrets.token_hex(NONCE_BYTES)
    return RecordDict({**content, _REQUEST: ConfigRecord({"nonce": nonce})}), nonce


def signed(answer: RecordDict, message: Message, key: Key) -> RecordDict:
    """Return an answer to a message, signed; an UpdateError if the message has no nonce."""
    record = message.content.get(_REQUEST)
    if not isinstance(record, ConfigRecord):
        raise UpdateError("asked without a nonce, which every question of a server has")
    nonce = typed(dict(record), "nonce", str)
    signature = key.private.sign(_transcript(Content.of(answer), Request.of(message, nonce)))
    values = ConfigRecord({"nonce": nonce, "key": key.public, "lasts": key.lasts, "signature": signature.hex()})
    return RecordDict({**answer, _SIGNATURE: values})


def verified(answer: RecordDict, request: Request) -> Content:
    """Read an answer; an UpdateError if it does not return the request's nonce, or its key did not sign it."""
    content, record = Content.of(answer), answer.get(_SIGNATURE)
    if not isinstance(record, ConfigRecord):
        raise UpdateError("the answer is not signed")
    values = dict(record)
    if not secrets.compare_digest(typed(values, "nonce", str).encode(), request.nonce.encode()):
        raise UpdateError("the answer does not return the nonce of its question")
    if "refused" in content.values:  # also by a client that cannot read its key
        raise UpdateError(clean(content.get("refused", str)))
    key = typed(values, "key", str)
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(typed(values, "signature", str)), _transcript(content, request))
    except (ValueError, InvalidSignature) as error:
        raise UpdateError(f"key {shown(key)} did not sign this answer to this question") from error
    return replace(content, signer=Signer(public.public_bytes_raw().hex(), typed(values, "lasts", bool)))


def unsigned(answer: RecordDict, message: Message) -> RecordDict:
    """Return a refusal with the nonce of its request alone: a client that cannot read its key has no more."""
    record = message.content.get(_REQUEST)
    return RecordDict({**answer, _SIGNATURE: record}) if isinstance(record, ConfigRecord) else answer


def _transcript(content: Content, request: Request) -> bytes:
    """Return what is signed: whose answer to which request it is, and all of its content."""
    vectors = {name: sha256(data).hexdigest() for name, data in content.vectors.items()}
    values = dict(content.values)
    parts = ["fedclade answer", PROTOCOL, request.run, request.node, request.kind, request.nonce, values, vectors]
    return json.dumps(parts, sort_keys=True, default=lambda value: {"bytes": value.hex()}).encode()
