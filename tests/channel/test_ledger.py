from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from fedclade import ConfigError, MissingExtraError
from fedclade.channel import accounting as ledger
from fedclade.channel.accounting import Budget, Ledger, epsilon_of
from fedclade.core.errors import PrivacyError

DELTA = 1e-5
KINDS = st.dictionaries(st.floats(0.5, 50), st.integers(1, 300), min_size=1, max_size=4)


def analytic(releases, delta: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) of the Gaussian mechanism with μ² = Σ n (2/z)², solved for ε."""
    mu = math.sqrt(sum(n * (2 / z) ** 2 for z, n in releases.items()))

    def excess(epsilon: float) -> float:
        return (
            norm.cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
            - delta
        )

    return brentq(excess, 0, 100 + 2 * mu**2 + 20 * mu, xtol=1e-9) if excess(0) > 0 else 0.0


@given(KINDS, st.sampled_from([1e-3, 1e-5, 1e-7]))
def test_epsilon_is_that_of_the_analytic_gaussian_mechanism(releases, delta):
    assert epsilon_of(releases, delta) == pytest.approx(
        analytic(releases, delta), rel=1e-6, abs=1e-6
    )


def test_epsilon_agrees_with_accountants_that_compose_step_by_step():
    """Replacing a client's data is a sensitivity of two clip norms, so z = 8 and 12 are multipliers of 4 and 6.

    Privacy loss distributions are exact but for their grid, Rényi's ε is a bound from above.
    """
    accounting = pytest.importorskip("dp_accounting")
    releases = {8.0: 10, 12.0: 5}
    pld, rdp = accounting.pld.PLDAccountant(), accounting.rdp.RdpAccountant()
    for z, count in releases.items():
        for accountant in (pld, rdp):
            accountant.compose(accounting.GaussianDpEvent(z / 2), count)
    exact = epsilon_of(releases, DELTA)
    assert exact == pytest.approx(pld.get_epsilon(DELTA), rel=1e-2)
    assert exact < rdp.get_epsilon(DELTA) < 1.25 * exact


def test_the_known_value_for_a_multiplier_of_one():
    """z = 2 is multiplier 1, for which Φ(1/2 − ε) − e^ε Φ(−1/2 − ε) = 1e-5 at ε = 4.3777."""
    assert epsilon_of({2.0: 1}, DELTA) == pytest.approx(4.3777, abs=1e-3)


def test_those_that_book_at_once_are_all_counted(tmp_path):
    path = tmp_path / "ledger.json"
    with ThreadPoolExecutor(8) as pool:
        for number in pool.map(lambda number: Ledger(path).book(4.0, "run", number), range(24)):
            assert number is None
    assert Ledger(path).counted() == {4.0: 24}


def test_so_little_noise_that_its_square_is_too_small_costs_all():
    assert epsilon_of({1e-160: 1}, DELTA) == math.inf


def test_nothing_released_costs_nothing_and_one_release_without_noise_costs_all():
    assert epsilon_of({}, DELTA) == 0
    assert epsilon_of({3.0: 5, 0.0: 1}, DELTA) == math.inf


@pytest.mark.parametrize("delta", [0, 1, -0.5, math.nan])
def test_delta_out_of_range_is_named(delta):
    with pytest.raises(
        ConfigError, match=f"delta should be greater than 0 and less than 1, got {delta}"
    ):
        epsilon_of({1.0: 1}, delta)


def test_without_dp_accounting_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(
        MissingExtraError, match=r"stating ε needs the package 'dp-accounting'.*fedclade\[privacy\]"
    ):
        epsilon_of({1.0: 1}, DELTA)


def test_a_ledger_adds_up_rounds_runs_and_noise(tmp_path):
    path = tmp_path / "ledger.json"
    for z, run, number in [
        (4.0, "first", 1),
        (4.0, "first", 1),
        (4.0, "first", 2),
        (8.0, "second", 1),
    ]:
        Ledger(path).book(z, run, number)
    assert [(e.run, e.round, e.noise_multiplier, e.releases) for e in Ledger(path).entries()] == [
        ("first", 1, 4.0, 2),
        ("first", 2, 4.0, 1),
        ("second", 1, 8.0, 1),
    ]
    assert Ledger(path).spent(DELTA) == epsilon_of({4.0: 3, 8.0: 1}, DELTA)
    assert {path.name for path in tmp_path.iterdir()} <= {"ledger.json", ".ledger.json.lock"}


def test_who_has_released_nothing_has_spent_nothing(tmp_path):
    assert Ledger(tmp_path / "ledger.json").spent(DELTA) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_half_a_ledger_is_no_ledger(tmp_path, share):
    path = tmp_path / "ledger.json"
    for number in (1, 2):
        Ledger(path).book(4.0, "run", number)
    half = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(half)
    for use in (lambda: Ledger(path).spent(DELTA), lambda: Ledger(path).book(4.0, "run", 3)):
        with pytest.raises(
            PrivacyError, match=r"the privacy ledger .*ledger.json is damaged.* restore the file"
        ):
            use()
    assert path.read_bytes() == half


RELEASES = """
import sys
from pathlib import Path
from fedclade.channel.accounting import Ledger

for number in range(1, 10**6):
    Ledger(Path(sys.argv[1])).book(4.0, "run", number)
    print(number, flush=True)
"""


def test_a_client_that_is_killed_has_booked_all_that_it_sent(tmp_path):
    """It tells of each release after it has booked it; what it was booking when it died may count or not."""
    path = tmp_path / "ledger.json"
    with subprocess.Popen(
        [sys.executable, "-c", RELEASES, str(path)], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        sent = [client.stdout.readline() for _ in range(20)]
        client.kill()
        sent += client.stdout.readlines()
    booked = [entry.round for entry in Ledger(path).entries()]
    assert booked == list(range(1, len(booked) + 1))
    assert int(sent[-1]) <= len(booked) <= int(sent[-1]) + 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 7}, "format version of a privacy ledger should be 1, got 7"),
        ({"entries": 5}, "TypeError"),
        ({"entries": [{"run": "r", "round": 1}]}, "missing 2 required"),
        (
            {"entries": [{"run": "r", "round": 1, "noise_multiplier": -1.0, "releases": 1}]},
            "noise multiplier -1.0",
        ),
        (
            {"entries": [{"run": "r", "round": 1, "noise_multiplier": 4.0, "releases": -3}]},
            "-3 releases",
        ),
        (
            {"entries": [{"run": "r", "round": 1, "noise_multiplier": 4.0, "releases": 1.5}]},
            "1.5 releases",
        ),
        (
            {"entries": [{"run": "r", "round": 1, "noise_multiplier": "4", "releases": 1}]},
            "TypeError",
        ),
    ],
)
def test_a_ledger_that_does_not_add_up_is_damaged(tmp_path, change, told):
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"format": 1, "entries": [], **change}))
    with pytest.raises(PrivacyError, match=told):
        Ledger(path).entries()


def test_what_cannot_be_booked_may_not_leave_and_is_not_half_booked(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    Ledger(path).book(4.0, "run", 1)
    before = path.read_bytes()

    def full(target, write, *, private):
        raise OSError("No space left on device")

    monkeypatch.setattr(ledger, "appear", full)
    with pytest.raises(OSError, match="No space left"):
        Ledger(path).book(4.0, "run", 2)
    assert path.read_bytes() == before


def test_a_budget_holds_over_runs(tmp_path):
    """Releases of multiplier 4 (z = 8) cost ε = 0.93 one, 1.36 two, 1.70 three together."""
    path, budget = tmp_path / "ledger.json", Budget(epsilon=1.5, delta=DELTA)
    assert [round(epsilon_of({8.0: n}, DELTA), 2) for n in (1, 2, 3)] == [0.93, 1.36, 1.7]
    Ledger(path, budget).book(8.0, "first", 1)
    Ledger(path, budget).book(8.0, "second", 1)
    before = path.read_bytes()
    with pytest.raises(
        PrivacyError,
        match=r"would have spent ε = 1\.\d+ at δ = 1e-05, more than its budget of 1\.5",
    ):
        Ledger(path, budget).book(8.0, "second", 2)
    assert path.read_bytes() == before


def test_without_noise_no_budget_is_enough(tmp_path):
    with pytest.raises(PrivacyError, match="would have spent ε = inf"):
        Ledger(tmp_path / "ledger.json", Budget(epsilon=1e6)).book(0.0, "run", 1)


@pytest.mark.parametrize(
    ("name", "value"), [("epsilon", 0), ("epsilon", math.nan), ("delta", 1), ("delta", 0)]
)
def test_a_budget_out_of_range_is_named(name, value):
    with pytest.raises(ConfigError, match=f"budget.{name} should be greater than 0.*, got {value}"):
        Budget(**{"epsilon": 1.0, name: value})
