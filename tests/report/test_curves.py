"""Scores, gaps and norms over the rounds, against runs whose numbers were put there by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedclade.report.curves import norms_picture, score_picture
from fedclade.report.picture import Band, Line, Rule
from fedclade.report.queries import score_series
from fedclade.report.run_view import RunView
from tests.report.pictures import labels, lines, marks


@pytest.fixture
def split_run(make_run):
    """0 splits into 1 and 2 after round 1, 2 into 3 and 4 after round 2: of four clients, the leaves are 1, 3, 4."""
    return make_run([(1, 0), (2, 2)], truth=[0, 0, 1, 2])


def accuracy(run):
    return score_picture(RunView(run))


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, 2),
        ({"children_start": "cluster_mean"}, 2),
        ({"children_start": "own_mean"}, 1),
        ({"keep_updates": True}, 1),
    ],
)
def test_scores_in_the_round_of_a_split_are_those_of_the_models_evaluated(
    split_run, settings, first
):
    """Node 1 begins in round 1: with the model of node 0, or with one of its own, which the evaluation is then of."""
    run = replace(split_run, config={**split_run.config, "algorithm": settings})
    series = score_series(run)
    assert series[1].rounds[0] == first
    assert (0 in series) == (first == 2)


def test_accuracy_of_a_cluster_goes_on_from_that_of_the_one_it_came_from(split_run):
    points = lines(accuracy(split_run).panels[0])
    assert list(points) == ["cluster 0", "cluster 1", "cluster 2", "cluster 3", "cluster 4"]
    # The evaluation of the round of a split counts for the node that was split: here the mean of nodes 1 and 2.
    root = (1, 0.5 + 0.01 + 0.15)
    assert points["cluster 0"] == [root]
    assert points["cluster 1"] == [root, (2, 0.62), (3, 0.63), (4, 0.64)]
    # In round 2 its parts 3 and 4 score 0.82 and 0.92.
    assert points["cluster 2"] == [root, (2, 0.87)]
    assert points["cluster 3"] == [(2, 0.87), (3, 0.83), (4, 0.84)]


def test_rounds_without_an_evaluation_leave_no_hole(make_run):
    # Evaluated in rounds 3 and 4 only: nodes 0 and 2 never were, and their parts start where they are first seen.
    points = lines(accuracy(make_run([(1, 0), (2, 2)], every=3)).panels[0])
    assert sorted(points) == ["cluster 1", "cluster 3", "cluster 4"]
    assert all([x for x, _ in line] == [3, 4] for line in points.values())


def test_clients_that_no_leaf_holds_yet_have_the_roots_line_and_no_leaf_goes_on_from_it(make_run):
    run = make_run(star=True, clients=3)
    late = [
        row | ({"cluster": 0} if row["client"] == 2 and row["round"] < 3 else {})
        for row in run.client_rows
    ]
    picture = accuracy(replace(run, client_rows=late))
    points = lines(picture.panels[0])
    assert labels(picture)[-1] == "root, for clients in no cluster yet"
    assert labels(accuracy(run))[-1] == "cluster 3 (1 client)"
    assert [x for x, _ in points["cluster 0"]] == [1, 2]
    assert [x for x, _ in points["cluster 1"]] == [1, 2, 3, 4]
    # the mean score of the node that its only client came from
    assert [x for x, _ in points["cluster 3"]] == [2, 3, 4]


def test_gap_panel_has_a_line_for_every_cluster_of_two_and_a_zero_line(split_run):
    _, bottom = accuracy(split_run).panels
    assert bottom.y.title == "gap g(α)"
    assert lines(bottom) == {
        "cluster 0": [(1, 0.2)],
        "cluster 1": [(2, 0.2), (3, 0.2), (4, 0.2)],
        "cluster 2": [(2, 0.2)],
    }
    assert marks(bottom, Rule) == [Rule(0, dashed=False)]


def test_without_a_truth_the_panel_shows_alpha_cross_max(make_run):
    _, bottom = accuracy(make_run()).panels
    assert bottom.y.title == "α cross max"
    assert lines(bottom) == {"cluster 0": [(n, 0.1) for n in (1, 2, 3, 4)]}


def test_without_either_there_are_only_scores(make_run):
    run = make_run([(2, 0)])
    without = {"alpha_cross_max", "gamma_bound", "separation_gap"}
    rows = [
        {key: value for key, value in row.items() if key not in without} for row in run.cluster_rows
    ]
    picture = accuracy(replace(run, cluster_rows=rows))
    assert [panel.y.title for panel in picture.panels] == ["mean test accuracy"]


def test_splits_are_named_and_those_of_one_round_share_a_marker(split_run, make_run):
    assert accuracy(split_run).uprights == {1: "split 0", 2: "split 2"}
    assert accuracy(make_run([(1, 0), (3, 1), (3, 2)])).uprights == {1: "split 0", 3: "split 1, 2"}
    many = make_run([(1, 0), (2, 1), (2, 2), (3, 3), (3, 4), (3, 5)], clients=8)
    assert accuracy(many).uprights == {1: "split 0", 2: "split 1, 2", 3: "split 3 nodes"}


def test_colours_are_those_of_the_leaves_in_every_panel(split_run):
    leaves = {
        "cluster 0": "@ink",
        "cluster 1": "@c0",
        "cluster 2": "@muted",
        "cluster 3": "@c1",
        "cluster 4": "@c2",
    }
    for panel in [*accuracy(split_run).panels, *norms_picture(RunView(split_run)).panels]:
        assert all(line.colour == leaves[line.name] for line in marks(panel, Line))
    assert labels(accuracy(split_run)) == [
        *("cluster 1 (2 clients)", "cluster 3 (1 client)", "cluster 4 (1 client)"),
        *("root, until its split", "other clusters, until their split"),
    ]


def test_one_cluster_needs_no_legend(make_run):
    picture = accuracy(make_run(truth=[0, 0, 1, 1]))
    assert [list(lines(panel)) for panel in picture.panels] == [["cluster 0"], ["cluster 0"]]
    assert not picture.legend
    assert not picture.uprights


def test_of_more_clusters_than_colours_the_mean_and_a_band_are_drawn(make_run):
    picture = accuracy(make_run(clients=20, star=True, truth=[0] * 20))
    (panel,) = picture.panels
    (band,), (mean,) = marks(panel, Band), marks(panel, Line)
    # Nodes 1 to 20 score min(1, 0.51 + 0.1 node) in round 1: 0.61, 0.71, 0.81, 0.91, and sixteen times 1.
    scores = [0.61, 0.71, 0.81, 0.91, *([1] * 16)]
    assert mean.y[0] == pytest.approx(np.mean(scores))
    assert (band.low[0], band.high[0]) == pytest.approx(tuple(np.percentile(scores, (10, 90))))
    assert labels(picture) == ["mean of the clusters", "10th to 90th percentile of the clusters"]
    assert [entry.colour for entry in picture.legend] == [mean.colour, band.colour]


def test_language_models_are_drawn_by_perplexity(make_run):
    picture = accuracy(make_run([(1, 0)], language=True))
    (top, _) = picture.panels
    assert (picture.title, top.y.title, top.y.log) == (
        "Perplexity of the clusters",
        "mean test perplexity",
        True,
    )
    assert lines(top)["cluster 2"] == [(1, 11.5), (2, 12), (3, 12), (4, 12)]


def test_norms_have_both_criteria_and_their_thresholds(split_run):
    run = replace(split_run, config={"algorithm": {"eps1": "auto", "eps2": 0.5}})
    top, bottom = norms_picture(RunView(run)).panels
    assert lines(top)["cluster 1"] == [(2, 1), (3, round(2 / 3, 9)), (4, 1 / 2)]
    assert lines(bottom)["cluster 1"] == [(2, 1 / 2), (3, round(1 / 3, 9)), (4, 1 / 4)]
    assert marks(top, Rule) == [Rule(0.5, "ε₂ = 0.5")]
    assert lines(bottom)["ε₁ of 1"] == [(2, 0.1), (3, 0.1), (4, 0.1)]
    by_date = replace(
        split_run, config={"algorithm": {"eps1": 0.1, "eps2": 0.5, "split_rounds": [2]}}
    )
    assert not marks(norms_picture(RunView(by_date)).panels[1], Rule), "ε₁ decides nothing"


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({"eps2": math.inf}, False),
        ({"similarity": "gradients"}, False),
        ({"compared_at": "stationary"}, False),
        ({"similarity": "gradients", "compared_at": "stationary", "eps2_of": "updates"}, True),
    ],
)
def test_a_threshold_is_drawn_only_if_the_norms_of_the_updates_are_held_against_it(
    split_run, settings, drawn
):
    run = replace(split_run, config={"algorithm": {"eps1": 0.1, "eps2": 0.5, **settings}})
    assert bool(marks(norms_picture(RunView(run)).panels[0], Rule)) == drawn


def test_norms_of_zero_are_drawn_on_a_linear_scale(make_run):
    run = make_run()
    zero = replace(run, cluster_rows=[row | {"mean_norm": 0.0} for row in run.cluster_rows])
    assert [panel.y.log for panel in norms_picture(RunView(zero)).panels] == [False, False]
    assert [panel.y.log for panel in norms_picture(RunView(run)).panels] == [True, True]


def test_a_run_without_norms_has_no_picture_of_them(make_run):
    assert norms_picture(RunView(replace(make_run(), cluster_rows=[]))) is None
