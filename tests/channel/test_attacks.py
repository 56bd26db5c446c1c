"""What adversaries make of the updates of others, against the literal formulas, and what it promises."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from fedclade.channel.adversary import alie, alie_z, deviation, ipm, min_max, min_sum
from tests.reference import attacks as reference

DIRECTIONS = ("std", "sign", "unit")
UPDATES = torch.randn(7, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.2
EACH = list(UPDATES)


@pytest.mark.parametrize(("n", "f"), [(9, 2), (10, 3), (20, 8), (21, 1)])
def test_z_is_the_papers(n, f):
    s = n // 2 + 1 - f
    assert alie_z(n, f) == pytest.approx(NormalDist().inv_cdf((n - f - s) / (n - f)), abs=1e-12)


def test_z_is_that_of_twenty_clients_with_eight_adversaries():
    """s = 11 − 8 = 3, so z = Φ⁻¹(9 / 12) = 0.6745: the upper quartile."""
    assert alie_z(20, 8) == pytest.approx(0.6745, abs=1e-4)


def test_z_stays_finite_where_adversaries_are_the_majority():
    assert alie_z(10, 7) == pytest.approx(NormalDist().inv_cdf(2 / 3))
    assert alie_z(10, 9) == 0.0


def test_alie_and_ipm_are_the_formulas():
    torch.testing.assert_close(alie(UPDATES, alie_z(9, 2)), reference.alie(EACH, 9, 2))
    torch.testing.assert_close(ipm(UPDATES, 0.1), reference.ipm(EACH, 0.1))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("attack", "literal"), [(min_max, reference.min_max), (min_sum, reference.min_sum)]
)
def test_min_max_and_min_sum_are_what_bisection_finds(attack, literal, direction):
    torch.testing.assert_close(
        attack(UPDATES, direction), literal(EACH, direction), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_min_max_is_as_far_from_an_update_as_the_two_furthest_are(direction):
    lie = min_max(UPDATES, direction)
    furthest = max(float((one - other).norm()) for one in UPDATES for other in UPDATES)
    assert max(float((lie - update).norm()) for update in UPDATES) == pytest.approx(
        furthest, rel=1e-9
    )
    assert not torch.allclose(lie, UPDATES.mean(0))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_min_sum_meets_its_constraint_with_equality(direction):
    lie = min_sum(UPDATES, direction)
    sums = [float(((update - UPDATES) ** 2).sum()) for update in UPDATES]
    assert float(((lie - UPDATES) ** 2).sum()) == pytest.approx(max(sums), rel=1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_of_a_single_update_or_equal_ones_the_mean_is_sent(direction):
    for updates in (UPDATES[:1], UPDATES[:1].expand(4, -1)):
        assert not deviation(updates).any()
        for lie in (min_max(updates, direction), min_sum(updates, direction), alie(updates, 1.5)):
            torch.testing.assert_close(lie, UPDATES[0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_where_nothing_moves_nothing_is_sent(direction):
    for attack in (min_max, min_sum):
        assert not attack(torch.zeros(3, 5), direction).any()
