"""Reports of runs in which clients came, left, and did not answer: clients without a cluster, a score, or a name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from fedclade import LocalTraining, Run, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.channel.retry import Faults
from fedclade.core.events import Clustered
from fedclade.core.tree import ParameterTree
from fedclade.data import Federation
from fedclade.report import cluster_table, dendrogram_figure, show_run, similarity_figure
from fedclade.report.curves import Merges
from fedclade.report.page import Page, RunView, page_html, run_page
from fedclade.report.page.section import Section
from fedclade.report.run_view import ClientOrder, Outcome
from fedclade.runs.churn import Churn
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

TRUTH = [0, 1, 2, 3, 0, 1, 2, 3]

OPTIONS = {
    "cfl": {"eps1": 100.0, "eps2": 1e-4},
    "fl_hc": {"rounds_before": 1, "n_clusters": 3},
    "fedgroup": {"groups": 2, "pretrain_scale": 2},
    "ifca": {"clusters": 2},
    "pacfl": {"n_clusters": 3},
    "rcfl": {},
}


def with_newcomers() -> Federation:
    """Eight clients, and two more who come later."""
    everybody = federation_of([*TRUTH, 0, 1])
    truth = dict(enumerate(TRUTH))
    newcomers = replace(everybody, clients=everybody.clients[8:], true_clusters={8: 0, 9: 1})
    return replace(
        everybody, clients=everybody.clients[:8], true_clusters=truth, newcomers=newcomers
    )


def run_of(name: str, **settings) -> Run:
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), dict(enumerate(TRUTH)))
    settings = {
        "local": LocalTraining(batch_size=12),
        "rounds": 4,
        "engine": "loop",
        "model": perceptron,
    } | settings
    return simulate(algorithm, settings.pop("model"), with_newcomers(), **settings)


def normed(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))


def reported(run: Run) -> Page:
    """Return a run's page after all that a report is made of was made."""
    show_run(run, Console(quiet=True))
    cluster_table(run)
    similarity_figure(run)
    dendrogram_figure(run)
    page = run_page(RunView(run))
    page_html(page)
    return page


WAYS = {
    "join": {"presence": Churn(join_round=2)},
    "leave": {"presence": Churn(leave_round=3)},
    "join and leave": {"presence": Churn(join_round=2, leave_round=4)},
    "join, and are absent": {
        "presence": Churn(join_round=2, leave_round=4),
        "faults": Faults(dropout=0.6),
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIONS)
def test_runs_whose_clients_come_and_go_are_reported(name, way):
    run = run_of(name, **WAYS[way])
    sections = {section.title: section for section in reported(run).sections}
    assert {"Parameter tree", "Scores of the clients", "Config"} <= set(sections)
    check_clients(run, sections)
    assert bool(clients_of(run, "left")) == (way != "join")
    if way != "leave":
        assert clients_of(run, "joined") >= {8, 9}
    (table,) = sections["Newcomers"].tables
    assert table.title == "Clients that joined or left"
    told = [event for event in run.events if event["kind"] in ("joined", "left")]
    assert [(row[0], row[1]) for row in table.rows] == [
        (str(event["round"]), event["kind"]) for event in told
    ]
    assert [row[3] for row in table.rows] == [
        ", ".join(map(str, event["clients"])) for event in told
    ]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in OPTIONS])
def test_so_are_those_of_all_other_methods(name: str):
    """FedBN needs a layer of normalization to keep, and FedBuff draws by its own clock who is there."""
    ways = {} if name == "fedbuff" else WAYS["leave"]
    run = run_of(name, **ways, **({"model": normed} if name == "fedbn" else {}))
    sections = {section.title: section for section in reported(run).sections}
    assert "Config" in sections
    check_clients(run, sections)
    if name != "fedbuff":
        assert clients_of(run, "left")
        assert any(row[1] == "left" for row in sections["Newcomers"].tables[0].rows)


def clients_of(run: Run, kind: str) -> set[int]:
    """Return the clients of all events of a kind."""
    return {client for event in run.events if event["kind"] == kind for client in event["clients"]}


def check_clients(run: Run, sections: dict[str, Section]) -> None:
    """Check that a page shows exactly the clients that were evaluated at the end, each with its own accuracy."""
    last = max(row["round"] for row in run.client_rows)
    scores = {row["client"]: row["accuracy"] for row in run.client_rows if row["round"] == last}
    assert scores
    assert not clients_of(run, "left") & set(scores)
    # behind those to compare with, if there are any
    points = sections["Scores of the clients"].figures[""]["data"][-1]
    shown = {
        int(text.partition(",")[0][1:]): score
        for text, score in zip(points["text"], points["y"], strict=True)
    }
    assert shown == pytest.approx(scores)
    assert points["y"] == sorted(points["y"])


def test_a_similarity_matrix_of_a_client_that_waits_at_an_inner_node_is_reported(make_run):
    """A client that was absent when its cluster was split stays with its node, which is neither a leaf nor the root."""
    run = make_run([(2, 0), (3, 1)], truth=[0, 0, 1, 1])
    nodes = [replace(node, members=() if node.id == 3 else node.members) for node in run.tree.nodes]
    run = replace(run, tree=ParameterTree(tuple(nodes)))
    assert run.tree.stragglers == {1: (0,)}
    assert ClientOrder(run).clusters([0, 1, 2, 3]) == [(0, 1, "1"), (1, 1, "4"), (2, 2, "2")]
    assert ClientOrder(run).rows((3, 2, 1, 0)) == [3, 2, 1, 0]
    assert "Similarity of the clients’ updates" in [
        section.title for section in reported(run).sections
    ]


def gone_from(make_run, *clients: int) -> Run:
    """Clients that were split into 0, 1 and 2, 3 in round 2, some of whom were evaluated for the last time then."""
    run = make_run([(2, 0)], truth=[0, 0, 1, 1])
    rows = [row for row in run.client_rows if row["client"] not in clients or row["round"] <= 2]
    tree = ParameterTree(tuple(replace(node, cached=None) for node in run.tree.nodes))
    return replace(run, tree=tree.without(clients), client_rows=rows)


def test_clients_that_left_stand_last_and_keep_their_name_and_truth(make_run):
    run = gone_from(make_run, 0)
    order, outcome = ClientOrder(run), Outcome.of(run)
    assert [(0, 1, 2, 3)[row] for row in order.rows((0, 1, 2, 3))] == [1, 2, 3, 0]
    assert order.clusters([1, 2, 3, 0]) == [(0, 1, "1"), (1, 2, "2"), (3, 1, "left")]
    assert order.true_clusters([1, 2, 3, 0]) == [(0, 1, 0), (1, 2, 1), (3, 1, 0)]
    assert outcome.truth == {0: 0, 1: 0, 2: 1, 3: 1}
    assert list(outcome.rows) == [1, 2, 3]
    assert [text.get_text() for text in similarity_figure(run).axes[0].get_xticklabels()] == [
        "1",
        "2",
        "left",
    ]


def test_clients_that_never_answered_an_evaluation_go_by_their_id(make_run):
    run = make_run([(2, 0)], truth=[0, 0, 1, 1])
    run = replace(
        run,
        client_rows=[
            {**row, "name": f"site {row['client']}"} for row in run.client_rows if row["client"]
        ],
    )
    outcome = Outcome.of(run)
    assert [outcome.name(client) for client in range(4)] == ["0", "site 1", "site 2", "site 3"]
    assert outcome.truth == {1: 0, 2: 1, 3: 1}
    assert outcome.mean_score([0]) is None
    assert outcome.mean_score([0, 1]) == outcome.mean_score([1])
    assert ClientOrder(run).true_clusters([0, 1, 2, 3]) == [(1, 1, 0), (2, 2, 1)]
    reported(run)


def test_merges_of_clients_that_left_take_the_colour_of_those_who_stayed():
    tree = ParameterTree.root_only(range(4), torch.zeros(1))
    step = Clustered(
        0,
        metric="l2",
        linkage="ward",
        threshold=1.5,
        sizes=(2, 2),
        clients=(0, 1, 2, 3),
        merges=((0, 1, 1.0), (2, 3, 1.0), (4, 5, 2.0)),
    )
    zero = torch.zeros(1)
    tree = tree.split(
        0, [[0, 1], [2, 3]], params=zero, cached=[zero, zero], round_number=1, criteria={}
    )
    tree = ParameterTree(tuple(replace(node, cached=None) for node in tree.nodes)).without([0])
    merges = Merges(Run({}, {}, tree, [], [], [], []), 1, step)
    assert merges.found == [None, 1, 2, 2]
    assert merges.nodes == [None, 1, 2, 2, 1, 2, None]


def test_a_run_that_nobody_was_evaluated_in_at_the_end_is_measured_by_nothing(make_run):
    run, other = make_run(), replace(make_run(), client_rows=[])
    cards = run_page(RunView(run, other, "another")).cards
    assert cards[0].note.startswith("std ")


def test_the_runs_above_do_split_and_lose_clients():
    run = run_of("cfl", **WAYS["join and leave"])
    assert len(run.tree.nodes) > 1
    assert any(event["kind"] == "left" for event in run.events)
