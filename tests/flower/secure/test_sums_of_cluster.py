"""Several sums for one cluster: clients are dealt at random, and one bad sum of three does not turn their mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import Aggregation
from fedclade.flower.secure.secrets import ClusterSum
from fedclade.flower.secure.sums_of_cluster import combine, deal


def sum_of(mean: list[float], weight: float = 10.0, **figures: float) -> ClusterSum:
    whole = ClusterSum(
        total=weight * torch.tensor(mean, dtype=torch.float64),
        weight=weight,
        clients=4,
        loss=1.0,
        norm=1.0,
        norm_of_buffers=1.0,
        clipped=1,
    )
    return replace(whole, **figures)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("clients", "sums", "sizes"),
    [(12, 3, [4, 4, 4]), (13, 3, [4, 4, 5]), (20, 9, [3] * 4 + [4] * 2), (9, 3, [3] * 3)],
)
def test_every_client_is_in_one_sum_of_enough(clients: int, sums: int, sizes: list[int]):
    names = [10 * k for k in range(clients)]
    dealt = deal(names, sums, 3, np.random.default_rng(0))
    assert sorted(map(len, dealt)) == sizes
    assert sorted(client for group in dealt for client in group) == names
    assert dealt != deal(names, sums, 3, np.random.default_rng(1))


@pytest.mark.parametrize(("clients", "sums"), [(8, 3), (12, 2), (12, 1), (3, 3)])
def test_too_few_clients_are_one_sum(clients: int, sums: int):
    assert deal(range(clients), sums, 3, np.random.default_rng(0)) == [list(range(clients))]


def test_one_bad_sum_of_three_does_not_turn_the_mean():
    honest = [sum_of([1.0, 0.1, 2.0]), sum_of([1.1, -0.1, 2.0])]
    bad = sum_of([-40.0, 30.0, -50.0], weight=9.0, loss=-300.0, norm=9.0)
    found = combine([*honest, bad], 2, Aggregation())
    mean = found.total / found.weight
    assert mean[0] > 0.9
    assert -0.2 < mean[1] < 0.2
    assert float(mean[2]) == 2.0
    assert (found.weight, found.clients, found.clipped) == (29.0, 12, 3)
    assert (found.loss, found.norm) == (1.0, 1.0)


def test_a_rule_of_the_run_is_taken_instead_of_the_median():
    sums = [sum_of([value, 0.0]) for value in (1.0, 1.0, 0.4, 0.7, 0.6)]
    how = Aggregation(rule="trimmed_mean", byzantine=0.2)
    assert float((combine(sums, 1, how).total / 50)[0]) == pytest.approx((0.6 + 0.7 + 0.7) / 3)
    assert float((combine(sums, 1, Aggregation()).total / 50)[0]) == pytest.approx(0.7)


def test_two_sums_are_added_up():
    found = combine(
        [sum_of([1.0, 3.0], weight=10.0, loss=2.0), sum_of([4.0, 0.0], weight=20.0)],
        1,
        Aggregation(),
    )
    assert found.total.tolist() == [90.0, 30.0]
    assert found.loss == pytest.approx((10 * 2 + 20 * 1) / 30)
    assert (found.clients, found.norm) == (8, 1.0)
