"""Keys, seeds, masks and shares, built on ``cryptography`` and on Flower's SecAgg+."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import UpdateError
from fedclade.flower.secure.encoding import DIGEST_BYTES, digest, encode, transcript
from fedclade.flower.secure.rotation import Rotation

# Updates as whole numbers modulo 2²⁴, to which masks are added, and the checks on their sums.
#
# A client's vector has three parts: its rotated update of the parameters, its rotated update of the
# buffers (statistics of batch normalisation), and a tail of 14 entries from which the server learns
# totals of the cluster and detects invalid sums. Nothing that depends on the data of a single
# client travels outside of this vector.
#
# An update is clipped to norm C, so the norm of an honest sum is at most C times its weight, and a
# longer sum is rejected. This bounds the effect of a malicious client on a model in one round. It
# does not prevent an attack: a malicious client under masks can still turn the mean of its sum to
# any direction within C.

BITS = 24
MODULUS = 2**BITS
BYTES_PER_ENTRY = 3
LARGEST_SUM = MODULUS // 2 - 1
"""Largest magnitude of an entry of a sum."""

SPREAD = 5.0
"""Largest magnitude of a rotated entry, in C/√d.

A normal variable exceeds this number of standard deviations once in 1.7 million times.
"""

CHECKS = 8
"""Number of check entries, which every client sets to 1.

A sum with noise in it, such as a remaining mask, passes the check with a probability of 2⁻¹⁹².
"""

TAIL = 14
WEIGHT, LOSS, LOSS_FRACTION, CLIPPED, SQUARED_NORM, SQUARED_NORM_OF_BUFFERS = range(CHECKS, TAIL)
"""Positions in the tail, after the check entries."""

ROUNDING = 1e-9
"""Relative tolerance for float64 rounding errors in the check of a sum."""

Masked = NDArray[np.uint32]
"""Numbers modulo 2²⁴."""


class RejectedSumError(UpdateError):
    """Sum that honest clients cannot have made.

    The sum is not used, and its cluster keeps its model.
    """


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Contribution of a client to a sum.

    Parameters
    ----------
    update
        Update of parameters and buffers, ``[S]``.
    examples
        Number of training examples |D_i|.
    loss
        Mean training loss; zero if the client withholds it.
    """

    update: Tensor
    examples: int
    loss: float = 0.0

    @classmethod
    def of_failed_training(cls, size: int) -> Contribution:
        """Return the contribution of a client after failed training, which is not usable."""
        return cls(update=torch.full((size,), math.nan), examples=0)

    @property
    def is_usable(self) -> bool:
        """Whether the loss and all entries of the update are finite."""
        return math.isfinite(self.loss) and bool(torch.isfinite(self.update).all())


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterSum:
    """Totals of a cluster's clients: all that the server learns, and nothing about a single client.

    Parameters
    ----------
    total
        Σ w_i Δθ_i over the clients, float64 ``[S]``, w_i in examples.
    weight
        Σ w_i, in examples.
    clients
        Number of clients in the sum.
    loss
        Mean training loss, weighted by w_i.
    norm
        Root mean square of the norms ‖Δθ_i‖ of the clipped updates of parameters.
    norm_of_buffers
        Root mean square of the norms of the clipped updates of buffers.
    clipped
        Number of clients whose update of parameters or of buffers was longer than its limit C.
    """

    total: Tensor
    weight: float
    clients: int
    loss: float
    norm: float
    norm_of_buffers: float
    clipped: int


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Encoding of updates by the clients of one sum, and decoding of the sum by the server.

    A rotated entry between −5C/√d and 5C/√d has q = ⌊(2²³ − 1)/n⌋ steps on either side, so a sum of
    n clients fits. Rounding moves an update by 1.44 C/q (root mean square), the mean of m clients
    with equal weights by 1.44 C/(q √m): for n = 20 this is 8e-7 C, for n = 1,000 it is 5e-6 C.

    Parameters
    ----------
    clients
        Largest number of clients n in the sum.
    parameters, buffers
        Number of entries of an update of each kind, D and S − D.
    clip, clip_of_buffers
        C: largest norm of an update of the parameters, and of the buffers.
    largest_weight
        Number of examples at which a client has the largest weight; more examples add none.
    key
        Bytes from which the random signs of the rotations derive; all clients of the sum agree on
        them.
    """

    clients: int
    parameters: int
    buffers: int
    clip: float
    clip_of_buffers: float
    largest_weight: int
    key: bytes

    @property
    def steps(self) -> int:
        """Number of steps q of a client's entry on either side of zero."""
        return LARGEST_SUM // self.clients

    @property
    def weight_steps(self) -> int:
        """Number of steps of a weight: one for each example, as long as a sum has room for them."""
        return min(self.largest_weight, self.steps)

    @property
    def length(self) -> int:
        """Number of entries of a client's vector."""
        return sum(part.rotation.padded_size for part in self._parts) + TAIL

    def encode(self, contribution: Contribution) -> Masked:
        """Return a client's contribution as whole numbers ``[length]``.

        A contribution that is not usable becomes zeros with weight 0. The masked vector looks like
        any other, since whether training diverged depends on the client's data.
        """
        tail = np.zeros(TAIL, np.int64)
        tail[:CHECKS] = 1
        if not contribution.is_usable:
            return _modulo(np.concatenate([np.zeros(self.length - TAIL, np.int64), tail]))
        share = min(contribution.examples, self.largest_weight) / self.largest_weight
        # At least 1, as only a contribution that is not usable has weight 0.
        tail[WEIGHT] = max(1, round(share * self.weight_steps))
        # as rounded, since the server divides by it
        weight = float(tail[WEIGHT]) / self.weight_steps
        update = contribution.update.detach().cpu().double().numpy()
        vectors = update[: self.parameters], update[self.parameters :]
        encoded = [
            part.encode(vector, weight) for part, vector in zip(self._parts, vectors, strict=True)
        ]
        tail[LOSS], tail[LOSS_FRACTION] = self._digits(weight * contribution.loss)
        tail[CLIPPED] = any(each.clipped for each in encoded)
        tail[SQUARED_NORM], tail[SQUARED_NORM_OF_BUFFERS] = (
            round(each.squared_norm * self.steps) for each in encoded
        )
        return _modulo(np.concatenate([*(each.entries for each in encoded), tail]))

    def decode(self, total: Masked, clients: int) -> ClusterSum:
        """Decode the sum of the vectors of ``clients`` clients.

        Raises
        ------
        RejectedSumError
            If honest clients cannot have made the sum.
        """
        # Extend the sign of 24-bit numbers: those from 2²³ on are negative.
        signed = (total << np.uint32(32 - BITS)).view(np.int32).astype(np.int64) >> (32 - BITS)
        tail = signed[-TAIL:]
        entries = signed[:-TAIL]
        self._check_tail(tail, clients)
        weight = float(tail[WEIGHT]) / self.weight_steps
        ends = np.cumsum([part.rotation.padded_size for part in self._parts])
        totals = [
            part.decode(rotated, clients, weight)
            for part, rotated in zip(self._parts, np.split(entries, ends[:-1]), strict=True)
        ]
        loss = (float(tail[LOSS]) + float(tail[LOSS_FRACTION]) / self.steps) / weight
        norms = [
            part.clip * math.sqrt(float(tail[place]) / self.steps / clients)
            for part, place in zip(
                self._parts, (SQUARED_NORM, SQUARED_NORM_OF_BUFFERS), strict=True
            )
        ]
        return ClusterSum(
            total=torch.from_numpy(np.concatenate(totals) * self.largest_weight),
            weight=weight * self.largest_weight,
            clients=clients,
            loss=loss,
            norm=norms[0],
            norm_of_buffers=norms[1],
            clipped=int(tail[CLIPPED]),
        )

    @cached_property
    def _parts(self) -> tuple[_Part, _Part]:
        parameters = Rotation(self.parameters, b"parameters" + self.key)
        buffers = Rotation(self.buffers, b"buffers" + self.key)
        return (
            _Part("update", parameters, self.clip, self.steps),
            _Part("update of the buffers", buffers, self.clip_of_buffers, self.steps),
        )

    def _digits(self, value: float) -> tuple[int, int]:
        """Return a number in two entries: its whole part, and its fraction in steps of 1/q."""
        bounded = min(max(value, -float(self.steps)), float(self.steps - 1))
        whole = math.floor(bounded)
        return whole, round((bounded - whole) * self.steps)

    def _check_tail(self, tail: NDArray[np.int64], clients: int) -> None:
        if wrong := int((tail[:CHECKS] != clients).sum()):
            raise RejectedSumError(
                f"{wrong} of the {CHECKS} check entries of the sum are not {clients}, its number "
                "of clients: one of them was not masked as it should be, or did not keep to the "
                "protocol"
            )
        if tail[WEIGHT] == 0:
            raise RejectedSumError(f"none of the {clients} clients of the sum could train")
        of_one = {
            "weight": (WEIGHT, self.weight_steps),
            "fraction of the loss": (LOSS_FRACTION, self.steps),
            "number of clipped updates": (CLIPPED, 1),
            "squared norm": (SQUARED_NORM, self.steps),
            "squared norm of the buffers": (SQUARED_NORM_OF_BUFFERS, self.steps),
        }
        for name, (place, largest) in of_one.items():
            value = int(tail[place])
            most = clients * largest
            if not 0 <= value <= most:
                raise RejectedSumError(
                    f"the {name} of the sum is {value}, and {clients} clients that keep to the "
                    f"protocol come to 0 to {most}"
                )


@dataclass(frozen=True, eq=False)
class _Encoded:
    """Encoded part of a client's vector, whether it was clipped, and its squared norm over C²."""

    entries: NDArray[np.int64]
    clipped: bool
    squared_norm: float


@dataclass(frozen=True)
class _Part:
    """One of the two parts of an update: the parameters or the buffers of a model."""

    name: str
    rotation: Rotation
    clip: float
    steps: int

    @property
    def _unit(self) -> float:
        """Length of a step: q steps are 5C/√d, or C if that is smaller."""
        return (
            self._spread * self.clip / (math.sqrt(max(1, self.rotation.padded_size)) * self.steps)
        )

    @property
    def _spread(self) -> float:
        """Largest magnitude of an entry, in C/√d."""
        return min(SPREAD, math.sqrt(max(1, self.rotation.padded_size)))

    def encode(self, update: NDArray[np.float64], weight: float) -> _Encoded:
        """Clip a finite update to norm C, weight it, rotate it and round it."""
        norm = _norm(update)
        scale = self.clip / norm if norm > self.clip else 1.0
        rotated = self.rotation.apply(update * scale)
        bounded = np.clip(rotated / self._unit, -self.steps, self.steps)
        entries = np.rint(weight * bounded).astype(np.int64)
        return _Encoded(entries, norm > self.clip, (min(norm, self.clip) / self.clip) ** 2)

    def decode(
        self, entries: NDArray[np.int64], clients: int, weight: float
    ) -> NDArray[np.float64]:
        """Return Σ w_i Δθ_i of clients whose weights w_i, in [0, 1], total ``weight``."""
        if beyond := int((np.abs(entries) > clients * self.steps).sum()):
            raise RejectedSumError(
                f"{beyond} of {len(entries)} entries of the {self.name} are larger than {clients} "
                "updates can come to"
            )
        rotated = entries.astype(np.float64) * self._unit
        mean_norm = _norm(rotated) / weight
        # The rounding of each client adds at most half a step to every entry, so at most 2.5 C/q
        # to the norm of the sum.
        longest = (
            self.clip * (1 + clients / weight * self._spread / 2 / self.steps) * (1 + ROUNDING)
        )
        if mean_norm > longest:
            raise RejectedSumError(
                f"the mean {self.name} has norm {mean_norm:.3g}, and none of its clients may send "
                f"one of more than {self.clip:.3g} (network.secure_norm)"
            )
        # With a small total weight the tolerance for rounding is large relative to C. The mean is
        # shortened to C, so that no client can exploit the tolerance.
        shortened = rotated * min(1.0, self.clip / mean_norm) if mean_norm else rotated
        return self.rotation.undo(shortened)


def pack(numbers: Masked) -> bytes:
    """Return numbers modulo 2²⁴ as bytes for a message: three bytes each, the lowest first."""
    return (
        numbers.astype("<u4", copy=False)
        .view(np.uint8)
        .reshape(-1, 4)[:, :BYTES_PER_ENTRY]
        .tobytes()
    )


def unpack(data: bytes) -> Masked:
    """Return the numbers of :func:`pack`, each from three bytes."""
    padded = np.zeros((len(data) // BYTES_PER_ENTRY, 4), np.uint8)
    padded[:, :BYTES_PER_ENTRY] = np.frombuffer(data, np.uint8).reshape(-1, BYTES_PER_ENTRY)
    return padded.view("<u4").ravel().astype(np.uint32)


def _norm(vector: NDArray[np.float64]) -> float:
    """Return the Euclidean norm, also of entries with squares that would overflow."""
    largest = float(np.abs(vector).max(initial=0.0))
    if largest == 0:
        return 0.0
    return largest * float(np.linalg.norm(vector / largest))


def _modulo(numbers: NDArray[np.int64]) -> Masked:
    return (numbers % MODULUS).astype(np.uint32)


# 248 bits: with Flower's padding 31 bytes take two blocks of Shamir's scheme, and 32 would take
# three.
SEED_BYTES = 31
LONGEST_SHARE = 128  # largest number of bytes of a share; a private key's share has 52
NONCE_BYTES = 12  # bytes of a nonce of AES-GCM

Scope = tuple[bytes, bytes]
"""Digests that all secrets of a sum are bound to: ctx, of its terms, and λ, of its list."""

_CURVE = ec.SECP256R1()


def new_seed() -> bytes:
    """Draw the seed of a client's own mask from the operating system."""
    return secrets.token_bytes(SEED_BYTES)


def new_key() -> bytes:
    """Draw a private key from the operating system."""
    return _private_bytes(ec.generate_private_key(_CURVE))


def public_of(private: bytes) -> bytes:
    """Return the public half of a private key; raise a ValueError if it is not a private key."""
    public = _private(private).public_key()
    return public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public(public: bytes) -> None:
    """Check that some bytes are a public key; raise a ValueError if they are not."""
    _public(public)


def agreed(private: bytes, public: bytes) -> bytes:
    """Return the shared secret of two clients, from one's private and the other's public key."""
    return _private(private).exchange(ec.ECDH(), _public(public))


def commitment(seed: bytes, scope: Scope, client: int) -> bytes:
    """Return the hash by which a client commits to its seed.

    A seed has too many bits to be guessed from its hash.
    """
    return digest("seed", *scope, client, seed)


def own_mask(seed: bytes, scope: Scope, client: int, size: int) -> Masked:
    """Return a client's own mask of ``size`` numbers."""
    return _stream(seed, transcript("own", *scope, client), size)


def pair_mask(shared: bytes, scope: Scope, pair: tuple[int, int], size: int) -> Masked:
    """Return the mask that two clients share.

    The client with the smaller number adds it, and the other subtracts it.
    """
    return _stream(shared, transcript("mask", *scope, min(pair), max(pair)), size)


def _stream(secret: bytes, purpose: bytes, size: int) -> Masked:
    """Return ``size`` numbers, uniform modulo 2²⁴ for any party that does not know the secret.

    They are AES-256 in counter mode. The key is derived for this purpose alone, so a counter that
    begins at 0 is never used twice.
    """
    encryptor = Cipher(algorithms.AES(_derived(secret, purpose)), modes.CTR(bytes(16))).encryptor()
    return unpack(encryptor.update(bytes(BYTES_PER_ENTRY * size)))


def seal(
    shared: bytes,
    scope: Scope,
    way: tuple[int, int],
    *,
    shares: tuple[bytes, bytes],
    nonce: bytes | None = None,
) -> bytes:
    """Encrypt the shares of a dealer's seed and key for their holder.

    The nonce is drawn from the operating system, so even a dealer whose state was restored from a
    backup never uses one twice.

    Parameters
    ----------
    shared
        Shared secret of dealer and holder.
    scope
        Digests of the sum.
    way
        Dealer and holder.
    shares
        Share of the seed, and share of the key.
    nonce
        Nonce of AES-GCM; None draws one.
    """
    nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
    cipher = AESGCM(_derived(shared, transcript("share", *scope, *way)))
    return nonce + cipher.encrypt(nonce, encode(*shares), None)


def unseal(
    shared: bytes, scope: Scope, way: tuple[int, int], sealed: bytes
) -> tuple[bytes, bytes] | None:
    """Return the shares that a dealer has sealed for a holder in this sum; None if invalid."""
    cipher = AESGCM(_derived(shared, transcript("share", *scope, *way)))
    try:
        opened = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
    except (InvalidTag, ValueError):  # a ValueError if there are too few bytes
        return None
    length = int.from_bytes(opened[:4], "big")
    seed_share = opened[4 : 4 + length]
    key_share = opened[8 + length :]
    well_formed = encode(seed_share, key_share) == opened
    lengths = {len(seed_share) <= LONGEST_SHARE, len(key_share) <= LONGEST_SHARE}
    return (seed_share, key_share) if well_formed and lengths == {True} else None


def promises_of(seed_share: bytes, key_share: bytes, way: tuple[int, int], scope: Scope) -> bytes:
    """Return the concatenated hashes by which a dealer commits to a holder's two shares."""
    return promise_of(seed_share, "seed", way, scope) + promise_of(key_share, "key", way, scope)


def promise_of(share: bytes, which: str, way: tuple[int, int], scope: Scope) -> bytes:
    """Return the hash of a share of a dealer's ``seed`` or ``key``.

    A share is too random to be guessed from its hash.
    """
    return digest("promise", *scope, which, *way, share)


def is_promised(
    share: bytes, promises: bytes, which: str, way: tuple[int, int], scope: Scope
) -> bool:
    """Return whether a share fits the hash of its secret in ``promises`` (:func:`promises_of`)."""
    start = 0 if which == "seed" else DIGEST_BYTES
    return promises[start : start + DIGEST_BYTES] == promise_of(share, which, way, scope)


def combined(shares: Sequence[bytes], holds: Callable[[bytes], bool]) -> bytes | None:
    """Return the secret that shares combine to, if ``holds`` accepts it; None otherwise."""
    try:
        secret = combine_shares(list(shares))
    except (ValueError, IndexError, OverflowError, ZeroDivisionError):
        # errors that wrong shares can cause in Flower's code
        return None
    return secret if holds(secret) else None


def is_seed_of(promise: bytes, scope: Scope, client: int) -> Callable[[bytes], bool]:
    """Return a function that checks whether bytes are the seed that a client has committed to."""
    return lambda seed: commitment(seed, scope, client) == promise


def is_key_of(public: bytes) -> Callable[[bytes], bool]:
    """Return a function that checks whether bytes are the private half of a public key."""

    def holds(secret: bytes) -> bool:
        try:
            return public_of(secret) == public
        except ValueError:
            return False

    return holds


def digest_of_numbers(numbers: bytes) -> bytes:
    """Return the digest of a masked vector in the form of a message."""
    return sha256(numbers).digest()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(private, "big"), _CURVE)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(32, "big")


def _public(public: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
