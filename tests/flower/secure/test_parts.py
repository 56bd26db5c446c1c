"""What the protocol is put together from: numbers, masks, shares, and who shares them with whom."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.common.secure_aggregation.crypto.shamir import create_shares

from fedclade.core import UpdateError
from fedclade.flower.secure.encoding import bitmap, encode, read_bitmap, tag
from fedclade.flower.secure.parameters import Graph
from fedclade.flower.secure.secrets import (
    agreed,
    check_public,
    combined,
    commitment,
    is_key_of,
    is_promised,
    is_seed_of,
    new_key,
    new_seed,
    own_mask,
    pair_mask,
    promises_of,
    public_of,
    seal,
    unseal,
)
from fedclade.flower.secure.terms import draw_holders

SCOPE = b"c" * 32, b"l" * 32


def test_two_agree_on_a_key_and_its_masks_belong_to_one_sum_and_one_pair():
    mine, yours = new_key(), new_key()
    assert agreed(mine, public_of(yours)) == agreed(yours, public_of(mine))
    assert agreed(mine, public_of(yours)) != agreed(mine, public_of(new_key()))
    shared = agreed(mine, public_of(yours))
    first = pair_mask(shared, SCOPE, (3, 7), 10_000)
    assert (first == pair_mask(shared, SCOPE, (7, 3), 10_000)).all()
    others = [
        pair_mask(shared, SCOPE, (3, 8), 10_000),
        pair_mask(shared, (SCOPE[0], b"m" * 32), (3, 7), 10_000),
        pair_mask(shared, (b"d" * 32, SCOPE[1]), (3, 7), 10_000),
        own_mask(shared, SCOPE, 3, 10_000),
    ]
    assert all((first != other).mean() > 0.99 for other in others)
    assert first.dtype == np.uint32
    assert int(first.max()) < 2**24
    bits = np.unpackbits(first.view(np.uint8)).mean()
    assert abs(bits - 3 / 4 * 0.5) < 0.01  # of the 32 bits of each number 24 are used
    with pytest.raises(ValueError, match=r"."):
        check_public(b"\2" + bytes(10))


def test_sealed_shares_are_read_on_their_way_in_their_sum_alone():
    shared, shares = b"s" * 32, (b"of the seed", b"of the key")
    sealed = seal(shared, SCOPE, (1, 2), shares=shares)
    assert unseal(shared, SCOPE, (1, 2), sealed) == shares
    assert sealed != seal(shared, SCOPE, (1, 2), shares=shares)
    assert unseal(b"t" * 32, SCOPE, (1, 2), sealed) is None
    assert unseal(shared, SCOPE, (2, 1), sealed) is None
    assert unseal(shared, (SCOPE[1], SCOPE[0]), (1, 2), sealed) is None
    for damaged in (b"", sealed[:13], sealed[:-1], bytes([sealed[0] ^ 1]) + sealed[1:]):
        assert unseal(shared, SCOPE, (1, 2), damaged) is None
    assert (
        unseal(shared, SCOPE, (1, 2), seal(shared, SCOPE, (1, 2), shares=(bytes(200), b""))) is None
    )


def test_a_secret_is_put_together_from_any_shares_that_are_enough():
    seed = new_seed()
    holds = is_seed_of(commitment(seed, SCOPE, 1), SCOPE, 1)
    shares = create_shares(seed, 4, 7)
    assert combined(shares[:4], holds) == combined(shares[3:], holds) == seed
    for wrong in (
        [*shares[:3], b"\1" * 500],
        [*shares[:3], shares[2]],
        shares[:3],
        create_shares(new_seed(), 4, 7)[:4],
    ):
        assert combined(wrong, holds) is None


def test_a_share_is_promised_to_one_holder_for_one_secret():
    seed_share, key_share = create_shares(new_seed(), 3, 4)[0], create_shares(new_key(), 3, 4)[0]
    promises = promises_of(seed_share, key_share, (1, 2), SCOPE)
    assert is_promised(seed_share, promises, "seed", (1, 2), SCOPE)
    assert is_promised(key_share, promises, "key", (1, 2), SCOPE)
    assert not is_promised(key_share, promises, "seed", (1, 2), SCOPE)
    assert not is_promised(seed_share, promises, "seed", (1, 3), SCOPE)
    assert not is_promised(seed_share, promises, "seed", (3, 2), SCOPE)
    assert not is_promised(seed_share, promises, "seed", (1, 2), (SCOPE[0], b"another"))


def test_a_key_is_told_from_any_other_bytes():
    key = new_key()
    holds = is_key_of(public_of(key))
    assert holds(key)
    assert not any(map(holds, (new_key(), b"", bytes(32), b"\xff" * 32)))


def test_values_are_encoded_so_that_no_two_lists_are_alike():
    assert encode(1, "a", b"b", 0.5) == bytes.fromhex(
        "00000008 0000000000000001 00000001 61 00000001 62 00000008 3fe0000000000000"
    )
    assert encode("ab", "c") != encode("a", "bc")
    assert tag("terms") == b"\0fedclade/secagg/13/terms\0"


def test_a_bitmap_names_members_in_one_way():
    members = [2, 3, 5, 7, 11, 13, 17, 19, 23]
    bits = bitmap({2, 19, 23}, members)
    assert bits == b"\x81\x01"
    assert read_bitmap(bits, members) == [2, 19, 23]
    for wrong in (b"\x81", b"\x81\x03", b"\x81\x01\x00"):
        with pytest.raises(
            UpdateError,
            match=rf"a bitmap of {len(wrong)} bytes does not have one bit for each of 9 clients",
        ):
            read_bitmap(wrong, members)


def test_a_client_draws_its_holders_among_all_others():
    members = list(range(100, 200))
    assert draw_holders(120, members, Graph(0, 51)) == [
        member for member in members if member != 120
    ]
    draws = [draw_holders(120, members, Graph(22, 14)) for _ in range(60)]
    assert all(sorted({*draw}) == draw and len(draw) == 22 and 120 not in draw for draw in draws)
    assert {member for draw in draws for member in draw} == {*members} - {120}
