"""Unambiguous encoding of values as bytes that are hashed and signed."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from hashlib import sha256

from fedclade.core import UpdateError
from fedclade.flower.wire import PROTOCOL

DIGEST_BYTES = 32

Value = bytes | str | int | float


def tag(purpose: str) -> bytes:
    """Return the bytes that a transcript begins with, different for each purpose.

    The first byte is zero. Replies to queries are signed as JSON, which cannot begin with a zero
    byte, so no signature of one kind is valid for the other.
    """
    return f"\0fedclade/secagg/{PROTOCOL}/{purpose}\0".encode()


def encode(*values: Value) -> bytes:
    """Return the concatenated values, each after its length in 4 bytes, big-endian.

    Whole numbers have 8 bytes, other numbers are IEEE-754 binary64, and texts are UTF-8.
    """
    return b"".join(len(data).to_bytes(4, "big") + data for data in map(_bytes_of, values))


def transcript(purpose: str, *values: Value) -> bytes:
    """Return the bytes that are hashed or signed for a purpose."""
    return tag(purpose) + encode(*values)


def digest(purpose: str, *values: Value) -> bytes:
    """Return the SHA-256 digest of a transcript, in full."""
    return sha256(transcript(purpose, *values)).digest()


def bitmap(chosen: Collection[int], members: Sequence[int]) -> bytes:
    """Return the chosen members as a bitmap.

    It has one bit for each member, in their order, the lowest bit first.
    """
    bits = bytearray(-(-len(members) // 8))
    for place, member in enumerate(members):
        if member in chosen:
            bits[place // 8] |= 1 << place % 8
    return bytes(bits)


def read_bitmap(bits: bytes, members: Sequence[int]) -> list[int]:
    """Return the chosen members of a bitmap; raise an UpdateError if it does not fit them."""
    chosen = [m for place, m in enumerate(members) if _bit(bits, place)]
    if bitmap(set(chosen), members) != bits:
        raise UpdateError(f"a bitmap of {len(bits)} bytes is none of {len(members)} clients")
    return chosen


def _bit(bits: bytes, place: int) -> bool:
    return place // 8 < len(bits) and bool(bits[place // 8] >> place % 8 & 1)


def _bytes_of(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int):
        return value.to_bytes(8, "big", signed=True)
    return struct.pack(">d", value)
