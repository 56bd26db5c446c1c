"""What the audits in ``studies/`` count with, against values worked out by hand; and decoders, on small cases."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedclade.channel.signature import CountSketch
from tests.tiny import federation_of

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(STUDIES))

    def imported(name: str) -> ModuleType:
        return importlib.import_module(f"audit_{name}")

    return imported


@pytest.fixture
def scores(audit):
    return audit("scores")


def test_auc_counts_pairs_and_ties_as_halves(scores):
    inside, outside = np.array([3.0, 1.0]), np.array([2.0, 1.0, 0.0])
    # 3 beats all; 1 beats 0 and ties with 1
    assert scores.auc(inside, outside) == pytest.approx((3 + 1.5) / 6)


def test_the_threshold_lets_through_no_more_of_the_others_than_it_may(scores):
    inside, outside = np.array([9.5, 8.5, 7.5, 0.5]), np.arange(10.0)
    assert scores.tpr_at(inside, outside, 0.1) == 2 / 4  # above 8: the others' 9 is let through
    assert scores.tpr_at(inside, outside, 0.01) == 1 / 4  # above 9: none
    # a tie is not parted
    assert scores.tpr_at(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.5) == 1 / 2
    assert scores.tpr_at(inside, outside, 1.0) == 1.0


def test_an_interval_of_groups_that_are_all_alike_has_no_width(scores):
    group = np.array([2.0, 1.0]), np.array([1.5, 0.0])
    assert scores.interval([group] * 3, scores.auc) == (0.75, 0.75, 0.75)


def test_bounds_of_a_share_are_those_of_clopper_and_pearson(scores):
    assert scores.share_bounds(0, 10) == (0.0, pytest.approx(1 - 0.025**0.1))
    assert scores.share_bounds(10, 10) == (pytest.approx(0.025**0.1), 1.0)
    low, high = scores.share_bounds(5, 10)
    # of printed tables
    assert (low, high) == (pytest.approx(0.1871, abs=1e-4), pytest.approx(0.8129, abs=1e-4))


def test_epsilon_by_rates_of_an_attack_that_never_errs(scores):
    """Each rate is at most 1 − 0.0125^(1/n), at 97.5 % together with the other's at 95 %."""
    edge = 0.0125 ** (1 / 100)
    delta = 0.01
    assert scores.epsilon_of_rates(100, 100, 0, 100, delta) == pytest.approx(
        math.log((edge - delta) / (1 - edge))
    )
    assert scores.epsilon_of_rates(50, 100, 50, 100, delta) == 0.0
    assert scores.epsilon_of_rates(0, 100, 0, 100, delta) == 0.0


def test_epsilon_by_scores_is_below_that_of_the_mechanism(scores):
    """Randomised response keeps a bit with probability e/(1 + e): ε = 1."""
    draw = np.random.default_rng(0)
    inside, outside = (
        (draw.random(20_000) < p).astype(float) for p in (math.e / (1 + math.e), 1 / (1 + math.e))
    )
    assert 0.9 < scores.epsilon_of_scores(inside, outside, 1e-5) < 1.0


def test_mu_by_rates_is_just_below_that_of_the_mechanism(scores):
    """The likeliest counts at the middle threshold of a Gaussian mechanism of μ = 1."""
    hits = round(float(norm.cdf(0.5)) * 100_000)
    assert 0.97 < scores.mu_of_rates(hits, 100_000, 100_000 - hits, 100_000) < 1.0
    assert scores.mu_of_rates(0, 10, 0, 10) == 0.0


def test_epsilon_by_guesses_refutes_what_would_guess_so_well_too_rarely(scores):
    """With δ = 0 all of n guesses are right with probability (1 + e^−ε)^−n, which is 0.05 at the bound."""
    assert scores.epsilon_of_guesses(100, 100, 100, 0.0) == pytest.approx(
        -math.log(0.05 ** (-1 / 100) - 1)
    )
    assert scores.epsilon_of_guesses(50, 100, 100, 0.0) == 0.0
    # p + 2·δ·P(no right guess) = 0.05, so that p = 0.03/0.98 < 1/2
    one = scores.epsilon_of_guesses(1, 1, 1, 0.01)
    assert one == 0.0
    low, high = (scores.epsilon_of_guesses(95, 100, 100, delta) for delta in (1e-3, 0.0))
    assert 0 < low < high


def test_lira_finds_the_member_whose_confidence_is_its_shadows(audit):
    membership = audit("membership")
    inside = np.stack([membership.coins(run) for run in range(8)])
    assert (inside.sum(0) == 4).all()
    # images differ in how hard they are
    hard = np.linspace(0, 50, inside[0].size).reshape(inside[0].shape)
    phi = hard + inside + np.random.default_rng(0).normal(scale=0.05, size=inside.shape)
    found = {
        name: np.mean([membership.auc(*group) for group in groups])
        for name, groups in membership.attacked(phi, inside).items()
    }
    assert found["online"] == found["offline"] == 1.0
    assert found["loss"] < 0.6


def test_clients_are_guessed_by_the_probes_that_they_land_with(audit):
    clusters = audit("clusters")
    leaves, truth = {0: 1, 1: 2, 2: 1, 3: 1, 4: 3}, {0: 0, 1: 1, 2: 0, 3: 1, 4: 1}
    assert clusters.guessed(leaves, truth, (0, 1)) == [1.0, 0.0, 0.5]
    assert clusters.guessed(dict.fromkeys(leaves, 0), truth, (0, 1)) == [0.5, 0.5, 0.5]


def test_the_threshold_of_a_canary_is_judged_on_other_runs(audit):
    found = audit("clusters").threshold_bound([3] * 200, [2] * 200)
    assert found[:2] == (1.0, 0.0)
    assert found[2] == pytest.approx(audit("scores").epsilon_of_rates(100, 100, 0, 100, 1e-5))
    assert audit("clusters").threshold_bound([2] * 8, [2] * 8)[2] == 0.0


def test_the_shortest_vector_has_the_sketch_and_is_right_where_few_entries_are_not_zero(audit):
    sketches, size = audit("sketches"), 1000
    sketch = CountSketch(0, size, 300)
    sparse = torch.zeros(1, size, dtype=torch.float64)
    sparse[0, [3, 500, 999]] = torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64)
    found = sketches.shortest(sketch.apply, sketch.apply(sparse), size)
    torch.testing.assert_close(sketch.apply(found), sketch.apply(sparse))
    assert float(found.norm()) <= float(sparse.norm())
    # a bucket has three or four entries
    assert set(found[0].abs().topk(12).indices.tolist()) >= {3, 500, 999}
    isometry = CountSketch(0, size, size)
    torch.testing.assert_close(
        sketches.shortest(isometry.apply, isometry.apply(sparse), size), sparse
    )


def test_a_combination_of_own_updates_is_found_from_its_sketch(audit):
    draw = torch.Generator().manual_seed(0)
    own = torch.randn(30, 5, generator=draw, dtype=torch.float64) @ torch.randn(
        5, 400, generator=draw, dtype=torch.float64
    )
    sketch = CountSketch(1, 400, 60)
    assert (
        float(
            torch.nn.functional.cosine_similarity(
                audit("sketches").among(sketch.apply, sketch.apply(own), own), own
            ).min()
        )
        > 0.99
    )


def test_entries_of_one_class_and_of_one_pixel_are_told_apart(audit):
    """Weights of eight black pixels move as −0.42 biases do; the ten of each of four live pixels add up to 0."""
    permutation, draw = audit("permutation"), np.random.default_rng(0)
    rows, classes = 200, 10
    of_class = draw.normal(size=(rows, classes))
    bias = of_class - of_class.mean(1, keepdims=True)
    shown = np.repeat(-0.42, 8)[None], -0.42 + 0.1 * draw.normal(size=(rows, 4))
    dark = bias[:, :, None] * shown[0][:, None, :]
    noise = draw.normal(size=(rows, classes, 4))
    live = bias[:, :, None] * shown[1][:, None, :] + 0.3 * (noise - noise.mean(1, keepdims=True))
    updates = np.concatenate([np.concatenate([dark, live], 2).reshape(rows, -1), bias], 1)
    right = np.r_[np.repeat(np.arange(classes), 12), np.arange(classes)]
    pixel = np.r_[np.tile(np.arange(12), classes), np.full(classes, -1)]
    moved = permutation.moves(updates[None])
    groups = permutation.alike(moved, least=5)
    assert groups.max() == classes - 1
    assert permutation.named(groups, right)[0] == pytest.approx(9 / 13)  # all but the live pixels
    assert sorted(permutation.biases(groups, updates[None])) == [*range(12 * classes, 13 * classes)]
    alive = np.flatnonzero(groups < 0)
    together = permutation.pixel_groups(moved, alive)
    assert {tuple(pixel[alive[together == g]]) for g in range(together.max() + 1)} == {
        (p,) * classes for p in range(8, 12)
    }
    found = permutation.classes_of(
        moved, alive, together, groups, permutation.biases(groups, updates[None])
    )
    assert permutation.named(found, right)[0] == 1.0


def test_a_server_sees_permuted_updates_and_their_right_places(
    audit, monkeypatch: pytest.MonkeyPatch
):
    federation = federation_of([0, 0, 0])
    permutation = audit("permutation")
    monkeypatch.setattr(permutation, "LABELS", 4)
    clear, hidden = (
        permutation.watched(federation, 2, 0, permute=permute) for permute in (False, True)
    )
    assert clear.updates.shape == (2, 3, 28)
    assert clear.classes.tolist() == [*np.repeat(np.arange(4), 6), 0, 1, 2, 3]
    assert not np.array_equal(clear.classes, hidden.classes)
    order = {(c, p): k for k, (c, p) in enumerate(zip(clear.classes, clear.pixels, strict=True))}
    places = [order[c, p] for c, p in zip(hidden.classes, hidden.pixels, strict=True)]
    np.testing.assert_allclose(hidden.updates, clear.updates[:, :, places], atol=1e-6)
