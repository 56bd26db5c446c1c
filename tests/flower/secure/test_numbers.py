"""Updates as whole numbers under masks: honest sums come out right, and no sum moves a model further than allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as hadamard_matrix
from torch import Tensor

from fedclade.flower.secure.rotation import Rotation, hadamard
from fedclade.flower.secure.secrets import (
    LARGEST_SUM,
    LOSS_FRACTION,
    SQUARED_NORM,
    TAIL,
    WEIGHT,
    Contribution,
    Masked,
    Numbers,
    RejectedSumError,
    pack,
    unpack,
)

D, BUFFERS = 500, 12


def numbers_of(**changes: Any) -> Numbers:
    numbers = Numbers(
        clients=5,
        parameters=D,
        buffers=BUFFERS,
        clip=2.0,
        clip_of_buffers=3.0,
        largest_weight=100,
        key=b"the terms of a sum",
    )
    return replace(numbers, **changes)


def update_of(seed: int, norm: float = 1.0, norm_of_buffers: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    parts = torch.randn(D, generator=draw), torch.randn(BUFFERS, generator=draw)
    scaled = [
        part / part.norm() * wanted
        for part, wanted in zip(parts, (norm, norm_of_buffers), strict=True)
    ]
    return torch.cat(scaled)


def total_of(vectors: Sequence[Masked]) -> Masked:
    total = np.zeros(len(vectors[0]), np.uint32)
    for vector in vectors:
        total += vector
    return total % 2**24


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_a_sum_comes_out_weighted_with_the_figures_of_its_cluster():
    numbers, sizes, losses = numbers_of(), (100, 50, 7, 300), (0.5, 2.0, 300.0, -1.25)
    updates = [update_of(k, norm=0.25 * (k + 1), norm_of_buffers=0.5 * (k + 1)) for k in range(4)]
    encoded = [
        numbers.encode(Contribution(update=update, examples=size, loss=loss))
        for update, size, loss in zip(updates, sizes, losses, strict=True)
    ]
    found = numbers.decode(total_of(encoded), 4)
    weights = np.array([100, 50, 7, 100])  # none counts with more than largest_weight examples
    exact = sum(weight * update.double() for weight, update in zip(weights, updates, strict=True))
    assert isinstance(exact, Tensor)
    assert error_of(found.total, exact) < 1e-5
    assert found.weight == pytest.approx(257, abs=1e-9)
    assert found.loss == pytest.approx(float(np.dot(weights, losses)) / 257, abs=1e-5)
    assert found.norm == pytest.approx(math.sqrt(np.mean([0.25**2, 0.5**2, 0.75**2, 1])), rel=1e-4)
    assert found.norm_of_buffers == pytest.approx(
        math.sqrt(np.mean([0.5**2, 1, 1.5**2, 4])), rel=1e-4
    )
    assert (found.clients, found.clipped) == (4, 0)


def test_rounding_moves_a_mean_by_no_more_than_stated():
    """The class says 1.44 C/(q √m), root mean square, with equal weights."""
    numbers = numbers_of(clients=20, clip=2.0, buffers=0)
    updates = [update_of(k)[:D] for k in range(20)]
    encoded = [numbers.encode(Contribution(update=update, examples=100)) for update in updates]
    found = numbers.decode(total_of(encoded), 20)
    off = (found.total / found.weight - torch.stack(updates).double().mean(0)).norm()
    stated = 1.44 * 2.0 / (numbers.steps * math.sqrt(20))
    assert 0.8 * stated < float(off) < 1.2 * stated


def test_a_longer_update_is_shortened_and_counted():
    numbers = numbers_of()
    updates = [update_of(0), update_of(1, norm=50.0), update_of(2, norm_of_buffers=30.0)]
    encoded = [numbers.encode(Contribution(update=update, examples=100)) for update in updates]
    found = numbers.decode(total_of(encoded), 3)
    shortened = [update_of(0), update_of(1, norm=2.0), update_of(2, norm_of_buffers=3.0)]
    assert error_of(found.total, 100 * torch.stack(shortened).double().sum(0)) < 1e-5
    assert found.clipped == 2
    assert found.norm == pytest.approx(math.sqrt((1 + 4 + 1) / 3), rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"update": torch.full((D + BUFFERS,), math.nan)},
        {"update": torch.cat([update_of(1)[:-1], torch.tensor([math.inf])])},
        {"loss": math.inf},
    ],
)
def test_what_is_not_finite_counts_nothing_and_its_vector_looks_like_any_other(
    changes: dict[str, Any],
):
    numbers = numbers_of()
    usable = Contribution(update=update_of(0), examples=60, loss=1.5)
    unusable = replace(usable, **changes)
    failed = Contribution.of_failed_training(D + BUFFERS)
    assert not unusable.is_usable
    vectors = [numbers.encode(usable), numbers.encode(unusable)]
    assert (numbers.encode(failed) == vectors[1]).all()
    assert vectors[0].shape == vectors[1].shape == (numbers.length,)
    found = numbers.decode(total_of(vectors), 2)
    assert error_of(found.total, 60 * update_of(0).double()) < 1e-5
    assert (found.weight, found.loss) == pytest.approx((60, 1.5), abs=1e-5)
    with pytest.raises(
        RejectedSumError, match="the updates of all 2 clients in the sum were unusable"
    ):
        numbers.decode(total_of([vectors[1], vectors[1]]), 2)


def test_updates_of_any_finite_size_are_encoded():
    numbers = numbers_of()
    for size in (1e-300, 1e300, 0.0):
        update = torch.full((D + BUFFERS,), size, dtype=torch.float64)
        found = numbers.decode(numbers.encode(Contribution(update=update, examples=100)), 1)
        assert math.isfinite(found.norm)
        assert float(found.total[:D].norm()) <= 100 * 2.0 * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.data())
def test_the_largest_contributions_never_overflow(clients: int, data: st.DataObject):
    """An entry at its limit in the updates of all clients, and all figures at theirs."""
    numbers = numbers_of(clients=clients, parameters=3, buffers=1)
    update = torch.zeros(4)
    update[data.draw(st.integers(0, 2))] = data.draw(st.sampled_from([-1e9, 1e9]))
    loss = data.draw(st.sampled_from([-1e30, 1e30]))
    vector = numbers.encode(Contribution(update=update, examples=1000, loss=loss))
    found = numbers.decode(total_of([vector] * clients), clients)
    assert (
        error_of(found.total / found.weight, update.double() / update.norm() * numbers.clip) < 1e-5
    )
    assert found.loss == pytest.approx(math.copysign(numbers.steps, loss), rel=0.5)


def test_a_sum_with_noise_in_it_is_rejected():
    numbers = numbers_of()
    honest = [numbers.encode(Contribution(update=update_of(k), examples=100)) for k in range(4)]
    noise = np.random.default_rng(0).integers(0, 2**24, numbers.length).astype(np.uint32)
    with pytest.raises(
        RejectedSumError,
        match="8 of the 8 check entries of the sum do not equal its number of clients, 5",
    ):
        numbers.decode(total_of([*honest, noise]), 5)
    with pytest.raises(
        RejectedSumError,
        match="8 of the 8 check entries of the sum do not equal its number of clients, 5",
    ):
        numbers.decode(total_of(honest), 5)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (0, 1, "1 of the 8 check entries of the sum do not equal its number of clients, 3"),
        (
            WEIGHT,
            10**6,
            "the weight of the sum is .*, expected 0 to 300 for 3 clients that follow the protocol",
        ),
        (WEIGHT, -301, "the weight of the sum is -1"),
        (LOSS_FRACTION, -LARGEST_SUM // 2, "the fraction of the loss of the sum is -"),
        (SQUARED_NORM, -LARGEST_SUM // 2, "the squared norm of the sum is -"),
        (
            -1,
            LARGEST_SUM,
            "1 of 512 entries of the update are larger than a sum of 3 updates can be",
        ),
    ],
)
def test_a_figure_that_honest_clients_cannot_have_made_rejects_the_sum(
    place: int, value: int, why: str
):
    numbers = numbers_of()
    vectors = [numbers.encode(Contribution(update=update_of(k), examples=100)) for k in range(3)]
    total = total_of(vectors)
    place = len(total) - TAIL + place if place >= 0 else 0
    total[place] = (int(total[place]) + value) % 2**24
    with pytest.raises(RejectedSumError, match=why):
        numbers.decode(total, 3)


@pytest.mark.parametrize("part", ["update", "update of the buffers"])
def test_a_malicious_client_cannot_make_a_mean_longer_than_c(part: str):
    """It may add any numbers. With all its strength it moves the mean by C, and what moves it further is rejected."""
    numbers = numbers_of()
    clip = numbers.clip if part == "update" else numbers.clip_of_buffers
    honest = [numbers.encode(Contribution(update=update_of(k), examples=100)) for k in range(4)]
    lie = update_of(9, norm=1.0, norm_of_buffers=1.0)
    # the steps of its update are these times as large
    larger = numbers_of(clip=100.0, clip_of_buffers=100.0)
    where = slice(0, -TAIL - BUFFERS) if part == "update" else slice(-TAIL - BUFFERS, -TAIL)

    def attack(norm: float) -> Masked:
        vector = numbers.encode(Contribution(update=update_of(9), examples=100))
        grown = larger.encode(Contribution(update=norm * lie, examples=100))
        signed = (grown[where].astype(np.int64) + 2**23) % 2**24 - 2**23
        vector[where] = np.rint(signed * (100.0 / clip)).astype(np.int64) % 2**24
        return total_of([*honest, vector])

    with pytest.raises(
        RejectedSumError, match=rf"the mean {part} has norm .*, but each client should clip it to"
    ):
        numbers.decode(attack(5.5 * clip), 5)
    found = numbers.decode(attack(3.0 * clip), 5)
    mean = found.total / found.weight
    kept = mean[:D] if part == "update" else mean[D:]
    assert float(kept.norm()) <= clip * (1 + 1e-5)


def test_a_small_weight_does_not_make_a_sum_of_honest_clients_longer_than_allowed():
    numbers = numbers_of(largest_weight=10**9, clients=1000)
    update = update_of(0, norm=2.0)
    vectors = [
        numbers.encode(Contribution(update=update, examples=examples)) for examples in (1, 2, 10**4)
    ]
    assert numbers.decode(total_of(vectors), 3).clients == 3


@pytest.mark.parametrize("size", [1, 3, 40, 650, 5000])
def test_a_rotation_keeps_norms_and_is_undone(size: int):
    rotation, vector = Rotation(size, b"key"), np.random.default_rng(size).normal(size=size)
    rotated = rotation.apply(vector)
    assert rotated.shape == (rotation.padded_size,)
    assert rotation.padded_size <= size * 17 / 16
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(vector), rel=1e-12)
    np.testing.assert_allclose(rotation.undo(rotated), vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [650, 20_000])
def test_a_rotation_spreads_one_entry_over_all(size: int):
    vector = np.zeros(size)
    vector[17] = 1.0
    rotated = Rotation(size, b"key").apply(vector)
    assert np.abs(rotated).max() < 5 / math.sqrt(len(rotated))
    other = Rotation(size, b"other").apply(vector)
    assert abs(float(rotated @ other)) < 0.2


@pytest.mark.parametrize("order", [1, 2, 8, 64])
def test_the_fast_transform_is_the_hadamard_matrix(order: int):
    rows = np.random.default_rng(0).normal(size=(3, order))
    np.testing.assert_allclose(
        hadamard(rows), rows @ hadamard_matrix(order) / math.sqrt(order), rtol=0, atol=1e-12
    )


def test_numbers_travel_in_three_bytes():
    numbers = np.array([0, 1, 255, 256, 2**24 - 1], np.uint32)
    assert pack(numbers) == bytes([0, 0, 0, 1, 0, 0, 255, 0, 0, 0, 1, 0, 255, 255, 255])
    assert (unpack(pack(numbers)) == numbers).all()
