from dataclasses import replace

import matplotlib.image
import pytest
import torch

from fedclade.core.tree import ParameterTree
from fedclade.report import dendrogram_figure, event_table, save_figures
from fedclade.report.style import ACCENT, CLUSTERS, MUTED, TRUTH


def clustered(run, merges, threshold, number=2, **changes):
    """Add the event of a clustering step to a run."""
    m = len(merges) + 1
    event = {"round": number, "kind": "clustered", "node": 0, "metric": "l2", "linkage": "ward", "threshold": threshold}
    event |= {"sizes": [len(leaf.members) for leaf in run.tree.leaves], "clients": list(range(m)), "merges": merges}
    return replace(run, events=[*run.events, event | changes])


PAIRS = [[0, 2, 1.0], [1, 3, 1.5], [4, 5, 4.0]]
"""Of clients 0 to 3: 0 with 2, 1 with 3, then all."""


def chain(m):
    """Join clients one after another, as single linkage often does."""
    return [[0, 1, 1.0], *([k + 1, m + k - 1, 1.0 + k] for k in range(1, m - 1))]


def artists(axes, gid):
    found = [*axes.lines, *axes.texts, *axes.patches, *axes.collections]
    return [artist for artist in found if artist.get_gid() == gid]


def bridges(axes):
    (drawn,) = artists(axes, "merges")
    return [[tuple(point) for point in path.tolist()] for path in drawn.get_segments()]


def colours(axes):
    from matplotlib.colors import to_hex

    (drawn,) = artists(axes, "merges")
    return [to_hex(colour).upper() for colour in drawn.get_colors()]


def strip(axes):
    from matplotlib.colors import to_hex

    bars = artists(axes, "true cluster")
    return [(round(bar.get_x(), 9), round(bar.get_width(), 9), to_hex(bar.get_facecolor()).upper()) for bar in bars]


@pytest.fixture
def run(make_run):
    """Clients 0, 1 went to node 1 and clients 2, 3 to node 2, after round 2."""
    run = make_run([(2, 0)], truth=[0, 0, 1, 2])
    return clustered(run, [[0, 1, 1.0], [2, 3, 1.5], [4, 5, 4.0]], 2.75)


def test_every_merge_is_a_bridge_over_its_parts(run):
    (axes,) = dendrogram_figure(run).axes
    assert bridges(axes) == [
        [(0, 0), (0, 1), (1, 1), (1, 0)],
        [(2, 0), (2, 1.5), (3, 1.5), (3, 0)],
        [(0.5, 1), (0.5, 4), (2.5, 4), (2.5, 1.5)],
    ]
    assert axes.get_ylabel() == "L2 distance of clusters that merge, ward linkage"


def test_leaves_stand_so_that_no_lines_cross(make_run):
    run = clustered(make_run(truth=[0, 1, 0, 1]), PAIRS, None)
    (axes,) = dendrogram_figure(run).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2", "1", "3"]
    assert bridges(axes)[1] == [(2, 0), (2, 1.5), (3, 1.5), (3, 0)]
    assert strip(axes) == [(-0.5, 2, TRUTH[0]), (1.5, 2, TRUTH[1])]


def test_clusters_have_their_colours_and_what_lies_above_the_cut_has_none(run):
    (axes,) = dendrogram_figure(run).axes
    assert colours(axes) == [CLUSTERS[0], CLUSTERS[1], MUTED]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["1 (2 clients)", "2 (2 clients)"]
    assert [line.get_color() for line in legend.get_lines()] == [CLUSTERS[0], CLUSTERS[1]]


def test_the_cut_is_drawn_and_labelled(run):
    (axes,) = dendrogram_figure(run).axes
    (line,) = artists(axes, "cut")
    assert list(line.get_ydata()) == [2.75, 2.75]
    (label,) = artists(axes, "cut label")
    assert label.get_text() == "cut at 2.75: 2 clusters"


def test_a_cut_above_all_merges_is_in_the_picture(make_run):
    (axes,) = dendrogram_figure(clustered(make_run(), PAIRS, 20.0)).axes
    assert axes.get_ylim()[1] > 20
    (label,) = artists(axes, "cut label")
    assert label.get_text() == "cut at 20: 1 cluster"


def test_one_cluster_is_not_cut(make_run):
    (axes,) = dendrogram_figure(clustered(make_run(), PAIRS, None)).axes
    assert not artists(axes, "cut")
    (label,) = artists(axes, "cut label")
    assert label.get_text() == "not cut: 1 cluster"
    assert colours(axes) == [CLUSTERS[0]] * 3
    assert not strip(axes)  # the truth is not known
    assert axes.get_xlabel() == "client"


def test_the_strip_tells_the_true_clusters(run):
    (axes,) = dendrogram_figure(run).axes
    assert strip(axes) == [(-0.5, 2, TRUTH[0]), (1.5, 1, TRUTH[1]), (2.5, 1, TRUTH[2])]
    assert [text.get_text() for text in axes.texts if text.get_gid() is None] == ["0", "1", "2"]
    assert axes.get_xlabel() == "true cluster of each client"


def test_many_clients_have_no_names(make_run):
    run = clustered(make_run(clients=41, truth=[0] * 41), chain(41), None)
    (axes,) = dendrogram_figure(run).axes
    assert not list(axes.get_xticks())
    assert axes.get_xlabel() == "true clusters of the 41 clients"


def test_a_chain_of_2000_merges_can_be_drawn(make_run):
    """A recursion would be too deep."""
    (axes,) = dendrogram_figure(clustered(make_run(clients=2000, rounds=1), chain(2000), None)).axes
    assert len(bridges(axes)) == 1999


def test_many_clusters_are_drawn_alike(make_run):
    """Eleven pairs of clients, then a chain of the pairs."""
    pairs, zero = [[2 * k, 2 * k + 1] for k in range(11)], torch.zeros(1)
    tree = ParameterTree.root_only(range(22), zero)
    tree = tree.split(0, pairs, params=zero, cached=[zero] * 11, round_number=2, criteria={})
    merges = [[a, b, 1.0] for a, b in pairs] + [[22 + a, 22 + b, 5.0 + a] for a, b, _ in chain(11)]
    run = clustered(replace(make_run(clients=22), tree=tree), merges, 2.0)
    (axes,) = dendrogram_figure(run).axes
    assert colours(axes) == [ACCENT] * 11 + [MUTED] * 10
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["11 clusters"]


def test_updates_that_are_all_equal_can_be_drawn(make_run):
    (axes,) = dendrogram_figure(clustered(make_run(), [[0, 1, 0.0], [2, 4, 0.0], [3, 5, 0.0]], None)).axes
    assert axes.get_ylim()[1] == 1


def test_there_is_none_without_a_clustering_step(make_run, tmp_path):
    assert dendrogram_figure(make_run([(1, 0)])) is None
    assert [path.name for path in save_figures(make_run([(1, 0)]), tmp_path)] == [
        *("accuracy.png", "norms.png", "similarity.png")
    ]


def test_it_is_saved_with_the_others(run, tmp_path):
    files = save_figures(run, tmp_path)
    assert [path.name for path in files] == ["accuracy.png", "norms.png", "similarity.png", "dendrogram.png"]
    assert matplotlib.image.imread(files[3]).shape[:2] == (840, 1440)


def test_the_table_tells_what_was_found(run, make_run):
    assert event_table(run).caption == "Round 2: 2 clusters by l2 distance and ward linkage, cut at 2.75"
    assert event_table(clustered(make_run(), PAIRS, None)).caption == (
        "No cluster was split.\nRound 2: 1 cluster by l2 distance and ward linkage, not cut"
    )
