"""The shifts of FLUX's arena, feature skews, and what clients see of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from fedclade import ConfigError, DataError, load_federation
from fedclade.data.view import ANGLES, COLOURS, rotate_images

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 1, 28, 28), dtype=np.uint8)


def anda(kind: str, level: int, *, clients: int = 10, seed: int = 0, **more):
    return load_federation(
        "digits",
        clients=clients,
        scaling="unit",
        shift="anda",
        shift_arguments={"kind": kind, "level": level},
        partition_arguments={"tests": "parts"},
        seed=seed,
        **more,
    )


def pixels(federation, client):
    return federation.pool.x[torch.from_numpy(federation.by_id[client].train)].numpy()


@pytest.mark.parametrize("degrees", [0, 33.3, 72, 90, 120, 144, 180, 216, 240, 270, 288, 359])
def test_images_are_turned_as_pil_turns_them(degrees):
    expected = np.stack(
        [np.asarray(Image.fromarray(image[0]).rotate(degrees))[None] for image in IMAGES]
    )
    assert np.array_equal(rotate_images(IMAGES, degrees), expected)


def test_oblong_images_are_turned_as_pil_turns_them():
    image = IMAGES[:1, :, :20]
    expected = np.asarray(Image.fromarray(image[0, 0]).rotate(90))
    assert np.array_equal(rotate_images(image, 90)[0, 0], expected)


@pytest.mark.parametrize("level", range(1, 9))
def test_inputs_differ_by_an_angle_and_a_colour_that_clients_drew(level):
    federation = anda("P(X)", level, clients=40)
    truth = federation.true_clusters
    assert len(set(truth.values())) <= ANGLES[level - 1] * COLOURS[level - 1]
    assert federation.pool.input_shape == (3, 8, 8)
    full = {
        tuple((federation.examples(c, "train")[0] == 1).all(dim=(0, 2, 3)).tolist())
        for c in federation.ids
    }
    assert len(full) == COLOURS[level - 1]
    assert all(sum(channels) == (COLOURS[level - 1] > 1) for channels in full)


def test_clients_that_drew_the_same_angle_are_a_cluster_and_see_the_images_turned():
    federation, plain = anda("P(X)", 3, clients=6), load_federation("digits", clients=6)
    angles = {}
    for client in federation.ids:
        images, seen = pixels(plain, client), pixels(federation, client)
        assert np.array_equal(seen[:, :1], seen[:, 2:])
        (angles[client],) = (
            k for k in range(4) if np.array_equal(seen[:, :1], rotate_images(images, 90 * k))
        )
    assert len(set(angles.values())) > 1
    for one, other in itertools.combinations(angles, 2):
        together = federation.true_clusters[one] == federation.true_clusters[other]
        assert (angles[one] == angles[other]) == together


@pytest.mark.parametrize("level", [1, 5, 8])
def test_clients_have_some_classes_and_as_many_examples_as_before(level):
    federation, plain = (
        anda("P(Y)", level, validation_fraction=0.2),
        anda("P(Y|X)", 1, validation_fraction=0.2),
    )
    sets = set()
    for client in federation.ids:
        for split in ("train", "validation", "test"):
            labels = federation.examples(client, split)[1]
            assert len(labels) == len(plain.examples(client, split)[1])
        sets.add(tuple(federation.examples(client, "train")[1].unique().tolist()))
        assert len(federation.examples(client, "train")[1].unique()) == 11 - level
        held = [
            set(getattr(federation.by_id[client], split).tolist())
            for split in ("train", "validation", "test")
        ]
        assert not held[0] & held[1]
        assert not (held[0] | held[1]) & held[2]
    assert len(sets) == len(set(federation.true_clusters.values())) <= 5


@pytest.mark.parametrize("level", [1, 3, 8])
def test_labels_of_a_pool_are_permuted_by_each_client(level):
    federation = anda("P(Y|X)", level)
    maps = [torch.arange(10) if c.label_map is None else c.label_map for c in federation.clients]
    moved = {label for label_map in maps for label in range(10) if label_map[label] != label}
    assert len(moved) <= level
    assert all(sorted(label_map.tolist()) == list(range(10)) for label_map in maps)
    assert len({tuple(label_map.tolist()) for label_map in maps}) == len(
        set(federation.true_clusters.values())
    )
    assert (len(set(federation.true_clusters.values())) == 1) == (level == 1)


def test_images_of_some_classes_are_turned_by_each_client():
    federation, plain = anda("P(X|Y)", 2), load_federation("digits", clients=10)
    of_turned = set()
    for client in federation.ids:
        changed = (pixels(federation, client)[:, :1] != pixels(plain, client)).any(axis=(1, 2, 3))
        of_turned |= set(plain.examples(client, "train")[1].numpy()[changed].tolist())
    assert len(of_turned) == 2


def test_tests_are_equal_parts_that_nobody_shares():
    tests = [client.test for client in anda("P(Y|X)", 2).clients]
    together = np.concatenate(tests)
    assert len(np.unique(together)) == len(together)
    assert max(map(len, tests)) - min(map(len, tests)) <= 1


def test_the_same_seed_draws_the_same_and_another_does_not():
    assert (
        anda("P(X)", 8).fingerprint
        == anda("P(X)", 8).fingerprint
        != anda("P(X)", 8, seed=1).fingerprint
    )


def test_newcomers_see_data_as_some_client_does():
    federation = anda("P(X)", 5, newcomers=5)
    assert set(federation.newcomers.true_clusters.values()) <= set(
        federation.true_clusters.values()
    )
    assert federation.newcomers.pool is federation.pool


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "P(Z)", "level": 1}, "should be .P\\(X\\)"),
        ({"kind": "P(X)", "level": 9}, "level should be from 1 to 8"),
    ],
)
def test_what_is_out_of_range_is_an_error(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_federation("digits", shift="anda", shift_arguments=arguments)


def test_the_number_of_clusters_is_not_for_the_user_to_say():
    with pytest.raises(ConfigError, match="clusters should be left out"):
        load_federation(
            "digits", shift="anda", clusters=3, shift_arguments={"kind": "P(X)", "level": 1}
        )


def test_inputs_that_are_no_images_cannot_look_different(make_pool):
    for shift in ("invert", "blur", "noise", "thickness"):
        with pytest.raises(DataError, match="needs images"):
            load_federation(make_pool(), clients=2, shift=shift, clusters=2)


@pytest.mark.parametrize("shift", ["invert", "blur", "noise", "colour", "thickness"])
def test_one_cluster_sees_images_as_they_are_and_the_other_does_not(shift):
    federation = load_federation("digits", clients=4, shift=shift, clusters=2, scaling="unit")
    plain = load_federation("digits", clients=4, scaling="unit")
    same = [
        bool((federation.examples(c, "test")[0] == plain.examples(c, "test")[0]).all())
        for c in range(4)
    ]
    assert same == [True, False, True, False]
    if shift == "invert":
        assert np.array_equal(pixels(federation, 1), 255 - pixels(plain, 1))


def test_each_cluster_can_have_all_examples():
    federation = load_federation("digits", clients=8, shift="rotation", clusters=4, views="each")
    every = set(federation.pool.train.tolist())
    for cluster in range(4):
        mine = [
            federation.by_id[c].train
            for c in federation.ids
            if federation.true_clusters[c] == cluster
        ]
        assert sum(map(len, mine)) == len(every)
        assert set(np.concatenate(mine).tolist()) == every
    assert not np.array_equal(
        np.sort(federation.by_id[0].train), np.sort(federation.by_id[1].train)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"clients": 6, "shift": "rotation"},
        {"clients": 4},
        {"clients": 4, "shift": "rotation", "newcomers": 2},
    ],
)
def test_clusters_that_each_have_all_examples_are_equally_many_clients(settings):
    with pytest.raises(ConfigError):
        load_federation("digits", views="each", **settings)


@pytest.mark.parametrize("more", [{}, {"samples_per_client": 40}])
def test_newcomers_are_of_the_members_clusters_in_turn(more):
    for seed in range(5):
        federation = anda("P(X)", 8, clients=6, seed=seed, newcomers=4, **more)
        found = sorted(set(federation.true_clusters.values()))
        assert found == [*range(len(found))]
        assert [*federation.newcomers.true_clusters.values()] == [k % len(found) for k in range(4)]


def test_the_description_tells_kind_and_level_and_nothing_that_the_seed_decides():
    told = "digits, 6 clients, partition iid (tests parts), shift anda (kind P(X), level 8)"
    assert {anda("P(X)", 8, clients=6, seed=seed).description for seed in range(4)} == {told}
    assert (
        len(
            {
                len(set(anda("P(X)", 8, clients=6, seed=seed).true_clusters.values()))
                for seed in range(4)
            }
        )
        > 1
    )
