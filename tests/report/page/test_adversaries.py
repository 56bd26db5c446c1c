"""What tables, pages and comparisons say of adversaries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedclade.report.comparison import Comparison
from fedclade.report.page.faults import adversaries_section
from fedclade.report.run_view import RunView
from fedclade.report.tables import facts

TOLD = {
    "kind": "backdoor",
    "ids": [2, 3],
    "scores": {"accuracy": {"honest": 0.6, "honest_worst10": 0.5, "adversaries": 0.9}},
    "clusters": {"of_adversaries": 1, "of_both": 1, "adversaries_with_honest": 1},
    "ari_honest": 0.5,
    "attack_success": 0.25,
}


@pytest.fixture
def run(make_run):
    """Clients 0 and 1 in cluster 1, with 2; 3 alone in cluster 3."""
    made = make_run([(1, 0), (2, 2)], truth=[0, 0, 1, 2])
    columns = {"accuracy_adversaries": 0.9, "attack_success": 0.25}
    rows = [
        {"round": number, "accuracy_honest": 0.5 + number / 100, **columns} for number in (1, 2, 3)
    ]
    return replace(made, summary={**made.summary, "adversary": TOLD}, metric_rows=rows)


def test_the_terminal_says_how_honest_clients_fare(run):
    lines = [value for _, value in facts(run)]
    assert "2 of 4 clients, backdoor; honest clients: accuracy 60.0 %, worst tenth 50.0 %" in lines
    assert (
        "1 cluster of adversaries alone, 1 adversary in clusters with honest clients; ARI 0.50 of honest clients"
        in lines
    )
    assert "backdoor: succeeds with 25.0 % of honest clients' test examples" in lines


def test_the_page_draws_both_and_lists_clusters(run):
    section = adversaries_section(RunView(run))
    assert section is not None
    assert section.caption == (
        "Mean test accuracy of honest clients and of 2 adversaries of kind backdoor. 1 cluster without honest clients; "
        "1 adversary in clusters with honest clients. ARI of honest clients: 0.50. The backdoor succeeds with 25.0 % "
        "of their test examples."
    )
    lines = {trace["name"]: trace for trace in section.figures[""]["data"]}
    assert lines.keys() == {"honest clients", "adversaries", "backdoor"}
    assert lines["honest clients"]["y"] == [0.5 + row["round"] / 100 for row in run.metric_rows]
    (table,) = section.tables
    mine = {row[0]: row[1:] for row in table.rows}
    for leaf in run.tree.leaves:
        liars = [client for client in leaf.members if client in TOLD["ids"]]
        assert mine[str(leaf.id)] == [
            str(len(leaf.members) - len(liars)),
            str(len(liars)),
            ", ".join(map(str, liars)),
        ]


def test_without_adversaries_nothing_is_said(run, make_run):
    plain = make_run()
    assert adversaries_section(RunView(plain)) is None
    assert "adversaries" not in dict(facts(plain))
    kind = {**TOLD, "kind": "ipm", "attack_success": None, "ari_honest": None}
    rows = [{**row, "attack_success": None} for row in run.metric_rows]
    section = adversaries_section(
        RunView(replace(run, summary={**run.summary, "adversary": kind}, metric_rows=rows))
    )
    assert section is not None
    assert section.caption.endswith("1 adversary in clusters with honest clients.")
    assert {trace["name"] for trace in section.figures[""]["data"]} == {
        "honest clients",
        "adversaries",
    }


def test_a_comparison_has_columns_of_them_where_a_run_has_some(summary_run):
    plain, attacked = summary_run(), summary_run(adversary=TOLD)
    columns = Comparison({"plain": [plain], "attacked": [attacked]}).columns
    assert columns["honest clients, %"] == ["–", "60.0"]
    assert columns["backdoor"] == ["–", "0.25"]
    assert not {"honest clients, %", "backdoor"} & Comparison({"plain": [plain]}).columns.keys()
    assert "honest" in Comparison({"attacked": [attacked]}).csv()
    assert "honest" not in Comparison({"plain": [plain]}).csv()


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        (
            "",
            "2 of 4 clients, false losses, shifts; honest",
            "2 adversaries with false losses, shifts. 1 cluster",
        ),
        (
            "scaled",
            "2 of 4 clients, scaled, false losses, shifts; honest",
            "2 adversaries of kind scaled with false losses, shifts. 1 cluster",
        ),
    ],
)
def test_false_statements_are_named(run, kind, line, words):
    told = {**TOLD, "kind": kind, "lies": ["losses", "shifts"], "attack_success": None}
    run = replace(run, summary={**run.summary, "adversary": told})
    assert any(value.startswith(line) for _, value in facts(run))
    section = adversaries_section(RunView(run))
    assert section is not None
    assert words in section.caption
