"""Plotly's figures of runs and comparisons."""

from __future__ import annotations

import sys

import plotly.io
import pytest

from fedclade.core import ConfigError, MissingExtraError
from fedclade.report import Comparison
from fedclade.report.colours import DAY, NIGHT
from fedclade.report.page.plot import draw
from fedclade.report.picture import Axis, Dots, Panel, Picture

from .conftest import scored


def test_a_run_is_drawn_with_its_splits_and_a_legend(make_run):
    figure = make_run([(2, 0)], truth=[0, 0, 1, 1]).plot()
    assert figure.layout.title.text.startswith("Accuracy of the clusters<br>")
    assert [shape.x0 for shape in figure.layout.shapes if shape.line.dash == "dot"] == [2]
    assert [note.text for note in figure.layout.annotations] == ["split 0"]
    drawn = {
        trace.name: trace
        for trace in figure.data
        if trace.showlegend is not False and trace.x == (None,)
    }
    assert list(drawn) == [
        "cluster 1 (2 clients)",
        "cluster 2 (2 clients)",
        "root, until its split",
    ]
    lines = {
        trace.name: trace for trace in figure.data if trace.yaxis == "y" and trace.x != (None,)
    }
    assert lines["cluster 0"].x == (1, 2)
    assert lines["cluster 0"].y[0] == 0.51
    assert lines["cluster 1"].line.color == drawn["cluster 1 (2 clients)"].line.color
    assert "@" not in figure.to_json().replace("@media", ""), "every colour has been looked up"


@pytest.mark.parametrize(("template", "palette"), [("plotly", DAY), ("plotly_dark", NIGHT)])
def test_a_dark_template_makes_a_dark_figure(make_run, monkeypatch, template, palette):
    monkeypatch.setattr(plotly.io.templates, "default", template)
    figure = make_run().plot()
    assert (figure.layout.paper_bgcolor, figure.layout.font.color) == (
        palette["panel"],
        palette["ink"],
    )


def test_a_comparison_is_drawn_with_its_intervals_within_the_picture(summary_run):
    runs = {
        "<b>mine": [summary_run(mean=0.7), summary_run(mean=0.72, seed=1)],
        "fedavg": [summary_run("fedavg", 0.5)],
    }
    figure = Comparison(runs).plot()
    interval, seeds, mean, base = figure.data
    half = 12.7062 * 0.01  # t(0.975, 1) · s / √2 with s = 0.02 / √2
    assert interval.x == pytest.approx([0.71 - half, 0.71 + half], rel=1e-4)
    assert (seeds.x, seeds.text) == ((0.7, 0.72), ("seed 0", "seed 1"))
    assert (mean.x, base.x) == (pytest.approx([0.71]), (0.5,))
    low, high = figure.layout.xaxis.range
    assert low < 0.5
    assert high > 0.71 + half
    assert figure.layout.yaxis.ticktext == ("&lt;b&gt;mine", "fedavg")
    assert mean.marker.color == DAY["accent"]
    assert base.marker.color == DAY["muted"], "a baseline"


def test_configurations_without_a_metric_in_common_are_not_drawn(make_run):
    other = scored(make_run(), "mae", higher=False, share=False)
    with pytest.raises(ConfigError, match="at least one metric in common"):
        Comparison({"a": [make_run()], "b": [other]}).plot()


def test_without_plotly_a_figure_says_how_to_get_it(make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(
        MissingExtraError, match=r"needs the package 'plotly'.*fedclade\[notebook\]"
    ):
        make_run().plot()


@pytest.mark.parametrize(
    ("names", "angle"),
    [
        (["a"] * 12, 0),
        (["a"] * 13, -90),
        (["hospital-01"] * 12, -90),  # wider than the figure
        (["hospital-01"] * 8, 0),
    ],
)
def test_names_that_would_touch_are_written_upwards(names: list[str], angle: int):
    axis = Axis("", range=(0, len(names) + 1), ticks=dict(enumerate(names)))
    dots = Dots(x=[0], y=[0.5], colour="@accent", size=6)
    drawn = draw(Picture("dots", [Panel([dots], Axis())], axis, 300))
    assert drawn["layout"]["xaxis"]["tickangle"] == angle
