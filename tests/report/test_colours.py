import pytest

from fedclade.report.colours import (
    CONTRAST,
    DAY,
    NIGHT,
    ClusterColours,
    contrast,
    lightened,
    palette,
    series,
    truth_colour,
)
from fedclade.report.picture import LegendEntry
from fedclade.report.style import CLUSTERS, TRUTH


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    # the known grey that just fails AA
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)
    assert contrast("#123456", "#123456") == 1


def test_clusters_stand_out_by_night_and_are_the_figures_colours_by_day():
    night, day = palette(night=True), palette(night=False)
    for i, colour in enumerate(CLUSTERS):
        assert day[f"c{i}"] == colour
        assert contrast(night[f"c{i}"], NIGHT["panel"]) >= CONTRAST
    assert [day[f"t{i}"] for i in range(len(TRUTH))] == list(TRUTH)


def test_what_stands_out_already_is_left_as_it_is():
    assert lightened("#E0A800", NIGHT["panel"]) == "#E0A800"
    assert lightened("#332288", NIGHT["panel"]) == "#857AB8"
    assert lightened("#332288", "#FFFFFF") == "#332288", "dark on light"
    assert lightened("#AAAAAA", "#808080") == "#FFFFFF", "white is the most there is"


@pytest.mark.parametrize("theme", [DAY, NIGHT])
def test_text_can_be_read(theme):
    for ground in ("paper", "panel"):
        for text in ("ink", "muted", "good", "bad"):
            assert contrast(theme[text], theme[ground]) >= 4.5, f"{text} on {ground}"


def test_a_cluster_has_one_colour_and_those_that_were_split_are_grey(make_run):
    colours = ClusterColours(make_run([(1, 0), (2, 2)]))
    assert [colours.of(node) for node in range(5)] == ["@ink", "@c0", "@muted", "@c1", "@c2"]
    assert [entry.label for entry in colours.legend()] == [
        *("cluster 1 (2 clients)", "cluster 3 (1 client)", "cluster 4 (1 client)"),
        *("root, until its split", "other clusters, until their split"),
    ]
    assert {entry.shape for entry in colours.current("dot")} == {"dot"}


def test_from_the_sixth_on_lines_are_dashed(make_run):
    colours = ClusterColours(make_run(star=True, clients=6))
    assert [colours.dash(node) for node in range(1, 7)] == ["solid"] * 5 + ["dash"]
    assert colours.legend()[-1] == LegendEntry("@c5", "cluster 6 (1 client)", "dashed")


def test_thirty_lines_are_told_apart_by_colour_and_dashes():
    entries = series([f"run {i}" for i in range(30)])
    assert len({(entry.colour, entry.dash) for entry in entries}) == 30
    assert [entry.dash for entry in entries[:11:5]] == ["solid", "dash", "dot"]


def test_more_clusters_than_colours_share_one(make_run):
    colours = ClusterColours(make_run(star=True, clients=len(CLUSTERS) + 1))
    assert {colours.of(leaf) for leaf in colours.leaves} == {"@accent"}
    assert colours.legend() == [LegendEntry("@accent", "11 clusters")]


def test_series_and_truths_begin_anew_where_colours_end():
    assert series([""] * 11)[10].colour == "@c0"
    assert truth_colour(12) == "@t2"
