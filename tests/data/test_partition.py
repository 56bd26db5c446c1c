from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import pfllib_dirichlet
from tests.reference.power_law import examples_of_each

from fedclade.core import rng
from fedclade.core.errors import ConfigError, DataError, MissingExtraError
from fedclade.data import PARTITIONS, Parts, Pool, load_pool, partition_pool
from fedclade.data.partition import shuffle_training

DIGITS = load_pool("digits")  # 1,437 training examples
OWNED = load_pool("synthetic", clients=6, max_samples=60)
USES_ALL = ["iid", "pathological", "dirichlet", "quantity_skew", "label_groups"]

MakePool = Callable[..., Pool]


def sizes(parts: Parts) -> list[int]:
    return [len(indices) for indices in parts.indices]


def labels(pool: Pool, parts: Parts) -> list[set[int]]:
    return [set(pool.groups[indices].tolist()) for indices in parts.indices]


def check_cover(pool: Pool, parts: Parts, clients: int) -> None:
    """Every index is a training example's, given out once at most."""
    assert len(parts.indices) == clients
    given_out = np.concatenate(parts.indices)
    assert given_out.dtype == np.int64
    assert len(np.unique(given_out)) == len(given_out)
    assert np.isin(given_out, pool.train).all() or parts.test == "own"


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([*USES_ALL, "shards"]), st.integers(2, 25), st.integers(0, 2**31))
def test_every_example_is_given_out_once(name: str, clients: int, seed: int) -> None:
    more = {"min_samples": 1} if name == "dirichlet" else {}
    parts = partition_pool(DIGITS, name, clients=clients, seed=seed, **more)
    check_cover(DIGITS, parts, clients)
    if name == "shards":
        assert set(sizes(parts)) == {2 * (1437 // (2 * clients))}, (
            "equal shards; what is left over is not used"
        )
    elif name != "pathological" or clients >= 10:  # with fewer clients some label may be nobody's
        assert sum(sizes(parts)) == 1437
    assert (parts.names, parts.test) == (
        None,
        "pool" if name in ("iid", "quantity_skew") else "matched",
    )


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_same_seed_same_partition_and_another_seed_another(name: str) -> None:
    pool = OWNED if name == "natural" else DIGITS

    def draw(seed: int) -> list[list[int]]:
        parts = partition_pool(pool, name, clients=5, samples_per_client=20, seed=seed)
        assert sizes(parts) == [20] * 5
        check_cover(pool, parts, 5)
        return [indices.tolist() for indices in parts.indices]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_iid_is_flowers_iid_partitioner_on_the_shuffled_data() -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import IidPartitioner

    parts = partition_pool(DIGITS, "iid", clients=23, seed=5)
    flower = IidPartitioner(num_partitions=23)
    flower.dataset = Dataset.from_dict({"index": np.concatenate(parts.indices)})
    assert [flower.load_partition(i)["index"][:] for i in range(23)] == [
        part.tolist() for part in parts.indices
    ]
    assert set(sizes(parts)) == {62, 63}, "1437 = 23 · 62 + 11"


def test_natural_is_flowers_natural_id_partitioner_on_the_shuffled_data() -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import NaturalIdPartitioner

    parts, order = partition_pool(OWNED, "natural", clients=5, seed=5), shuffle_training(OWNED, 5)
    flower = NaturalIdPartitioner(partition_by="owner")
    flower.dataset = Dataset.from_dict({"index": order, "owner": OWNED.natural[order].tolist()})
    by_owner = [flower.load_partition(i)["index"][:] for i in range(6)]
    assert all(part.tolist() in by_owner for part in parts.indices)
    assert sizes(parts) == sorted(map(len, by_owner), reverse=True)[:5]


@pytest.mark.parametrize("labels_per_client", [1, 2, 5])
def test_pathological_gives_each_client_that_many_labels(labels_per_client: int) -> None:
    parts = partition_pool(DIGITS, "pathological", clients=20, labels_per_client=labels_per_client)
    assert {len(held) for held in labels(DIGITS, parts)} == {labels_per_client}
    assert set.union(*labels(DIGITS, parts)) == set(range(10))


def test_dirichlet_is_more_skewed_the_smaller_alpha_is() -> None:
    def largest_share(alpha: float) -> float:
        parts = partition_pool(DIGITS, "dirichlet", clients=5, alpha=alpha)
        return float(
            np.mean([np.bincount(DIGITS.groups[part]).max() / len(part) for part in parts.indices])
        )

    assert largest_share(1000) < 0.15 < 0.25 < largest_share(0.1)


@pytest.mark.parametrize("seed", range(6))
def test_balanced_dirichlet_with_tests_of_clients_own_is_that_of_pfllib(seed: int) -> None:
    """Literal reference: the same draws give every client the same number of each label, to within rounding."""
    more = {"alpha": 0.1, "min_samples": 20, "balanced": True, "tests": "own"}
    parts = partition_pool(DIGITS, "dirichlet", clients=10, seed=seed, **more)
    check_cover(DIGITS, parts, 10)
    assert (sum(sizes(parts)), parts.test) == (1797, "own"), "the test split, too"
    shares = np.random.default_rng(int(rng.generator(seed, "flwr-datasets").integers(2**31)))
    there = np.bincount(DIGITS.groups).tolist()
    expected = pfllib_dirichlet.examples_of_each(
        there, 10, lambda: shares.dirichlet([0.1] * 10), least_samples=20
    )
    found = [np.bincount(DIGITS.groups[part], minlength=10) for part in parts.indices]
    assert np.abs(np.array(found) - expected).max() <= 1
    alone = partition_pool(
        DIGITS, "dirichlet", clients=10, seed=seed, **{**more, "balanced": False, "min_samples": 0}
    )
    assert max(sizes(parts)) < max(sizes(alone))


def test_shards_hold_at_most_two_labels_each() -> None:
    parts = partition_pool(DIGITS, "shards", clients=20, shards_per_client=1)
    assert set(sizes(parts)) == {71}
    assert max(len(held) for held in labels(DIGITS, parts)) == 2


def test_natural_keeps_the_largest_owners_largest_first(make_pool: MakePool) -> None:
    owners = [*"bbbb", *"é" * 6, *"aaaa", "A", *"cc"]
    pool = make_pool(train=15, test=2, owners=owners)
    parts = partition_pool(pool, "natural", clients=3)
    assert parts.names == ["é", "a", "b"], "ties in alphabetical order"
    assert [sorted(indices.tolist()) for indices in parts.indices] == [
        list(range(4, 10)),
        list(range(10, 14)),
        list(range(4)),
    ]
    assert parts.test == "own"
    assert partition_pool(pool, "natural", clients=None).names == ["é", "a", "b"], (
        "A has one example only"
    )
    assert partition_pool(pool, "natural", clients=None, min_samples=5).names == ["é"]
    assert sizes(partition_pool(pool, "natural", clients=2, samples_per_client=5)) == [5, 4], (
        "at most"
    )


def test_natural_draws_owners_at_random_if_asked_to(make_pool: MakePool) -> None:
    """FL+HC, section II-A: "367 users were randomly selected"; each has all of its own examples."""
    owners = [f"w{k:02d}" for k in range(30) for _ in range(1 + k % 5)]
    pool = make_pool(train=90, test=2, owners=[*owners, "w00", "w00"])
    with_enough = {name for name in owners if owners.count(name) >= 2}
    arguments = {"name": "natural", "owners": "random", "seed": 3}
    parts = partition_pool(pool, clients=10, **arguments)
    order = rng.generator(3, "owners").permutation(30)
    assert parts.names == [name for k in order if (name := f"w{k:02d}") in with_enough][:10]
    assert parts.names is not None
    for name, indices in zip(parts.names, parts.indices, strict=True):
        assert sorted(indices.tolist()) == [
            row for row, owner in enumerate(owners) if owner == name
        ]
    assert partition_pool(pool, clients=4, **arguments).names == parts.names[:4]
    assert set(partition_pool(pool, clients=None, **arguments).names or ()) == with_enough
    assert partition_pool(pool, clients=10, **{**arguments, "seed": 4}).names != parts.names
    counted = Counter(name for seed in range(200) for name in drawn_names(pool, seed))
    assert set(counted) == with_enough
    assert 40 < min(counted.values()) < max(counted.values()) < 130, (
        "every owner is as likely: 83 of 200"
    )


def drawn_names(pool: Pool, seed: int) -> list[str]:
    return partition_pool(pool, "natural", clients=10, owners="random", seed=seed).names or []


def test_natural_refuses_another_choice_of_owners() -> None:
    with pytest.raises(
        ConfigError,
        match="owners of partition 'natural' should be 'largest' or 'random', got 'first'",
    ):
        partition_pool(OWNED, "natural", clients=2, owners="first")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.floats(1.1, 5), st.integers(0, 1000))
def test_quantity_skew_uses_all_and_respects_the_minimum(
    clients: int, least: int, exponent: float, seed: int
) -> None:
    more = {"min_samples": least, "exponent": exponent}
    parts = partition_pool(DIGITS, "quantity_skew", clients=clients, seed=seed, **more)
    check_cover(DIGITS, parts, clients)
    assert sum(sizes(parts)) == 1437
    assert min(sizes(parts)) >= least


def test_quantity_skew_has_sizes_with_the_tail_of_their_exponent(make_pool: MakePool) -> None:
    pool = make_pool(train=2_000_000, test=0)
    drawn = np.sort(
        sizes(partition_pool(pool, "quantity_skew", clients=4000, min_samples=1, exponent=2.5))
    )
    spare = (drawn - 1) / np.median(drawn - 1)
    # P(size > s) = (s / s_min)^-(exponent - 1), so that ten times the median is exceeded by half of
    # 10^-1.5.
    assert (spare > 10).mean() == pytest.approx(0.5 * 10**-1.5, rel=0.25)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 5), st.floats(0, 3), st.integers(1, 10), st.integers(0, 1000)
)
def test_power_law_is_the_generator_of_fedprox(
    clients: int, labels_per_client: int, sigma: float, least: int, seed: int
) -> None:
    """Literal reference: the same draws give every client the same number of examples of each label."""
    more = {"labels_per_client": labels_per_client, "sigma": sigma, "min_samples": least}
    parts = partition_pool(DIGITS, "power_law", clients=clients, seed=seed, **more)
    check_cover(DIGITS, parts, clients)
    weights = rng.generator(seed, "log-normal").lognormal(0, sigma, (clients, labels_per_client))
    there = np.bincount(DIGITS.groups, minlength=10).tolist()  # the test split, too
    first = math.ceil(least / labels_per_client)
    expected = examples_of_each(there, weights, per_label_first=first)
    found = [
        dict(zip(*np.unique(DIGITS.groups[part], return_counts=True), strict=True))
        for part in parts.indices
    ]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs
    assert (parts.test, parts.own_test_fraction) == ("own", 0.1)


def test_power_law_makes_overlapping_runs_of_labels_and_no_groups_of_equal_clients() -> None:
    parts = partition_pool(DIGITS, "power_law", clients=20)
    assert labels(DIGITS, parts) == [{i % 10, (i + 1) % 10} for i in range(20)]
    assert 1797 - 20 * 2 <= sum(sizes(parts)) <= 1797, "rounded down for each client and label"


def test_label_groups_are_runs_of_labels() -> None:
    parts = partition_pool(DIGITS, "label_groups", clients=5, clusters=2)
    first, second = set(range(5)), set(range(5, 10))
    assert labels(DIGITS, parts) == [first, second, first, second, first]
    parts = partition_pool(DIGITS, "label_groups", clients=4, clusters=4)
    assert labels(DIGITS, parts) == [{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}]
    assert sum(sizes(parts)) == 1437


def test_partitions_go_by_groups_not_by_targets(make_pool: MakePool) -> None:
    pool = make_pool(labels=4)
    object.__setattr__(pool, "y", pool.y * 0)
    assert labels(pool, partition_pool(pool, "label_groups", clients=4, clusters=4)) == [
        {0},
        {1},
        {2},
        {3},
    ]


def test_flowers_progress_bars_stay_silent(capfd: pytest.CaptureFixture[str]) -> None:
    partition_pool(OWNED, "natural", clients=3)
    partition_pool(DIGITS, "shards", clients=3)
    partition_pool(DIGITS, "pathological", clients=3)
    assert capfd.readouterr() == ("", "")


def test_every_partition_has_a_one_line_description() -> None:
    assert list(PARTITIONS) == [
        *(
            "iid",
            "pathological",
            "dirichlet",
            "shards",
            "natural",
            "quantity_skew",
            "power_law",
            "label_groups",
        )
    ]
    assert all(kind.description and "\n" not in kind.description for kind in PARTITIONS.values())


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("idd", {}, "unknown partition 'idd'; did you mean 'iid'"),
        ("iid", {"alpha": 1.0}, "unknown key of partition 'iid': 'alpha'"),
        (
            "dirichlet",
            {"alhpa": 1.0},
            "unknown key of partition 'dirichlet': 'alhpa'; did you mean 'alpha'",
        ),
        ("dirichlet", {"alpha": 0.0}, "alpha should be above 0, got 0.0"),
        ("dirichlet", {"min_samples": -1}, "min_samples should be at least 0, got -1"),
        (
            "dirichlet",
            {"tests": "parts"},
            "tests of partition 'dirichlet' should be 'matched' or 'own', got 'parts'",
        ),
        ("iid", {"clients": 0}, "clients should be at least 1, got 0"),
        ("iid", {"clients": None}, "clients should be at least 1, got None"),
        ("iid", {"samples_per_client": 0}, "samples_per_client should be at least 1, got 0"),
        (
            "pathological",
            {"labels_per_client": 11},
            "labels_per_client should be from 1 to the number of labels (10)",
        ),
        (
            "power_law",
            {"labels_per_client": 0},
            "labels_per_client should be from 1 to the number of labels (10)",
        ),
        ("power_law", {"sigma": -1.0}, "sigma should be at least 0, got -1.0"),
        ("power_law", {"min_samples": 0}, "min_samples should be at least 1, got 0"),
        ("quantity_skew", {"exponent": 1.0}, "exponent should be above 1, got 1.0"),
        ("quantity_skew", {"min_samples": 0}, "min_samples should be at least 1, got 0"),
        ("shards", {"shards_per_client": 0}, "shards_per_client should be at least 1, got 0"),
        (
            "label_groups",
            {"clusters": 6},
            "clusters should be from 1 to the number of clients (5), got 6",
        ),
        (
            "label_groups",
            {"clients": 20, "clusters": 11},
            "at most the number of labels (10) for label_groups, got 11",
        ),
    ],
)
def test_settings_that_cannot_be(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        partition_pool(DIGITS, name, **{"clients": 5, **more})
    assert message in str(caught.value)


def test_natural_min_samples(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="min_samples should be at least 2, got 1"):
        partition_pool(OWNED, "natural", clients=2, min_samples=1)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (
            "iid",
            {"clients": 20, "samples_per_client": 72},
            "20 clients with 72 training examples each need 1440, but digits has 1437",
        ),
        (
            "dirichlet",
            {"clients": 1438},
            "1438 clients with 1 training examples each need 1438, but digits has 1437",
        ),
        (
            "shards",
            {"clients": 10, "shards_per_client": 3, "samples_per_client": 142},
            "samples_per_client=142 is more than the number of examples that partition 'shards' has for client 0, 141",
        ),
        (
            "shards",
            {"clients": 800},
            "800 clients with 2 shards each need 1600 training examples, but digits has 1437",
        ),
        (
            "natural",
            {},
            "partition 'natural' needs data with the owner of each example, but digits has no owners",
        ),
        (
            "quantity_skew",
            {"clients": 100, "min_samples": 15},
            "100 clients with at least 15 examples each need 1500, but digits has only 1437; set fewer",
        ),
        (
            "power_law",
            {"clients": 100, "min_samples": 18},
            "20 clients with at least 9 examples of label 0 each need 180, but digits has only 178; set fewer",
        ),
        (
            "power_law",
            {"clients": 90, "samples_per_client": 20},
            "90 clients with 20 training examples each need 1800, but digits has 1797",
        ),
        (
            "dirichlet",
            {"clients": 1798, "tests": "own"},
            "1798 clients with 1 training examples each need 1798, but digits has 1797",
        ),
        (
            "dirichlet",
            {"clients": 100, "alpha": 0.01},
            "no draw of Dirichlet(alpha = 0.01) gave each of 100 clients at least min_samples = "
            "10 of the 1437 examples in digits; set a smaller min_samples, fewer clients, or a "
            "larger alpha",
        ),
        (
            "dirichlet",
            {"clients": 100, "min_samples": 15},
            "100 clients with at least min_samples = 15 examples each need 1500, but digits has "
            "1437; set a smaller min_samples, or fewer clients",
        ),
    ],
)
def test_not_enough_data(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        partition_pool(DIGITS, name, **{"clients": 5, **more})
    assert message in str(caught.value)


def test_not_enough_owners() -> None:
    with pytest.raises(DataError) as caught:
        partition_pool(OWNED, "natural", clients=7)
    assert str(caught.value) == (
        "7 clients need as many owners with at least 2 examples each, but only 6 of the 6 owners in "
        "synthetic have that many; set fewer clients or a smaller min_samples"
    )


@pytest.mark.parametrize("name", ["pathological", "dirichlet", "shards"])
def test_without_flwr_datasets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in itertools.chain(
        ["flwr_datasets.partitioner"], [m for m in sys.modules if m == "flwr_datasets"]
    ):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError, match=r"needs the package 'flwr-datasets'; .*'fedclade\[data\]'"
    ):
        partition_pool(DIGITS, name, clients=5)


def test_more_clients_than_can_be_counted_one_by_one_are_refused():
    n = 10**15
    with pytest.raises(
        DataError, match=f"{n} clients with 1 training examples each need {n}, but digits has"
    ):
        partition_pool(DIGITS, "iid", clients=n)


@pytest.mark.parametrize(
    "name", ["pathological", "dirichlet", "shards", "power_law", "label_groups"]
)
def test_a_partition_by_label_needs_labels(name):
    y = torch.arange(40.0)
    pool = Pool.of_examples("load", y[:, None], y, np.arange(40), np.arange(0), task="regression")
    with pytest.raises(
        ConfigError, match="load has regression targets and no groups; use partition 'iid'"
    ):
        partition_pool(pool, name, clients=2)
    assert len(partition_pool(pool, "iid", clients=2).indices[0]) == 20
    binary = replace(pool, y=(y > 19).float(), groups=(y > 19).long().numpy(), task="binary")
    assert len(partition_pool(binary, "label_groups", clients=2, clusters=2).indices) == 2
