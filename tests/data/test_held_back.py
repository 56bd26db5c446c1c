"""Newcomers: who is held back, and with what data."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedclade.core.errors import ConfigError, DataError
from fedclade.data import Federation, load_federation


def loaded(**settings: Any) -> tuple[Federation, Federation]:
    federation = load_federation(**{"clients": 8, "newcomers": 6, **settings})
    assert federation.newcomers is not None
    return federation, federation.newcomers


def held(federation: Federation) -> list[set[int]]:
    return [{*client.train, *client.validation} for client in federation.clients]


def same(some: Federation, others: Federation) -> bool:
    pairs = zip(some.clients, others.clients, strict=True)
    splits = ("train", "validation", "test")
    return all(np.array_equal(getattr(a, s), getattr(b, s)) for a, b in pairs for s in splits)


OWN = {"partition": "dirichlet", "partition_arguments": {"tests": "own"}}
WAYS = [{"samples_per_client": 50}, {}, {"partition": "label_groups", "shift": "none"}]


@pytest.mark.parametrize("settings", WAYS)
def test_newcomers_are_like_the_others_but_none_of_them(settings: dict[str, Any]):
    federation, late = loaded(
        **{"shift": "label_swap", "clusters": 4, "validation_fraction": 0.2, **settings}
    )
    assert federation.ids == tuple(range(8))
    assert late.ids == tuple(range(8, 14))
    assert [client.key for client in late.clients] == list(range(8, 14))
    for one, other in itertools.combinations([*held(federation), *held(late)], 2):
        assert one
        assert not one & other, "no example is given out twice"
    truth, theirs = federation.true_clusters, late.true_clusters
    assert truth is not None
    assert theirs is not None
    assert sorted(Counter(theirs.values()).values()) == [1, 1, 2, 2], "evenly"
    assert min(Counter(truth.values()).values()) >= 1
    view = {truth[client.id]: client for client in federation.clients}
    for client in late.clients:
        mine = view[theirs[client.id]]
        assert client.label_map is mine.label_map
        if settings.get("partition") == "label_groups":
            groups = federation.pool.groups
            assert set(groups[client.train]) == set(groups[mine.train])


def test_with_a_number_of_samples_newcomers_change_nothing_for_the_others():
    settings: dict[str, Any] = {"samples_per_client": 50, "shift": "label_swap", "partition": "iid"}
    assert same(load_federation(clients=8, **settings), loaded(**settings)[0])


@pytest.mark.parametrize("settings", [{"samples_per_client": 50}, {}])
def test_the_number_of_their_samples_changes_nothing_for_the_others(settings: dict[str, Any]):
    federation, late = loaded(newcomer_samples=7, shift="label_swap", **settings)
    assert same(federation, loaded(shift="label_swap", **settings)[0])
    assert [len(client.train) for client in late.clients] == [7] * 6


def test_where_everything_is_shared_out_all_have_the_same_share_and_the_seed_draws_who_is_held_back():
    federation, late = loaded(shift="label_swap", seed=1)
    sizes = [len(client.train) for client in (*federation.clients, *late.clients)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == len(federation.pool.train)
    drawn = {tuple(client.name for client in held_back(seed).clients) for seed in range(4)}
    assert len(drawn) == 4


def held_back(seed: int) -> Federation:
    arguments = {"partition": "natural", "source": "synthetic", "seed": seed}
    return loaded(clients=4, newcomers=3, **arguments)[1]


def test_what_clients_were_tested_on_is_not_given_to_newcomers_again():
    federation, late = loaded(**OWN, samples_per_client=100)
    everyone = [*federation.clients, *late.clients]
    every = np.concatenate(
        [indices for client in everyone for indices in (client.train, client.test)]
    )
    assert len(every) == len(np.unique(every))
    assert np.isin(every, federation.pool.test).any(), "which is shared out as well"


def test_natural_newcomers_are_other_people():
    federation, late = loaded(
        source="synthetic", partition="natural", clients=4, newcomers=3, newcomer_samples=9
    )
    names = [client.name for client in (*federation.clients, *late.clients)]
    assert len(set(names)) == 7
    natural = late.pool.natural
    assert natural is not None
    for client in late.clients:
        assert set(natural[[*client.train, *client.test]].tolist()) == {client.name}
        assert len(client.train) + len(client.test) <= 9


def test_without_newcomers_there_are_none():
    assert load_federation(clients=4).newcomers is None


def test_too_few_examples_are_left():
    told = (
        "6 newcomers with 200 training examples each need 1200, but the other clients leave 1037 "
        "of digits; set fewer newcomers, or a smaller newcomers.samples_per_client or "
        "data.samples_per_client"
    )
    with pytest.raises(DataError, match=re.escape(told)):
        loaded(samples_per_client=50, newcomer_samples=200)


def test_an_even_partition_names_the_client_that_falls_short():
    with pytest.raises(
        DataError,
        match=r"samples_per_client=150 is more than the number of examples that partition 'iid' has for client \d+, 10",
    ):
        loaded(newcomer_samples=150)


@pytest.mark.parametrize(
    ("settings", "told"), [({"newcomers": -2}, "newcomers.clients should be at least 0, got -2")]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_federation(**settings)


def test_more_newcomers_than_examples_are_refused_before_they_are_drawn():
    told = (
        "20 clients and 1000000000 newcomers need at least 1 example each, but digits has 1797; "
        "set fewer clients or newcomers"
    )
    with pytest.raises(DataError) as caught:
        load_federation("digits", clients=20, newcomers=10**9)
    assert str(caught.value) == told
