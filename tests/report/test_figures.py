"""Pictures as files: what is described is drawn."""

import sys
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import same_color, to_hex

from fedclade.core.errors import MissingExtraError
from fedclade.report import (
    dendrogram_figure,
    norms_figure,
    save_figures,
    score_figure,
    similarity_figure,
)
from fedclade.report.figures import draw
from fedclade.report.picture import Axis, Dots, Panel, Picture, rounds_axis
from fedclade.report.style import CLUSTERS


def artists(axes, gid: str) -> list:
    return [
        artist for artist in [*axes.lines, *axes.texts, *axes.patches] if artist.get_gid() == gid
    ]


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.fixture
def split_run(make_run):
    """0 splits into 1 and 2 after round 1, 2 into 3 and 4 after round 2: of four clients, the leaves are 1, 3, 4."""
    return make_run([(1, 0), (2, 2)], truth=[0, 0, 1, 2])


def test_lines_have_their_points_colours_and_names(split_run):
    top, bottom = score_figure(split_run).axes
    (line,) = artists(top, "cluster 3")
    assert line.get_xdata().tolist() == [2, 3, 4]
    assert line.get_ydata().tolist() == pytest.approx([0.87, 0.83, 0.84])
    assert line.get_color() == CLUSTERS[1]
    assert legend(top)[1] == "cluster 3 (1 client)"
    assert (top.get_ylabel(), bottom.get_ylabel(), bottom.get_xlabel()) == (
        "mean test accuracy",
        "gap g(α)",
        "round",
    )
    (zero,) = artists(bottom, "rule")
    assert list(zero.get_ydata()) == [0, 0]


def test_splits_are_marked_in_both_panels_and_named_above(split_run):
    top, bottom = score_figure(split_run).axes
    for axes in (top, bottom):
        assert [line.get_xdata()[0] for line in artists(axes, "upright")] == [1, 2]
    assert [text.get_text() for text in artists(top, "upright label")] == ["split 0", "split 2"]


def test_crowded_markers_keep_their_lines_and_lose_labels(make_run):
    # In each of rounds 1 to 6 of 300, the second part of the last split is split again: six labels for three rows.
    run = make_run([(number, 2 * (number - 1)) for number in range(1, 7)], clients=64, rounds=300)
    top, _ = score_figure(run).axes
    assert len(artists(top, "upright")) == 6
    assert len(artists(top, "upright label")) == 3


def test_many_clusters_have_a_band_and_a_short_legend(make_run):
    (axes,) = score_figure(make_run(clients=20, star=True)).axes
    (band,) = axes.collections
    assert legend(axes) == ["mean of the clusters", "10th to 90th percentile of the clusters"]
    shown = axes.get_legend().legend_handles[1]
    assert same_color(shown.get_color(), band.get_facecolor()[0])


def test_perplexities_and_norms_have_a_logarithmic_scale(make_run):
    assert score_figure(make_run([(1, 0)], language=True)).axes[0].get_yscale() == "log"
    assert score_figure(make_run(language=True)).axes[0].get_yscale() == "linear", (
        "there is one number"
    )
    assert [axes.get_yscale() for axes in norms_figure(make_run()).axes] == ["log", "log"]


def test_thresholds_are_drawn_and_named(split_run):
    top, bottom = norms_figure(
        replace(split_run, config={"algorithm": {"eps1": 0.2, "eps2": 0.5}})
    ).axes
    for axes, level, text in ((top, 0.5, "ε₂ = 0.5"), (bottom, 0.2, "ε₁ = 0.2")):
        (line,), (label,) = artists(axes, "rule"), artists(axes, "rule label")
        assert (list(line.get_ydata()), label.get_text()) == ([level, level], text)


def test_rounds_are_whole_numbers_even_for_one(make_run):
    *_, axes = score_figure(make_run(rounds=1)).axes
    assert [tick for tick in axes.get_xticks() if 0.5 <= tick <= 1.5] == [1]


def test_similarities_of_the_root_are_large_and_those_of_the_others_small(make_run):
    run = make_run([(1, 0)], truth=[0, 1, 1, 0])
    large, first, second, bar = similarity_figure(run).axes
    assert [axes.get_title(loc="left") for axes in (large, first, second)] == [
        *(
            "root: 4 clients, round 1",
            "cluster 1: 2 clients, round 4",
            "cluster 2: 2 clients, round 4",
        )
    ]
    assert [label.get_text() for label in large.get_xticklabels()] == ["1", "2"]
    assert (large.get_xlabel(), large.get_ylabel(), first.get_xlabel()) == (
        "current cluster",
        "true cluster",
        "",
    )
    assert [(patch.get_y(), patch.get_height()) for patch in artists(large, "box")] == [
        *((-0.5, 1), (0.5, 1), (1.5, 1), (2.5, 1))
    ]
    assert len(artists(large, "line")) == 2
    (image,) = large.images
    assert image.get_clim() == (-0.3, 0.3)
    assert image.get_array().filled(np.nan)[0].tolist() == pytest.approx(
        [np.nan, 0.25, 0.25, 0.25], nan_ok=True
    )
    assert "cosine similarity" in bar.get_ylabel()


def test_similarities_without_a_root_are_equals(make_run):
    run = make_run([(1, 0)])
    without = replace(run, similarities=[s for s in run.similarities if s.node != 0])
    first, second, _ = similarity_figure(without).axes
    assert [axes.get_xlabel() for axes in (first, second)] == ["current cluster"] * 2


def test_many_similarities_are_cut_short_and_their_number_is_said(make_run):
    splits = [(1, 0), *((2, node) for node in (1, 2)), *((3, node) for node in (3, 4, 5, 6))]
    figure = similarity_figure(make_run([*splits], clients=16))
    assert len(figure.axes) == 1 + 12 + 1
    assert any("2 more clusters not shown" in text.get_text() for text in figure.texts)


def test_what_a_run_has_nothing_of_has_no_file(make_run, tmp_path):
    run = replace(make_run(), cluster_rows=[], similarities=())
    assert (norms_figure(run), similarity_figure(run), dendrogram_figure(run)) == (None, None, None)
    assert [path.name for path in save_figures(run, tmp_path)] == ["accuracy.png"]


def test_pictures_of_dots_are_on_pages_alone():
    dots = Dots(x=[1], y=[1], colour="@c0", size=3)
    with pytest.raises(
        TypeError, match=r"a mark of a figure in a file should be a line, .*, got Dots"
    ):
        draw(Picture("dots", [Panel([dots], Axis())], rounds_axis(1), 300), "")


def test_save_figures_writes_pictures_of_the_expected_size(split_run, tmp_path):
    files = save_figures(split_run, tmp_path / "figures")
    assert [path.name for path in files] == ["accuracy.png", "norms.png", "similarity.png"]
    height, width, _ = matplotlib.image.imread(files[0]).shape
    assert (width, height) == (1440, int(150 * (0.64 + 500 / 84)))  # 9.6 inches at 150 dots each


def test_colours_of_files_are_those_of_a_page_by_day(split_run):
    top, _ = norms_figure(split_run).axes
    assert to_hex(artists(top, "cluster 2")[0].get_color()).upper() == "#5F666D"


def test_save_figures_leaves_no_global_figure_behind(split_run, tmp_path):
    save_figures(split_run, tmp_path)
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_missing_matplotlib_names_the_extra_and_leaves_no_folder(split_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        MissingExtraError, match=r"drawing figures needs .*'matplotlib'.*'fedclade\[report\]'"
    ):
        save_figures(split_run, tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
