from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import SHIFTS, ClientData, Pool, load_pool, shift_views

DIGITS = load_pool("digits")


def maps(name: str, clusters: int, seed: int = 0, pool: Pool = DIGITS) -> list[list[int]]:
    views, _ = shift_views(pool, name, clients=max(clusters, 1), clusters=clusters, seed=seed)
    assert all(view.label_map is not None and view.quarter_turns == 0 for view in views)
    return [view.label_map.tolist() for view in views if view.label_map is not None]


def swapped(label_map: list[int]) -> frozenset[int]:
    return frozenset(label for label, seen in enumerate(label_map) if label != seen)


def test_clients_are_dealt_evenly() -> None:
    _, clusters = shift_views(DIGITS, "none", clients=7, clusters=3)
    assert clusters == (0, 1, 2, 0, 1, 2, 0)


def test_none_changes_nothing() -> None:
    views, _ = shift_views(DIGITS, "none", clients=2, clusters=2)
    assert [(view.label_map, view.quarter_turns) for view in views] == [(None, 0), (None, 0)]


@given(st.integers(1, 45), st.integers(0, 1000))
def test_label_swap_swaps_another_pair_in_each_cluster(clusters: int, seed: int) -> None:
    pairs = [swapped(label_map) for label_map in maps("label_swap", clusters, seed)]
    assert all(len(pair) == 2 for pair in pairs)
    assert len(set(pairs)) == clusters, "no two clusters swap the same"
    disjoint = pairs[:5]  # ten labels have five disjoint pairs
    assert len(frozenset().union(*disjoint)) == 2 * len(disjoint)


@given(st.integers(1, 30), st.integers(0, 1000))
def test_label_permutations_are_distinct_permutations(clusters: int, seed: int) -> None:
    found = maps("label_permutation", clusters, seed)
    assert all(sorted(label_map) == list(range(10)) for label_map in found)
    assert len({tuple(label_map) for label_map in found}) == clusters


@given(
    st.sampled_from(["label_swap", "label_permutation"]), st.integers(1, 8), st.integers(0, 1000)
)
def test_more_clusters_leave_the_first_ones_as_they_are(
    name: str, clusters: int, seed: int
) -> None:
    assert maps(name, clusters, seed) == maps(name, clusters + 1, seed)[:clusters]


def test_seeds_differ() -> None:
    assert len({str(maps("label_swap", 4, seed)) for seed in range(10)}) == 10


def test_all_permutations_of_few_labels_can_be_used(make_pool: Callable[..., Pool]) -> None:
    found = maps("label_permutation", 6, pool=make_pool(labels=3))
    assert sorted(found) == [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]


def test_rotation_turns_the_images_a_quarter_more_for_each_cluster() -> None:
    views, _ = shift_views(DIGITS, "rotation", clients=4, clusters=4)
    assert [(view.label_map, view.quarter_turns) for view in views] == [
        (None, 0),
        (None, 1),
        (None, 2),
        (None, 3),
    ]
    image = DIGITS.inputs(DIGITS.train[:1])
    for turns in range(4):
        turned = DIGITS.inputs(DIGITS.train[:1], turns)
        assert (turned == torch.rot90(image, turns, (2, 3))).all()
    assert (DIGITS.inputs(DIGITS.train[:1], 1)[0, 0, :, 0] == image[0, 0, 0].flip(0)).all(), (
        "counter-clockwise"
    )


def test_a_client_sees_labels_through_its_map() -> None:
    label_map = torch.tensor([1, 0, 2])
    client = ClientData(0, "a", 0, *[DIGITS.train] * 3, label_map=label_map)
    assert client.labels(torch.tensor([0, 1, 2, 0])).tolist() == [1, 0, 2, 1]


def test_every_shift_has_a_one_line_description() -> None:
    assert {"none", "label_swap", "label_permutation", "rotation", "anda", "invert"} < set(SHIFTS)
    assert all(shift.description and "\n" not in shift.description for shift in SHIFTS.values())


@pytest.mark.parametrize(
    ("name", "clients", "clusters", "message"),
    [
        ("label_swop", 4, 2, "unknown shift 'label_swop'; did you mean 'label_swap'"),
        ("label_swap", 4, 0, "clusters should be from 1 to the number of clients (4), got 0"),
        ("label_swap", 4, 5, "clusters should be from 1 to the number of clients (4), got 5"),
        (
            "label_swap",
            99,
            math.comb(10, 2) + 1,
            "at most 45 with shift 'label_swap', which is the number of pairs of 10 lab",
        ),
        (
            "rotation",
            9,
            5,
            "at most 4 with shift 'rotation', which turns by 0°, 90°, 180° and 270°, got 5",
        ),
    ],
)
def test_clusters_that_cannot_be(name: str, clients: int, clusters: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shift_views(DIGITS, name, clients=clients, clusters=clusters)
    assert message in str(caught.value)


def test_too_many_permutations(make_pool: Callable[..., Pool]) -> None:
    with pytest.raises(
        ConfigError,
        match="at most 2 with shift 'label_permutation', which is the number of permutations of 2",
    ):
        shift_views(make_pool(labels=2), "label_permutation", clients=3, clusters=3)


@pytest.mark.parametrize("name", ["label_swap", "label_permutation"])
def test_language_data_has_no_labels_to_shift(make_pool: Callable[..., Pool], name: str) -> None:
    with pytest.raises(DataError) as caught:
        shift_views(make_pool(task="language"), name, clients=4, clusters=2)
    assert (
        str(caught.value)
        == f"shift {name!r} needs labels, but toy is language data (next-word prediction); "
        "choose another shift, or shift = 'none'"
    )


@pytest.mark.parametrize(
    ("inputs", "shape"), [(torch.zeros(250, 6), "[6]"), (torch.zeros(250, 1, 2, 3), "[1, 2, 3]")]
)
def test_only_square_images_can_be_turned(
    make_pool: Callable[..., Any], inputs: torch.Tensor, shape: str
) -> None:
    pool = make_pool()
    object.__setattr__(pool, "x", inputs)
    with pytest.raises(DataError) as caught:
        shift_views(pool, "rotation", clients=4, clusters=2)
    assert (
        str(caught.value)
        == f"shift 'rotation' needs square images [C, H, H], but inputs of toy have the shape "
        f"{shape}; choose another shift"
    )


@pytest.mark.parametrize("shift", ["label_swap", "label_permutation"])
def test_targets_that_are_no_labels_are_not_exchanged(shift):
    pool = Pool.of_examples(
        "load", torch.zeros(4, 1), torch.rand(4), np.arange(4), np.arange(0), task="regression"
    )
    with pytest.raises(
        ConfigError, match=f"shift should be 'none' or 'rotation' for load: .* got '{shift}'"
    ):
        shift_views(pool, shift, clients=2, clusters=2)
