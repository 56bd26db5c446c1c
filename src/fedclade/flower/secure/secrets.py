"""Cryptography of secure aggregation: encoding of updates as integers, keys, masks and shares.

The module is based on the package ``cryptography`` and on Shamir's secret sharing in Flower's
SecAgg+.
"""

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
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import UpdateError
from fedclade.flower.flwr_internals import combine_shares
from fedclade.flower.secure.encoding import DIGEST_BYTES, digest, encode, transcript
from fedclade.flower.secure.rotation import Rotation

# Encoding of updates as integers modulo 2²⁴, to which masks are added, and checks of their sums.
#
# A client's vector has three parts: its rotated update of the parameters, its rotated update of the
# buffers (statistics of batch normalisation), and a tail of 14 entries from which the server learns
# totals of the cluster and detects invalid sums. All values that depend on the data of a single
# client are in this vector.
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
"""Largest magnitude of a rotated entry, in units of C/√d for d entries and norm C.

A normal variable exceeds this number of standard deviations once in 1.7 million times.
"""

CHECKS = 8
"""Number of check entries, which every client sets to 1.

A sum that still contains a mask passes the check only with a probability of 2⁻¹⁹².
"""

TAIL = 14
WEIGHT, LOSS, LOSS_FRACTION, CLIPPED, SQUARED_NORM, SQUARED_NORM_OF_BUFFERS = range(CHECKS, TAIL)
"""Positions of totals in the tail of a vector, after the check entries."""

ROUNDING = 1e-9
"""Relative tolerance for float64 rounding errors when the norm of a sum is checked."""

Masked = NDArray[np.uint32]
"""Integers modulo 2²⁴: a vector to which masks are added."""


class RejectedSumError(UpdateError):
    """Error for a sum that is impossible for clients that follow the protocol.

    The sum is not used, and the model of its cluster does not change.
    """


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """Contribution of a client to a sum.

    Parameters
    ----------
    update
        Update of parameters and buffers, ``[S]``.
    examples
        Number of training examples |D_i| of client i.
    loss
        Mean training loss; zero if the client withholds its loss.
    """

    update: Tensor
    examples: int
    loss: float = 0.0

    @classmethod
    def of_failed_training(cls, size: int) -> Contribution:
        """Return a contribution of NaN, for a client whose training failed; it is encoded as zeros.

        ``size`` is the number S of entries of an update.
        """
        return cls(update=torch.full((size,), math.nan), examples=0)

    @property
    def is_usable(self) -> bool:
        """Whether the loss and all entries of the update are finite."""
        return math.isfinite(self.loss) and bool(torch.isfinite(self.update).all())


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterSum:
    """Totals over the clients of a cluster, the only values that the server learns from a sum.

    Parameters
    ----------
    total
        Σ w_i Δθ_i over the clients i, float64 ``[S]``, with weights w_i in numbers of examples.
    weight
        Σ w_i, in numbers of examples.
    clients
        Number of clients in the sum.
    loss
        Mean training loss, weighted by w_i.
    norm
        Root mean square of the norms ‖Δθ_i‖ of the clipped updates of parameters.
    norm_of_buffers
        Root mean square of the norms of the clipped updates of buffers.
    clipped
        Number of clients whose update of parameters or of buffers exceeded the limit C on its norm.
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

    An update of d entries, whose norm is at most C, is first rotated. Then each entry is rounded to
    a whole number of steps. There are q = ⌊(2²³ − 1)/n⌋ steps from zero to the largest value 5C/√d,
    and as many to the smallest value −5C/√d, so that the sum of n clients fits into 24 bits.
    Rounding changes one update by a vector of norm 1.44 C/q (root mean square), and the mean of m
    clients with equal weights by a vector of norm 1.44 C/(q √m). The latter norm is 8e-7 C for
    m = n = 20, and 5e-6 C for m = n = 1,000.

    Parameters
    ----------
    clients
        Largest number of clients n in the sum.
    parameters, buffers
        Number D of parameters, and number S − D of buffers, in an update of S entries.
    clip, clip_of_buffers
        C: largest norm of an update of the parameters, and of the buffers.
    largest_weight
        Number of examples at which a client has the largest weight; more examples add no weight.
    key
        Bytes that determine the random signs of the rotations, the same for all clients of the sum.
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
        """Number of steps q between zero and the largest value of an entry of one client."""
        return LARGEST_SUM // self.clients

    @property
    def weight_steps(self) -> int:
        """Whole number by which a client with the largest weight encodes its weight.

        The weight of a client is in [0, 1], and is encoded as a multiple of 1/``weight_steps``. If
        the number of steps allows, one step is one example.
        """
        return min(self.largest_weight, self.steps)

    @property
    def length(self) -> int:
        """Number of entries of a client's encoded vector.

        The vector has the rotated update, entries of 1 by which the server checks the sum, and the
        client's contribution to totals, such as the weight and the loss.
        """
        return sum(part.rotation.padded_size for part in self._parts) + TAIL

    def encode(self, contribution: Contribution) -> Masked:
        """Encode a client's contribution as integers modulo 2²⁴, ``[length]``.

        A contribution with entries that are not finite is encoded as zeros with weight 0. After
        masking, it looks like any other vector. So the server does not learn that training has
        diverged, which would reveal something about the client's data.
        """
        tail = np.zeros(TAIL, np.int64)
        tail[:CHECKS] = 1
        if not contribution.is_usable:
            return _reduce_modulo(np.concatenate([np.zeros(self.length - TAIL, np.int64), tail]))
        share = min(contribution.examples, self.largest_weight) / self.largest_weight
        # The weight is at least 1, since weight 0 stands for a contribution that is not usable.
        tail[WEIGHT] = max(1, round(share * self.weight_steps))
        # Use the rounded weight, since the server divides by the sum of rounded weights.
        weight = float(tail[WEIGHT]) / self.weight_steps
        update = contribution.update.detach().cpu().double().numpy()
        vectors = update[: self.parameters], update[self.parameters :]
        encoded = [
            part.encode(vector, weight) for part, vector in zip(self._parts, vectors, strict=True)
        ]
        tail[LOSS], tail[LOSS_FRACTION] = self._split_number(weight * contribution.loss)
        tail[CLIPPED] = any(each.clipped for each in encoded)
        tail[SQUARED_NORM], tail[SQUARED_NORM_OF_BUFFERS] = (
            round(each.squared_norm * self.steps) for each in encoded
        )
        return _reduce_modulo(np.concatenate([*(each.entries for each in encoded), tail]))

    def decode(self, total: Masked, clients: int) -> ClusterSum:
        """Decode the sum of the vectors of ``clients`` clients.

        Raises
        ------
        RejectedSumError
            If the sum is impossible for clients that follow the protocol.
        """
        # Extend the sign of the 24-bit numbers: numbers from 2²³ on stand for negative numbers.
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
        """Encodings of the two parts of an update: the parameters and the buffers."""
        parameters = Rotation(self.parameters, b"parameters" + self.key)
        buffers = Rotation(self.buffers, b"buffers" + self.key)
        return (
            _Part("update", parameters, self.clip, self.steps),
            _Part("update of the buffers", buffers, self.clip_of_buffers, self.steps),
        )

    def _split_number(self, value: float) -> tuple[int, int]:
        """Split a number into two entries: its integer part, and its fraction in steps of 1/q.

        Here q is the number of steps between zero and the largest value of an entry. A number
        outside of the range from −q to q − 1 is first clipped to this range.
        """
        bounded = min(max(value, -float(self.steps)), float(self.steps - 1))
        whole = math.floor(bounded)
        return whole, round((bounded - whole) * self.steps)

    def _check_tail(self, tail: NDArray[np.int64], clients: int) -> None:
        """Check the entries that follow the update in a sum of ``clients`` vectors.

        The first of these entries are 1 in each client's vector, so their sum is the number of
        clients. The others are totals, such as the total weight of the clients.

        Raises
        ------
        RejectedSumError
            If a value is impossible for clients that follow the protocol.
        """
        if wrong := int((tail[:CHECKS] != clients).sum()):
            raise RejectedSumError(
                f"{wrong} of the {CHECKS} check entries of the sum do not equal its number of "
                f"clients, {clients}: a mask was not removed, or a client did not follow the "
                "protocol"
            )
        if tail[WEIGHT] == 0:
            raise RejectedSumError(
                f"the updates of all {clients} clients in the sum were unusable (not finite), as "
                "after training that diverges; lower local.lr"
            )
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
                    f"the {name} of the sum is {value}, expected 0 to {most} for {clients} clients "
                    "that follow the protocol"
                )


@dataclass(frozen=True, eq=False)
class _Encoded:
    """Encoded part of a client's update, as integers.

    ``clipped`` is whether the part exceeded the limit C on its norm, and ``squared_norm`` is its
    squared norm after clipping, divided by C².
    """

    entries: NDArray[np.int64]
    clipped: bool
    squared_norm: float


@dataclass(frozen=True)
class _Part:
    """Encoding of one of the two parts of an update: the parameters or the buffers of a model.

    Parameters
    ----------
    name
        Name of the part, for errors.
    rotation
        Rotation of the part, which makes its entries similar in size.
    clip
        Limit C on the norm of the part.
    steps
        Number of steps between zero and the largest value of an entry.
    """

    name: str
    rotation: Rotation
    clip: float
    steps: int

    @property
    def _unit(self) -> float:
        """Size of one rounding step of a rotated entry.

        The largest entry that can be encoded is q steps, which are 5C/√d, or C if this is smaller.
        Here q is ``steps``, C is ``clip``, the limit on the norm, and d is the number of entries of
        the rotated vector.
        """
        return (
            self._spread * self.clip / (math.sqrt(max(1, self.rotation.padded_size)) * self.steps)
        )

    @property
    def _spread(self) -> float:
        """Largest magnitude of an entry that can be encoded, in units of C/√d.

        C is the limit on the norm, and d the number of entries of the rotated vector.
        """
        return min(SPREAD, math.sqrt(max(1, self.rotation.padded_size)))

    def encode(self, update: NDArray[np.float64], weight: float) -> _Encoded:
        """Clip a finite update to norm C, rotate it, multiply it by its weight, and round it."""
        norm = _norm(update)
        scale = 1.0
        if norm > self.clip:
            scale = self.clip / norm
        rotated = self.rotation.apply(update * scale)
        bounded = np.clip(rotated / self._unit, -self.steps, self.steps)
        entries = np.rint(weight * bounded).astype(np.int64)
        return _Encoded(entries, norm > self.clip, (min(norm, self.clip) / self.clip) ** 2)

    def decode(
        self, entries: NDArray[np.int64], clients: int, weight: float
    ) -> NDArray[np.float64]:
        """Decode the sum Σ w_i Δθ_i of clients' updates.

        Parameters
        ----------
        entries
            Entries of the sum, as signed integers.
        clients
            Number of clients.
        weight
            Sum of the clients' weights w_i, each in [0, 1].

        Raises
        ------
        RejectedSumError
            If the sum is impossible for clients that follow the protocol.
        """
        if beyond := int((np.abs(entries) > clients * self.steps).sum()):
            raise RejectedSumError(
                f"{beyond} of {len(entries)} entries of the {self.name} are larger than a sum of "
                f"{clients} updates can be, so the sum is not used: a mask was not removed, or a "
                "client did not follow the protocol"
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
                f"the mean {self.name} has norm {mean_norm:.3g}, but each client should clip it to "
                f"at most {self.clip:.3g} (network.secure_norm), so the sum is not used: a client "
                "did not follow the protocol"
            )
        # With a small total weight the tolerance for rounding is large relative to C. The mean is
        # scaled down to norm C, so that no client can exploit the tolerance.
        if mean_norm > 0:
            rotated = rotated * min(1.0, self.clip / mean_norm)
        return self.rotation.undo(rotated)


def pack(numbers: Masked) -> bytes:
    """Return integers modulo 2²⁴ as bytes for a message: three bytes per integer, little-endian."""
    return (
        numbers.astype("<u4", copy=False)
        .view(np.uint8)
        .reshape(-1, 4)[:, :BYTES_PER_ENTRY]
        .tobytes()
    )


def unpack(data: bytes) -> Masked:
    """Return integers modulo 2²⁴ from bytes of a message, the inverse of :func:`pack`."""
    padded = np.zeros((len(data) // BYTES_PER_ENTRY, 4), np.uint8)
    padded[:, :BYTES_PER_ENTRY] = np.frombuffer(data, np.uint8).reshape(-1, BYTES_PER_ENTRY)
    return padded.view("<u4").ravel().astype(np.uint32)


def _norm(vector: NDArray[np.float64]) -> float:
    """Return the Euclidean norm of a vector without overflow in the squares of its entries."""
    largest = float(np.abs(vector).max(initial=0.0))
    if largest == 0:
        return 0.0
    return largest * float(np.linalg.norm(vector / largest))


def _reduce_modulo(numbers: NDArray[np.int64]) -> Masked:
    """Return signed integers modulo 2²⁴."""
    return (numbers % MODULUS).astype(np.uint32)


# 248 bits: with Flower's padding 31 bytes take two blocks of Shamir's scheme, and 32 would take
# three.
SEED_BYTES = 31
LONGEST_SHARE = 128  # largest number of bytes of a share; a private key's share has 52
NONCE_BYTES = 12  # bytes of a nonce of AES-GCM

Scope = tuple[bytes, bytes]
"""Digests that are part of all secrets of a sum: ctx of its terms, λ of its list of clients."""

_CURVE = ec.SECP256R1()


def new_seed() -> bytes:
    """Draw the random seed of a client's own mask from the operating system."""
    return secrets.token_bytes(SEED_BYTES)


def new_key() -> bytes:
    """Draw a private key of an elliptic curve from the operating system."""
    return _private_bytes(ec.generate_private_key(_CURVE))


def public_of(private: bytes) -> bytes:
    """Return the public key of a private key; raise a ValueError for bytes that are no key."""
    public = _private(private).public_key()
    return public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public(public: bytes) -> None:
    """Raise a ValueError if some bytes are not a public key of the elliptic curve."""
    _read_public_key(public)


def agreed(private: bytes, public: bytes) -> bytes:
    """Return the shared secret of two clients (ECDH key agreement).

    Each of the two clients computes the same secret from its own private key and the public key of
    the other client.
    """
    return _private(private).exchange(ec.ECDH(), _read_public_key(public))


def commitment(seed: bytes, scope: Scope, client: int) -> bytes:
    """Return the hash by which a client commits to the seed of its own mask in one sum.

    A seed has too many bits to be guessed from its hash.
    """
    return digest("seed", *scope, client, seed)


def own_mask(seed: bytes, scope: Scope, client: int, size: int) -> Masked:
    """Return a client's own mask in one sum, ``size`` integers modulo 2²⁴, from its seed."""
    return _mask_stream(seed, transcript("own", *scope, client), size)


def pair_mask(shared: bytes, scope: Scope, pair: tuple[int, int], size: int) -> Masked:
    """Return the pairwise mask of two clients in one sum, ``size`` integers modulo 2²⁴.

    The client with the smaller number adds the mask, and the other client subtracts the mask, so
    the mask cancels in the sum. ``shared`` is the shared secret of the two clients.
    """
    return _mask_stream(shared, transcript("mask", *scope, min(pair), max(pair)), size)


def _mask_stream(secret: bytes, purpose: bytes, size: int) -> Masked:
    """Return ``size`` pseudorandom integers modulo 2²⁴, determined by a secret and a purpose.

    They are the stream of AES-256 in counter mode. The key is derived from the secret for this
    purpose only, so no counter is used twice with a key although the counter begins at 0.
    """
    encryptor = Cipher(
        algorithms.AES(_derive_key(secret, purpose)), modes.CTR(bytes(16))
    ).encryptor()
    return unpack(encryptor.update(bytes(BYTES_PER_ENTRY * size)))


def seal(
    shared: bytes,
    scope: Scope,
    way: tuple[int, int],
    *,
    shares: tuple[bytes, bytes],
    nonce: bytes | None = None,
) -> bytes:
    """Encrypt two shares of a dealer's secrets for the holder of the shares.

    The nonce is drawn from the operating system, so even a dealer whose state was restored from a
    backup does not use a nonce twice.

    Parameters
    ----------
    shared
        Shared secret of dealer and holder.
    scope
        Digests of the terms of the sum and of the list of its clients.
    way
        Numbers of dealer and holder.
    shares
        Share of the dealer's seed, and share of its masking key.
    nonce
        Nonce of AES-GCM; None to draw a random nonce.
    """
    if nonce is None:
        nonce = secrets.token_bytes(NONCE_BYTES)
    cipher = AESGCM(_derive_key(shared, transcript("share", *scope, *way)))
    return nonce + cipher.encrypt(nonce, encode(*shares), None)


def unseal(
    shared: bytes, scope: Scope, way: tuple[int, int], sealed: bytes
) -> tuple[bytes, bytes] | None:
    """Decrypt the shares that a dealer has encrypted for a holder (:func:`seal`).

    Returns
    -------
    tuple[bytes, bytes] or None
        Share of the dealer's seed and share of its masking key; None if the ciphertext is invalid,
        or belongs to another sum, dealer or holder.
    """
    cipher = AESGCM(_derive_key(shared, transcript("share", *scope, *way)))
    try:
        opened = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
    except (InvalidTag, ValueError):  # a ValueError if there are too few bytes
        return None
    length = int.from_bytes(opened[:4], "big")
    seed_share = opened[4 : 4 + length]
    key_share = opened[8 + length :]
    well_formed = encode(seed_share, key_share) == opened
    if not well_formed or max(len(seed_share), len(key_share)) > LONGEST_SHARE:
        return None
    return seed_share, key_share


def promises_of(seed_share: bytes, key_share: bytes, way: tuple[int, int], scope: Scope) -> bytes:
    """Return the concatenated hashes by which a dealer commits to the two shares of a holder.

    ``way`` are the numbers of dealer and holder. ``scope`` are the digests of the terms of the sum
    and of the list of its clients.
    """
    return promise_of(seed_share, "seed", way, scope) + promise_of(key_share, "key", way, scope)


def promise_of(share: bytes, which: str, way: tuple[int, int], scope: Scope) -> bytes:
    """Return the hash by which a dealer commits to a share of one of its secrets.

    A share has too many random bits to be guessed from its hash.

    Parameters
    ----------
    share
        The share.
    which
        Name of the secret, ``seed`` or ``key``.
    way
        Numbers of dealer and holder.
    scope
        Digests of the terms of the sum and of the list of its clients.
    """
    return digest("promise", *scope, which, *way, share)


def is_promised(
    share: bytes, promises: bytes, which: str, way: tuple[int, int], scope: Scope
) -> bool:
    """Return whether a share has the hash by which its dealer has committed to the share.

    ``promises`` are the hashes of both shares of the holder, see :func:`promises_of`.
    """
    start = 0 if which == "seed" else DIGEST_BYTES
    return promises[start : start + DIGEST_BYTES] == promise_of(share, which, way, scope)


def combined(shares: Sequence[bytes], holds: Callable[[bytes], bool]) -> bytes | None:
    """Reconstruct a secret from its shares (Shamir's secret sharing).

    Parameters
    ----------
    shares
        Shares of the secret, at least as many as are needed.
    holds
        Function that checks whether bytes are the secret.

    Returns
    -------
    bytes or None
        The secret; None if the shares are invalid or give another secret.
    """
    try:
        secret = combine_shares(list(shares))
    except (ValueError, IndexError, OverflowError, ZeroDivisionError):
        # Invalid shares can cause these errors in Flower's code.
        return None
    if not holds(secret):
        return None
    return secret


def is_seed_of(promise: bytes, scope: Scope, client: int) -> Callable[[bytes], bool]:
    """Return a function that checks whether bytes are the seed that a client has committed to."""
    return lambda seed: commitment(seed, scope, client) == promise


def is_key_of(public: bytes) -> Callable[[bytes], bool]:
    """Return a function that checks whether bytes are the private key of a public key."""

    def holds(secret: bytes) -> bool:
        try:
            return public_of(secret) == public
        except ValueError:
            return False

    return holds


def digest_of_numbers(numbers: bytes) -> bytes:
    """Return the SHA-256 digest of a masked vector, given its bytes in a message."""
    return sha256(numbers).digest()


def _derive_key(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key of 256 bits from a secret, for one purpose only (HKDF)."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    """Return a private key from its bytes; raise a ValueError if they are no private key."""
    return ec.derive_private_key(int.from_bytes(private, "big"), _CURVE)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as 32 bytes."""
    return key.private_numbers().private_value.to_bytes(32, "big")


def _read_public_key(public: bytes) -> ec.EllipticCurvePublicKey:
    """Return a public key from its bytes; raise a ValueError if they are no public key."""
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
