"""Heat maps of similarities, against matrices that were put there by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade.core.tree import ParameterTree
from fedclade.report.curves import similarity_pictures
from fedclade.report.picture import Box, HeatMap, Picture
from fedclade.report.run_view import RunView
from tests.report.pictures import labels, marks


def pictures(run, side: int = 100) -> list[Picture]:
    return similarity_pictures(RunView(run), run.similarities, side)


def heat_map(picture: Picture) -> HeatMap:
    (found,) = marks(picture.panels[0], HeatMap)
    return found


def test_clients_stand_in_the_order_of_leaves_with_lines_and_a_strip(make_run):
    root, first, second = pictures(make_run([(1, 0)], truth=[0, 1, 1, 0]))
    assert [each.title for each in (root, first, second)] == [
        *(
            "root: 4 clients, round 1",
            "cluster 1: 2 clients, round 4",
            "cluster 2: 2 clients, round 4",
        )
    ]
    assert root.x.ticks == {0.5: "1", 2.5: "2"}
    boxes = marks(root.panels[0], Box)
    assert [(box.x0, box.y0) for box in boxes if box.colour == "@panel"] == [
        (1.5, -0.5),
        (-0.5, 1.5),
    ]
    assert not [box for box in marks(first.panels[0], Box) if box.colour == "@panel"]
    # Clients 0, 1 in leaf 1, then 3 before 2 in leaf 2: by true cluster within a leaf.
    strip = [(box.y0, box.y1, box.colour, box.label) for box in boxes if box.colour != "@panel"]
    assert strip == [
        *(
            (-0.5, 0.5, "@t0", "0"),
            (0.5, 1.5, "@t1", "1"),
            (1.5, 2.5, "@t0", "0"),
            (2.5, 3.5, "@t1", "1"),
        )
    ]
    assert labels(root) == ["true cluster 0", "true cluster 1"]


def test_matrices_are_reordered_and_their_scale_is_symmetric(make_run):
    run = make_run([(4, 0)], truth=[1, 0, 0, 0])
    (matrix,) = run.similarities
    alpha = np.array(
        [[1, 0.1, -0.2, 0.3], [0.1, 1, 0.4, -0.5], [-0.2, 0.4, 1, 0.45], [0.3, -0.5, 0.45, 1]]
    )
    (picture,) = pictures(replace(run, similarities=[replace(matrix, alpha=alpha)]))
    heat = heat_map(picture)
    assert heat.limit == 0.5
    # True cluster 0 comes first: the order is 1, 0, 2, 3.
    assert heat.names == ["1", "0", "2", "3"]
    assert heat.values[0].tolist() == pytest.approx([np.nan, 0.1, 0.4, -0.5], nan_ok=True)
    assert matrix.alpha[0, 0] == 1  # the run itself is untouched


def test_clients_that_no_leaf_holds_stand_first(make_run):
    tree = ParameterTree.star([(0,), (2,)], torch.zeros(1), unassigned=[1, 3])
    (picture,) = pictures(replace(make_run([(4, 0)]), tree=tree))
    assert list(picture.x.ticks.values()) == ["0", "1", "2"]


def test_without_a_truth_there_is_no_strip(make_run):
    (picture,) = pictures(make_run())
    assert marks(picture.panels[0], Box) == []
    assert picture.panels[0].y.title == ""
    assert picture.x.range == (-0.5, 3.5)


def test_of_many_clients_means_over_neighbours_are_drawn(make_run):
    run = make_run(clients=5, rounds=1, truth=[0, 0, 0, 1, 1])
    (picture,) = pictures(run, side=3)
    heat = heat_map(picture)
    assert list(heat.names) == ["0 … (0)", "2 … (1)", "4 … (2)"]
    assert heat.values.tolist() == [
        [0.25] * 3,
        [0.25] * 3,
        [0.25, 0.25, pytest.approx(np.nan, nan_ok=True)],
    ]
    assert [(box.y0, box.y1) for box in marks(picture.panels[0], Box)] == [(-0.5, 1.0), (1.0, 2.0)]
