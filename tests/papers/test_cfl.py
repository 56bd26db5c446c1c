"""The CFL paper's figures at the scale ``smoke``: the claims that hold there, in their direction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedclade import LocalTraining, load_federation, simulate
from fedclade.core.updates import Updates
from fedclade.models import build_model
from fedclade_papers import EXPERIMENTS, Outcome, ResultCache, Row
from fedclade_papers.cfl.gaps import gaps_over_rounds, separation
from fedclade_papers.cfl.norms import check_vanishing
from fedclade_papers.cfl.series import Series, WatchedCFL, pairs_of
from fedclade_papers.cfl.splits import compare_by_cluster, count_rounds_below
from fedclade_papers.cfl.theory import (
    Sample,
    bounds,
    draw_sample,
    find_largest_noise,
    largest_noise,
    summary,
)
from fedclade_papers.cfl.toys import TwoWeights, federated_xor, opposed, risk, two_risks
from fedclade_papers.result import Result

Smoke = Callable[[str], Result]


def row_of(result: Result, start: str) -> Row:
    (row,) = [row for row in result.outcome.rows if row.what.startswith(start)]
    return row


def answer(result: Result, part: str) -> bool | None:
    (claim,) = [claim for claim in result.outcome.claims if part in claim.text]
    return claim.holds


def on_digits(name: str, **settings: object) -> Outcome:
    """Measure an experiment at the scale ``smoke``, but for its data."""
    settings = {
        **EXPERIMENTS[name].settings("smoke"),
        "data": "digits",
        "model": "mclr",
        **settings,
    }
    return EXPERIMENTS[name].measure(ResultCache(settings), settings)


@pytest.mark.slow
def test_one_linear_model_does_not_fit_xor_and_cfl_does(smoke: Smoke):
    result = smoke("cfl-fig1-xor")
    assert row_of(result, "federated XOR, linear model · one model").ours < 80
    assert row_of(result, "federated XOR, linear model · CFL").ours > 95
    assert row_of(result, "federated XOR, one hidden layer · one model").ours > 95
    assert row_of(result, "diverging conditionals, one hidden layer · one model").ours < 60
    assert row_of(result, "diverging conditionals, one hidden layer · CFL").ours > 95
    assert all(claim.holds for claim in result.outcome.claims)


@pytest.mark.slow
def test_paths_end_where_gradients_are_opposite_or_gone(smoke: Smoke):
    result = smoke("cfl-fig2-paths")
    assert result.outcome.rows[0].ours == pytest.approx(-1, abs=1e-3)
    apart, together = (result.outcome.series[kind] for kind in ("incongruent", "congruent"))
    assert apart["max_norm"][-1] > 50 * apart["mean_norm"][-1]
    assert together["max_norm"][-1] < 0.01 * together["max_norm"][0]
    assert all(claim.holds for claim in result.outcome.claims)


def test_the_bounds_of_theorem_1_hold_and_their_area_is_always_right(smoke: Smoke):
    result = smoke("cfl-fig3-theory")
    assert answer(result, "eq. 19") is True
    assert answer(result, "eq. 21") is True
    assert answer(result, "green area") is True
    assert answer(result, "k > 10 and γ_max > 1") is True
    assert answer(result, "Corollary 1") is True
    assert row_of(result, "P[g(α) > 0], k = 12").ours > 90


@pytest.mark.slow
def test_more_data_widens_the_gap(smoke: Smoke):
    result = smoke("cfl-fig5-data")
    points = [row.ours for row in result.outcome.rows if "weight updates" in row.what]
    assert points[-1] > points[0]
    assert answer(result, "the gap grows monotonically") is None  # after so few rounds


def test_gaps_are_told_for_every_round_asked_for():
    outcome = on_digits(
        "cfl-fig6-rounds", tasks={"digits": {"model": "mclr", "points": 20}}, rounds=[1, 3]
    )
    assert [row.what for row in outcome.rows] == [
        f"digits, rounds = {rounds} · {kind}: g(α)"
        for kind in ("weight updates", "gradients")
        for rounds in (1, 3)
    ]


def test_the_largest_norm_is_larger_where_clients_are_incongruent():
    outcome = on_digits("cfl-fig7-norms", samples_per_client=200)
    (told,) = [claim.holds for claim in outcome.claims if "tells the two cases apart" in claim.text]
    assert told is True
    largest = {
        row.what.partition(":")[0]: row.ours for row in outcome.rows if "largest norm" in row.what
    }
    assert largest["incongruent"] > largest["congruent"]


@pytest.mark.scheduled  # test_experiments.py runs figure 8 at this scale, too
def test_fl_cfl_and_rcfl_are_told_with_the_papers_figures(smoke: Smoke):
    cifar, agnews = smoke("cfl-fig8-cifar"), smoke("cfl-fig9-agnews")
    assert [row.paper for row in cifar.outcome.rows] == [20.0, 20.0, 25.0, 60.0, None, None, None]
    assert [row.paper for row in agnews.outcome.rows] == [43.0, 42.0, 36.0, None, None]
    for result in (cifar, agnews):
        series = result.outcome.series
        assert series["fl"]["splits"] == []
        assert series["cfl"]["splits"]
        assert set(series["cfl"]["splits"]) <= set(result.settings["split_rounds"])
        assert {claim.holds for claim in result.outcome.claims} == {None}
        assert set(series) == {"fl", "cfl", "own", "rcfl"}
        assert len({tuple(each["rounds"]) for each in series.values()}) == 1


def test_pairs_are_told_by_whether_they_are_of_one_distribution_and_already_a_cluster():
    """Truth: {0, 1} and {2, 3}; split by hand after the second round."""
    federation = load_federation(
        "digits", clients=4, samples_per_client=60, shift="label_swap", clusters=2
    )
    truth = federation.true_clusters
    assert truth is not None
    local = LocalTraining(epochs=3, batch_size=20, lr=0.1)
    run = simulate(
        WatchedCFL(split_rounds=(2,), eps2=1e-6), "mclr", federation, local=local, rounds=3
    )
    assert run.summary["clusters"]["ari"] == 1
    pairs = pairs_of(run, truth)
    assert {kind: [row[0] for row in rows] for kind, rows in pairs.items()} == {
        "same": [1, 2],
        "other": [1, 2],
        "clustered": [3],
    }
    told = [
        event for event in run.events if event["kind"] == "similarities" and event["round"] == 1
    ]
    alpha = np.array(told[0]["alpha"])
    alike = [alpha[a, b] for a in range(4) for b in range(a) if truth[a] == truth[b]]
    assert len(alike) == 2
    assert pairs["same"][0][1:] == pytest.approx([min(alike), np.mean(alike), max(alike)], abs=1e-3)


def test_criteria_that_are_not_known_are_said_to_be_so():
    """Without ε₁, ε₂ and γ_max that serve there is no run, and no row."""
    small = {"clients": 8, "samples_per_client": 60, "test_samples": 20}
    outcome = on_digits("cfl-fig8-cifar", criteria={}, model_arguments={}, **small)
    assert set(outcome.series) == {"fl", "cfl", "rcfl"}
    assert not any("criteria" in row.what for row in outcome.rows)
    assert any("No ε₁, ε₂ and γ_max were found" in remark for remark in outcome.remarks)


def test_without_rcfl_there_are_the_papers_methods_alone():
    small = {"clients": 8, "samples_per_client": 60, "test_samples": 20}
    outcome = on_digits("cfl-fig8-cifar", criteria={}, with_rcfl=False, model_arguments={}, **small)
    assert set(outcome.series) == {"fl", "cfl"}
    assert not any("rcfl" in row.what for row in outcome.rows)
    assert not any(claim.own for claim in outcome.claims)


def series_by_hand(**changed: object) -> Series:
    """Return the stored results of a run with two true clusters, in rounds 2, 4 and 6."""
    usual = {"rounds": [2, 4, 6], "scores": [20.0, 20.0, 20.0], "by_cluster": [[20.0] * 3] * 2}
    return {**usual, **changed}


def test_accuracies_are_compared_by_true_cluster():
    fl = series_by_hand(by_cluster=[[10.0, 20.0, 30.0], [30.0, 25.0, 30.0]])
    cfl = series_by_hand(by_cluster=[[10.0, 20.0, 50.0], [30.0, 25.0, 45.0]])
    found = {"fl": [fl], "cfl": [cfl]}
    assert compare_by_cluster(found, first=4) == [2.5, 1.8]  # mean over the clients: 2.1


def test_perplexities_are_compared_in_every_round_from_the_last_split_on():
    fl = series_by_hand(scores=[50.0, 45.0, 40.0])
    below = series_by_hand(scores=[60.0, 44.0, 39.0])
    once_above = series_by_hand(scores=[40.0, 46.0, 30.0])
    assert count_rounds_below({"fl": [fl], "cfl": [below]}, last=4) == (2, 2)
    assert count_rounds_below({"fl": [fl, fl], "cfl": [below, once_above]}, last=4) == (3, 4)


def test_a_norm_vanishes_only_along_with_the_norm_of_the_mean():
    assert check_vanishing([0.05], [0.09])[::2] == (True, True)
    assert check_vanishing([0.05], [0.5])[::2] == (True, False)
    assert check_vanishing([0.05], [1.1])[::2] == (False, False)
    assert check_vanishing([0.2, 0.3], [0.05, 0.1])[1] == (
        "largest norm ×0.2 to ×0.3, norm of the mean ×0.05 to ×0.1"
    )


def test_every_k_above_ten_has_to_be_split_right_at_large_noise():
    cells = [
        {"k": k, "d": 100, "gamma": gamma, "gap_positive": share}
        for k, gamma, share in ((10, 1.5, 0.0), (12, 0.9, 1.0), (12, 1.1, 0.995), (15, 1.1, 0.9))
    ]
    cells.append({"k": 15, "d": 1000, "gamma": 1.1, "gap_positive": 1.0})
    assert find_largest_noise(cells, d=100) == {12: 1.1, 15: 0.0}


@pytest.mark.parametrize("k", [2, 3, 7])
def test_the_bounds_meet_at_the_largest_noise(k: int):
    gamma = largest_noise(k)
    cross, intra = bounds(k, gamma)
    assert cross == pytest.approx(intra)
    cross, intra = bounds(k, 0.99 * gamma)
    assert cross < intra


def test_without_noise_clients_of_one_distribution_are_alike():
    sample = draw_sample(4, 50, 0.0, 3, np.random.default_rng(0))
    assert sample.intra == pytest.approx(1)
    assert sample.right
    assert sample.gap == pytest.approx(1 - sample.cross)


def test_noise_has_the_norm_that_was_asked_for():
    """Noise of 1000 times the gradient's norm leaves random directions: nothing is right in the long run."""
    draw = np.random.default_rng(0)
    assert not any(draw_sample(5, 30, 1000.0, 3, draw).gap > 0 for _ in range(20))


def test_a_summary_counts_both_ways_of_being_right():
    samples = [
        Sample(0.5, 0.1, True, 0.4),
        Sample(-0.2, 0.1, True, -0.3),
        Sample(0.0, 0.3, False, -0.3),
    ]
    assert summary(samples) == {
        "gap_positive": pytest.approx(1 / 3),
        "right": pytest.approx(2 / 3),
        "wrong_with_gap": 0,
        "right_without_gap": 1,
        "highest_cross": 0.3,
        "lowest_intra": -0.2,
    }


def updates_of(rows: list[list[float]]) -> Updates:
    deltas = torch.tensor(rows)
    n = len(rows)
    return Updates.received(range(n), [1] * n, deltas, deltas.shape[1], torch.zeros(n), 1)


def test_separation_by_hand():
    apart = separation(updates_of([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), [0, 0, 1, 1])
    assert apart == {"gap": pytest.approx(1.0), "right": True}
    # The third is nearer to the first two than to its like: 0.8 across, 0.6 within, and the split is wrong.
    mixed = separation(updates_of([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), [0, 0, 1, 1])
    assert mixed == {"gap": pytest.approx(0.0), "right": False}


def test_gaps_are_taken_at_the_rounds_asked_for():
    federation = load_federation(
        "digits", clients=4, samples_per_client=40, shift="label_swap", clusters=2
    )

    def make(seed: int) -> torch.nn.Module:
        return build_model("mclr", input_shape=(1, 8, 8), outputs=10, seed=seed)

    settings = {"rounds": 3, "epochs": 1, "batch_size": 20, "lr": 0.1}
    both, last = (
        gaps_over_rounds(ResultCache(settings, device="cpu"), federation, make, settings, at, 0)
        for at in ([1, 3], [3])
    )
    for kind in ("updates", "gradients"):
        assert len(both[kind]) == 2
        assert both[kind][1]["gap"] == pytest.approx(last[kind][0]["gap"], abs=1e-6)


@pytest.mark.parametrize("make", [federated_xor, opposed])
def test_toys_have_two_clusters_that_see_the_plane_differently(make):
    federation = make(4, 50, 0)
    assert federation.true_clusters == {0: 0, 1: 1, 2: 0, 3: 1}
    assert [len(client.train) for client in federation.clients] == [50] * 4
    for split, rows in {"train": federation.pool.train, "test": federation.pool.test}.items():
        assert sorted(rows) == sorted(
            np.concatenate([getattr(client, split) for client in federation.clients])
        )
    lines = []
    for client in (0, 1):
        x, y = federation.examples(client, "train")
        side = x[:, 0] > 0
        lines.append(float((side == (y == 1)).float().mean()))
    assert lines[0] > 0.95  # label 1 is at the right for the first cluster
    assert lines[1] < 0.05  # and at the left for the second


def test_congruent_risks_have_one_minimum_and_incongruent_ones_do_not():
    side = np.stack(np.meshgrid(*[np.linspace(-3, 5, 33)] * 2), axis=-1).reshape(-1, 2)

    def best(congruent: bool) -> tuple[float, float]:
        """Return the least sum of both risks, and the sum of the least of each."""
        risks = [risk(two_risks(300, 0, congruent=congruent), client, side) for client in (0, 1)]
        return float(sum(risks).min()), float(sum(each.min() for each in risks))

    joint, single = best(congruent=True)
    assert joint == pytest.approx(single, abs=1e-12)
    joint, single = best(congruent=False)
    assert joint > 1.1 * single


def test_a_risk_is_the_models_cross_entropy():
    federation = two_risks(100, 0, congruent=False)
    x, y = federation.examples(0, "train")
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(TwoWeights((0.5, -1.0))(x), y)
    assert risk(federation, 0, np.array([0.5, -1.0])) == pytest.approx(float(loss), rel=1e-5)
