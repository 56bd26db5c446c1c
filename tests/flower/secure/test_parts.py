"""What the protocol is put together from: numbers, masks, shares, and who shares them with whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.common.secure_aggregation.crypto.shamir import create_shares

from fedclade.core import UpdateError
from fedclade.flower.secure.graph import neighbours_of
from fedclade.flower.secure.numbers import ROOM, Numbers
from fedclade.flower.secure.secrets import (
    agreed,
    check_public,
    combined,
    commitment,
    is_key_of,
    is_promised,
    is_seed_of,
    mask,
    new_key,
    new_seed,
    promises_of,
    public_of,
)
from fedclade.flower.secure.terms import Terms


def test_numbers_are_off_by_half_a_step_and_sums_by_as_many_halves():
    numbers, draw = Numbers(clip=2.0, clients=4), torch.Generator().manual_seed(0)
    updates = 4 * torch.rand(4, 1000, generator=draw) - 2
    coded = [numbers.encode(update, weight)[0] for update, weight in zip(updates, (1.0, 0.5, 0.1, 1.0), strict=True)]
    total = numbers.decode(sum(coded, np.zeros(1000, np.uint32)), 4)
    exact = (updates.double() * torch.tensor([1.0, 0.5, 0.1, 1.0])[:, None]).sum(0)
    step = 2.0 * 4 / ROOM
    assert numbers.steps * 4 <= ROOM
    assert float((total - exact).abs().max()) <= 2 * step
    assert numbers.encode(torch.tensor([3.0, -3.0, 0.0]), 1.0)[1] == 2


def test_what_is_not_finite_is_no_number():
    with pytest.raises(UpdateError, match="2 of 3 entries are NaN or infinite"):
        Numbers(8.0, 4).encode(torch.tensor([torch.nan, 0.0, -torch.inf]), 1.0)


def test_a_sum_larger_than_its_clients_can_make_is_none():
    numbers = Numbers(8.0, 4)
    largest = np.array([3 * numbers.steps, 0], np.uint32)
    assert numbers.decode(largest, 3).tolist() == [24.0, 0.0]
    with pytest.raises(UpdateError, match="1 of 2 entries of the sum are larger than 3 updates can come to"):
        numbers.decode(largest + np.uint32(1), 3)


def test_two_agree_on_a_key_and_its_masks_belong_to_one_context():
    mine, yours = new_key(), new_key()
    assert agreed(mine, public_of(yours)) == agreed(yours, public_of(mine))
    assert agreed(mine, public_of(yours)) != agreed(mine, public_of(new_key()))
    shared = agreed(mine, public_of(yours))
    first = mask(shared, b"one", 10_000)
    assert (first == mask(shared, b"one", 10_000)).all()
    assert (first != mask(shared, b"two", 10_000)).mean() > 0.99
    assert first.dtype == np.uint32
    bits = np.unpackbits(first.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.01
    with pytest.raises(ValueError, match=r"."):
        check_public(b"\2" + bytes(10))


def test_a_secret_is_put_together_from_any_shares_that_are_enough():
    seed, context = new_seed(), b"context"
    holds = is_seed_of(commitment(seed, context), context)
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
    promises = promises_of(seed_share, key_share, 1, 2, b"context")
    assert is_promised(seed_share, promises, "seed", 1, 2, b"context")
    assert is_promised(key_share, promises, "key", 1, 2, b"context")
    assert not is_promised(key_share, promises, "seed", 1, 2, b"context")
    assert not is_promised(seed_share, promises, "seed", 1, 3, b"context")
    assert not is_promised(seed_share, promises, "seed", 3, 2, b"context")
    assert not is_promised(seed_share, promises, "seed", 1, 2, b"another")


def test_a_key_is_told_from_any_other_bytes():
    key = new_key()
    holds = is_key_of(public_of(key))
    assert holds(key)
    assert not any(map(holds, (new_key(), b"", bytes(32), b"\xff" * 32)))


@pytest.mark.parametrize(("count", "degree"), [(0, 8), (4, 4), (5, 6), (8, 8), (20, 8)])
def test_neighbours_are_so_many_and_mutual(count: int, degree: int):
    near = neighbours_of(range(9), count)
    assert {len(others) for others in near.values()} == {degree}
    assert all(client in near[other] and client != other for client, others in near.items() for other in others)


@pytest.mark.parametrize("holders", range(2, 40))
def test_more_than_half_of_the_shares_are_always_needed(holders: int):
    """Or half of those that hold them could tell a client's seed, and the other half its key."""
    for threshold in (0.51, 0.66, 1.0):
        terms = Terms(instance="", clients=40, threshold=threshold, clip=1.0, weight=1, question="", vectors="")
        assert holders / 2 < terms.needed(holders) <= holders
        assert terms.needed(holders) >= min(holders, threshold * holders - 1e-6)
