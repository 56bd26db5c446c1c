"""Who an answer is by: a client signs what it answers with a key of its own, and the server knows the key again.

Flower lets a SuperNode that is let in answer in the name of another. So every question carries a nonce that nobody else
can know, and every answer returns it, signed together with all that it says, by an Ed25519 key of the client's.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedclade.core import (
    ConfigError,
    UpdateError,
)
from fedclade.flower.wire import PROTOCOL, Content, Signer, Words, clean, shown

KEY_FILE = "client.key"
"""Of a client's folder; its public half lies beside it, with ``.pub`` behind."""

NONCE_BYTES = 16

_ASKED, _SIGNED, _KEPT = "asked", "signed", "fedclade-key"
"""Records: of a question, of an answer, and of what Flower keeps of a client without a folder."""

_MADE_BY = "make one with: ssh-keygen -t ed25519 -N '' -f client.key"


@dataclass(frozen=True)
class Asked:
    """A question that was sent, as far as its answer is checked against it.

    Parameters
    ----------
    run, node, kind
        Flower's id of the run, the node that was asked, and Flower's type of the message.
    nonce
        The secret of the question, which its answer returns.
    largest
        Bytes that the vectors of its answer take at most.
    """

    run: int
    node: int
    kind: str
    nonce: str
    largest: int = 0

    @classmethod
    def of(cls, question: Message, nonce: str, largest: int = 0) -> Asked:
        """Return what a message asks of whom."""
        data = question.metadata
        return cls(data.run_id, data.dst_node_id, data.message_type, nonce, largest)


@dataclass(frozen=True)
class Key:
    """A client's key.

    Parameters
    ----------
    private
        To sign with.
    lasts
        Whether it is in the client's folder, so that the client has it also after its next start.
    """

    private: Ed25519PrivateKey
    lasts: bool = False

    @classmethod
    def new(cls) -> Key:
        """Make a key."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """The public half, in hexadecimal."""
        return self.private.public_key().public_bytes_raw().hex()


def key_of(context: Context) -> Key:
    """Return the key of a client; make one if it has none.

    It is in the client's ``folder``. A client without one has a key for as long as its SuperNode runs.

    Raises
    ------
    ConfigError
        If the file cannot be read or written, or holds no such key.
    """
    folder = context.node_config.get("folder")
    if folder is not None:
        return _key_in(Path(str(folder)))
    kept = context.state.get(_KEPT)
    if isinstance(kept, ConfigRecord):
        return Key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(str(kept["private"]))))
    key = Key.new()
    context.state[_KEPT] = ConfigRecord({"private": key.private.private_bytes_raw().hex()})
    return key


def question(content: RecordDict) -> tuple[RecordDict, str]:
    """Return a question with a fresh nonce, and the nonce; what it carries is not copied."""
    nonce = secrets.token_hex(NONCE_BYTES)
    return RecordDict({**content, _ASKED: ConfigRecord({"nonce": nonce})}), nonce


def signed(answer: RecordDict, message: Message, key: Key) -> RecordDict:
    """Return an answer to a message, signed.

    Raises
    ------
    UpdateError
        If the message has no nonce.
    """
    record = message.content.get(_ASKED)
    if not isinstance(record, ConfigRecord):
        raise UpdateError("asked without a nonce, which every question of a server has")
    nonce = Words(dict(record)).get("nonce", str)
    signature = key.private.sign(_transcript(Content.of(answer), Asked.of(message, nonce)))
    words = ConfigRecord({"nonce": nonce, "key": key.public, "lasts": key.lasts, "signature": signature.hex()})
    return RecordDict({**answer, _SIGNED: words})


def verified(answer: RecordDict, asked: Asked) -> Content:
    """Read an answer, and check that it is one to a question, and by whom.

    Raises
    ------
    UpdateError
        If it does not return the question's nonce, or whoever has the key that it names did not sign it.
    """
    content, record = Content.of(answer), answer.get(_SIGNED)
    if not isinstance(record, ConfigRecord):
        raise UpdateError("the answer is not signed")
    words = Words(dict(record))
    if not secrets.compare_digest(words.get("nonce", str).encode(), asked.nonce.encode()):
        raise UpdateError("the answer does not return the nonce of its question")
    if "refused" in content.words.values:  # also by a client that cannot read its key
        raise UpdateError(clean(content.words.get("refused", str)))
    key = words.get("key", str)
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(words.get("signature", str)), _transcript(content, asked))
    except (ValueError, InvalidSignature) as error:
        raise UpdateError(f"key {shown(key)} did not sign this answer to this question") from error
    return replace(content, signer=Signer(public.public_bytes_raw().hex(), words.get("lasts", bool)))


def unsigned(answer: RecordDict, message: Message) -> RecordDict:
    """Return a refusal with the nonce of its question: a client that cannot read its key has only that."""
    record = message.content.get(_ASKED)
    return RecordDict({**answer, _SIGNED: record}) if isinstance(record, ConfigRecord) else answer


def read_keys(path: Path) -> dict[str, int]:
    """Return an operator's list: the number of each client by its public key, in hexadecimal.

    A line is ``NUMBER ssh-ed25519 AAAA... [comment]``, as ``client.key.pub`` has it with a number before; empty ones
    and those that begin with ``#`` are skipped.

    Raises
    ------
    ConfigError
        If it cannot be read, or a line is none, or a number or a key is there twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the list of clients' keys {path}: {error}") from error
    found: dict[str, int] = {}
    for place, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        number, _, rest = line.strip().partition(" ")
        try:
            public = load_ssh_public_key(rest.strip().encode())
        except (ValueError, UnsupportedAlgorithm):
            public = None
        if not (number.isdecimal() and number.isascii() and len(number) < 10) or not isinstance(
            public, Ed25519PublicKey
        ):
            raise ConfigError(
                f"{path}, line {place}: expected a client's number and its public key, such as "
                f"'0 ssh-ed25519 AAAA...', got {shown(line)}"
            )
        key = public.public_bytes_raw().hex()
        if key in found or int(number) in found.values():
            raise ConfigError(f"{path}, line {place}: client {number} or its key is there twice; each has one line")
        found[key] = int(number)
    if not found:
        raise ConfigError(f"{path} names no client; give each a line '0 ssh-ed25519 AAAA...'")
    return found


def _transcript(content: Content, asked: Asked) -> bytes:
    """Return what is signed: whose answer to which question it is, and all that it says."""
    vectors = {name: sha256(data).hexdigest() for name, data in content.vectors.items()}
    said = dict(content.words.values)
    parts = ["fedclade answer", PROTOCOL, asked.run, asked.node, asked.kind, asked.nonce, said, vectors]
    return json.dumps(parts, sort_keys=True, default=lambda value: {"bytes": value.hex()}).encode()


def _key_in(folder: Path) -> Key:
    path = folder / KEY_FILE
    try:
        if not path.exists():
            _make(path)
        private = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the client's key {path}: {why}; {_MADE_BY}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(f"the client's key {path} is a {type(private).__name__}, expected Ed25519; {_MADE_BY}")
    return Key(private, lasts=True)


def _make(path: Path) -> None:
    """Make a key, whole or not at all, that only its owner can read; if another process is faster, its key is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    private = Ed25519PrivateKey.generate()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
            file.flush()
            os.fsync(file.fileno())
        os.link(beside, path)
    except FileExistsError:
        return
    finally:
        beside.unlink(missing_ok=True)
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")
