"""Clients' Ed25519 keys: one in each client's folder, and the operator's list of public keys."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import ConfigRecord, Context

from fedclade.core import ConfigError
from fedclade.flower.wire import shown

KEY_FILE = "client.key"  # of a client's folder; its public half lies beside it, with .pub appended
_STATE = "fedclade-key"  # record in Flower's state of a client without a folder

_HINT = "make one with: ssh-keygen -t ed25519 -N '' -f client.key"


@dataclass(frozen=True)
class Key:
    """A client's key; it lasts if it is in the client's folder, so that the client has it after a restart too."""

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
    """Return the key of a client, from its ``folder`` or, without one, its SuperNode's memory; make one if needed."""
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

    A line is ``NUMBER ssh-ed25519 AAAA... [comment]``: ``client.key.pub`` after a number. Empty lines and those that
    begin with ``#`` are skipped. Anything else is a ConfigError.
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
            raise ConfigError(f"{path}, line {place}: client {number} or its key is there twice; each has one line")
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
        raise ConfigError(f"the client's key {path} is a {type(private).__name__}, expected Ed25519; {_HINT}")
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
