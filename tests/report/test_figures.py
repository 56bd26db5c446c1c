import sys
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch

from fedclade.core.errors import MissingExtraError
from fedclade.core.tree import ParameterTree
from fedclade.report import accuracy_figure, norms_figure, save_figures, similarity_figure
from fedclade.report.style import CLUSTERS, MUTED


def artists(axes, gid: str) -> list:
    return [artist for artist in [*axes.lines, *axes.texts, *axes.patches] if (artist.get_gid() or "").startswith(gid)]


def lines(axes, gid: str = "node") -> dict[str, list]:
    """Return the points of the lines of every node."""
    return {line.get_gid(): [(x, round(y, 9)) for x, y in line.get_xydata().tolist()] for line in artists(axes, gid)}


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.fixture
def split_run(make_run):
    """0 splits into 1 and 2 after round 1, 2 into 3 and 4 after round 2: of four clients, the leaves are 1, 3, 4."""
    return make_run([(1, 0), (2, 2)], truth=[0, 0, 1, 2])


def test_accuracy_of_a_cluster_goes_on_from_that_of_the_one_it_came_from(split_run):
    top, _ = accuracy_figure(split_run).axes
    points = lines(top)
    assert list(points) == ["node 0", "node 1", "node 2", "node 3", "node 4"]
    # The evaluation of the round of a split counts for the node that was split: here the mean of nodes 1 and 2.
    root = (1, 0.5 + 0.01 + 0.15)
    assert points["node 0"] == [root]
    assert points["node 1"] == [root, (2, 0.62), (3, 0.63), (4, 0.64)]
    # In round 2 its parts 3 and 4 score 0.82 and 0.92.
    assert points["node 2"] == [root, (2, 0.87)]
    assert points["node 3"] == [(2, 0.87), (3, 0.83), (4, 0.84)]


def test_rounds_without_an_evaluation_leave_no_hole(make_run):
    # Evaluated in rounds 3 and 4 only: nodes 0 and 2 never were, and their parts start where they are first seen.
    run = make_run([(1, 0), (2, 2)], every=3)
    points = lines(accuracy_figure(run).axes[0])
    assert sorted(points) == ["node 1", "node 3", "node 4"]
    assert all([x for x, _ in line] == [3, 4] for line in points.values())


def test_clients_that_no_leaf_holds_yet_have_the_roots_line_and_no_leaf_goes_on_from_it(make_run):
    run = make_run(star=True, clients=3)
    late = [row | ({"cluster": 0} if row["client"] == 2 and row["round"] < 3 else {}) for row in run.clients]
    top, _ = accuracy_figure(replace(run, clients=late)).axes
    points = lines(top)
    assert legend(top)[-1] == "0, in no other yet"
    assert legend(accuracy_figure(run).axes[0])[-1] == "3 (1 client)"
    assert [x for x, _ in points["node 0"]] == [1, 2]
    assert [x for x, _ in points["node 1"]] == [1, 2, 3, 4]
    assert [x for x, _ in points["node 3"]] == [2, 3, 4]  # the mean score of the node that its only client came from


def test_gap_panel_has_a_line_for_every_cluster_of_two_and_a_zero_line(split_run):
    _, bottom = accuracy_figure(split_run).axes
    assert bottom.get_ylabel() == "separation gap g(α)"
    assert lines(bottom) == {
        "node 0": [(1, 0.2)],
        "node 1": [(2, 0.2), (3, 0.2), (4, 0.2)],
        "node 2": [(2, 0.2)],
    }
    assert len(artists(bottom, "zero")) == 1


def test_without_a_truth_the_panel_shows_alpha_cross_max(make_run):
    _, bottom = accuracy_figure(make_run()).axes
    assert bottom.get_ylabel() == "α cross max"
    assert lines(bottom) == {"node 0": [(n, 0.1) for n in (1, 2, 3, 4)]}


def test_splits_are_marked_in_both_panels_and_named_above(split_run):
    top, bottom = accuracy_figure(split_run).axes
    for axes in (top, bottom):
        assert [line.get_xdata()[0] for line in artists(axes, "split") if line in axes.lines] == [1, 2]
    assert [text.get_text() for text in artists(top, "split label")] == ["split 0", "split 2"]


def test_splits_of_one_round_share_a_marker(make_run):
    top, _ = accuracy_figure(make_run([(1, 0), (3, 1), (3, 2)])).axes
    assert [text.get_text() for text in artists(top, "split label")] == ["split 0", "split 1, 2"]


def test_crowded_markers_keep_their_lines_and_lose_labels(make_run):
    # In each of rounds 1 to 6 of 300, the second part of the last split is split again: six labels for three rows.
    run = make_run([(number, 2 * (number - 1)) for number in range(1, 7)], clients=64, rounds=300)
    top, _ = accuracy_figure(run).axes
    assert len([line for line in artists(top, "split") if line in top.lines]) == 6
    assert len(artists(top, "split label")) == 3


def test_colours_are_those_of_the_leaves_in_every_panel(split_run):
    leaves = {"node 1": CLUSTERS[0], "node 3": CLUSTERS[1], "node 4": CLUSTERS[2]}
    for axes in [*accuracy_figure(split_run).axes, *norms_figure(split_run).axes]:
        colours = {line.get_gid(): line.get_color() for line in artists(axes, "node")}
        assert {node: colours[node] for node in leaves if node in colours} == {
            node: colour for node, colour in leaves.items() if node in colours
        }
        assert colours["node 2"] == MUTED
    assert legend(accuracy_figure(split_run).axes[0]) == [
        "1 (2 clients)",
        "3 (1 client)",
        "4 (1 client)",
        "0, until its split",
        "others, until theirs",
    ]


def test_one_cluster(make_run):
    top, bottom = accuracy_figure(make_run(truth=[0, 0, 1, 1])).axes
    assert legend(top) == ["0 (4 clients)"]
    assert list(lines(top)) == list(lines(bottom)) == ["node 0"]
    assert not artists(top, "split")


def test_many_clusters_are_drawn_alike_with_their_mean_and_a_short_legend(make_run):
    top, bottom = accuracy_figure(make_run(clients=20, star=True, truth=[0] * 20)).axes
    assert len(lines(top)) == 20
    assert legend(top) == ["20 clusters", "mean of the clusters"]
    (mean,) = artists(top, "mean")
    # Nodes 1 to 20 score min(1, 0.51 + 0.1 node) in round 1: 0.61, 0.71, 0.81, 0.91, and sixteen times 1.
    assert mean.get_ydata()[0] == pytest.approx((0.61 + 0.71 + 0.81 + 0.91 + 16) / 20)
    (why,) = artists(bottom, "empty")
    assert why.get_text() == "Every cluster holds one client: there are no two updates to compare."


def test_language_models_are_drawn_by_perplexity(make_run):
    top, _ = accuracy_figure(make_run([(1, 0)], language=True)).axes
    assert "perplexity" in top.get_ylabel()
    assert top.get_yscale() == "log"
    assert lines(top)["node 2"] == [(1, 11.5), (2, 12), (3, 12), (4, 12)]


def test_norms_have_both_criteria_and_their_thresholds(split_run):
    run = replace(split_run, config={"algorithm": {"eps1": "auto", "eps2": 0.5}})
    top, bottom = norms_figure(run).axes
    assert lines(top)["node 1"] == [(2, 1), (3, round(2 / 3, 9)), (4, 1 / 2)]
    assert lines(bottom)["node 1"] == [(2, 1 / 2), (3, round(1 / 3, 9)), (4, 1 / 4)]
    (threshold,) = artists(top, "threshold")
    assert list(threshold.get_ydata()) == [0.5, 0.5]
    assert lines(bottom, "threshold")["threshold 1"] == [(2, 0.1), (3, 0.1), (4, 0.1)]
    assert top.get_ylim() == bottom.get_ylim()
    by_date = replace(split_run, config={"algorithm": {"eps1": 0.1, "eps2": 0.5, "split_rounds": [2]}})
    assert not artists(norms_figure(by_date).axes[1], "threshold"), "ε₁ decides nothing"


def test_norms_of_zero_are_drawn_on_a_linear_scale(make_run):
    run = make_run()
    top, _ = norms_figure(replace(run, clusters=[row | {"mean_norm": 0.0} for row in run.clusters])).axes
    assert top.get_yscale() == "linear"
    assert norms_figure(run).axes[0].get_yscale() == "log"


def test_rounds_are_whole_numbers_even_for_one(make_run):
    _, bottom = accuracy_figure(make_run(rounds=1)).axes
    assert [tick for tick in bottom.get_xticks() if 0.5 <= tick <= 1.5] == [1]


def test_similarities_stand_in_the_order_of_leaves_with_lines_and_a_strip(make_run):
    run = make_run([(1, 0)], truth=[0, 1, 1, 0])
    large, first, second, bar = similarity_figure(run).axes
    assert large.get_title(loc="left") == "node 0: 4 clients, round 1"
    assert [axes.get_title(loc="left") for axes in (first, second)] == [
        "1: 2 clients, round 4",
        "2: 2 clients, round 4",
    ]
    assert [label.get_text() for label in large.get_xticklabels()] == ["1", "2"]
    assert len(artists(large, "between leaves")) == 2
    assert not artists(first, "between leaves")
    # Clients 0, 1 in leaf 1, then 3 before 2 in leaf 2: by true cluster within a leaf.
    assert [(patch.get_y(), patch.get_height()) for patch in large.patches] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert len({patch.get_facecolor() for patch in large.patches}) == 2
    assert "cosine similarity" in bar.get_ylabel()


def test_similarities_are_reordered_and_their_scale_is_symmetric(make_run):
    run = make_run([(4, 0)], truth=[1, 0, 0, 0])
    (matrix,) = run.similarities
    alpha = np.array([[1, 0.1, -0.2, 0.3], [0.1, 1, 0.4, -0.5], [-0.2, 0.4, 1, 0.45], [0.3, -0.5, 0.45, 1]])
    large, _ = similarity_figure(replace(run, similarities=[replace(matrix, alpha=alpha)])).axes
    (image,) = large.images
    assert image.get_clim() == (-0.5, 0.5)
    # True cluster 0 comes first: the order is 1, 0, 2, 3.
    drawn = image.get_array().filled(np.nan)
    assert drawn[0].tolist() == pytest.approx([np.nan, 0.1, 0.4, -0.5], nan_ok=True)
    assert matrix.alpha[0, 0] == 1  # the run itself is untouched


def test_in_similarities_clients_that_no_leaf_holds_stand_first(make_run):
    run = make_run([(4, 0)])
    tree = ParameterTree.star([(0,), (2,)], torch.zeros(1), unassigned=[1, 3])
    large, _ = similarity_figure(replace(run, tree=tree)).axes
    assert [label.get_text() for label in large.get_xticklabels()] == ["0", "1", "2"]


def test_similarities_without_a_root_are_equals(make_run):
    run = make_run([(1, 0)])
    without = replace(run, similarities=[s for s in run.similarities if s.node != 0])
    first, second, _ = similarity_figure(without).axes
    assert [axes.get_xlabel() for axes in (first, second)] == ["current cluster"] * 2
    assert not artists(first, "true cluster")


def test_many_similarities_are_cut_short_and_their_number_told(make_run):
    splits = [(1, 0), *((2, node) for node in (1, 2)), *((3, node) for node in (3, 4, 5, 6))]
    figure = similarity_figure(make_run([*splits], clients=16))
    assert len(figure.axes) == 1 + 12 + 1
    assert any("2 more clusters not shown" in text.get_text() for text in figure.texts)


def test_no_similarities_say_why(make_run):
    (why,) = artists(similarity_figure(make_run(star=True)).axes[0], "empty")
    assert "one client" in why.get_text()
    (why,) = artists(similarity_figure(replace(make_run(), similarities=[])).axes[0], "empty")
    assert why.get_text() == "No similarities were kept."


def test_save_figures_writes_three_pictures_of_the_expected_size(split_run, tmp_path):
    files = save_figures(split_run, tmp_path / "figures")
    assert [path.name for path in files] == ["accuracy.png", "norms.png", "similarity.png"]
    height, width, _ = matplotlib.image.imread(files[0]).shape
    assert (width, height) == (1440, 990)  # 9.6 by 6.6 inches at 150 dots each


def test_save_figures_leaves_no_global_figure_behind(split_run, tmp_path):
    save_figures(split_run, tmp_path)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_missing_matplotlib_names_the_extra_and_leaves_no_folder(split_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"drawing figures needs .*'matplotlib'.*'fedclade\[report\]'"):
        save_figures(split_run, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
