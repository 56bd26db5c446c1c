"""What notebooks show: the numbers, text of others as it is, and nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from fedclade.core import ParameterTree
from fedclade.data import federation, load_federation
from fedclade.report import Comparison, SuiteComparison, html_of
from fedclade.report.notebook import LISTED
from tests.tiny import federation_of

EVIL = "</td><script>alert(1)</script>\u202e"
VOID = {"progress"}


class Parts(HTMLParser):
    """Texts and tags, each of which must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.open[-1] != "style":
            self.texts.append(data)


def parts(thing: object) -> Parts:
    html = thing._repr_html_()
    assert html == html_of(thing)
    assert re.findall(r"https?:|<script|src=|url\(", html) == [], "it needs nothing from elsewhere"
    return Parts(html)


def test_a_run_shows_its_scores_its_clusters_and_its_tree(make_run):
    found = parts(make_run([(2, 0)], truth=[0, 0, 1, 1]))
    for text in ("Accuracy", "75.0 %", "Clusters", "Traffic"):
        assert text in found.texts
    assert found.tags.count("li") == 3
    assert any("true cluster 1" in text for text in found.texts)
    assert "details" not in found.tags


def test_a_large_tree_is_folded_away(make_run):
    assert "details" in parts(make_run(clients=20, star=True)).tags


def test_of_very_many_clients_only_the_summary_is_shown(make_run, monkeypatch):
    monkeypatch.setattr("fedclade.report.notebook.MANY", 10)
    run = make_run([(2, 0)])
    found = parts(run)
    assert "traffic" in found.texts
    assert found.tags.count("li") == 3
    assert "Worst tenth" not in found.texts


def test_names_of_others_are_shown_as_they_are(make_run):
    run = make_run([(2, 0)], data=f"{EVIL}, 4 clients", model=EVIL)
    rows = [row | {"name": EVIL} for row in run.client_rows]
    run = replace(run, client_rows=rows, summary={**run.summary, "algorithm": EVIL})
    x, y = np.zeros((30, 2), dtype=np.float32), np.arange(30) % 3
    held = federation({EVIL: (x, y), "b": (x, y)}, name=EVIL)
    for thing in (
        run,
        held,
        Comparison({EVIL: [run]}, EVIL),
        SuiteComparison({EVIL: Comparison({EVIL: [run]})}),
    ):
        found = parts(thing)
        assert any("</td><script>alert(1)</script>" in text for text in found.texts)
        assert not any("\u202e" in text for text in found.texts)


def test_a_tree_alone_shows_how_it_grew():
    zero = torch.zeros(1)
    tree = ParameterTree.root_only(range(4), zero)
    tree = tree.split(
        0,
        [[0, 1], [2, 3]],
        params=zero,
        cached=[zero, zero],
        round_number=2,
        criteria={"gamma_bound": 0.74},
    )
    found = parts(tree)
    assert "Parameter tree: 4 clients in 2 clusters" in found.texts
    assert [text for text in found.texts if "γ bound" in text] == ["split at γ bound 0.74"]
    assert "0, 1" in found.texts


def test_a_federation_lists_its_first_clients_and_what_they_hold():
    held = federation_of([0, 1] * 5)
    found = parts(held)
    assert found.tags.count("tr") == 1 + LISTED
    assert "and 2 more clients" in found.texts
    assert found.texts[found.texts.index("Training examples") + 1] == f"{24 * 10:,}"
    assert found.texts[found.texts.index("true cluster") + 1 :].count("24") == LISTED
    assert found.tags.count("svg") == LISTED, "a histogram of the labels of each"
    assert "1 newcomer" in html_of(
        load_federation("digits", clients=2, samples_per_client=20, newcomers=1)
    )


@pytest.mark.parametrize(
    ("task", "y", "drawn"),
    [
        ("regression", np.linspace(0, 1, 30), 2),
        ("multilabel", np.ones((30, 2)), 0),
        ("binary", np.arange(30) % 2, 2),
    ],
)
def test_targets_of_every_task_are_shown_or_left_out(task, y, drawn):
    x = np.zeros((30, 2), dtype=np.float32)
    assert parts(federation({"a": (x, y), "b": (x, y)}, task)).tags.count("svg") == drawn


def test_the_bars_are_the_labels_as_the_client_sees_them():
    x, y = np.zeros((20, 1), dtype=np.float32), np.array([0] * 10 + [1] * 10)
    html = html_of(federation({"a": (x, y), "b": (x, 0 * y)}))
    one, two = re.findall(r'<path d="([^"]*)"', html)
    assert one.count("z") == 2
    assert two.count("z") == 1
    assert one.split("z")[0] == two.split("z")[0], "the highest bar is as high as the line"


def test_a_comparison_shows_each_mean_with_its_interval(summary_run):
    runs = {
        "mine": [summary_run(mean=0.7), summary_run(mean=0.9, seed=1)],
        "fedavg": [summary_run("fedavg", 0.5)],
    }
    comparison = Comparison(runs)
    found = parts(comparison)
    assert "80.0 ± 127.1" in found.texts
    assert found.tags.count("circle") == 2 + 1 + 1 + 1, "each run, and each mean"
    assert found.tags.count("path") == 1, "one seed has no interval"
    frame = comparison.frame()
    assert frame["accuracy"].tolist() == pytest.approx([0.8, 0.5])
    assert frame["accuracy_half_width"].isna().tolist() == [False, True]
    assert repr(comparison) == "Comparison(mine, fedavg)"


def test_a_suite_shows_the_overview_and_folds_its_scenarios(summary_run):
    suite = SuiteComparison(
        {name: Comparison({"mine": [summary_run(mean=m)]}) for name, m in (("a", 0.7), ("b", 0.8))}
    )
    found = parts(suite)
    assert found.tags.count("details") == 2
    assert found.texts.count("80.0") == 3, (
        "in the overview, and in its scenario, of all and of the worst tenth"
    )
    assert suite.frame()["scenario"].tolist() == ["a", "b"]
    assert repr(suite) == "SuiteComparison(a, b)"


def test_a_comparison_with_a_run_that_was_not_scored_is_shown(summary_run):
    nan = summary_run(mean=float("nan"))
    assert "–" in parts(Comparison({"a": [nan], "b": [summary_run()]})).texts


def test_other_things_have_no_picture():
    with pytest.raises(
        TypeError, match=r"an object with an HTML view for notebooks should be a run, .*, got int"
    ):
        html_of(3)
