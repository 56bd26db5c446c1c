"""Secure aggregation beside a second implementation of its arithmetic, in whole numbers of Python.

The second implementation shares no code with the first: secrets are interpolated in GF(2¹²⁸), keys
are agreed on the curve P-256 by the formulas for adding points, HKDF is written with hmac, and the
masks are the stream of another library's AES. It removes the masks from the vectors that clients
have really sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence

import pytest
from Crypto.Cipher import AES
from Crypto.Util import Counter
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.flower.secure.encoding import transcript
from fedclade.flower.secure.group import Group
from fedclade.flower.secure.secrets import agreed, combined, new_key, own_mask, public_of
from tests.flower.secure.sums import RULES, Room, summed
from tests.flower.secure.test_properties import noting

SCOPE = b"c" * 32, b"l" * 32

# Shamir's scheme: polynomials over GF(2¹²⁸) with x¹²⁸ + x⁷ + x² + x + 1, one for each 16 bytes.

REDUCTION = (1 << 128) | 0b10000111


def times(a: int, b: int) -> int:
    """Multiply two elements of GF(2¹²⁸)."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a >> 128:
            a ^= REDUCTION
        b >>= 1
    return product


def inverse(a: int) -> int:
    """Return a^(2¹²⁸ − 2), the inverse of an element that is not 0."""
    result = 1
    for _ in range(127):
        a = times(a, a)
        result = times(result, a)
    return result


def padded(secret: bytes) -> bytes:
    """Pad as in PKCS#7, to a multiple of 16 bytes."""
    missing = 16 - len(secret) % 16
    return secret + bytes([missing]) * missing


def shares_of(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret: each share is the place of a holder, and a value for each 16 bytes."""
    whole = padded(secret)
    shares = [place.to_bytes(4, "little") for place in range(1, count + 1)]
    for start in range(0, len(whole), 16):
        coefficients = [int.from_bytes(whole[start : start + 16], "big")]
        coefficients += [secrets.randbits(128) for _ in range(threshold - 1)]
        for i in range(count):
            value = 0
            for coefficient in reversed(coefficients):
                value = times(value, i + 1) ^ coefficient
            shares[i] += value.to_bytes(16, "big")
    return shares


def secret_of(shares: Sequence[bytes]) -> bytes:
    """Interpolate a secret from its shares, at place 0, and remove the padding."""
    places = [int.from_bytes(share[:4], "little") for share in shares]
    assert len(set(places)) == len(places)
    weights: list[int] = []
    for place in places:
        weight = 1
        for other in places:
            if other != place:
                weight = times(weight, times(other, inverse(other ^ place)))
        weights.append(weight)
    whole = b""
    for start in range(4, len(shares[0]), 16):
        value = 0
        for weight, share in zip(weights, shares, strict=True):
            value ^= times(weight, int.from_bytes(share[start : start + 16], "big"))
        whole += value.to_bytes(16, "big")
    assert whole == padded(whole[: -whole[-1]])
    return whole[: -whole[-1]]


# Agreement on a key: the curve P-256, y² = x³ − 3x + b modulo p.

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B

Point = tuple[int, int] | None
"""A point of the curve; None is the point at infinity."""


def add(one: Point, other: Point) -> Point:
    if one is None or other is None:
        return one or other
    if one[0] == other[0]:
        if (one[1] + other[1]) % P == 0:
            return None
        slope = (3 * one[0] ** 2 - 3) * pow(2 * one[1], -1, P)
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, P)
    x = (slope**2 - one[0] - other[0]) % P
    return x, (slope * (one[0] - x) - one[1]) % P


def agreed_here(private: bytes, public: bytes) -> bytes:
    """Return the first coordinate of the public key, multiplied by the private key."""
    x = int.from_bytes(public[1:], "big")
    y = pow(x**3 - 3 * x + B, (P + 1) // 4, P)
    if y % 2 != public[0] % 2:
        y = P - y
    assert (y * y - x**3 + 3 * x - B) % P == 0
    product: Point = None
    point: Point = (x, y)
    factor = int.from_bytes(private, "big")
    while factor:
        if factor & 1:
            product = add(product, point)
        point = add(point, point)
        factor >>= 1
    assert product is not None
    return product[0].to_bytes(32, "big")


# Masks: the stream of AES-256 in counter mode, in numbers of three bytes.


def mask_here(secret: bytes, purpose: bytes, size: int) -> list[int]:
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    key = hmac.new(extracted, purpose + b"\1", hashlib.sha256).digest()
    cipher = AES.new(key, AES.MODE_CTR, counter=Counter.new(128, initial_value=0))
    stream = cipher.encrypt(bytes(3 * size))
    return [int.from_bytes(stream[i : i + 3], "little") for i in range(0, 3 * size, 3)]


def unmasked_here(group: Group, needed: int) -> list[int]:
    """Remove all masks from the sum of the vectors that have arrived, in whole numbers."""
    first, second = group.scope
    vectors = {client: [int(n) for n in group.masked[client]] for client in group.active}
    size = len(next(iter(vectors.values())))
    total = [sum(column) for column in zip(*vectors.values(), strict=True)]

    def move(mask: Sequence[int], sign: int) -> None:
        for i, number in enumerate(mask):
            total[i] += sign * number

    def secret(client: int) -> bytes:
        return secret_of(list(group.shares[client].values())[:needed])

    for client in group.active:
        move(mask_here(secret(client), transcript("own", first, second, client), size), -1)
    for gone in group.dealt:
        if gone in group.masked:
            continue
        for other in group.active:
            shared = agreed_here(secret(gone), group.adverts[other].masking)
            purpose = transcript("mask", first, second, min(gone, other), max(gone, other))
            # the lower of a pair has added the mask, and the upper has subtracted it
            move(mask_here(shared, purpose, size), 1 if gone < other else -1)
    return [number % 2**24 for number in total]


@given(st.binary(min_size=1, max_size=40), st.integers(2, 5), st.integers(0, 3), st.randoms())
@settings(max_examples=10)
def test_shares_of_either_implementation_are_put_together_by_the_other(secret, needed, more, draw):
    count = needed + more
    for split in (create_shares, shares_of):
        shares = split(secret, needed, count)
        some = draw.sample(shares, needed)
        assert combined(some, lambda found: found == secret) == secret
        assert secret_of(some) == secret
    # With one share less the polynomial is another one.
    fewer = draw.sample(shares_of(secret, needed, count), needed - 1)
    assert combined(fewer, lambda found: found == secret) is None


@given(st.integers(0, 2**24 - 1), st.integers(1, 50))
@settings(max_examples=10)
def test_masks_are_the_stream_of_another_library(client, size):
    seed = secrets.token_bytes(31)
    mask = own_mask(seed, SCOPE, client, size)
    assert mask.tolist() == mask_here(seed, transcript("own", *SCOPE, client), size)


def test_keys_are_agreed_as_by_the_formulas_of_the_curve():
    for _ in range(3):
        one, other = new_key(), new_key()
        assert agreed_here(one, public_of(other)) == agreed(other, public_of(one))


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """All groups whose masks are removed."""
    noted: list[Group] = []
    unmask = Group.unmasked

    def noting_groups(group: Group):
        noted.append(group)
        return unmask(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "unmasked", noting_groups)
        yield noted


@pytest.mark.parametrize("gone", [{}, {1: "masked"}, {0: "masked", 4: "masked"}, {2: "unmask"}])
def test_the_sum_without_masks_is_that_of_whole_numbers(
    groups: list[Group], gone: Mapping[int, str]
):
    assert RULES.neighbours == 0, "all are partners of all, as unmasked_here supposes"
    room = Room.of(6)
    for client, stage in gone.items():
        room.drop(client, stage)
    with noting() as noted:
        updates = summed(room, [0] * 6)
    (group,) = groups
    assert {*updates.ids} == {*range(6)} - {c for c, stage in gone.items() if stage == "masked"}
    here = unmasked_here(group, group.quorum)
    assert here == noted.sums[0].tolist()
    # What clients have put under the masks, added without a modulus: no entry overflows.
    sent = [noted.numbers[client].tolist() for client in updates.ids]
    exact = [sum(column) for column in zip(*sent, strict=True)]
    assert here == [number % 2**24 for number in exact]
