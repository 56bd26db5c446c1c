"""Signatures: a client signs every reply with its own key, by which the server recognizes it.

A SuperNode that Flower admits can reply in the name of another. So every request has a nonce that
no other party can know, and every reply returns the nonce, signed together with all content of the
reply by the client's Ed25519 key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
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
from torch import Tensor

from fedclade.core import ConfigError, Layout, UpdateError, rng
from fedclade.flower.wire import PROTOCOL, Content, Signer, clean, shown, typed
from fedclade.runs import Maker

# Clients' Ed25519 keys: one in each client's folder, and the operator's list of public keys.

# File in a client's folder; the public half is in the same folder, with .pub appended to the name.
KEY_FILE = "client.key"
_STATE = "fedclade-key"  # record in Flower's state of a client without a folder

_HINT = "make one with: ssh-keygen -t ed25519 -N '' -f client.key"


@dataclass(frozen=True)
class Key:
    """Key of a client.

    A key that ``lasts`` is in the client's folder, so the client has it after a restart, too.
    """

    private: Ed25519PrivateKey
    lasts: bool = False

    @classmethod
    def new(cls) -> Key:
        """Make a new key."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """Public half of the key, in hexadecimal."""
        return self.private.public_key().public_bytes_raw().hex()


def key_of(context: Context) -> Key:
    """Return the key of a client; make one if there is none.

    The key is in the client's ``folder``, or without one in the memory of its SuperNode.
    """
    folder = context.node_config.get("folder")
    if folder is not None:
        return _key_in(Path(str(folder)))
    kept = context.state.get(_STATE)
    if isinstance(kept, ConfigRecord):
        return Key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(str(kept["private"]))))
    key = Key.new()
    context.state[_STATE] = ConfigRecord({"private": key.private.private_bytes_raw().hex()})
    return key


def read_keys(path: Path) -> dict[str, int]:
    """Return an operator's list: the number of each client by its public key, in hexadecimal.

    A line is ``NUMBER ssh-ed25519 AAAA... [comment]``: a number and the text of ``client.key.pub``.
    Empty lines and lines that begin with ``#`` are skipped.

    Raises
    ------
    ConfigError
        If the file cannot be read, or has another line.
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
        numbered = number.isdecimal() and number.isascii() and len(number) < 10
        if not numbered or not isinstance(public, Ed25519PublicKey):
            raise ConfigError(
                f"{path}, line {place}: expected a client's number and its public key, such as "
                f"'0 ssh-ed25519 AAAA...', got {shown(line)}"
            )
        key = public.public_bytes_raw().hex()
        if key in found or int(number) in found.values():
            raise ConfigError(
                f"{path}, line {place}: client {number} or its key is there twice; each has one "
                "line"
            )
        found[key] = int(number)
    if not found:
        raise ConfigError(f"{path} names no client; give each a line '0 ssh-ed25519 AAAA...'")
    return found


def _key_in(folder: Path) -> Key:
    path = folder / KEY_FILE
    try:
        if not path.exists():
            _make(path)
        private = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the client's key {path}: {why}; {_HINT}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(
            f"the client's key {path} is a {type(private).__name__}, expected Ed25519; {_HINT}"
        )
    return Key(private, lasts=True)


def _make(path: Path) -> None:
    """Write a new key atomically; only its owner can read it.

    If another process is faster, the key of that process remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    private = Ed25519PrivateKey.generate()
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link fails if the file exists, so it replaces no key.
        os.link(beside, path)
    except FileExistsError:
        return
    finally:
        beside.unlink(missing_ok=True)
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


# The secret that clients share and the server does not know. Their permutation and initial models
# derive from it.

SHORTEST = 32  # characters of a secret: 32 hexadecimal digits are 128 bits


def read_secret(path: Path) -> str:
    """Return the secret in a file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or the secret is short enough to be guessed.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the clients' secret {path}: {error}") from error
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"the clients' secret {path} has {len(secret)} characters, expected at least "
            f"{SHORTEST}; make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


def seed_of(secret: str) -> int:
    """Return a secret as a number of 256 bits."""
    return int.from_bytes(hashlib.sha256(secret.encode()).digest(), "big")


def secret_digest(secret: str) -> str:
    """Return a digest by which clients with the same secret are recognized.

    The secret cannot be computed from the digest.
    """
    return hmac.new(secret.encode(), b"fedclade: do we share this?", hashlib.sha256).hexdigest()


def secret_model(make: Maker, layout: Layout, seed: int, number: int = 0) -> Tensor:
    """Return the initial model ``[S]`` that clients draw from their shared secret ``seed``.

    The entries of each parameter are shuffled. The reason is that torch draws a model from 32 bits,
    so few that a server could try all seeds, and a party that knows every entry of a model θ can
    see from P·θ where the permutation P puts it.

    Parameters
    ----------
    make
        Function that makes the model from a seed.
    layout
        Layout of the model.
    seed
        The clients' secret as a number.
    number
        Number of the model, if an algorithm has several initial models.
    """
    vector = layout.flatten(make(rng.torch_seed(seed, "initial model", number)))
    draw = rng.generator(seed, "initial model's order", number)
    for slot in layout.parameters:
        part = vector[slot.start : slot.stop]
        part.copy_(part[torch.from_numpy(draw.permutation(len(part)))])
    return vector


NONCE_BYTES = 16

# Names of the records of a request and of a reply.
_REQUEST = "asked"
_SIGNATURE = "signed"


@dataclass(frozen=True)
class Request:
    """Request that a reply is checked against: Flower's metadata, the nonce, and a limit.

    ``largest`` is the largest number of bytes of the reply's vectors.
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
    """Return the content of a request with a fresh nonce, and the nonce.

    The records of the content are not copied.
    """
    nonce = secrets.token_hex(NONCE_BYTES)
    return RecordDict({**content, _REQUEST: ConfigRecord({"nonce": nonce})}), nonce


def signed(answer: RecordDict, message: Message, key: Key) -> RecordDict:
    """Return a signed reply to a message; raise an UpdateError if the message has no nonce."""
    record = message.content.get(_REQUEST)
    if not isinstance(record, ConfigRecord):
        raise UpdateError("asked without a nonce, which every question of a server has")
    nonce = typed(dict(record), "nonce", str)
    signature = key.private.sign(_transcript(Content.of(answer), Request.of(message, nonce)))
    values = ConfigRecord(
        {"nonce": nonce, "key": key.public, "lasts": key.lasts, "signature": signature.hex()}
    )
    return RecordDict({**answer, _SIGNATURE: values})


def verified(answer: RecordDict, request: Request) -> Content:
    """Read a reply and verify its signature.

    Raises
    ------
    UpdateError
        If the reply is a refusal, does not return the request's nonce, or is not signed by its key.
    """
    content = Content.of(answer)
    record = answer.get(_SIGNATURE)
    if not isinstance(record, ConfigRecord):
        raise UpdateError("the answer is not signed")
    values = dict(record)
    if not secrets.compare_digest(typed(values, "nonce", str).encode(), request.nonce.encode()):
        raise UpdateError("the answer does not return the nonce of its question")
    # before the signature: a client that cannot read its key refuses unsigned
    if "refused" in content.values:
        raise UpdateError(clean(content.get("refused", str)))
    key = typed(values, "key", str)
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(typed(values, "signature", str)), _transcript(content, request))
    except (ValueError, InvalidSignature) as error:
        raise UpdateError(f"key {shown(key)} did not sign this answer to this question") from error
    return replace(
        content, signer=Signer(public.public_bytes_raw().hex(), typed(values, "lasts", bool))
    )


def unsigned(answer: RecordDict, message: Message) -> RecordDict:
    """Return a refusal with only the nonce of its request.

    It is for a client that cannot read its key, and so cannot sign.
    """
    record = message.content.get(_REQUEST)
    return (
        RecordDict({**answer, _SIGNATURE: record}) if isinstance(record, ConfigRecord) else answer
    )


def _transcript(content: Content, request: Request) -> bytes:
    """Return the bytes that are signed: the request, the node, and all content of the reply."""
    vectors = {name: sha256(data).hexdigest() for name, data in content.vectors.items()}
    values = dict(content.values)
    parts = [
        "fedclade answer",
        PROTOCOL,
        request.run,
        request.node,
        request.kind,
        request.nonce,
        values,
        vectors,
    ]
    return json.dumps(parts, sort_keys=True, default=lambda value: {"bytes": value.hex()}).encode()
