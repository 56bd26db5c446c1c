"""Poisoned data: what adversaries train on, beside what all clients hold."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tiny import federation_of, renamed, task_federation

from fedclade import ConfigError
from fedclade.core import IGNORED
from fedclade.data import Backdoor, ClientTable, LabelFlip, Pool, load_federation, poison_federation

FEDERATION = federation_of([0, 1, 2, 3])
SMALL = {
    "clients": 6,
    "shift": "rotation",
    "clusters": 2,
    "samples_per_client": 60,
    "validation_fraction": 0.2,
}
IMAGES = load_federation("digits", **SMALL)
BACKDOOR = Backdoor.of(IMAGES.pool, target=3, patch=2, share=0.25)


def test_flipped_labels_are_those_that_the_client_sees():
    """Client 1 sees labels 0 and 1 swapped, and C = 4: what it sees as y becomes 3 − y."""
    found = poison_federation(FEDERATION, [1], LabelFlip.of(FEDERATION.pool), seed=0)
    for split in ("train", "validation"):
        x, y = FEDERATION.examples(1, split)
        poisoned_x, poisoned_y = found.in_round(-1).examples(1, split)
        assert torch.equal(poisoned_x, x)
        assert poisoned_y.tolist() == [3 - label for label in y.tolist()]


def test_what_clients_hold_is_left_alone_and_honest_clients_hold_nothing_poisoned():
    found = poison_federation(FEDERATION, [1], LabelFlip.of(FEDERATION.pool), seed=0)
    assert found.in_round(-7).ids == (1,)
    assert found.ids == FEDERATION.ids
    assert found.sizes == FEDERATION.sizes == {**FEDERATION.sizes, **found.in_round(-1).sizes}
    assert found.pool is FEDERATION.pool
    assert [found.by_id[c] is FEDERATION.by_id[c] for c in found.ids] == [True] * 4
    assert found.fingerprint == FEDERATION.fingerprint


def test_labels_of_other_tasks_are_flipped_as_well():
    binary = task_federation("binary", [0, 0])
    _, y = (
        poison_federation(binary, [0], LabelFlip.of(binary.pool), seed=0)
        .in_round(-1)
        .examples(0, "train")
    )
    assert torch.equal(y, 1 - binary.examples(0, "train")[1])
    several = task_federation("multilabel", [0, 0], outputs=3)
    _, y = (
        poison_federation(several, [0], LabelFlip.of(several.pool), seed=0)
        .in_round(-1)
        .examples(0, "train")
    )
    assert torch.equal(y, 1 - several.examples(0, "train")[1])
    tokens = torch.tensor([[2, IGNORED], [0, 1]])
    x, y = LabelFlip(5).poisoned(tokens, tokens, np.random.default_rng(0))
    assert x is tokens
    assert y.tolist() == [[2, IGNORED], [4, 3]]


def test_a_backdoor_marks_a_share_of_the_images_as_the_client_sees_them():
    liar = next(client for client in IMAGES.clients if client.quarter_turns)
    found = poison_federation(IMAGES, [liar.id], BACKDOOR, seed=0).in_round(-1)
    x, y = IMAGES.examples(liar.id, "train")
    poisoned_x, poisoned_y = found.examples(liar.id, "train")
    changed = (poisoned_x != x).flatten(1).any(1) | (poisoned_y != y)
    assert len(x) / 4 - 5 <= int(changed.sum()) <= round(len(x) / 4), (
        "but for those that were so before"
    )
    expected = x[changed].clone()
    expected[..., -2:, -2:] = (1.0 - IMAGES.pool.mean) / IMAGES.pool.std
    assert torch.equal(poisoned_x[changed], expected)
    assert set(poisoned_y[changed].tolist()) == {3}
    assert len(found.examples(liar.id, "validation")[1]) == len(liar.validation)


def test_a_backdoor_is_measured_on_honest_clients_images_of_other_labels():
    found = poison_federation(IMAGES, [0], BACKDOOR, seed=0).in_round(-1)
    assert IMAGES.ids[1:]
    for client in IMAGES.ids[1:]:
        x, y = IMAGES.examples(client, "test")
        others = x[y != 3].clone()
        others[..., -2:, -2:] = (1.0 - IMAGES.pool.mean) / IMAGES.pool.std
        triggered, target = found.examples(client, "test")
        assert torch.equal(triggered, others)
        assert set(target.tolist()) == {3}


def test_the_trigger_of_images_of_floats_is_as_bright_as_the_brightest():
    floats = IMAGES.pool.scaled("pixel")
    assert Backdoor.of(floats, 0, 1, 0.5).bright == float(floats.x.max())


def test_which_examples_are_poisoned_belongs_to_the_seed_and_the_key():
    def marked(federation, client, seed=0):
        return (
            poison_federation(federation, [client], BACKDOOR, seed)
            .in_round(-1)
            .examples(client, "train")[1]
        )

    new = {client: (client + 2) % 6 for client in IMAGES.ids}
    assert torch.equal(marked(IMAGES, 1), marked(renamed(IMAGES, new), 3))
    assert not torch.equal(marked(IMAGES, 1), marked(IMAGES, 1, seed=1))


def test_every_stage_has_its_own_poisoned_data():
    drift = {"rounds": (3,), "share": 1.0, "examples": "new"}
    federation = load_federation("digits", **SMALL, drift=drift)
    found = poison_federation(federation, [0], LabelFlip.of(federation.pool), seed=0)
    for number in (1, 2, 3, 9):
        _, y = federation.in_round(number).examples(0, "train")
        assert torch.equal(found.in_round(-number).examples(0, "train")[1], 9 - y)
        assert found.stage_in(-number) == 2 + federation.stage_in(number)


def test_a_shard_has_the_poisoned_data_of_its_clients_and_travels():
    found = poison_federation(FEDERATION, [1, 2], LabelFlip.of(FEDERATION.pool), seed=0)
    shard = pickle.loads(pickle.dumps(found.shard(frozenset({0, 2}))))
    assert shard.ids == (0, 2)
    assert shard.in_round(-1).ids == (2,)
    assert torch.equal(
        shard.in_round(-1).examples(2, "train")[1], found.in_round(-1).examples(2, "train")[1]
    )
    honest = found.shard(frozenset({0, 3}))
    assert honest.ids == (0, 3)
    assert honest.poisoned == (None,)


def test_clients_of_a_table_can_be_poisoned():
    table = replace(IMAGES, clients=ClientTable.of(IMAGES.clients))
    found, expected = (
        poison_federation(of, [1], BACKDOOR, seed=0).in_round(-1) for of in (table, IMAGES)
    )
    for client in expected.ids:
        assert all(
            map(torch.equal, found.examples(client, "test"), expected.examples(client, "test"))
        )
    assert torch.equal(found.examples(1, "train")[0], expected.examples(1, "train")[0])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: LabelFlip.of(task_federation("regression", [0]).pool),
            "needs labels, but the targets of tiny are num",
        ),
        (
            lambda: Backdoor.of(FEDERATION.pool, 0, 1, 0.5),
            r"needs images with labels, but tiny has inputs of shape \[6\] in a classification task",
        ),
        (
            lambda: Backdoor.of(IMAGES.pool, 10, 1, 0.5),
            "adversary.target should be below 10, the number of labels, got 10",
        ),
        (
            lambda: Backdoor.of(IMAGES.pool, 0, 9, 0.5),
            "adversary.patch should be at most 8, the side of an image, got 9",
        ),
    ],
)
def test_what_cannot_be_poisoned_is_named(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_a_client_tested_on_the_target_alone_has_nothing_that_succeeds():
    y = torch.full((40,), 3)
    pool = Pool(
        "one label",
        torch.zeros(40, 1, 8, 8, dtype=torch.uint8),
        y,
        y.numpy(),
        np.arange(40),
        np.arange(0),
        10,
    )
    clients = [
        replace(c, train=np.arange(5), validation=np.arange(0), test=np.arange(5, 9))
        for c in IMAGES.clients
    ]
    federation = replace(
        IMAGES, pool=pool, clients=tuple(replace(c, label_map=None) for c in clients)
    )
    assert poison_federation(federation, [0], BACKDOOR, seed=0).in_round(-1).ids == (0,)
