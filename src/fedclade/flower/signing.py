"""Signatures of replies, and the secret that clients share.

A client signs every reply with its own Ed25519 key, by which the server recognizes the client. This
is needed since a SuperNode that Flower admits can reply in the name of another SuperNode. So every
request has a random nonce, which only the SuperNode that receives the request knows. The client's
signature covers the request with its nonce, and all values and vectors of the reply.

The nonce is the last word of the message's group, which is a part of Flower's metadata. So messages
to many nodes can have the same content, and the server sends that content to the SuperLink once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

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
from fedclade.flower.wire import (
    PROTOCOL,
    Content,
    Signer,
    clean,
    pack,
    shown,
    typed,
    unpack,
    with_proof,
)
from fedclade.runs import Maker

# Ed25519 keys of clients: a private key in the client's folder, and a list of all clients' public
# keys.

# File in a client's folder with the private key. The public key is in the same folder, in a file
# with .pub appended to the name.
KEY_FILE = "client.key"
_STATE = "fedclade-key"  # record in Flower's state of a client without a folder

_HINT = "make one with: ssh-keygen -t ed25519 -N '' -f client.key"


@dataclass(frozen=True)
class Key:
    """Ed25519 key pair of a client, by which it signs replies.

    Parameters
    ----------
    private
        Private key.
    lasts
        Whether the key is in the client's folder, so that the client has the same key after a
        restart.
    """

    private: Ed25519PrivateKey
    lasts: bool = False

    @classmethod
    def new(cls) -> Key:
        """Generate a new key pair that is not stored in a folder."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """Public key in hexadecimal."""
        return self.private.public_key().public_bytes_raw().hex()


def key_of(context: Context) -> Key:
    """Return the signature key of a client; generate and store a key if the client has none.

    The key is stored in the client's folder, or in the memory of its SuperNode if the node config
    sets no ``folder``.

    Raises
    ------
    ConfigError
        If the key in the folder cannot be read or written.
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
    """Read a list of clients: the number of each client by its public key in hexadecimal.

    Each line of the file has the form ``NUMBER ssh-ed25519 AAAA... [comment]``: the number of a
    client and the text of its file ``client.key.pub``. Empty lines and lines that begin with ``#``
    are skipped.

    Raises
    ------
    ConfigError
        If the file cannot be read, lists no client, lists a client or key twice, or has a line of
        another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the list of clients' keys {path}: {error}") from error
    found: dict[str, int] = {}
    for place, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        number, key = _read_key_line(line, f"{path}, line {place}")
        if key in found or number in found.values():
            raise ConfigError(
                f"{path}, line {place}: client {number} or its key occurs twice; each client and "
                "each key may occur in one line only"
            )
        found[key] = number
    if not found:
        raise ConfigError(
            f"the list of clients' keys {path} is empty; add a line for each client, such as "
            "'0 ssh-ed25519 AAAA...'"
        )
    return found


def _read_key_line(line: str, where: str) -> tuple[int, str]:
    """Read a client's number and its public key, in hexadecimal, from a line of a list."""
    number, _, rest = line.strip().partition(" ")
    try:
        public = load_ssh_public_key(rest.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        public = None
    is_number = number.isdecimal() and number.isascii() and len(number) < 10
    if not is_number or not isinstance(public, Ed25519PublicKey):
        raise ConfigError(
            f"{where}: expected a client's number and its public key, such as "
            f"'0 ssh-ed25519 AAAA...', got {shown(line)}"
        )
    return int(number), public.public_bytes_raw().hex()


def _key_in(folder: Path) -> Key:
    """Return the key in a client's folder; generate and store a key if there is none."""
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
    """Generate a key pair and write it atomically; the private key is readable by its owner only.

    If another process has written a key in the meantime, the key of that process is used.
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


# Secret that clients share and the server does not know. It determines the permutation of model
# vectors and the initial models.

SHORTEST = 32  # characters of a secret: 32 hexadecimal digits are 128 bits


def read_secret(path: Path) -> str:
    """Read the secret that clients share from a file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or the secret is so short that it could be guessed.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the file {path} with the clients' secret: {error}"
        ) from error
    if len(secret) < SHORTEST:
        raise ConfigError(
            f"the clients' secret in {path} has {len(secret)} characters, expected at least "
            f"{SHORTEST}; make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


def seed_of(secret: str) -> int:
    """Return the SHA-256 digest of the clients' secret as a number, for use as a seed."""
    return int.from_bytes(hashlib.sha256(secret.encode()).digest(), "big")


def secret_digest(secret: str) -> str:
    """Return a digest of the clients' secret, by which the server finds clients with equal secrets.

    The secret cannot be computed from the digest.
    """
    return hmac.new(secret.encode(), b"fedclade: do we share this?", hashlib.sha256).hexdigest()


def secret_model(make: Maker, layout: Layout, seed: int, number: int = 0) -> Tensor:
    """Return the initial model, as a vector ``[S]``, that clients draw from their shared secret.

    The entries of each parameter are shuffled in addition. Otherwise a server could find the
    clients' permutation P: torch draws a model from a seed of only 32 bits, so the server could try
    all seeds, and a party that knows all entries of a model θ can read the permutation off P·θ.

    Parameters
    ----------
    make
        Function that makes the model from a seed.
    layout
        Layout of the model.
    seed
        The clients' secret as a number, see :func:`seed_of`.
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
_DIGITS = frozenset("0123456789abcdef")  # of a nonce, which is written in hexadecimal


@dataclass(frozen=True)
class Request:
    """Request that the server has sent, against which the reply is checked.

    Parameters
    ----------
    run, node, kind
        Flower's metadata of the message: the ids of the run and of the node, and the message type.
    nonce
        Random number of the request, which the reply must return.
    largest
        Largest number of bytes of the vectors of the reply.
    """

    run: int
    node: int
    kind: str
    nonce: str
    largest: int = 0

    @classmethod
    def of(cls, message: Message, nonce: str, largest: int = 0) -> Request:
        """Return the record of a request that the server sends as ``message`` with this nonce."""
        data = message.metadata
        return cls(data.run_id, data.dst_node_id, data.message_type, nonce, largest)


def with_nonce(group: str) -> tuple[str, str]:
    """Return the group of a message with a fresh random nonce as its last word, and the nonce."""
    nonce = secrets.token_hex(NONCE_BYTES)
    return f"{group} {nonce}", nonce


def nonce_of(message: Message) -> str | None:
    """Return the nonce of a request; None if it has none."""
    word = message.metadata.group_id.rpartition(" ")[2]
    return word if len(word) == 2 * NONCE_BYTES and _DIGITS.issuperset(word) else None


def signed(answer: RecordDict, message: Message, key: Key) -> RecordDict:
    """Sign a reply to a message with the client's key; return the reply with the signature.

    Raises
    ------
    UpdateError
        If the message has no nonce.
    """
    nonce = nonce_of(message)
    if nonce is None:
        raise UpdateError(
            "the request contains no nonce, which every request must have, so this client does not "
            "reply; run the server with fedclade.flower.federate or server_app"
        )
    signature = key.private.sign(_transcript(Content.of(answer), Request.of(message, nonce)))
    values = {"nonce": nonce, "key": key.public, "lasts": key.lasts, "signature": signature}
    return with_proof(answer, pack(values))


def verified(answer: RecordDict, request: Request) -> Content:
    """Verify the signature of a reply to a request, and return the reply's content.

    Raises
    ------
    UpdateError
        If the reply is a refusal, does not return the nonce of the request, or has no valid
        signature by the key that it contains.
    """
    content = Content.of(answer)
    if not content.proof:
        raise UpdateError(
            "the reply is not signed, so the server ignores it; run the client as a "
            "fedclade.flower.client_app, which signs every reply"
        )
    values = unpack(content.proof)
    if not secrets.compare_digest(typed(values, "nonce", str).encode(), request.nonce.encode()):
        raise UpdateError(
            "the reply does not return the nonce of its request; it may be a copy of an old reply"
        )
    # Refusals are read before the signature is verified, since a client that cannot read its key
    # cannot sign its refusal.
    if "refused" in content.values:
        raise UpdateError(clean(content.get("refused", str)))
    key = typed(values, "key", str)
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(typed(values, "signature", bytes), _transcript(content, request))
    except (ValueError, InvalidSignature) as error:
        raise UpdateError(
            f"the reply has no valid signature by the key {shown(key)} for this request, so the "
            "server ignores it; the reply may have been changed on its way"
        ) from error
    return replace(
        content, signer=Signer(public.public_bytes_raw().hex(), typed(values, "lasts", bool))
    )


def unsigned(answer: RecordDict, message: Message) -> RecordDict:
    """Return a refusal with the nonce of its request but without a signature.

    A client that cannot read its key cannot sign its refusal.
    """
    nonce = nonce_of(message)
    return answer if nonce is None else with_proof(answer, pack({"nonce": nonce}))


def _transcript(content: Content, request: Request) -> bytes:
    """Return the bytes that a client signs: the request, its node, and the reply's content."""
    signed_values: dict[str, Any] = {
        "statement": "fedclade answer",
        "protocol": PROTOCOL,
        "run": request.run,
        "node": request.node,
        "kind": request.kind,
        "nonce": request.nonce,
        "values": content.packed,
    }
    digests = {f"vector {name}": sha256(data).digest() for name, data in content.vectors.items()}
    return pack(signed_values | digests)  # in the order of names
