"""Partitions and shifts of a user's own, by ``module:function``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedclade import ConfigError, DataError, load_federation
from fedclade.config import check_config
from fedclade.data import Pool, find_partition, find_shift, load_pool, partition_pool, shift_views

DIGITS = load_pool("digits")

OWN = """
import numpy as np
from fedclade.data import Parts, View

def halves(pool, clients, seed, *, left=0):
    "The left part, and the rest. In order."
    return np.split(pool.train, [left] if left else [len(pool.train) // 2])

def named(pool, clients, seed):
    return Parts([pool.train[:2], pool.train[2:4]], names=["a", "b"], test="own")

def outside(pool, clients, seed):
    return [pool.train[:2], pool.test[:2]]

def twice(pool, clients, seed):
    return [pool.train[:2], pool.train[1:3]]

def nothing(pool, clients, seed):
    return [pool.train, pool.train[:0]]

def words(pool, clients, seed):
    return [["a"], ["b"]]

def fails(pool, clients, seed):
    return {}["x"]

def number(pool, clients, seed):
    return 3

def rolled(pool, clusters, seed, *, by=1):
    "Rolls the labels."
    return [View(label_map=[(y + by * k) % pool.outputs for y in range(pool.outputs)]) for k in range(clusters)]

def turned(pool, clusters, seed):
    return [View(quarter_turns=1)] * clusters

def short(pool, clusters, seed):
    return [View(label_map=[0])] * clusters

def far(pool, clusters, seed):
    return [View(label_map=range(1, pool.outputs + 1))] * clusters

def one(pool, clusters, seed):
    return [View()]

def pair(pool, clusters):
    return [View()] * clusters
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_data", None)


def test_a_partition_of_ones_own_has_options_and_may_return_plain_indices(own: None) -> None:
    parts = partition_pool(DIGITS, "users_data:halves", clients=2, left=10)
    assert [len(indices) for indices in parts.indices] == [10, len(DIGITS.train) - 10]
    assert parts.test == "matched"
    limited = partition_pool(DIGITS, "users_data:halves", clients=2, samples_per_client=5)
    assert [len(indices) for indices in limited.indices] == [5, 5]
    assert partition_pool(DIGITS, "users_data:named", clients=2).names == ["a", "b"]
    assert (
        find_partition("users_data:halves").description == "The left part, and the rest. In order"
    )


def test_newcomers_to_a_partition_of_ones_own_are_drawn_from_among_all(own: None) -> None:
    federation = load_federation(
        DIGITS,
        clients=1,
        newcomers=1,
        samples_per_client=20,
        partition="users_data:halves",
        test_fraction=0.5,
    )
    assert federation.newcomers is not None
    half = len(DIGITS.train) // 2
    starts = {
        bool(each.clients[0].train.min() >= DIGITS.train[half])
        for each in (federation, federation.newcomers)
    }
    assert starts == {False, True}


@pytest.mark.parametrize(
    ("name", "clients", "message"),
    [
        (
            "halves",
            3,
            "partition 'users_data:halves' should return the examples of each of 3 clients, got the examples of 2",
        ),
        ("outside", 2, "partition 'users_data:outside' should return indices in pool.train, got "),
        (
            "twice",
            2,
            "partition 'users_data:twice' should assign every example to at most one client, got",
        ),
        (
            "nothing",
            2,
            "partition 'users_data:nothing' should give every client at least 1 example, got none for client 1",
        ),
        (
            "words",
            2,
            "the indices of client 0 by partition 'users_data:words' should be an array [n] of whole numbers",
        ),
        ("fails", 2, "partition 'users_data:fails' failed: KeyError: 'x'"),
        (
            "number",
            2,
            "partition 'users_data:number' should return the indices of each client's examples, got 3",
        ),
    ],
)
def test_what_a_partition_of_ones_own_gives_is_checked(
    own: None, name: str, clients: int, message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        partition_pool(DIGITS, f"users_data:{name}", clients=clients)


def test_options_of_a_partition_of_ones_own_are_checked(own: None) -> None:
    with pytest.raises(
        ConfigError, match=r"partition 'users_data:halves': 'lft'; did you mean 'left'\?"
    ):
        partition_pool(DIGITS, "users_data:halves", clients=2, lft=1)
    with pytest.raises(
        ConfigError, match=r"\[data\] partition 'users_data:np' should name a function that ret"
    ):
        check_config({"data": {"partition": "users_data:np"}})
    data = check_config({"data": {"partition": "users_data:halves", "clients": 2, "left": 7}}).data
    assert (data["partition"], data["left"]) == ("users_data:halves", 7)


def test_a_shift_of_ones_own_has_options_and_may_give_plain_lists(own: None) -> None:
    views, places = shift_views(DIGITS, "users_data:rolled", clients=4, clusters=2, by=3)
    assert places == (0, 1, 0, 1)
    assert [view.label_map.tolist()[:2] for view in views if view.label_map is not None] == [
        [0, 1],
        [3, 4],
    ]
    assert find_shift("users_data:rolled").description == "Rolls the labels"
    raw = {"data": {"clients": 4, "clusters": 2, "shift": "users_data:rolled", "by": 3}}
    federation = check_config(raw).federation()
    assert federation.true_clusters == {0: 0, 1: 1, 2: 0, 3: 1}
    pooled = DIGITS.y[federation.clients[1].train]
    assert federation.examples(1, "train")[1].tolist() == ((pooled + 3) % 10).tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one", "shift 'users_data:one' should return a View for each of 2 clusters, got [View("),
        ("number", "shift 'users_data:number' should return a View for each of 2 clusters, got 3"),
        ("fails", "shift 'users_data:fails' failed: KeyError: 'x'"),
        (
            "short",
            "the label_map by shift 'users_data:short' should have an entry for each of the 10 labels, got 1",
        ),
        (
            "far",
            "the label_map by shift 'users_data:far' should lie in 0 .. 9, got values from 1 to 10",
        ),
    ],
)
def test_what_a_shift_of_ones_own_returns_is_checked(own: None, name: str, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        shift_views(DIGITS, f"users_data:{name}", clients=4, clusters=2)


def test_a_shift_of_ones_own_is_checked_against_the_data(
    own: None, make_pool: Callable[..., Pool]
) -> None:
    with pytest.raises(DataError, match="shift 'users_data:rolled' needs labels, but "):
        shift_views(make_pool(task="language"), "users_data:rolled", clients=2, clusters=2)
    with pytest.raises(DataError, match="shift 'users_data:turned' needs square images"):
        shift_views(load_pool("synthetic"), "users_data:turned", clients=2, clusters=2)


def test_a_shift_that_takes_something_else_is_refused(own: None) -> None:
    told = "shift 'users_data:pair' should have the parameters (pool, clusters, seed), and options after a *, got (pool"
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_config({"data": {"shift": "users_data:pair", "clients": 4}})
    with pytest.raises(
        ConfigError, match=r"unknown key of shift 'users_data:rolled': 'bye'; did you mean 'by'\?"
    ):
        shift_views(DIGITS, "users_data:rolled", clients=4, clusters=2, bye=1)
