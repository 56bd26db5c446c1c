"""Robust rules: they do what the papers state, and no minority moves them far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.core import Aggregation, Rule, Updates, mean, mean_of_all
from fedclade.core import aggregate as rules
from tests.reference import aggregation as paper

ROBUST: tuple[Rule, ...] = tuple(rule for rule in get_args(Rule) if rule != "mean")

D = 5


def drawn(n: int, seed: int, d: int = D) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def made(rule: Rule, rows: Tensor, buffers: int = 0, **how: object) -> Tensor:
    """Return what a rule makes of rows whose last entries are buffers."""
    return rules.robust(rows, rows.shape[1] - buffers, Aggregation(rule=rule, **how))  # type: ignore[arg-type]


def updates_of(rows: Tensor, sizes: Sequence[int], first: int = 0) -> Updates:
    ids = range(first, first + len(rows))
    return Updates.received(ids, sizes, rows, rows.shape[1], torch.zeros(len(rows)), 1)


def with_rule(updates: Updates, how: Aggregation) -> Updates:
    return updates.with_common(aggregation=how)


def in_paper(rule: Rule, rows: Tensor, f: int) -> np.ndarray:
    """Return what the literal twin makes of rows of which f are bad."""
    vectors, n = list(rows.numpy()), len(rows)
    alike, zeros = [1.0] * n, np.zeros(rows.shape[1])
    return {
        "median": lambda: paper.median(vectors),
        "trimmed_mean": lambda: paper.trimmed_mean(vectors, f),
        "krum": lambda: paper.krum(vectors, f),
        "multi_krum": lambda: paper.multi_krum(vectors, f, n - f - 2),
        "bulyan": lambda: paper.bulyan(vectors, f),
        "geometric_median": lambda: paper.geometric_median(
            vectors, alike, paper.median(vectors), 1e-6, 300
        ),
        "centred_clipping": lambda: paper.centred_clipping(vectors, zeros, None, 5),
    }[rule]()


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize(
    ("n", "share"), [(11, 0.2), (15, 0.2), (7, 0.15), (5, 0.1), (4, 0.0), (3, 0.0), (40, 0.22)]
)
def test_each_rule_is_that_of_its_paper(rule: Rule, n: int, share: float):
    rows = drawn(n, seed=n)
    f = min(int(share * n + 1e-9), (n - 3) // 4)  # the least that all rules allow
    # it ends before the last digit
    tolerance = {"rtol": 0.0, "atol": 1e-5} if rule == "geometric_median" else {}
    torch.testing.assert_close(
        made(rule, rows, byzantine=share), torch.from_numpy(in_paper(rule, rows, f)), **tolerance
    )


@pytest.mark.parametrize("radius", [0.1, 1.0, 1e6])
def test_a_given_radius_is_the_papers(radius: float):
    rows, zeros = drawn(9, seed=3), np.zeros(D)
    expected = paper.centred_clipping(list(rows.numpy()), zeros, radius, 5)
    torch.testing.assert_close(
        made("centred_clipping", rows, radius=radius), torch.from_numpy(expected)
    )


def test_the_geometric_median_is_smoothed_as_in_the_paper():
    rows, weights = drawn(6, seed=4), [1.0] * 6
    zeros = torch.zeros(D, dtype=torch.float64)
    for nu, steps in ((1e-6, 1), (1.0, 3), (0.1, 7)):
        here = rules.geometric_median(rows, zeros, nu=nu, steps=steps)
        there = paper.geometric_median(list(rows.numpy()), weights, zeros.numpy(), nu, steps)
        torch.testing.assert_close(here, torch.from_numpy(there))


def test_claimed_sizes_are_no_weight_of_a_geometric_median():
    rows = torch.cat([drawn(3, seed=21), torch.full((2, D), -100.0, dtype=torch.float64)])
    robust = with_rule(updates_of(rows, [1, 1, 1, 2, 2]), Aggregation(rule="geometric_median"))
    assert float(mean(robust).min()) > -10  # two of five lie, at twice the weight


def test_mixing_is_the_papers_and_comes_first():
    rows = drawn(10, seed=5)
    expected = np.stack(paper.mixed(list(rows.numpy()), 2))
    torch.testing.assert_close(rules.mixed(rows, 2), torch.from_numpy(expected))
    torch.testing.assert_close(
        made("median", rows, mixing=True), rules.median(torch.from_numpy(expected))
    )


def test_many_columns_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch):
    rows = drawn(8, seed=6, d=23)
    whole = {rule: made(rule, rows) for rule in ROBUST}
    monkeypatch.setattr(rules, "AT_ONCE", 8 * 4)
    for rule in ROBUST:
        torch.testing.assert_close(made(rule, rows), whole[rule])


@pytest.mark.parametrize("rule", ROBUST)
@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_the_order_of_clients_does_not_matter(rule: Rule, n: int, seed: int):
    rows = drawn(n, seed)
    order = torch.from_numpy(np.random.default_rng(seed + 1).permutation(n))
    torch.testing.assert_close(made(rule, rows[order]), made(rule, rows))


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("mixing", [False, True])
@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_of_equal_updates_it_is_that_update(rule: Rule, mixing: bool, n: int, seed: int):
    one = drawn(1, seed)[0]
    found = made(rule, one.repeat(n, 1), mixing=mixing)
    atol = 1e-9 if rule != "centred_clipping" else 1e-6
    torch.testing.assert_close(found, one, rtol=0, atol=atol)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "bulyan"])
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(7, 14),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1.0, 10.0, 1e3, 1e9, 1e17]),
)
def test_one_liar_cannot_leave_the_range_of_the_honest(rule: Rule, n: int, seed: int, size: float):
    rows = drawn(n, seed)
    rows[0] = size * drawn(1, seed + 1)[0]
    found, honest = made(rule, rows, byzantine=0.2), rows[1:]
    if rule in ("krum", "multi_krum") and size == 1.0:
        return  # it sends what an honest client may
    within = (found >= honest.amin(0) - 1e-9) & (found <= honest.amax(0) + 1e-9)
    assert bool(within.all())


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("n", [10, 11, 20])
def test_as_many_liars_as_are_assumed_move_it_no_further_than_honest_clients_differ(
    rule: Rule, n: int
):
    """They collude, and send one and the same thing of any size."""
    share, rows = 0.2, 1 + 0.1 * drawn(n, seed=7, d=30)
    for size in (-1.0, 10.0, -1e3, 1e9):
        lies = rows.clone()
        lies[: int(share * n)] = size
        found = made(rule, lies, byzantine=share)
        apart = float(torch.linalg.vector_norm(found - 1))
        # √30 · 0.1 = 0.55 is how far an honest client is from the centre
        assert apart < 1.1, (size, apart)
        mean_apart = float(torch.linalg.vector_norm(lies.mean(0) - 1))
        assert mean_apart > 1.5


@pytest.mark.parametrize("rule", ["median", "geometric_median"])
def test_a_majority_of_liars_wins(rule: Rule):
    rows = drawn(9, seed=8)
    rows[:5] = 1e6
    assert float(made(rule, rows).min()) > 1e5


@pytest.mark.parametrize("rule", ROBUST)
def test_of_one_or_two_clients_it_is_their_mean(rule: Rule):
    rows = drawn(2, seed=9)
    assert torch.equal(made(rule, rows[:1]), rows[0])
    assert torch.equal(made(rule, rows), rows.mean(0))


@pytest.mark.parametrize(
    ("rule", "most"), [("trimmed_mean", 4), ("krum", 3), ("multi_krum", 3), ("bulyan", 1)]
)
def test_a_rule_assumes_no_more_liars_than_it_allows(rule: Rule, most: int):
    """Of nine: 2f < n, n ≥ 2f + 3, and n ≥ 4f + 3, though a share of 0.49 is 4."""
    rows = drawn(9, seed=10)
    torch.testing.assert_close(
        made(rule, rows, byzantine=0.49), torch.from_numpy(in_paper(rule, rows, most))
    )


def test_the_share_is_rounded_down_but_for_what_floats_lack():
    # 0.29 · 100 is 28.999...
    assert Aggregation(rule="krum", byzantine=0.29).tolerated(100, 50) == 29
    assert Aggregation(rule="krum", byzantine=0.2).tolerated(9, 50) == 1
    assert Aggregation(rule="krum", byzantine=0.2).tolerated(3, -1) == 0


@pytest.mark.parametrize("rule", ROBUST)
def test_buffers_have_their_median_whatever_the_parameters_say(rule: Rule):
    rows = torch.cat([drawn(9, seed=11), drawn(9, seed=12, d=3)], 1)
    rows[0, D:] = 1e12  # of a client whose parameters are as good as any
    found = made(rule, rows, buffers=3)
    torch.testing.assert_close(found[D:], rules.median(rows[:, D:]))
    torch.testing.assert_close(found[:D], made(rule, rows[:, :D]))


@pytest.mark.parametrize("rule", ROBUST)
def test_updates_keep_their_type(rule: Rule):
    assert made(rule, drawn(7, seed=13).float()).dtype == torch.float32


def test_the_mean_of_updates_goes_by_their_rule():
    rows = drawn(5, seed=14)
    plain = updates_of(rows, [1, 2, 3, 4, 5])
    assert torch.equal(mean(with_rule(plain, Aggregation(rule="median"))), rules.median(rows))
    robust = with_rule(plain, Aggregation(rule="geometric_median"))
    torch.testing.assert_close(mean(robust), made("geometric_median", rows))
    assert robust.select([0, 2, 4]).aggregation == robust.aggregation
    assert robust.select([0]).concat(robust.select([1, 2])).aggregation == robust.aggregation


@pytest.mark.parametrize("aggregation", [None, Aggregation(rule="median")])
def test_clients_queried_apart_are_aggregated_together(aggregation: Aggregation | None):
    rows = drawn(5, seed=15)
    parts = [updates_of(rows[:2], [1, 2]), updates_of(rows[2:], [3, 4, 5], first=2)]
    parts = parts if aggregation is None else [with_rule(part, aggregation) for part in parts]
    whole = mean(parts[0].concat(parts[1]))
    torch.testing.assert_close(mean_of_all(parts), whole)


AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda q: q,
    "stretched": lambda q: 3 * torch.eye(D).double(),
}


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "geometric_median", "centred_clipping"])
@pytest.mark.parametrize("axes", AXES)
def test_rules_by_distance_do_not_depend_on_axes_or_units(rule: Rule, axes: str):
    rows = drawn(11, seed=16)
    turn = AXES[axes](torch.linalg.qr(drawn(D, seed=17)).Q)
    torch.testing.assert_close(
        made(rule, rows @ turn), made(rule, rows) @ turn, rtol=1e-5, atol=1e-6
    )
