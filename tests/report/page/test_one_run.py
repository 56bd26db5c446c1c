"""What the page of a run says, against runs whose numbers were put there by hand."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedclade.config import check_config
from fedclade.core.params import Layout
from fedclade.core.tree import ParameterTree
from fedclade.report.page import Card, RunView
from fedclade.report.page.curves import MATRICES, SIDE, scores_section
from fedclade.report.page.one_run import as_texts, repeat_command
from fedclade.report.page.plot import LONGEST
from fedclade.report.page.sankey import REST, STAGES, WIDEST
from fedclade.report.tables import event_table
from fedclade.runs import Callback, RoundRecord
from fedclade.runs.store.tree_files import SimilarityMatrix
from fedclade.tasks.metrics import spread

ALWAYS = ["scores", "tree", "clients", "config"]


@pytest.fixture
def split_run(make_run):
    """0 splits into 1 and 2 after round 1, 2 into 3 and 4 after round 2: of four clients, the leaves are 1, 3, 4."""
    return make_run([(1, 0), (2, 2)], truth=[0, 0, 1, 2])


def test_sections_without_data_are_left_out(make_run, page_of):
    run = replace(make_run(), cluster_rows=[], similarities=())
    assert [each.id for each in page_of(run).sections] == ALWAYS
    page = page_of(make_run([(2, 0)]))
    found = ["scores", "tree", "similarity", "flow", "clients", "norms", "config"]
    assert [each.id for each in page.sections] == found


def test_cards_tell_scores_clusters_bytes_and_time(make_run, page_of):
    clusters = {"found": 2, "true": 3, "ari": 0.5, "nmi": 0.25, "sizes": [3, 1]}
    steps = {"total": 12_345, "of_cohorts": 10_000, "ratio": 1.2345}
    privacy = {"epsilon": 2.5, "delta": 1e-5}
    cards = page_of(make_run(clusters=clusters, privacy=privacy, steps=steps)).cards
    assert cards == [
        Card("Accuracy", "75.0 %", "std 16.6 % over clients"),
        Card("Worst tenth", "50.0 %", "mean accuracy of the worst 1 client"),
        Card("Clusters", "2", "3 true, largest 3"),
        Card("ARI", "0.50", "NMI 0.25; 1 is the truth"),
        Card("Traffic", "3.0 kB", "1.0 kB up, 2.0 kB down"),
        Card("Time", "1 min 01 s", "1 min 00 s training, on cpu"),
        Card("Training steps", "12,345", "1.23 × FedAvg's"),
        Card("Privacy", "ε = 2.5", "at δ = 1e-05, client level"),
    ]


@pytest.mark.parametrize("name", ["network", "client_app"])
def test_the_time_of_a_run_that_waits_for_nodes_is_that_of_its_rounds(make_run, page_of, name):
    run = make_run()
    cards = page_of(replace(run, config={**run.config, name: {}})).cards
    assert Card("Time of the rounds", "1 min 01 s", "1 min 00 s training, on cpu") in cards


def test_what_stays_with_clients_is_told_in_a_few_words(make_run, page_of):
    layout = Layout.of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), ["1.*", "2.*", "3.*"])
    (card,) = [
        each
        for each in page_of(replace(make_run(), layout=layout)).cards
        if each.label == "Stays on clients"
    ]
    assert (card.value, card.note) == (
        "75.0 %",
        "18 of 24 numbers of a model: 1.weight, 1.bias … 4 more",
    )


@pytest.mark.parametrize(
    ("shift", "note", "trend"),
    [
        (0.1, "+10.0 points [5.9, 14.1] against fedavg", "good"),
        (-0.1, "−10.0 points [−14.1, −5.9] against fedavg", "bad"),
        (0.0, "+0.0 points [−4.1, 4.1] against fedavg", ""),
    ],
)
def test_accuracy_is_told_against_another_run(make_run, page_of, shift, note, trend):
    run, other = make_run(), make_run()
    noise = [0.03, -0.03, 0.01, -0.01]  # of the clients 0 to 3
    rows = [
        row | {"accuracy": row["accuracy"] - shift + noise[row["client"]]}
        for row in other.client_rows
    ]
    card = page_of(run, replace(other, client_rows=rows), "fedavg").cards[0]
    assert (card.note, card.trend) == (note, trend)


def test_of_perplexity_less_is_more(make_run, page_of):
    run = make_run(language=True)
    rows = [row | {"loss": float(np.log(20 + row["client"]))} for row in run.client_rows]
    other = replace(run, client_rows=rows)
    card = page_of(run, other, "fedavg").cards[0]
    assert (card.label, card.value, card.note, card.trend) == (
        "Perplexity",
        "11.2",
        "−11.5 [−13.6, −9.4] against fedavg",
        "good",
    )


def test_courses_go_on_from_the_cluster_that_was_split(split_run, section, page_of):
    found = section(page_of(split_run), "scores")
    lines = {
        trace["name"]: trace for trace in found.figures[""]["data"] if trace.get("yaxis") != "y2"
    }
    assert lines["cluster 1"]["x"] == [1, 2, 3, 4]
    assert lines["cluster 1"]["y"] == pytest.approx([0.66, 0.62, 0.63, 0.64])  # as in test_figures
    assert lines["cluster 3"]["x"] == [2, 3, 4]
    assert lines["cluster 1"]["line"]["color"] == "@c0"
    assert {
        mark["x0"] for mark in found.figures[""]["layout"]["shapes"] if mark["xref"] == "x"
    } == {1, 2}
    assert "clusters were split in round 1, 2." in found.caption
    (numbers,) = found.tables
    assert numbers.columns == ["round", "0", "2", "1", "3", "4"]
    assert numbers.rows[1] == ["2", "–", "87.0 %", "62.0 %", "–", "–"]


def test_of_more_clusters_than_colours_the_mean_and_a_band_are_drawn(make_run, section, page_of):
    found = section(page_of(make_run(star=True, clients=20)), "scores")
    low, high, mean = found.figures[""]["data"]
    # Clients score 0.5 + 0.01 round + 0.1 node, at most 1: nodes 1 to 4 or so differ, all later ones are at 1.
    scores = [min(1.0, 0.51 + 0.1 * node) for node in range(1, 21)]
    assert mean["y"][0] == pytest.approx(np.mean(scores))
    assert (low["y"][0], high["y"][0]) == pytest.approx(tuple(np.percentile(scores, (10, 90))))
    assert "There are more clusters than colours" in found.caption
    assert [entry.label for entry in found.legend] == [
        "mean of the clusters",
        "10th to 90th percentile of the clusters",
    ]
    assert [entry.colour for entry in found.legend] == ["@c1", high["fillcolor"]]


def test_long_runs_are_thinned_and_that_is_said(make_run):
    run = make_run(rounds=LONGEST + 101)
    found = scores_section(RunView(run))
    (line, *_) = found.figures[""]["data"]
    assert len(line["x"]) <= LONGEST
    assert (line["x"][0], line["x"][-1]) == (1, LONGEST + 101)
    assert f"Of {LONGEST + 101} rounds, at most {LONGEST} are drawn" in found.caption


def test_norms_stand_against_their_thresholds(make_run, section, page_of):
    run = replace(
        make_run([(1, 0)]), config={"algorithm": {"name": "cfl", "eps1": "auto", "eps2": 0.5}}
    )
    found = section(page_of(run), "norms")
    levels = [mark for mark in found.figures[""]["layout"]["shapes"] if mark["xref"] == "paper"]
    assert [(mark["yref"], mark["y0"]) for mark in levels] == [("y", 0.5)]
    found_out = {
        line["name"]: list(zip(line["x"], line["y"], strict=True))
        for line in found.figures[""]["data"]
    }
    assert found_out["ε₁ of 0"] == [(1, 0.1)], "a tenth of the largest mean norm so far"
    assert found_out["ε₁ of 1"] == [(2, 0.1), (3, 0.1), (4, 0.1)], "a lineage begins at the root"
    told = "ε₂ for the largest is 0.5 and ε₁ for the mean is a tenth of the largest mean so far"
    assert f"Threshold {told} (dashed)." in found.caption
    assert found.tables[0].rows == [
        ["0", "2.00", "1.00"],
        ["1", "0.50", "0.25"],
        ["2", "0.50", "0.25"],
    ]


def test_similarities_stand_in_the_order_of_the_tree(split_run, section, page_of):
    found = section(page_of(split_run), "similarity")
    assert list(found.figures) == [
        "root: 4 clients, round 1",
        "cluster 1: 2 clients, round 4",
        "cluster 2: 2 clients, round 2",
    ]
    (heat,) = found.figures["root: 4 clients, round 1"]["data"]
    assert heat["x"] == ["0", "1", "2", "3"]
    assert heat["z"][0] == [None, 0.25, 0.25, 0.25], "nobody is compared with themselves"
    assert [entry.label for entry in found.legend] == [
        "true cluster 0",
        "true cluster 1",
        "true cluster 2",
    ]
    assert found.tables[0].rows[0] == ["0", "1", "4", "0.25", "0.25", "0.25"]


def test_a_large_matrix_is_drawn_as_means_over_neighbours(make_run, section, page_of):
    n = 2 * SIDE
    run = make_run(clients=n, rounds=1)
    alpha = np.kron(np.eye(2), np.ones((SIDE, SIDE)))  # the first half alike, the second too
    run = replace(run, similarities=(SimilarityMatrix(0, 1, tuple(range(n)), alpha),))
    found = section(page_of(run), "similarity")
    (heat,) = next(iter(found.figures.values()))["data"]
    assert np.array(heat["z"]).shape == (SIDE, SIDE)
    assert heat["z"][0][0] == 1, "a block on the diagonal without the diagonal itself"
    assert heat["z"][0][SIDE - 1] == 0
    assert (
        f"Matrices of more than {SIDE} clients are drawn as means over neighbours." in found.caption
    )


def test_only_the_largest_clusters_have_heat_maps(make_run, section, page_of):
    run = make_run()
    same = [SimilarityMatrix(node, 1, (0, 1), np.ones((2, 2))) for node in range(MATRICES + 3)]
    found = section(page_of(replace(run, similarities=tuple(same))), "similarity")
    assert len(found.figures) == MATRICES
    assert found.caption.endswith("3 smaller clusters not shown.")


def test_clients_with_one_name_are_told_apart_in_a_heat_map(make_run, section, page_of):
    run = make_run()
    run = replace(run, client_rows=[row | {"name": "clinic"} for row in run.client_rows])
    (heat,) = next(iter(section(page_of(run), "similarity").figures.values()))["data"]
    assert heat["x"] == ["clinic (0)", "clinic (1)", "clinic (2)", "clinic (3)"]


def test_the_flow_tells_who_went_where(split_run, section, page_of, table):
    found = section(page_of(split_run), "flow")
    (sankey,) = found.figures[""]["data"]
    # Rows of the round of a split name the new clusters: of round 1 nodes 1 and 2, of round 2 nodes 1, 3 and 4.
    assert sankey["node"]["label"] == ["1", "2", "1", "3", "4", "true 0", "true 1", "true 2"]
    assert table(found, "Moves between clusters").rows == [
        *(
            ["round 1: 1", "round 2: 1", "2"],
            ["round 1: 2", "round 2: 3", "1"],
            ["round 1: 2", "round 2: 4", "1"],
        ),
        *(["round 2: 1", "truth: true 0", "2"], ["round 2: 3", "truth: true 1", "1"]),
        ["round 2: 4", "truth: true 2", "1"],
    ]
    assert all(0 < place < 1 for place in (*sankey["node"]["x"], *sankey["node"]["y"]))


def test_a_flow_of_many_stages_and_clusters_is_thinned(make_run, section, page_of):
    run = make_run(star=True, clients=20, rounds=12)
    rows = [row | {"cluster": 1 + (row["client"] + row["round"]) % 20} for row in run.client_rows]
    found = section(page_of(replace(run, client_rows=rows)), "flow")
    (sankey,) = found.figures[""]["data"]
    assert len(set(sankey["node"]["x"])) == STAGES
    assert sankey["node"]["label"].count("others") == STAGES
    assert len(sankey["node"]["label"]) == STAGES * WIDEST
    assert found.caption.endswith(
        f"5 further rounds with moves not drawn. Clusters beyond the {WIDEST - 1} largest of a column are merged."
    )
    assert REST < 0, "no cluster has that number"


def test_clients_that_lost_against_another_run_are_listed_those_first_that_lost_most(
    make_run, section, page_of, table
):
    run = make_run(clients=3, rounds=1)  # all at 0.51
    other = replace(
        run, client_rows=[row | {"accuracy": 0.5 + 0.1 * row["client"]} for row in run.client_rows]
    )
    found = section(page_of(run, other, "fedavg"), "clients")
    assert "Rings: the same clients with fedavg; 2 clients are worse off." in found.caption
    lost = table(found, "Clients with a worse score than with fedavg")
    assert lost.rows == [["2", "0", "70.0 %", "51.0 %"], ["1", "0", "60.0 %", "51.0 %"]]


def test_without_another_run_clients_are_measured_by_the_root_s_model(
    split_run, section, page_of, table
):
    first = dict.fromkeys(range(4), 0.9)
    rows = [
        row
        | (
            {"served_by": 0, "accuracy": first[row["client"]]}
            if row["round"] == 1
            else {"served_by": row["cluster"]}
        )
        for row in split_run.client_rows
    ]
    found = section(page_of(replace(split_run, client_rows=rows)), "clients")
    lost = table(found, "Clients with a worse score than with the root’s model of round 1")
    # At the end node 1 is at 0.64, node 3 at 0.84, node 4 at 0.94: the clients of the first two lost.
    assert [row[0] for row in lost.rows] == ["0", "1", "2"]


def test_nobody_lost_and_nobody_is_listed(make_run, section, page_of, table):
    run = make_run()
    found = section(page_of(run, run, "itself"), "clients")
    assert "no client is worse off" in found.caption
    assert table(found, "Clients with a worse score than with itself").note == (
        "No client has a worse score than with itself."
    )


def checked(kind: str, number: int, p_value: float, **numbers: float | None) -> dict:
    values = {
        "p_value": p_value,
        "level": 0.01,
        "gain": 0.5,
        "gain_before": 0.1,
        "gamma": None,
        **numbers,
    }
    return {"round": number, "kind": kind, "node": 0, "clusters": [[0, 1], [2, 3]], **values}


def test_repeated_checks_tell_e_value_number_level_left_and_what_they_could_find(
    make_run, section, page_of, table
):
    repeated = {"tests": 5, "level_left": 0.00025}
    events = [
        checked("checked", 2, 0.4, e_value=2.5, smallest_group=3, **repeated),
        checked("checked", 4, 1.0, smallest_group=0, **repeated),
    ]
    found = section(page_of(replace(make_run(), events=events)), "checks")
    assert "could not have been found by this check alone" in found.caption
    shown = table(found, "Checks")
    assert [row[4:8] for row in shown.rows] == [
        ["2.5", "5", "0.00025", "3"],
        ["", "5", "0.00025", "none"],
    ]


def test_checks_tell_the_stable_groups_and_their_stability(make_run, section, page_of, table):
    """A run from before they were measured has checks without them."""
    groups = [[0, 1], [2, 3]]
    events = [
        checked("regrouped", 2, 0.001, stability=0.931, stable_groups=groups),
        checked("checked", 3, 0.001, stability=0.3, stable_groups=[]),
        checked("checked", 4, 0.2),
    ]
    found = section(page_of(replace(make_run(), events=events)), "checks")
    assert [row[-1] for row in table(found, "Checks").rows] == ["2 (0.93)", "none (0.30)", ""]


@pytest.mark.parametrize(
    ("stability", "groups", "sentence"),
    [
        (0.931, [[0, 1], [2, 3]], "Stable groups: 2 (stability 0.93)."),
        (
            0.27,
            [],
            "No stable groups (stability 0.27): clients differ gradually, or too little to tell; the "
            "clusters may differ in a run with another seed.",
        ),
    ],
)
def test_the_stable_groups_are_told_beside_the_clusters(
    make_run, section, page_of, stability, groups, sentence
):
    run = make_run([(2, 0)])
    assert "table groups" not in section(page_of(run), "tree").caption
    clusters = {
        **run.summary["clusters"],
        "stability": stability,
        "stable_sizes": [len(group) for group in groups],
    }
    told = replace(run, summary={**run.summary, "clusters": clusters})
    assert section(page_of(told), "tree").caption.startswith(sentence)
    (card,) = (card for card in page_of(told).cards if card.label == "Stable groups")
    assert card.value == (str(len(groups)) if groups else "none")
    assert card.note == f"stability {stability:.2f}"


def test_fewer_stable_groups_than_clusters_are_told(make_run, section, page_of):
    run = make_run([(2, 0), (3, 1)])
    clusters = {**run.summary["clusters"], "stability": 0.9, "stable_sizes": [2, 2]}
    told = replace(run, summary={**run.summary, "clusters": clusters})
    assert section(page_of(told), "tree").caption.startswith(
        "Stable groups: 2 (stability 0.90); each has the clients of one or more clusters."
    )


def test_checks_tell_p_value_level_and_gain(make_run, section, page_of, table):
    events = [checked("regrouped", 2, 0.001), checked("checked", 4, 0.2, gamma=1.5)]
    found = section(page_of(replace(make_run(), events=events)), "checks")
    level, p_values, before, gains = found.figures[""]["data"]
    assert (level["y"], p_values["y"], before["y"], gains["y"]) == (
        [0.01] * 2,
        [0.001, 0.2],
        [0.1] * 2,
        [0.5] * 2,
    )
    assert "After 1 of 2 checks the clients were regrouped" in found.caption
    axis = found.figures[""]["layout"]["yaxis"]
    assert (axis["type"], axis["tickformat"]) == ("log", "~g"), "0.005 is no small 5"
    alone = section(page_of(replace(make_run(), events=events[:1])), "checks")
    assert alone.figures[""]["data"][0]["mode"] == "lines+markers", (
        "a line of one point is not seen"
    )
    assert table(found, "Checks").rows == [
        ["2", "changed to 2 + 2", "0.001", "0.01", "", "", "", "", "0.5", "0.1", "∞", ""],
        ["4", "unchanged 2 + 2", "0.2", "0.01", "", "", "", "", "0.5", "0.1", "1.50", ""],
    ]


def test_tests_of_cfl_show_which_cluster_was_split(make_run, section, page_of, table):
    split = {
        "round": 2,
        "kind": "split",
        "node": 0,
        "children": [1, 2],
        "clusters": [[0, 1], [2, 3]],
        "p_value": 0.001,
    }
    tests = [
        checked("tested", 2, 0.001),
        {**checked("tested", 4, 0.2), "node": 1, "clusters": [[0, 1]]},
    ]
    run = replace(make_run(), events=[tests[0], split, tests[1]])
    found = section(page_of(run), "checks")
    assert "After 1 of 2 checks a cluster was split" in found.caption
    _, p_values, *_ = found.figures[""]["data"]
    sizes = p_values["marker"]["size"]
    assert sizes[0] > sizes[1]
    assert [row[1] for row in table(found, "Checks").rows] == [
        "found 2 + 2",
        "found 2 in cluster 1",
    ]
    *_, p, gain = event_table(run).columns
    assert [(column.header, *column.cells) for column in (p, gain)] == [
        ("p-value", "0.001"),
        ("gain", "–"),
    ]


def test_answers_left_out_are_counted_by_round_reason_and_client(make_run, section, page_of, table):
    far, further = (
        f"norm {norm}, more than 20 times the median norm of its cluster, 0.687"
        for norm in (21, 36.5)
    )
    events = [
        {
            "round": 1,
            "kind": "left_out",
            "node": 0,
            "query": "train",
            "clients": {"0": "norm 7.5", "1": "no answer"},
        },
        {
            "round": 3,
            "kind": "left_out",
            "node": 0,
            "query": "train",
            "clients": {"0": "norm 8.1e+9"},
        },
        {
            "round": 3,
            "kind": "left_out",
            "node": 0,
            "query": "train",
            "clients": {"2": far, "3": further},
        },
        {"round": 3, "kind": "retried", "node": 0, "query": "train", "clients": 2, "answered": 1},
    ]
    found = section(page_of(replace(make_run(), events=events)), "faults")
    assert (
        found.caption
        == "5 replies left out, by round and reason. Absent clients were queried again 2 times."
    )
    assert [(bar["name"], bar["x"], bar["y"]) for bar in found.figures[""]["data"]] == [
        ("norm #", [1, 3], [1, 1]),
        ("norm more than 20 times the median norm of its cluster", [1, 3], [0, 2]),
        ("no answer", [1, 3], [1, 0]),
    ]
    assert table(found, "By client").rows == [["0", "2"], ["1", "1"], ["2", "1"], ["3", "1"]]


def test_what_was_limited_is_counted_by_how_and_by_client(make_run, section, page_of, table):
    capped, shortened = (
        "weight 9, limited to 4: 2 times the median weight of all clients",
        "norm 7, scaled down to 5 times the median norm of all clients, 1.2",
    )
    how = {"1": f"{capped}; {shortened}"}
    limited = [
        {"round": n, "kind": "limited", "node": 0, "query": "train", "clients": how} for n in (1, 2)
    ]
    lost = {
        "round": 3,
        "kind": "left_out",
        "node": 0,
        "query": "train",
        "clients": {"0": "no answer"},
    }
    for events, title in ((limited, "Limited replies"), ([*limited, lost], "Replies left out")):
        found = section(page_of(replace(make_run(), events=events)), "faults")
        assert found.title == title
        assert table(found, "Limited updates, by client").rows == [["1", "4"]]
        assert table(found, "Limited updates, by measure").rows == [
            ["weight #, limited to #: 2 times the median weight of all clients", "2"],
            ["norm scaled down to 5 times the median norm of all clients", "2"],
        ]


def test_sums_that_were_not_used_are_listed_with_the_reason(make_run, section, page_of, table):
    event = {"round": 2, "node": 0, "query": "train", "clients": [0, 1, 2]}
    events = [
        {"kind": "sum_clipped", **event, "clipped": 2, "norm": 3.5},
        {"kind": "sum_rejected", **event, "because": "too long"},
        {"kind": "sum_unguarded", **event, "sums": 1, "because": "few clients"},
    ]
    found = section(page_of(replace(make_run(), events=events)), "faults")
    assert found.title == "Limited replies"
    assert table(found, "Sums").rows == [
        ["2", "rejected", "train", "3", "too long"],
        ["2", "unguarded", "train", "3", "few clients"],
        ["2", "clipped", "train", "3", "2 updates to norm 3.5"],
    ]


def test_newcomers_are_shown_as_assign_wrote_them(make_run, section, page_of, table):
    row = {"name": "late", "path": [0, 2], "fits": False, "margin": 0.25}
    row |= {"accuracy": 0.9, "accuracy_root": 0.5, "accuracy_own": 0.7, "accuracy_fine_tuned": 0.95}
    summary = {"newcomers": 1, "fit_nowhere": 1, "assignment_accuracy": 1.0, **row}
    found = section(
        page_of(make_run(), newcomers={"summary": summary, "newcomers": [row]}), "newcomers"
    )
    assert [trace["y"] for trace in found.figures[""]["data"]] == [[0.9], [0.5], [0.7], [0.95]]
    assert (
        "100 % were assigned to clients of the same true cluster. 1 fit no cluster" in found.caption
    )
    lines = table(found, "Newcomers").rows
    assert lines[0] == [
        "late",
        "0 › 2 (fits no cluster)",
        "0.25",
        "90.0 %",
        "50.0 %",
        "70.0 %",
        "95.0 %",
    ]
    assert lines[1][0] == "mean"


def test_who_joined_and_left_is_told_without_newcomers_too(make_run, section, page_of, table):
    events = [
        {"round": 2, "kind": "joined", "node": 1, "clients": [7, 8]},
        {"round": 3, "kind": "left", "node": 0, "clients": [1]},
    ]
    found = section(page_of(replace(make_run(), events=events)), "newcomers")
    assert table(found, "Clients that joined or left").rows == [
        ["2", "joined", "1", "7, 8"],
        ["3", "left", "0", "1"],
    ]


def test_a_run_of_a_config_names_the_command_that_repeats_it(make_run, section, page_of, tmp_path):
    config = check_config({"seed": 3, "data": {"name": "digits", "clients": 4}}).as_dict()
    run = replace(make_run(), config={**config, "versions": {"torch": "2"}})
    subject = RunView(run, folder=tmp_path / "my run")
    assert repeat_command(subject) == f"fedclade run '{tmp_path}/my run/config.toml'"
    assert repeat_command(RunView(run)) == "fedclade run config.toml"
    found = section(page_of(run), "config")
    assert found.texts["Config, with every default filled in"].startswith("seed = 3\n")
    assert "versions" not in found.texts["Config, with every default filled in"]
    assert found.tables[0].rows == [["torch", "2"]]


def test_parts_of_a_model_and_a_task_are_settings_like_others(make_run, section, page_of):
    parts = {
        "model": {
            "name": "mlp",
            "personal": ["3.*", "a, b"],
            "adapter": {"kind": "lora", "targets": ["1.*"]},
        },
        "task": {"name": "regression", "metrics": ["mae"], "class_weights": []},
        "algorithm": {"name": "ifca", "long": [0.123456] * 20},
    }
    text = section(page_of(replace(make_run(), config=parts)), "config").texts[
        "Config, with every default filled in"
    ]
    for line in (
        'personal = ["3.*", "a, b"]',
        'targets = ["1.*"]',
        'metrics = ["mae"]',
        "class_weights = []",
    ):
        assert line in text.splitlines()
    assert tomllib.loads(text) == parts
    assert as_texts(parts) == {
        **{"model.name": "mlp", "model.personal": "3.*, a, b", "model.adapter.kind": "lora"},
        **{
            "model.adapter.targets": "1.*",
            "task.name": "regression",
            "task.metrics": "mae",
            "task.class_weights": "–",
        },
        **{"algorithm.name": "ifca", "algorithm.long": ", ".join(["0.123456"] * 20)},
    }


def test_a_run_of_python_has_no_command(make_run, section, page_of):
    run = replace(make_run(), config={"algorithm": {"name": "cfl", "unheard_of": 1}})
    found = section(page_of(run), "config")
    assert list(found.texts) == ["Config, with every default filled in"]
    assert "the same call repeats it" in found.caption


def test_a_run_whose_last_round_was_not_evaluated_can_be_shown(page_of):
    """As it is while a run goes on."""
    raw = {
        "rounds": 3,
        "evaluate_every": 2,
        "data": {"name": "digits", "clients": 3, "samples_per_client": 30},
    }
    config, seen = check_config(raw), []

    class Follows(Callback):
        def on_round(self, record: RoundRecord, /) -> None:
            seen.extend([run] if (run := record.so_far()) else [])

    config.run(config.federation(), callbacks=[Follows()])
    assert [run.summary["rounds"] for run in seen] == [2, 3], (
        "not before there is something to show"
    )
    early = json.dumps(seen[0].summary["accuracy"])
    assert page_of(seen[0]).cards[0].value != "–"
    assert json.dumps(seen[0].summary["accuracy"]) == early
    assert len(seen[0].metric_rows) == 2, "later rounds do not change it"


def test_the_tree_of_many_clusters_draws_the_largest(make_run, section, page_of):
    found = section(page_of(make_run(star=True, clients=60, rounds=1)), "tree")
    (picture,) = found.trees.values()
    assert len(picture.branches) == 1 + 40
    assert found.caption.endswith("The 40 largest of 60 clusters are drawn.")


def test_the_tree_says_what_each_cluster_is(split_run, section, page_of):
    (picture,) = section(page_of(split_run), "tree").trees.values()
    root, one, two, three, four = picture.branches
    assert [branch.id for branch in picture.branches] == [0, 1, 2, 3, 4]
    assert (two.level, two.parent, two.is_leaf) == (2, 0, False)
    assert two.end == three.start == four.start
    assert one.end == four.end
    assert two.y == (three.y + four.y) / 2
    assert root.thickness > one.thickness > three.thickness
    assert (one.colour, three.colour, two.colour, root.colour) == ("@c0", "@c1", "@muted", "@ink")
    assert dict(two.facts) == {
        **{
            "clients": "2",
            "rounds": "2 to 2",
            "accuracy before its split": "87.0 %",
            "purity": "50 %",
        },
        **{"mean norm at its split": "0.50", "max norm at its split": "1.00"},
        **{"α cross max at its split": "−0.10", "γ bound at its split": "0.74"},
    }
    assert [(share.label, share.inside, share.overall, share.width) for share in two.truth] == [
        (1, 1, 1, 50.0),
        (2, 1, 1, 50.0),
    ]
    assert one.members == "0, 1"
    assert one.spoken.startswith("cluster 1: clients 2, rounds 2 to 4, accuracy 64.0 %")


def test_the_label_of_a_short_bar_does_not_cover_the_parents_bar(make_run, section, page_of):
    run = make_run([(11, 0)], rounds=12)
    (picture,) = section(page_of(run), "tree").trees.values()
    root, above, below = picture.branches
    assert above.y < root.y < below.y
    assert above.side == below.side == "end"
    assert above.label_y < above.y - above.thickness / 2
    assert below.label_y > below.y + below.thickness / 2


def test_clusters_without_members_are_not_drawn(make_run, section, page_of):
    tree = ParameterTree.star([[0, 1, 2, 3], []], torch.zeros(1))
    rows = [row | {"cluster": 1} for row in make_run().client_rows]
    run = replace(
        make_run(), tree=tree, cluster_rows=[], similarities=(), client_rows=rows, events=[]
    )
    found = section(page_of(run), "tree")
    (picture,) = found.trees.values()
    assert [branch.id for branch in picture.branches] == [0, 1]
    assert found.caption.endswith("1 cluster without members not drawn.")


def test_quantiles_are_those_of_the_summary(make_run, section, page_of, table):
    found = section(page_of(make_run(accuracy=spread([0.1, 0.2, 0.9, 1.0]))), "clients")
    quantiles = table(found, "Quantiles of the clients’ accuracy")
    assert quantiles.columns[0] == "minimum"
    assert (quantiles.rows[0][0], quantiles.rows[0][-1]) == ("10.0 %", "100.0 %")
