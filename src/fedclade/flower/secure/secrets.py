"""Keys, seeds, masks and shares, from the parts of ``cryptography`` and of Flower's SecAgg+."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares

from fedclade.flower.secure.encoding import DIGEST_BYTES, digest, encode, transcript
from fedclade.flower.secure.numbers import BYTES_PER_ENTRY, Masked, unpack

SEED_BYTES = 31  # 248 bits: with Flower's padding two blocks of Shamir's scheme, and 32 would be three
LONGEST_SHARE = 128  # bytes of a share; a private key's has 52
NONCE_BYTES = 12  # of AES-GCM

Scope = tuple[bytes, bytes]
"""What all secrets of a sum are bound to: ctx, the digest of its terms, and λ, that of its list."""

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
    """Return what the holder of a private key shares with the holder of another, given the public half."""
    return _private(private).exchange(ec.ECDH(), _public(public))


def commitment(seed: bytes, scope: Scope, client: int) -> bytes:
    """Return the hash by which a client commits to its seed; that has too many bits to be guessed."""
    return digest("seed", *scope, client, seed)


def own_mask(seed: bytes, scope: Scope, client: int, size: int) -> Masked:
    """Return a client's own mask, of so many numbers."""
    return _stream(seed, transcript("own", *scope, client), size)


def pair_mask(shared: bytes, scope: Scope, pair: tuple[int, int], size: int) -> Masked:
    """Return the mask that two clients share: the smaller number adds it, the larger takes it off."""
    return _stream(shared, transcript("mask", *scope, min(pair), max(pair)), size)


def _stream(secret: bytes, purpose: bytes, size: int) -> Masked:
    """Return so many numbers, uniform modulo 2²⁴ to whoever does not know the secret.

    They are AES-256 in counter mode. The key is derived for this purpose alone, so a counter that
    begins at 0 is never used twice.
    """
    encryptor = Cipher(algorithms.AES(_derived(secret, purpose)), modes.CTR(bytes(16))).encryptor()
    return unpack(encryptor.update(bytes(BYTES_PER_ENTRY * size)))


def seal(
    shared: bytes, scope: Scope, way: tuple[int, int], *, shares: tuple[bytes, bytes], nonce: bytes | None = None
) -> bytes:
    """Encrypt the shares of a dealer's seed and key, ``way`` being dealer and holder.

    The nonce is drawn from the operating system, so that even a dealer whose state was brought back
    never uses one twice.
    """
    nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
    cipher = AESGCM(_derived(shared, transcript("share", *scope, *way)))
    return nonce + cipher.encrypt(nonce, encode(*shares), None)


def unseal(shared: bytes, scope: Scope, way: tuple[int, int], sealed: bytes) -> tuple[bytes, bytes] | None:
    """Return the shares that were sealed on this way, in this sum; None if these are none."""
    cipher = AESGCM(_derived(shared, transcript("share", *scope, *way)))
    try:
        opened = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
    except (InvalidTag, ValueError):  # a ValueError if there are too few bytes
        return None
    length = int.from_bytes(opened[:4], "big")
    seed_share, key_share = opened[4 : 4 + length], opened[8 + length :]
    well_formed = encode(seed_share, key_share) == opened
    lengths = {len(seed_share) <= LONGEST_SHARE, len(key_share) <= LONGEST_SHARE}
    return (seed_share, key_share) if well_formed and lengths == {True} else None


def promises_of(seed_share: bytes, key_share: bytes, way: tuple[int, int], scope: Scope) -> bytes:
    """Return the hashes by which a dealer commits to a holder's two shares, one behind the other."""
    return promise_of(seed_share, "seed", way, scope) + promise_of(key_share, "key", way, scope)


def promise_of(share: bytes, which: str, way: tuple[int, int], scope: Scope) -> bytes:
    """Return the hash of a share of a dealer's ``seed`` or ``key``; a share is too random to be guessed."""
    return digest("promise", *scope, which, *way, share)


def is_promised(share: bytes, promises: bytes, which: str, way: tuple[int, int], scope: Scope) -> bool:
    """Return whether a share is that of two hashes (:func:`promises_of`) which is of this secret."""
    start = 0 if which == "seed" else DIGEST_BYTES
    return promises[start : start + DIGEST_BYTES] == promise_of(share, which, way, scope)


def combined(shares: Sequence[bytes], holds: Callable[[bytes], bool]) -> bytes | None:
    """Return the secret that shares are of, if it holds; None otherwise."""
    try:
        secret = combine_shares(list(shares))
    except (ValueError, IndexError, OverflowError, ZeroDivisionError):  # whatever a wrong share does to it
        return None
    return secret if holds(secret) else None


def is_seed_of(promise: bytes, scope: Scope, client: int) -> Callable[[bytes], bool]:
    """Return a check whether some bytes are the seed that a client has committed to."""
    return lambda seed: commitment(seed, scope, client) == promise


def is_key_of(public: bytes) -> Callable[[bytes], bool]:
    """Return a check whether some bytes are the private half of a public key."""

    def holds(secret: bytes) -> bool:
        try:
            return public_of(secret) == public
        except ValueError:
            return False

    return holds


def digest_of_numbers(numbers: bytes) -> bytes:
    """Return the digest of a masked vector as it travels."""
    return sha256(numbers).digest()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(private, "big"), _CURVE)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(32, "big")


def _public(public: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
