"""What a server that lies can learn of a sum, in symbols: a search, and no proof."""

from __future__ import annotations

import random

import pytest

from tests.flower.secure.model import LEAST_HONEST, Rules, draw_model


def smallest_sum(honest: int, colluders: int, rules: Rules, strategies: int) -> tuple[int, int]:
    """Return of how few honest clients a sum was learned, and in how many strategies one was.

    The search ends with the first single update.
    """
    draw, smallest, opened = random.Random(0), honest, 0
    for _ in range(strategies):
        sums = draw_model(draw, honest, colluders, rules).learned()
        opened += bool(sums)
        smallest = min([smallest, *map(len, sums)])
        if smallest == 1:
            break
    return smallest, opened


@pytest.mark.parametrize(("honest", "colluders"), [(4, 1), (5, 1), (6, 1), (6, 2), (7, 2)])
def test_no_strategy_of_a_lying_server_opens_a_small_sum(honest: int, colluders: int):
    smallest, opened = smallest_sum(honest, colluders, Rules(), 500)
    assert opened > 10
    assert smallest >= LEAST_HONEST


@pytest.mark.parametrize(("honest", "colluders"), [(5, 1), (7, 2)])
def test_nor_a_single_update_where_one_more_share_than_colluders_opens_a_secret(
    honest: int, colluders: int
):
    smallest, opened = smallest_sum(honest, colluders, Rules(needs_quorum=False), 500)
    assert opened > 10
    assert smallest > 1


@pytest.mark.parametrize("rule", ["one_statement", "binds_list", "same_dealt"])
def test_without_one_of_the_rules_some_strategy_opens_a_single_update(rule: str):
    """Where one more share than there are colluders opens a secret, as on a long list few do."""
    smallest, _ = smallest_sum(6, 1, Rules(**{rule: False, "needs_quorum": False}), 3000)
    assert smallest == 1
