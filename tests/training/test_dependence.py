"""Signs that the examples of a client depend on each other: adjacent ones are similar."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclade.training.dependence import have_similar_neighbours


def series(correlation: float, steps: int = 200, columns: int = 5, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(steps, columns))
    for step in range(1, steps):
        x[step] = correlation * x[step - 1] + np.sqrt(1 - correlation**2) * x[step]
    return torch.from_numpy(x.astype(np.float32))


def shuffled(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return x[torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))]


@pytest.mark.parametrize("correlation", [0.8, 0.95, 0.999])
def test_a_time_series_has_similar_neighbours_until_it_is_shuffled(correlation: float):
    x = series(correlation)
    assert have_similar_neighbours(x)
    assert have_similar_neighbours(x.reshape(200, 5, 1))
    assert have_similar_neighbours(x * torch.tensor([1e6, 1, 1, 1e-6, 0])), "scales do not matter"
    assert have_similar_neighbours(x[:, 0])
    assert not have_similar_neighbours(series(0.0))


def test_random_orders_have_no_similar_neighbours():
    for seed in range(40):
        assert not have_similar_neighbours(shuffled(series(0.99, 80, seed=seed), seed))


def test_near_copies_are_similar_neighbours_only_if_they_are_adjacent():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 5, generator=draw).repeat_interleave(4, 0)
    x = x + 1e-3 * torch.randn(200, 5, generator=draw)
    assert have_similar_neighbours(x)
    assert not have_similar_neighbours(shuffled(x))


def test_rows_that_are_sorted_by_their_label_are_not_similar_for_that():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(200) // 50
    x = torch.randn(200, 5, generator=draw) + 5 * labels[:, None]
    assert have_similar_neighbours(x)
    assert not have_similar_neighbours(x, labels)
    alternating = torch.arange(200) % 2
    assert have_similar_neighbours(series(0.95), alternating), "every second row has the label"


def test_tokens_are_compared_by_the_positions_in_which_they_differ():
    draw = np.random.default_rng(0)
    texts = torch.from_numpy(draw.integers(0, 1000, size=(200, 8)))
    assert not have_similar_neighbours(texts)
    windows = torch.from_numpy(draw.integers(0, 1000, size=(50, 8))).repeat_interleave(4, 0)
    windows[:, 0] = torch.arange(200)
    assert have_similar_neighbours(windows)
    assert not have_similar_neighbours(shuffled(windows))


def test_images_are_compared_by_their_pixels():
    pixels = (50 * series(0.95) + 128).clamp(0, 255).to(torch.uint8).reshape(200, 1, 5, 1)
    assert have_similar_neighbours(pixels)
    assert not have_similar_neighbours(shuffled(pixels))


def test_of_many_rows_consecutive_ones_are_compared():
    x = torch.cat([series(0.0, 400), series(0.95, 300, seed=1), series(0.0, 400, seed=2)])
    assert have_similar_neighbours(x)


@pytest.mark.parametrize("rows", [1, 2, 3, 20])
def test_few_rows_are_never_enough(rows: int):
    assert not have_similar_neighbours(series(0.999, rows))


def test_equal_rows_and_equal_distances_are_no_sign():
    assert not have_similar_neighbours(torch.zeros(100, 3))
    assert not have_similar_neighbours(torch.eye(100))
