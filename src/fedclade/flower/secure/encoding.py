"""Unambiguous encoding of values as bytes, which are then hashed or signed.

Different sequences of values never have the same encoding, so no signature or hash for one
statement is valid for another statement.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from hashlib import sha256

from fedclade.core import UpdateError
from fedclade.flower.wire import PROTOCOL

DIGEST_BYTES = 32

Value = bytes | str | int | float


def tag(purpose: str) -> bytes:
    """Return the prefix of everything that is hashed or signed for a purpose.

    Each purpose has its own prefix. The first byte of every prefix is zero. Replies to queries are
    signed as JSON, which cannot begin with a zero byte. So a signature of a reply is never valid
    for a statement of secure aggregation, or the reverse.
    """
    return f"\0fedclade/secagg/{PROTOCOL}/{purpose}\0".encode()


def encode(*values: Value) -> bytes:
    """Encode values as bytes: each value follows its length, which takes 4 bytes (big-endian).

    Whole numbers have 8 bytes, other numbers are IEEE-754 binary64, and texts are UTF-8.
    """
    return b"".join(len(data).to_bytes(4, "big") + data for data in map(_bytes_of, values))


def transcript(purpose: str, *values: Value) -> bytes:
    """Return the bytes to hash or to sign for some values: a tag of the purpose and the values."""
    return tag(purpose) + encode(*values)


def digest(purpose: str, *values: Value) -> bytes:
    """Return the full SHA-256 digest of some values for a purpose, see :func:`transcript`."""
    return sha256(transcript(purpose, *values)).digest()


def bitmap(chosen: Collection[int], members: Sequence[int]) -> bytes:
    """Return a subset of the clients of a sum as a bitmap, for messages and signatures.

    The bitmap has one bit for each client in the order of ``members``, the lowest bit of a byte
    first. A bit is 1 if the client is in ``chosen``.
    """
    bits = bytearray(-(-len(members) // 8))
    for place, member in enumerate(members):
        if member in chosen:
            bits[place // 8] |= 1 << place % 8
    return bytes(bits)


def read_bitmap(bits: bytes, members: Sequence[int]) -> list[int]:
    """Return the subset of the clients ``members`` that a bitmap encodes (see :func:`bitmap`).

    Raises
    ------
    UpdateError
        If the bitmap does not have one bit for each client.
    """
    chosen = [m for place, m in enumerate(members) if _bit(bits, place)]
    if bitmap(set(chosen), members) != bits:
        raise UpdateError(
            f"a bitmap of {len(bits)} bytes does not have one bit for each of {len(members)} "
            "clients of the sum; the server, which has sent it, does not follow the protocol"
        )
    return chosen


def _bit(bits: bytes, place: int) -> bool:
    """Return a bit of a bitmap; false beyond its end."""
    return place // 8 < len(bits) and bool(bits[place // 8] >> place % 8 & 1)


def _bytes_of(value: Value) -> bytes:
    """Return the encoding of a single value without its length."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int):
        return value.to_bytes(8, "big", signed=True)
    return struct.pack(">d", value)
