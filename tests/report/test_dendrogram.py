from dataclasses import replace

import matplotlib.image
import pytest
import torch

from fedclade.core.tree import ParameterTree
from fedclade.report import dendrogram_figure, event_table, save_figures
from fedclade.report.curves import clustering_step, dendrogram_picture
from fedclade.report.picture import Box, Line, Picture, Rule
from fedclade.report.run_view import RunView
from tests.report.pictures import labels, marks


def clustered(run, merges, threshold, number=2, **changes):
    """Add the event of a clustering step to a run."""
    m = len(merges) + 1
    event = {
        "round": number,
        "kind": "clustered",
        "node": 0,
        "metric": "l2",
        "linkage": "ward",
        "threshold": threshold,
    }
    event |= {
        "sizes": [len(leaf.members) for leaf in run.tree.leaves],
        "clients": list(range(m)),
        "merges": merges,
    }
    return replace(run, events=[*run.events, event | changes])


PAIRS = [[0, 2, 1.0], [1, 3, 1.5], [4, 5, 4.0]]
"""Of clients 0 to 3: 0 with 2, 1 with 3, then all."""


def chain(m):
    """Join clients one after another, as single linkage often does."""
    return [[0, 1, 1.0], *([k + 1, m + k - 1, 1.0 + k] for k in range(1, m - 1))]


def drawn(run) -> Picture:
    return dendrogram_picture(RunView(run), *clustering_step(run))


def bridges(picture) -> dict[str, list]:
    """Return the bridges of each cluster, by colour."""
    found = {}
    for line in marks(picture.panels[0], Line):
        points = list(zip(line.x, line.y, strict=True))
        found[line.colour] = [points[at : at + 4] for at in range(0, len(points), 5)]
        assert points[4::5] == [(None, None)] * len(points[4::5]), "bridges are not joined"
    return found


def strip(picture):
    return [(box.x0, box.x1 - box.x0, box.colour) for box in marks(picture.panels[0], Box)]


def cut(picture) -> list[tuple[float, str]]:
    return [(rule.y, rule.label) for rule in marks(picture.panels[0], Rule)]


@pytest.fixture
def run(make_run):
    """Clients 0, 1 went to node 1 and clients 2, 3 to node 2, after round 2."""
    run = make_run([(2, 0)], truth=[0, 0, 1, 2])
    return clustered(run, [[0, 1, 1.0], [2, 3, 1.5], [4, 5, 4.0]], 2.75)


def test_every_merge_is_a_bridge_over_its_parts_in_the_colour_of_its_cluster(run):
    picture = drawn(run)
    assert bridges(picture) == {
        "@muted": [[(0.5, 1), (0.5, 4), (2.5, 4), (2.5, 1.5)]],
        "@c0": [[(0, 0), (0, 1), (1, 1), (1, 0)]],
        "@c1": [[(2, 0), (2, 1.5), (3, 1.5), (3, 0)]],
    }
    assert picture.panels[0].y.title == "L2 distance, ward linkage"
    assert picture.title == "Dendrogram of the clients’ updates, round 2"
    assert labels(picture) == ["cluster 1 (2 clients)", "cluster 2 (2 clients)", "above the cut"]


def test_leaves_stand_so_that_no_lines_cross(make_run):
    picture = drawn(clustered(make_run(truth=[0, 1, 0, 1]), PAIRS, None))
    assert list(picture.x.ticks.values()) == ["0", "2", "1", "3"]
    assert bridges(picture)["@c0"][1] == [(2, 0), (2, 1.5), (3, 1.5), (3, 0)]
    assert strip(picture) == [(-0.5, 2, "@t0"), (1.5, 2, "@t1")]


def test_the_cut_is_drawn_and_labelled(run):
    assert cut(drawn(run)) == [(2.75, "cut at 2.75: 2 clusters")]


def test_a_cut_above_all_merges_is_in_the_picture(make_run):
    picture = drawn(clustered(make_run(), PAIRS, 20.0))
    assert picture.panels[0].y.range[1] > 20
    assert cut(picture) == [(20.0, "cut at 20: 1 cluster")]


def test_one_cluster_is_not_cut(make_run):
    picture = drawn(clustered(make_run(), PAIRS, None))
    assert cut(picture) == []
    assert picture.title == "Dendrogram of the clients’ updates, round 2, not cut"
    assert list(bridges(picture)) == ["@c0"]
    assert not strip(picture)  # the truth is not known


def test_the_strip_shows_the_true_clusters(run):
    picture = drawn(run)
    assert strip(picture) == [(-0.5, 2, "@t0"), (1.5, 1, "@t1"), (2.5, 1, "@t2")]
    assert [box.label for box in marks(picture.panels[0], Box)] == ["0", "1", "2"]


def test_many_clients_have_no_names(make_run):
    picture = drawn(clustered(make_run(clients=41, truth=[0] * 41), chain(41), None))
    assert picture.x.ticks == {}
    assert picture.x.title == "41 clients"


def test_a_chain_of_2000_merges_can_be_drawn(make_run):
    """A recursion would be too deep."""
    picture = drawn(clustered(make_run(clients=2000, rounds=1), chain(2000), None))
    assert len(bridges(picture)["@c0"]) == 1999


def test_many_clusters_are_drawn_alike(make_run):
    """Eleven pairs of clients, then a chain of the pairs."""
    pairs, zero = [[2 * k, 2 * k + 1] for k in range(11)], torch.zeros(1)
    tree = ParameterTree.root_only(range(22), zero)
    tree = tree.split(0, pairs, params=zero, cached=[zero] * 11, round_number=2, criteria={})
    merges = [[a, b, 1.0] for a, b in pairs] + [[22 + a, 22 + b, 5.0 + a] for a, b, _ in chain(11)]
    picture = drawn(clustered(replace(make_run(clients=22), tree=tree), merges, 2.0))
    assert [line.colour for line in marks(picture.panels[0], Line)] == ["@muted", *["@accent"] * 11]
    assert labels(picture) == ["11 clusters", "above the cut"]


def test_updates_that_are_all_equal_can_be_drawn(make_run):
    picture = drawn(clustered(make_run(), [[0, 1, 0.0], [2, 4, 0.0], [3, 5, 0.0]], None))
    assert picture.panels[0].y.range[1] == 1


def test_there_is_none_without_a_clustering_step(make_run, tmp_path):
    assert dendrogram_figure(make_run([(1, 0)])) is None
    assert [path.name for path in save_figures(make_run([(1, 0)]), tmp_path)] == [
        *("accuracy.png", "norms.png", "similarity.png")
    ]


def test_it_is_saved_with_the_others(run, tmp_path):
    files = save_figures(run, tmp_path)
    assert [path.name for path in files] == [
        "accuracy.png",
        "norms.png",
        "similarity.png",
        "dendrogram.png",
    ]
    assert matplotlib.image.imread(files[3]).shape[:2] == (int(150 * (0.64 + 440 / 84)), 1440)


def test_the_table_tells_what_was_found(run, make_run):
    assert (
        event_table(run).caption
        == "Round 2: 2 clusters by l2 distance and ward linkage, cut at 2.75"
    )
    assert event_table(clustered(make_run(), PAIRS, None)).caption == (
        "No cluster was split.\nRound 2: 1 cluster by l2 distance and ward linkage, not cut"
    )
