import io
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import fedclade
from fedclade.core.params import Layout
from fedclade.core.tree import ParameterTree
from fedclade.report.page.one_run import run_cards
from fedclade.report.run_view import RunView
from fedclade.report.tables import (
    check_table,
    cluster_table,
    decision_tables,
    event_table,
    facts,
    run_table,
    tree_view,
)
from fedclade.tasks.metrics import spread


def lines(renderable, width=120) -> list[str]:
    """Render as a terminal without colours would; without the blanks at both ends."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return [line.strip() for line in console.export_text().splitlines() if line.strip()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_run_table_shows_every_number_of_the_summary(summary_run):
    run = summary_run(
        accuracy={
            **summary_run().summary["accuracy"],
            "mean": 0.9234,
            "std": 0.012,
            "worst10_mean": 0.81,
        },
        clusters={"found": 4, "true": 5, "ari": 0.876, "nmi": 0.9, "sizes": [5, 5, 5, 5]},
        target={
            "accuracy": 0.95,
            "share_of_clients": 0.4,
            "rounds_to_target": 12,
            "bytes_to_target": 3_210_000,
        },
        bytes_up=43_400_000,
        steps={"total": 12_345, "of_cohorts": 10_000, "ratio": 1.2345},
        seed=7,
    )
    text = "\n".join(lines(run_table(run)))
    assert "cfl on digits, 4 clients, seed 7" in text
    assert "mean 92.3 %, std 1.2 % over the clients" in text
    assert "worst tenth 81.0 %" in text
    assert "4 found, 5 true; sizes 5, 5, 5, 5" in text
    assert "ARI 0.88, NMI 0.90" in text
    assert "reached by the mean after 12 rounds and 3.2 MB; 40 % of the clients at the end" in text
    assert "43.4 MB up, 2.0 kB down" in text
    assert "12,345 steps, 1.23 × FedAvg's (10,000)" in text
    assert "1 min 01 s: train 1 min 00 s, evaluate 0.5 s, server 0.5 s" in text


def test_run_table_has_the_round_that_validation_data_chose(summary_run):
    of = {
        "metric": "accuracy",
        "round": 3,
        "validation": {"accuracy": 0.8},
        "test": {"accuracy": 0.75},
    }
    told = "\n".join(lines(run_table(summary_run(chosen=of))))
    assert "round 3, best on validation data: accuracy 80.0 % on them" in told
    assert "on test data accuracy 75.0 %" in told


def test_run_table_says_what_stays_with_clients(summary_run):
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    run = replace(summary_run(), layout=Layout.of(module, ["1.*"]))
    assert (
        "personal  1.weight, 1.bias: 6 of 14 numbers of each client's model stay on the client"
        in lines(run_table(run))
    )
    assert not [line for line in lines(run_table(summary_run())) if line.startswith("personal")]


def test_run_table_counts_sums_that_were_rejected_clipped_and_unguarded(summary_run):
    """Under secure aggregation nobody sees a single update, so what was wrong is known of sums alone."""
    event = {"node": 0, "query": "train", "clients": [0, 1, 2]}
    events = [
        {"round": 1, "kind": "sum_unguarded", **event, "sums": 1, "because": "few"},
        {"round": 2, "kind": "sum_clipped", **event, "clipped": 2, "norm": 3.5},
        {"round": 3, "kind": "sum_clipped", **event, "clipped": 1, "norm": 3.5},
        {"round": 3, "kind": "sum_rejected", **event, "because": "too long"},
    ]
    shown = [cells(line) for line in lines(run_table(replace(summary_run(), events=events)))]
    assert ["sums rejected", "1; the models of their clusters were not changed"] in shown
    assert ["updates clipped", "3 in 2 sums, by network.secure_norm"] in shown
    assert [
        "sums unguarded",
        "from round 1 on, a single client can determine the mean of a cluster",
    ] in shown
    assert "sums" not in "\n".join(lines(run_table(summary_run())))


def test_run_table_counts_answers_that_were_left_out(summary_run):
    event = {"round": 1, "kind": "left_out", "node": 0, "query": "train"}
    events = [
        {**event, "clients": {"0": "dropped out", "3": "too late"}},
        {**event, "clients": {"1": "loss nan"}},
    ]
    for some, text in (
        (events, "3 replies: 2 absent, 1 invalid"),
        (events[1:], "1 reply: 0 absent, 1 invalid"),
    ):
        assert ["left out", text] in [
            cells(line) for line in lines(run_table(replace(summary_run(), events=some)))
        ]
    assert "left out" not in "\n".join(lines(run_table(summary_run())))


def test_run_table_tells_who_came_and_went_and_who_was_kept_out(summary_run):
    events = [
        {"round": 2, "kind": "disconnected", "node": 0, "clients": [0, 3]},
        {"round": 3, "kind": "reconnected", "node": 0, "clients": [3]},
        {
            "round": 3,
            "kind": "refused",
            "node": 0,
            "nodes": {"77": "it has no secret", "78": "it has [no] model"},
        },
    ]
    shown = [cells(line) for line in lines(run_table(replace(summary_run(), events=events)))]
    assert ["connections", "2 lost, 1 restored"] in shown
    assert ["refused", "2 nodes, the last 78: it has [no] model"] in shown
    nothing = "\n".join(lines(run_table(summary_run())))
    assert "connections" not in nothing
    assert "refused" not in nothing


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (
            54725.3,
            "ε = 54,725 at δ = 1e-05, client level, towards everybody; 60 updates of the client that sent most",
        ),
        (
            12.3456,
            "ε = 12.3 at δ = 1e-05, client level, towards everybody; 60 updates of the client that sent most",
        ),
        (None, "clipped, without noise; 60 updates of the client that sent most"),
    ],
)
def test_run_table_tells_what_private_clients_spent(summary_run, epsilon, text):
    run = summary_run()
    spent = {
        "epsilon": epsilon,
        "delta": 1e-5,
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "releases": 60,
    }
    assert ["privacy", text] in [
        cells(line)
        for line in lines(run_table(replace(run, summary=run.summary | {"privacy": spent})))
    ]
    assert "privacy" not in "\n".join(lines(run_table(run)))
    spent |= {"level": "example", "steps": 1200}
    told = dict(facts(replace(run, summary=run.summary | {"privacy": spent})))["privacy"]
    assert told.endswith(" for each example; 1,200 noisy steps of the client that spent most")


def test_run_table_leaves_out_what_is_not_known(summary_run):
    text = "\n".join(lines(run_table(summary_run())))
    assert "1 found; sizes 4" in text
    for absent in ("ARI", "target", "perplexity", "None"):
        assert absent not in text


def test_run_table_says_that_a_target_was_missed(summary_run):
    target = {
        "accuracy": 0.95,
        "share_of_clients": 0.25,
        "rounds_to_target": None,
        "bytes_to_target": None,
    }
    text = "\n".join(lines(run_table(summary_run(target=target))))
    assert "not reached by the mean; 25 % of the clients at the end" in text


def test_run_table_of_a_language_model_has_perplexity(summary_run):
    perplexity = spread([30.0, 42.0], lower_is_better=True)
    _, counts, worst, second, *_ = [
        cells(line) for line in lines(run_table(summary_run(perplexity=perplexity)))[1:]
    ]
    assert counts == ["perplexity", "mean 36.0, std 6.00 over the clients"]
    assert worst[0].endswith("worst tenth 42.0")
    assert second == ["accuracy", "mean 70.0 %, std 0.0 % over the clients"]


def test_markup_in_names_is_not_read_as_markup(summary_run):
    assert "cfl on [red]mine[/red], seed 0" in "\n".join(
        lines(run_table(summary_run(data="[red]mine[/red]")))
    )


def test_cluster_table_lists_current_clusters_in_the_order_of_the_tree(make_run):
    # 0 splits into 1 and 2 after round 1, 1 into 3 and 4 after round 2: depth first the leaves are 3, 4, 2.
    table = lines(cluster_table(make_run([(1, 0), (2, 1)], truth=[0, 1, 2, 2])))
    assert cells(table[1]) == [
        "cluster",
        "size",
        "accuracy",
        "mean norm",
        "max norm",
        "true clusters",
        "clients",
    ]
    assert [cells(line) for line in table[3:]] == [
        ["3", "1", "84.0 %", "0.25", "0.50", "0 (1)", "0"],  # 0.5 + 0.04 + 0.3
        ["4", "1", "94.0 %", "0.25", "0.50", "1 (1)", "1"],
        ["2", "2", "74.0 %", "0.25", "0.50", "2 (2)", "2, 3"],
    ]


def test_cluster_table_without_a_truth_has_no_column_for_it(make_run):
    assert cells(lines(cluster_table(make_run()))[1])[-2:] == ["max norm", "clients"]


def test_cluster_table_of_a_language_model_shows_the_mean_of_perplexities(make_run):
    table = lines(cluster_table(make_run([(1, 0)], language=True)))
    assert cells(table[1])[2] == "perplexity"
    assert [cells(line)[2] for line in table[3:]] == ["11.0", "12.0"]


def test_a_cluster_that_has_not_trained_has_no_norms(make_run):
    last = lines(cluster_table(make_run([(4, 0)])))[-1]
    assert cells(last)[3:5] == ["–", "–"]


def test_cluster_table_counts_the_clusters_that_it_does_not_list(make_run):
    table = lines(cluster_table(make_run(clients=43, star=True, rounds=1)))
    assert table[-1] == "and 3 more clusters"


def test_names_stand_where_they_say_more_than_the_id(make_run):
    run = make_run()
    named = replace(
        run, client_rows=[row | {"name": f"[b]{row['client']}"} for row in run.client_rows]
    )
    assert lines(cluster_table(named))[-1].endswith("[b]0, [b]1, [b]2, [b]3")
    assert lines(tree_view(named.tree, named))[1] == "[b]0, [b]1, [b]2, [b]3"


def test_a_leaf_without_members_is_shown_as_empty(make_run):
    """Client 1 left leaf 2 for leaf 1."""
    run = make_run(star=True, clients=3, truth=[0, 0, 1])
    run = replace(run, tree=run.tree.reassigned({1: 1}))
    assert [cells(line) for line in lines(cluster_table(run))[3:]] == [
        ["1", "2", "69.0 %", "0.25", "0.50", "0 (2)", "0, 1"],
        ["2", "0", "–", "0.25", "0.50"],
        ["3", "1", "84.0 %", "0.25", "0.50", "1 (1)", "2"],
    ]
    assert lines(tree_view(run.tree, run))[4:6] == [
        "├── 2  0 clients · rounds 1–4 · accuracy –",
        "└── 3  1 client · rounds 1–4 · accuracy 84.0 %",
    ]


def test_event_table_lists_splits_with_their_criteria(make_run):
    table = lines(event_table(make_run([(2, 0), (4, 1)])))
    assert cells(table[1]) == [
        "round",
        "cluster",
        "children",
        "sizes",
        "mean norm",
        "max norm",
        "α cross max",
        "γ bound",
    ]
    assert [cells(line) for line in table[3:]] == [
        ["2", "0", "1 + 2", "2 + 2", "0.50", "1.00", "−0.10", "0.74"],
        ["4", "1", "3 + 4", "1 + 1", "0.25", "0.50", "−0.10", "0.74"],
    ]


def test_event_table_counts_rejected_splits_and_gives_the_last_reason(make_run):
    reject = {
        "kind": "rejected",
        "node": 0,
        "clusters": [[0], [1]],
        "because": "gamma_bound <= 0.8",
    }
    run = replace(make_run(), events=[{"round": 2, **reject}, {"round": 3, **reject}])
    assert lines(event_table(run))[-2:] == [
        "No cluster was split.",
        "2 bi-partitions rejected, the last in round 3: gamma_bound <= 0.8",
    ]


def test_only_splits_and_rejected_ones_are_worth_an_event_table(make_run):
    assert decision_tables(make_run([(1, 0)]))
    reject = {"round": 2, "kind": "rejected", "node": 0, "clusters": [[0], [1]], "because": "why"}
    assert decision_tables(replace(make_run(), events=[reject]))
    assert not decision_tables(
        replace(make_run(), events=[{"round": 1, "kind": "joined", "node": 1, "clients": [0]}])
    )


def test_tree_view_shows_lives_members_scores_and_criteria(make_run):
    run = make_run([(1, 0), (3, 2)], truth=[0, 0, 0, 1])
    assert lines(tree_view(run.tree, run)) == [
        "0  4 clients · round 1",
        "0, 1, 2, 3  (true clusters 0 (3), 1 (1); purity 75 %)",
        "split at mean norm 1.00, max norm 2.00, α cross max −0.10, γ bound 0.74",
        "├── 1  2 clients · rounds 2–4 · accuracy 64.0 %",
        "│   0, 1  (true cluster 0)",
        "└── 2  2 clients · rounds 2–3",
        "2, 3  (true clusters 0 (1), 1 (1); purity 50 %)",
        "split at mean norm 0.33, max norm 0.67, α cross max −0.10, γ bound 0.74",
        "├── 3  1 client · round 4 · accuracy 84.0 %",
        "│   2  (true cluster 0)",
        "└── 4  1 client · round 4 · accuracy 94.0 %",
        "3  (true cluster 1)",
    ]


def test_tree_view_in_the_middle_of_a_run_shows_what_the_tree_knows(make_run):
    assert lines(tree_view(make_run([(2, 0)]).tree))[3:5] == [
        "├── 1  2 clients · since round 3",
        "│   0, 1",
    ]


def test_tree_view_says_that_the_model_of_a_split_root_goes_on(make_run):
    tree = make_run([(1, 0), (3, 2)]).tree
    tree = tree.continued(tree.nodes[0].params)
    assert lines(tree_view(tree))[0] == "0  4 clients · round 1 · its model is trained further"


def test_tree_view_of_a_star_says_that_its_root_never_trained(make_run):
    run = make_run(star=True)
    assert lines(tree_view(run.tree, run))[0] == "0  4 clients · never trained"


def test_tree_view_of_a_star_whose_root_goes_on_says_so(make_run):
    run = make_run(star=True)
    root, *leaves = run.tree.nodes
    tree = ParameterTree((replace(root, split_in=None), *leaves))
    assert lines(tree_view(tree, run))[0] == "0  4 clients · rounds 1–4"


def test_tree_view_of_a_split_in_the_last_round_says_that_its_parts_have_not_trained(make_run):
    run = make_run([(4, 0)])
    assert (
        lines(tree_view(run.tree, run))[3] == "├── 1  2 clients · not trained yet · accuracy 64.0 %"
    )


def test_tree_view_shortens_long_lists_and_wide_and_deep_trees(make_run):
    wide = make_run(clients=50, star=True, rounds=1)
    text = lines(tree_view(wide.tree, wide))
    assert text[1] == "0, 1, 2, 3, 4, 5, 6 … 43 more"
    assert text[-1] == "└── and 10 more clusters"

    deep = ParameterTree.root_only(range(2000), torch.zeros(1))
    for number in range(1, 1500):  # one client leaves in every round: deeper than Python's stack
        node = deep.nodes[0 if number == 1 else -2]
        parts = [node.members[1:], node.members[:1]]
        deep = deep.split(
            node.id,
            parts,
            params=node.params,
            cached=[node.params] * 2,
            round_number=number,
            criteria={},
        )
    text = lines(tree_view(deep))
    # 12 levels with one leaf each are shown, and the 13th holds the remaining 1500 - 12.
    assert "└── and 1,488 more clusters" in " ".join(text)


def test_a_real_run_is_shown_whole():
    federation = fedclade.load_federation("digits", clients=4, shift="label_swap", clusters=2)
    run = fedclade.simulate(fedclade.CFL(eps1=10, eps2=0.01), "mclr", federation, rounds=2)
    assert len(lines(event_table(run))) == 3 + sum(event["kind"] == "split" for event in run.events)
    assert len(lines(cluster_table(run))) == 3 + len(run.tree.leaves)
    assert "true" in lines(tree_view(run.tree, run))[1]
    assert any(line.startswith("recovery  ARI") for line in lines(run_table(run)))


def test_tables_do_not_import_matplotlib():
    code = "import sys, fedclade.report.tables; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_table_shows_what_was_found_and_what_was_made_of_it(summary_run):
    told = {
        "node": 0,
        "p_value": 0.00025,
        "level": 0.005,
        "gain": 0.335,
        "gain_before": 0.0,
        "gamma": 0.81,
    }
    events = [
        {"round": 3, "kind": "regrouped", **told, "clusters": [[0, 1, 2], [3]]},
        {
            "round": 11,
            "kind": "checked",
            **told,
            "p_value": 1.0,
            "gamma": None,
            "clusters": [[0, 1, 2, 3]],
        },
    ]
    run = replace(summary_run(), events=events)
    (table,) = decision_tables(run)
    found = [cells(line) for line in lines(table)]
    assert ["3", "changed to 3 + 1", "0.00025", "0.005"] in found
    assert ["11", "unchanged 4", "1", "0.005"] in found
    assert decision_tables(summary_run()) == []
    assert lines(check_table(run)) == lines(table)


def test_tree_view_tells_a_p_value_however_small():
    star = ParameterTree.star([[0, 1], [2]], torch.zeros(3))
    root = replace(star.nodes[0], criteria={"p_value": 0.00025, "gain_before": 0.3})
    text = "\n".join(lines(tree_view(ParameterTree((root, *star.nodes[1:])))))
    assert "split at p-value 0.00025, gain before 0.30" in text


def test_recovery_is_also_that_of_the_clients_in_a_cluster(make_run):
    """Of a million clients few have trained; those that have not are in no cluster."""
    run = make_run([(0, 2)], truth=[0, 0, 1, 1])
    all_in = lines(run_table(run))
    clusters = {**run.summary["clusters"], "sizes": [2, 1], "ari": 0.25, "ari_assigned": 0.75}
    some = replace(run, summary={**run.summary, "clusters": clusters})
    assert "ARI 0.75 of the 3 clients in a cluster" in "\n".join(lines(run_table(some)))
    assert "in a cluster" not in "\n".join(all_in)
    (card,) = (card for card in run_cards(RunView(some)) if card.label == "ARI")
    assert (card.value, card.note) == ("0.75", "of 3 clients in a cluster; 0.25 of all")
