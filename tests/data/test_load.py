from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import ClientData, Federation, Pool, load_federation, load_pool
from fedclade.data.partition import divide_proportionally

MakePool = Callable[..., Pool]
DIGITS = load_pool("digits")


def all_indices(federation: Federation) -> np.ndarray:
    return np.concatenate([[*client.train, *client.validation] for client in federation.clients])


def test_defaults() -> None:
    federation = load_federation()
    assert str(federation) == "digits, 20 clients, partition iid"
    assert federation.ids == tuple(range(20))
    assert [client.key for client in federation.clients] == list(range(20))
    assert [client.name for client in federation.clients[:2]] == ["client-0", "client-1"]
    assert sorted(all_indices(federation)) == sorted(DIGITS.train)
    assert federation.true_clusters is None
    assert all(
        client.label_map is None and len(client.validation) == 0 for client in federation.clients
    )


def test_shift_makes_known_clusters_that_share_their_view() -> None:
    federation = load_federation(clients=8, shift="label_swap")
    assert str(federation) == "digits, 8 clients, partition iid, shift label_swap, 4 clusters"
    assert str(load_federation(clients=8, shift="label_swap", clusters=1)).endswith(
        "shift label_swap, 1 cluster"
    )
    assert federation.true_clusters == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 2, 7: 3}
    for client in federation.clients[:4]:
        assert client.label_map is federation.by_id[client.id + 4].label_map
        for split in ("train", "test"):
            _, y = federation.examples(client.id, split)
            indices = getattr(client, split)
            assert y.tolist() == client.label_map[DIGITS.y[torch.from_numpy(indices)]].tolist()


def test_the_seed_draws_the_shift() -> None:
    maps = {
        str([c.label_map for c in load_federation(DIGITS, shift="label_swap", seed=s).clients])
        for s in range(5)
    }
    assert len(maps) == 5


def test_fewer_clients_than_the_default_clusters() -> None:
    assert load_federation(clients=3, shift="rotation").true_clusters == {0: 0, 1: 1, 2: 2}


def test_one_cluster_is_known_truth_too() -> None:
    assert load_federation(clients=2, clusters=1).true_clusters == {0: 0, 1: 0}


def test_label_groups_are_the_true_clusters() -> None:
    federation = load_federation(clients=6, partition="label_groups", clusters=2)
    assert federation.true_clusters == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    for client in federation.clients:
        run = set(range(5)) if client.id % 2 == 0 else set(range(5, 10))
        assert set(DIGITS.groups[client.train]) == set(DIGITS.groups[client.test]) == run


def test_label_groups_default_to_at_most_the_number_of_labels(make_pool: MakePool) -> None:
    federation = load_federation(make_pool(labels=3), clients=6, partition="label_groups")
    assert federation.true_clusters == {i: i % 3 for i in range(6)}


@pytest.mark.parametrize("partition", ["iid", "quantity_skew"])
def test_with_like_clients_all_are_tested_on_the_one_test_split(partition: str) -> None:
    federation = load_federation(clients=4, partition=partition)
    assert {id(client.test) for client in federation.clients} == {id(federation.pool.test)}
    few = load_federation(clients=4, partition=partition, test_samples=30)
    assert len({id(client.test) for client in few.clients}) == 1
    assert len(set(few.clients[0].test) & set(few.pool.test)) == 30


@pytest.mark.parametrize(
    ("partition", "arguments"),
    [("pathological", {}), ("dirichlet", {"alpha": 0.3}), ("shards", {}), ("label_groups", {})],
)
def test_with_unlike_clients_each_is_tested_on_its_own_labels(
    partition: str, arguments: dict[str, Any]
) -> None:
    federation = load_federation(clients=10, partition=partition, partition_arguments=arguments)
    assert federation.clients
    for client in federation.clients:
        assert len(set(client.test)) == len(client.test), "without replacement"
        assert np.isin(client.test, DIGITS.test).all()
        train, test = (
            np.bincount(DIGITS.groups[indices], minlength=10)
            for indices in (client.train, client.test)
        )
        expected = train / train.sum() * test.sum()
        assert np.abs(test - expected).max() < 1, "proportions, up to rounding"
        there = np.bincount(DIGITS.groups[DIGITS.test], minlength=10)
        used_up = (expected + train / train.sum() > there) & (train > 0)
        assert used_up.any(), "one example more and some label would not do"


def test_labels_that_the_test_split_lacks_are_left_out(make_pool: MakePool) -> None:
    pool = make_pool(train=40, test=3, labels=4)  # the test split has labels 0, 1 and 2
    object.__setattr__(pool, "test", pool.test[pool.groups[pool.test] != 3])
    federation = load_federation(pool, clients=2, partition="label_groups", clusters=2)
    assert set(pool.groups[federation.clients[1].test]) == {2}
    with pytest.raises(
        DataError,
        match=r"client 3 cannot be tested, as none of its labels \[3\] is in the test split of toy",
    ):
        load_federation(pool, clients=4, partition="label_groups", clusters=4)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(0, 500))
def test_proportional_division_is_whole_and_within_one_of_the_exact(
    counts: list[int], total: int
) -> None:
    shares = divide_proportionally(np.asarray(counts), total)
    assert shares.sum() == total
    assert (np.abs(shares - np.asarray(counts) * total / sum(counts)) < 1).all()


def test_power_law_clients_are_tested_on_a_tenth_of_their_own() -> None:
    federation = load_federation(clients=10, partition="power_law")
    everybody = [(len(client.train), len(client.test)) for client in federation.clients]
    assert everybody == [(train, max(1, round(0.1 * (train + test)))) for train, test in everybody]
    given_out = all_indices(federation)
    assert len(np.unique(given_out)) == len(given_out)
    assert np.isin(DIGITS.test, given_out).mean() > 0.8, (
        "the source's test split is shared out, too"
    )


def test_power_law_with_newcomers_gives_no_example_twice() -> None:
    federation = load_federation(
        clients=8, partition="power_law", newcomers=4, samples_per_client=30
    )
    assert federation.newcomers is not None
    given_out = np.concatenate([all_indices(federation), all_indices(federation.newcomers)])
    assert len(np.unique(given_out)) == len(given_out)


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_the_part_that_clients_are_tested_on(fraction: float) -> None:
    federation = load_federation(
        "synthetic",
        clients=4,
        partition="natural",
        test_fraction=fraction,
        source_arguments={"clients": 4},
    )
    assert federation.clients
    for client in federation.clients:
        assert len(client.test) == round(fraction * (len(client.train) + len(client.test)))


def test_images_scaled_by_pixel() -> None:
    """(x − μ)/(σ + 0.001) of each pixel over all images, in grey levels (the generator of Li et al. 2018)."""
    scaled = load_federation(scaling="pixel", clients=2).pool
    x = DIGITS.x.double().numpy()
    expected = (x - x.mean(0)) / (x.std(0) + 0.001)
    assert scaled.x.dtype == torch.float32
    np.testing.assert_allclose(scaled.x.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(scaled.inputs(np.arange(3)), scaled.x[:3]), (
        "they reach the model as they are"
    )
    assert scaled.schema.scaled is None
    always_black = DIGITS.x.float().std(0) == 0
    assert always_black.any()
    assert (scaled.x[:, always_black] == 0).all()
    assert DIGITS.x.dtype == torch.uint8, "the source's own pool is not changed"


def test_images_scaled_to_the_unit_interval() -> None:
    scaled = load_federation(scaling="unit", clients=2).pool
    assert scaled.x is DIGITS.x or torch.equal(scaled.x, DIGITS.x)
    assert torch.equal(scaled.inputs(np.arange(3)), DIGITS.x[:3] / 255)
    assert scaled.schema.scaled == (0.0, 1.0)


@pytest.mark.parametrize("scaling", ["unit", "pixel"])
def test_only_images_are_scaled_otherwise(scaling: str) -> None:
    with pytest.raises(
        ConfigError,
        match="scaling should be 'source' for synthetic, whose inputs are not images of",
    ):
        load_federation("synthetic", partition="natural", scaling=scaling)
    with pytest.raises(
        ConfigError, match="unknown value of scaling: 'pixle'; did you mean 'pixel'"
    ):
        load_federation(scaling="pixle")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(
        ConfigError, match=f"test_fraction should be greater than 0 and less than 1, got {fraction}"
    ):
        load_federation(test_fraction=fraction)


def test_natural_clients_hold_back_a_fifth_and_keep_their_names() -> None:
    federation = load_federation(
        "synthetic", clients=5, partition="natural", source_arguments={"clients": 9}
    )
    pool = federation.pool
    assert federation.clients
    for client in federation.clients:
        own = [*client.train, *client.test]
        assert {str(who) for who in pool.natural[own]} == {client.name}
        assert sorted(own) == np.flatnonzero(pool.natural == client.name).tolist()
        assert len(client.test) == round(0.2 * len(own))


def test_natural_clients_are_tested_on_their_own_part_of_the_test_split_if_all_have_one(
    make_pool: MakePool,
) -> None:
    pool = make_pool(train=10, test=6, owners=[*"aaaaabbbbb", *"aaabbc"])
    federation = load_federation(pool, clients=2, partition="natural")
    assert [client.test.tolist() for client in federation.clients] == [[10, 11, 12], [13, 14]]
    assert [len(client.train) for client in federation.clients] == [5, 5]
    pool = make_pool(train=10, test=6, owners=[*"aaaaabbbbb", *"aaaaac"])
    federation = load_federation(pool, clients=2, partition="natural")
    assert [(len(client.train), len(client.test)) for client in federation.clients] == [
        (4, 1),
        (4, 1),
    ]


def test_everyone_the_data_knows() -> None:
    arguments = {"clients": 7}
    assert (
        len(
            load_federation(
                "synthetic", clients=None, partition="natural", source_arguments=arguments
            )
        )
        == 7
    )


def test_held_back_examples_keep_to_test_samples(make_pool: MakePool) -> None:
    federation = load_federation(make_pool(train=100, test=0), clients=2, test_samples=3)
    assert [(len(client.train), len(client.test)) for client in federation.clients] == [
        (47, 3),
        (47, 3),
    ]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.floats(0, 0.9), st.integers(2, 40))
def test_validation_is_a_part_of_the_training_examples(
    clients: int, fraction: float, samples: int
) -> None:
    federation = load_federation(
        DIGITS, clients=clients, samples_per_client=samples, validation_fraction=fraction
    )
    expected = max(1, min(round(fraction * samples), samples - 1)) if fraction else 0
    for client in federation.clients:
        assert (len(client.validation), len(client.train)) == (expected, samples - expected)
    assert len(np.unique(all_indices(federation))) == clients * samples


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "power_law", "label_groups"])
def test_same_seed_same_federation(partition: str) -> None:
    def draw(seed: int) -> list[list[int]]:
        federation = load_federation(
            clients=5, partition=partition, validation_fraction=0.2, test_samples=20, seed=seed
        )
        return [[*c.train, -1, *c.validation, -1, *c.test] for c in federation.clients]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_examples_are_not_copied_for_a_client() -> None:
    first, second = load_federation(DIGITS), load_federation(DIGITS, clients=2)
    assert first.pool is second.pool is DIGITS


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"source": "digit"}, "unknown data source 'digit'; did you mean 'digits'"),
        ({"partition": "natrual"}, "unknown partition 'natrual'; did you mean 'natural'"),
        ({"shift": "rotate"}, "unknown shift 'rotate'; did you mean 'rotation'"),
        ({"clients": 0}, "clients should be at least 1, got 0"),
        ({"clients": None}, "clients should be at least 1, got None"),
        ({"samples_per_client": 0}, "samples_per_client should be at least 1, got 0"),
        ({"validation_fraction": 1.0}, "validation_fraction should be in [0, 1), got 1.0"),
        ({"validation_fraction": -0.1}, "validation_fraction should be in [0, 1), got -0.1"),
        ({"seed": -1}, "seed should be at least 0, got -1"),
        ({"test_samples": 0}, "test_samples should be at least 1, got 0"),
        ({"shift": "label_swap", "clusters": 0}, "clusters should be at least 1, got 0"),
        (
            {"shift": "label_swap", "clusters": 21},
            "clusters should be from 1 to the number of clients (20), got 21",
        ),
        (
            {"partition": "label_groups", "clusters": 21},
            "clusters should be from 1 to the number of clients (20), got 21",
        ),
        (
            {"clusters": 4},
            "1 or left out without a shift and without partition 'label_groups', got 4",
        ),
        (
            {"partition": "label_groups", "shift": "label_swap"},
            "shift should be 'none' with partition 'label_groups', which makes clusters itself, got 'label_swap'",
        ),
        (
            {"partition": "label_groups", "partition_arguments": {"clusters": 2}},
            "partition_arguments should be without 'clusters', which is a separate setting, got {'clusters': 2}",
        ),
        (
            {"partition_arguments": {"alpha": 1}},
            "unknown key of partition 'iid': 'alpha' (known: tests)",
        ),
        (
            {"source_arguments": {"alpha": 1}},
            "unknown key of data source 'digits': 'alpha' (there are no valid names)",
        ),
        (
            {"source": DIGITS, "source_arguments": {"a": 1}},
            "source_arguments should be empty unless the source is a name",
        ),
    ],
)
def test_settings_that_cannot_be(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_federation(**settings_)
    assert message in str(caught.value)


def test_several_wrong_settings_are_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_federation(clusters=-1, validation_fraction=2.0, test_samples=0)
    assert len(str(caught.value).splitlines()) == 4


def client(number: int, train: int = 1, test: int = 1) -> ClientData:
    return ClientData(
        number, f"client-{number}", number, np.arange(train), np.arange(0), np.arange(test)
    )


@pytest.mark.parametrize(
    ("clients", "clusters", "message"),
    [
        ((), None, "a federation should have at least 1 client, got 0"),
        (
            (client(1), client(1)),
            None,
            "client ids should be distinct, got these more than once: [1]",
        ),
        (
            (client(0), client(1, train=0)),
            None,
            "client 1 ('client-1') has no training examples; request fewer clients (now 2)",
        ),
        ((client(0, test=0),), None, "client 0 ('client-0') has no test examples"),
        (
            (client(0), client(1)),
            {0: 0, 2: 1},
            "true_clusters should name every client of the federation and no other client; missing "
            "or unknown are: [1, 2]",
        ),
    ],
)
def test_federations_that_cannot_be(clients: Any, clusters: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        Federation(DIGITS, clients, clusters)
    assert message in str(caught.value)


def test_a_client_with_one_example_cannot_set_one_aside() -> None:
    with pytest.raises(DataError, match=r"client 0 .* has no training examples"):
        load_federation(clients=2, samples_per_client=1, validation_fraction=0.5)


def test_arguments_of_a_partition_win_over_the_seed_of_the_run():
    given = load_federation(clients=4, seed=0, partition_arguments={"seed": 3})
    same = load_federation(clients=4, seed=0)
    assert not all(
        np.array_equal(given.by_id[client].train, same.by_id[client].train) for client in given.ids
    )
