"""How many have to agree, and how many shares open a secret, against exact counts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fedclade.flower.secure.parameters import (
    GONE,
    LOSS_BITS,
    SECURITY_BITS,
    Graph,
    fewest_holders,
    fewest_needed,
    log2_loss,
    log2_risk,
    log2_tails,
    quorum,
)


def exact_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """Return the chance that so many of those drawn are marked."""
    ways = sum(
        math.comb(marked, hits) * math.comb(population - marked, drawn - hits)
        for hits in range(max(least, 0), min(marked, drawn) + 1)
    )
    return Fraction(ways, math.comb(population, drawn))


def exact_risk(clients: int, colluders: int, holders: int, needed: int) -> Fraction:
    honest = clients - colluders
    sizes = range(1, honest // 2 + 1)
    chances = [exact_tail(clients - 1, size - 1 + colluders, holders, needed) for size in sizes]
    return sum(
        (
            math.comb(honest, size) * chance**size
            for size, chance in zip(sizes, chances, strict=True)
        ),
        Fraction(0),
    )


@pytest.mark.parametrize(
    ("clients", "colluders", "holders"), [(9, 1, 5), (12, 3, 8), (20, 2, 9), (70, 5, 20)]
)
def test_the_bound_on_the_risk_is_the_exact_sum(clients: int, colluders: int, holders: int):
    for needed in range(1, holders + 1):
        exact = exact_risk(clients, colluders, holders, needed)
        found = log2_risk(clients, colluders, holders, needed=needed)
        if exact == 0:
            assert found == -math.inf
        else:
            assert found == pytest.approx(math.log2(exact), abs=1e-6)


def test_tails_are_those_of_the_hypergeometric_distribution():
    for marked in range(11):
        for least in range(-1, 6):
            exact = exact_tail(10, marked, 4, least)
            (found,) = log2_tails(10, np.array([marked]), 4, least)
            assert 2**found == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(
    ("clients", "colluders", "holders", "needed"),
    [
        (70, 1, 21, 14),
        (100, 10, 28, 19),
        (200, 20, 32, 21),
        (1000, 50, 38, 23),
        (1000, 100, 48, 32),
    ],
)
def test_as_few_shares_are_needed_as_keep_honest_clients_together(
    clients: int, colluders: int, holders: int, needed: int
):
    assert fewest_needed(clients, colluders, holders) == needed
    assert log2_risk(clients, colluders, holders, needed=needed) <= -SECURITY_BITS
    assert log2_risk(clients, colluders, holders, needed=needed - 1) > -SECURITY_BITS
    assert log2_loss(clients, holders, needed) <= -LOSS_BITS


def test_as_few_holders_are_drawn_as_survive_that_a_tenth_is_gone():
    holders = fewest_holders(100, 10)
    assert holders == 28
    assert fewest_needed(100, 10, holders) == 19
    gone = exact_tail(99, int(100 * GONE), holders, holders - 19 + 1)
    assert log2_loss(100, holders, 19) == pytest.approx(math.log2(100 * gone), abs=1e-6)
    before = fewest_needed(100, 10, holders - 1)
    assert before is None or log2_loss(100, holders - 1, before) > -LOSS_BITS


def test_of_two_statements_of_a_quorum_an_honest_client_has_signed_both():
    for clients in range(2, 60):
        for colluders in range(clients):
            assert 2 * quorum(clients, colluders) - clients > colluders
            assert 2 * (quorum(clients, colluders) - 1) - clients <= colluders


def test_short_lists_and_few_neighbours_make_a_complete_graph():
    assert Graph.of(64, 1, 30) == Graph(0, quorum(64, 1))
    assert Graph.of(70, 1, 0) == Graph(0, quorum(70, 1))
    assert Graph.of(70, 1, 21) == Graph(21, 14)
    # three cannot keep honest clients together
    assert Graph.of(70, 1, 3) == Graph(0, quorum(70, 1))
    assert Graph.of(70, 1, 69) == Graph(0, quorum(70, 1))
