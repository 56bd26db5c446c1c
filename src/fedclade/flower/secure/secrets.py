"""Keys, seeds, masks and shares: Flower's parts of SecAgg+ and those of ``cryptography``, put together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from numpy.typing import NDArray

SEED_BYTES = 31  # 248 bits: with Flower's padding two blocks of Shamir's scheme, and 32 would be three
LONGEST_SHARE = 128  # bytes of a share; a private key's has 52
PROMISE_BYTES = 32  # of a commitment

Masked = NDArray[np.uint32]
"""Numbers modulo 2³²."""

_CURVE = ec.SECP256R1()


def new_seed() -> bytes:
    """Draw the seed of a client's own mask, from the operating system."""
    return secrets.token_bytes(SEED_BYTES)


def new_key() -> bytes:
    """Draw a private key, from the operating system."""
    return _private_bytes(ec.generate_private_key(_CURVE))


def public_of(private: bytes) -> bytes:
    """Return the public half of a private key; a ValueError if it is none."""
    public = _private(private).public_key()
    return public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public(public: bytes) -> None:
    """Check that some bytes are a public key; a ValueError if they are none."""
    _public(public)


def agreed(private: bytes, public: bytes) -> bytes:
    """Return the key that the holder of a private key shares with the holder of another, given the public half."""
    return generate_shared_key(_private(private), _public(public))


def commitment(seed: bytes, context: bytes) -> bytes:
    """Return the hash by which a client commits to its seed; that has too many bits to be guessed."""
    return sha256(b"fedclade seed" + context + seed).digest()


def mask(secret: bytes, context: bytes, size: int) -> Masked:
    """Return so many numbers, uniform modulo 2³² to whoever does not know the secret: AES-256 in counter mode.

    The key is derived from the secret for this context alone, so a counter that begins at 0 is never used twice.
    """
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"fedclade mask" + context).derive(secret)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * size)), "<u4").astype(np.uint32)


def promises_of(seed_share: bytes, key_share: bytes, dealer: int, holder: int, context: bytes) -> bytes:
    """Return the hashes by which a dealer commits to the two shares of a holder, one behind the other."""
    return promise_of(seed_share, "seed", dealer, holder, context) + promise_of(
        key_share, "key", dealer, holder, context
    )


def promise_of(share: bytes, what: str, dealer: int, holder: int, context: bytes) -> bytes:
    """Return the hash of a share of a dealer's ``seed`` or ``key``; a share is too random to be guessed."""
    return sha256(b"fedclade share" + context + f"{what} of {dealer} held by {holder}: ".encode() + share).digest()


def is_promised(share: bytes, promises: bytes, what: str, dealer: int, holder: int, context: bytes) -> bool:
    """Return whether a share is that of two hashes (:func:`promises_of`) which is of this secret."""
    start = 0 if what == "seed" else PROMISE_BYTES
    return promises[start : start + PROMISE_BYTES] == promise_of(share, what, dealer, holder, context)


def combined(shares: Sequence[bytes], holds: Callable[[bytes], bool]) -> bytes | None:
    """Return the secret that shares are of, if it holds; None otherwise."""
    try:
        secret = combine_shares(list(shares))
    except (ValueError, IndexError, OverflowError, ZeroDivisionError):  # whatever a wrong share does to it
        return None
    return secret if holds(secret) else None


def is_seed_of(promise: bytes, context: bytes) -> Callable[[bytes], bool]:
    """Return a check whether some bytes are the seed of a commitment."""
    return lambda seed: commitment(seed, context) == promise


def is_key_of(public: bytes) -> Callable[[bytes], bool]:
    """Return a check whether some bytes are the private half of a public key."""

    def holds(secret: bytes) -> bool:
        try:
            return public_of(secret) == public
        except ValueError:
            return False

    return holds


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(private, "big"), _CURVE)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(32, "big")


def _public(public: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
