"""What releases cost together: against dp-accounting's own composition, and by formula."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade import ConfigError
from fedclade.channel.accounting import (
    Ledger,
    Release,
    composed_epsilon,
    epsilon_of,
    share_at_random,
)

DELTA = 1e-5
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE


def accountant(*events) -> float:
    return (
        PLDAccountant(REPLACE)
        .compose(dp_accounting.ComposedDpEvent(list(events)))
        .get_epsilon(DELTA)
    )


def response(epsilon: float, options: int):
    return dp_accounting.RandomizedResponseDpEvent(
        options / (math.exp(epsilon) + options - 1), options
    )


def test_nothing_released_costs_nothing_and_no_noise_has_no_bound():
    assert composed_epsilon([], DELTA, sampled=True) == 0
    assert composed_epsilon([Release(noise_multiplier=0.0)], DELTA, sampled=False) == math.inf
    assert composed_epsilon([Release(options=4)], DELTA, sampled=False) == math.inf
    assert share_at_random(None, 4) == 0
    with pytest.raises(ConfigError, match="delta should be greater than 0 and less than 1, got 1"):
        composed_epsilon([], 1.0, sampled=False)


@settings(deadline=None, max_examples=20)
@given(st.dictionaries(st.floats(2, 50), st.integers(1, 30), min_size=1, max_size=4))
def test_sums_alone_cost_what_local_releases_of_the_same_multipliers_do(counted):
    releases = [Release(noise_multiplier=z) for z, n in counted.items() for _ in range(n)]
    assert composed_epsilon(releases, DELTA, sampled=False) == pytest.approx(
        epsilon_of(counted, DELTA)
    )


def test_sums_and_a_choice_agree_with_dp_accountings_composition_step_by_step():
    """As the ledger of a private choice has them: eight sums of updates, two of signatures, and a choice."""
    releases = [Release(noise_multiplier=12.3)] * 8 + [Release(noise_multiplier=7.0)] * 2
    events = [dp_accounting.GaussianDpEvent(12.3)] * 8 + [dp_accounting.GaussianDpEvent(7.0)] * 2
    expected = accountant(*events, response(5.5, 4))
    found = composed_epsilon([*releases, Release(epsilon=5.5, options=4)], DELTA, sampled=False)
    assert found == pytest.approx(expected, abs=2e-3)
    # basic composition is no better
    assert found <= 5.5 + composed_epsilon(releases, DELTA, sampled=False) + 1e-3


def test_several_choices_count_one_by_one():
    """Though dp-accounting 0.6 counts one that is composed with itself once."""
    found = composed_epsilon([Release(epsilon=1.0, options=3)] * 3, DELTA, sampled=False)
    assert found == pytest.approx(accountant(*[response(1.0, 3)] * 3), abs=1e-3)
    assert 2.9 < found <= 3 + 1e-3


def test_sampled_sums_agree_with_dp_accountings_poisson_sampling():
    releases = [Release(noise_multiplier=3.0, sampling=0.2)] * 10
    event = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(3.0))
    expected = accountant(dp_accounting.SelfComposedDpEvent(event, 10))
    assert composed_epsilon(releases, DELTA, sampled=True) == pytest.approx(expected, abs=1e-3)
    known = composed_epsilon(releases, DELTA, sampled=False)  # to whom sampling hides nobody
    assert known == pytest.approx(epsilon_of({3.0: 10}, DELTA))
    assert known > expected


def test_little_noise_is_rounded_up_and_not_down():
    """A coarser grid, so that it takes no longer, and never less than the exact ε."""
    exact = epsilon_of({0.5: 1}, DELTA)
    found = composed_epsilon(
        [Release(noise_multiplier=0.5), Release(epsilon=1e-6, options=2)], DELTA, sampled=False
    )
    assert exact - 1e-3 <= found <= exact + 0.05


def test_a_ledger_of_updates_agrees_with_dp_accountings_composition(tmp_path):
    ledger = Ledger(tmp_path / "privacy.json")
    for number in range(6):
        ledger.book(10.0 + number, "run", number)
    events = [dp_accounting.GaussianDpEvent(10.0 + number) for number in range(6)]
    assert ledger.spent(DELTA) == pytest.approx(accountant(*events), abs=1e-3)
    assert '"level": "client"' in ledger.path.read_text()
