from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedclade.core import ConfigError, rng

KEYS = [
    (0, "a"),
    (1, "a"),
    (0, "b"),
    (0, "a", 0),
    (0, "a", 0, 0),
    (0, "a", 1),
    (0, "a", 1, 0),
    (0, "a", 0, 1),
]
"""All different; NumPy alone would take some for the same, since it pads a seed with zeros."""


def test_different_keys_draw_differently():
    assert len({rng.torch_seed(*key) for key in KEYS}) == len(KEYS)
    assert len({int(rng.generator(*key).integers(2**62)) for key in KEYS}) == len(KEYS)
    assert len(
        {int(torch.randint(2**62, (), generator=rng.torch_generator(*key))) for key in KEYS}
    ) == len(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_the_same_key_draws_the_same(key):
    assert rng.generator(*key).integers(2**62) == rng.generator(*key).integers(2**62)
    assert rng.torch_generator(*key).initial_seed() == rng.torch_seed(*key)
    assert 0 <= rng.torch_seed(*key) < 2**63


@settings(max_examples=200, deadline=None)
@given(
    seed=st.one_of(st.integers(0, 9), st.integers(0, 2**70)),
    numbers=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**70)), max_size=5),
)
@example(seed=2**32 - 1, numbers=[2**32 - 1])
@example(seed=2**32, numbers=[0])
@example(seed=0, numbers=[2**32])
def test_a_key_is_a_seed_and_a_spawn_key_of_numpy(seed: int, numbers: list[int]):
    """Keys are also written down in a shorter way, which must not change what is drawn."""
    words = [seed, zlib.crc32(b"train")]
    sequence = np.random.SeedSequence(words, spawn_key=numbers)
    state = int(sequence.generate_state(1, np.uint64)[0])
    assert rng.torch_seed(seed, "train", *numbers) == state >> 1
    expected = np.random.default_rng(sequence).integers(2**62)
    assert rng.generator(seed, "train", *numbers).integers(2**62) == expected


def test_drawing_leaves_the_global_generators_alone():
    before = torch.get_rng_state()
    torch.rand(3, generator=rng.torch_generator(0, "a"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_below_0_is_refused():
    with pytest.raises(ConfigError, match=r"^seed should be at least 0, got -1$"):
        rng.generator(-1, "purpose")
