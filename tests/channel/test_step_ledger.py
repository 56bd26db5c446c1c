"""What noisy steps cost by dp-accounting, and the file that a client counts them in."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping

import pytest

from fedclade import ConfigError, MissingExtraError, PrivacyError
from fedclade.channel.accounting import Budget, Ledger, epsilon_of
from fedclade.channel.example_privacy import StepLedger, epsilon_of_steps

DELTA = 1e-5


def direct(steps: Mapping[tuple[float, float], int], kind: str = "pld") -> float:
    """Return what an accountant of dp-accounting says of the same steps, on its own grid or by its own orders."""
    accounting = pytest.importorskip("dp_accounting")
    accountant = {
        "pld": lambda: accounting.pld.PLDAccountant(),
        "rdp": lambda: accounting.rdp.RdpAccountant(range(2, 64)),
    }[kind]()
    for (rate, sigma), count in steps.items():
        step = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(sigma))
        accountant.compose(accounting.SelfComposedDpEvent(step, count))
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize(
    "steps",
    [
        {(20 / 300, 1.0): 360},
        {(20 / 300, 4.0): 360},
        {(0.01, 0.8): 1000},
        {(1.0, 5.0): 10},
        {(0.1, 2.0): 50, (0.05, 2.0): 200, (0.1, 3.0): 7},
    ],
)
def test_epsilon_is_that_of_dp_accounting(steps):
    """Privacy loss distributions, and below the bound of Rényi's, the moments accountant of Abadi et al."""
    epsilon = epsilon_of_steps(steps, DELTA)
    assert epsilon == pytest.approx(direct(steps), rel=5e-3)
    assert epsilon < direct(steps, "rdp") < 1.3 * epsilon


def test_a_step_on_all_examples_is_a_gaussian_mechanism():
    """Of sensitivity C, so σ = 4 is what z = 8 is for whole updates, which lie 2C apart."""
    assert epsilon_of_steps({(1.0, 4.0): 1}, DELTA) == pytest.approx(
        epsilon_of({8.0: 1}, DELTA), rel=2e-3
    )
    assert epsilon_of_steps({}, DELTA, {8.0: 1}) == pytest.approx(
        epsilon_of({8.0: 1}, DELTA), rel=2e-3
    )
    both = epsilon_of_steps({(1.0, 4.0): 2}, DELTA, {8.0: 1})
    assert both == pytest.approx(epsilon_of({8.0: 3}, DELTA), rel=2e-3)


def test_little_noise_is_bounded_too():
    """On a coarser grid, in which losses of thousands fit."""
    exact = direct({(0.1, 0.3): 5})
    assert exact == pytest.approx(epsilon_of_steps({(0.1, 0.3): 5}, DELTA), rel=0.05)
    assert epsilon_of_steps({(0.1, 0.01): 5}, DELTA) > 1000


def test_nothing_costs_nothing_and_a_step_without_noise_costs_all():
    assert epsilon_of_steps({}, DELTA) == 0
    assert epsilon_of_steps({(0.1, 1.0): 0}, DELTA) == 0
    assert epsilon_of_steps({(0.1, 1.0): 5, (0.1, 0.0): 1}, DELTA) == math.inf
    assert epsilon_of_steps({(0.1, 1.0): 5}, DELTA, {0.0: 1}) == math.inf


@pytest.mark.parametrize("delta", [0, 1, math.nan])
def test_delta_out_of_range_is_named(delta):
    with pytest.raises(
        ConfigError, match=f"delta should be greater than 0 and less than 1, got {delta}"
    ):
        epsilon_of_steps({(0.1, 1.0): 1}, delta)


def test_without_dp_accounting_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(
        MissingExtraError, match=r"stating ε needs the package 'dp-accounting'.*fedclade\[privacy\]"
    ):
        epsilon_of_steps({}, DELTA)


def test_a_ledger_adds_up_rounds_runs_rates_and_noise(tmp_path):
    path = tmp_path / "ledger.json"
    for sigma, rates, run, number in [
        (4.0, {0.1: 5}, "first", 1),
        (4.0, {0.1: 5}, "first", 1),
        (4.0, {0.1: 5, 0.2: 3}, "first", 2),
        (8.0, {0.1: 1}, "second", 1),
    ]:
        StepLedger(path).book(sigma, rates, run, number)
    booked = [
        (e.run, e.round, e.noise_multiplier, e.rate, e.steps) for e in StepLedger(path).entries()
    ]
    assert booked == [
        *(("first", 1, 4.0, 0.1, 10), ("first", 2, 4.0, 0.1, 5), ("first", 2, 4.0, 0.2, 3)),
        ("second", 1, 8.0, 0.1, 1),
    ]
    together = {(0.1, 4.0): 15, (0.2, 4.0): 3, (0.1, 8.0): 1}
    assert StepLedger(path).spent(DELTA) == epsilon_of_steps(together, DELTA)
    assert StepLedger(tmp_path / "other.json").spent(DELTA) == 0


def test_whole_updates_count_as_well(tmp_path):
    whole = Ledger(tmp_path / "privacy.json")
    whole.book(8.0, "run", 1)
    ledger = StepLedger(tmp_path / "steps.json", beside=whole)
    ledger.book(4.0, {0.1: 5}, "run", 2)
    assert ledger.spent(DELTA) == epsilon_of_steps({(0.1, 4.0): 5}, DELTA, {8.0: 1})


def test_a_budget_holds_over_runs(tmp_path):
    path, cost = (
        tmp_path / "ledger.json",
        [epsilon_of_steps({(0.1, 1.0): n}, DELTA) for n in (20, 40, 60)],
    )
    ledger = StepLedger(path, Budget(epsilon=cost[1] * 1.01, delta=DELTA, level="example"))
    ledger.book(1.0, {0.1: 20}, "first", 1)
    ledger.book(1.0, {0.1: 20}, "second", 1)
    before = path.read_bytes()
    with pytest.raises(
        PrivacyError,
        match=rf"would have spent ε = {cost[2]:.4g} at δ = 1e-05, more than its budget",
    ):
        ledger.book(1.0, {0.1: 20}, "second", 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_half_a_ledger_is_no_ledger(tmp_path, share):
    path = tmp_path / "ledger.json"
    StepLedger(path).book(4.0, {0.1: 5}, "run", 1)
    half = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(half)
    with pytest.raises(
        PrivacyError,
        match=r"the privacy ledger .*ledger.json is damaged, so it is unknown how much",
    ):
        StepLedger(path).book(4.0, {0.1: 5}, "run", 2)
    assert path.read_bytes() == half


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 7}, "format version of a privacy ledger should be 1, got 7"),
        ({"steps": -3}, "-3 steps of rate 0.5"),
        ({"rate": 2.0}, "5 steps of rate 2.0"),
        ({"noise_multiplier": -1.0}, "noise multiplier -1.0"),
        ({"rate": "a half"}, "TypeError"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_damaged(tmp_path, change, told):
    path = tmp_path / "ledger.json"
    entry = {"run": "r", "round": 1, "noise_multiplier": 4.0, "rate": 0.5, "steps": 5}
    entry |= {key: value for key, value in change.items() if key in entry}
    path.write_text(json.dumps({"format": change.get("format", 1), "entries": [entry]}))
    with pytest.raises(PrivacyError, match=told):
        StepLedger(path).entries()


def test_a_budget_is_of_a_level_there_is():
    with pytest.raises(ConfigError, match=r"budget.level should be client or example, got 'label'"):
        Budget(epsilon=1.0, level="label")
