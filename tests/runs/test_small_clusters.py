"""Clusters with few members: merged into others, and nowhere to be read of."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedclade import (
    ConfigError,
    FedEM,
    FedGroup,
    FedSoft,
    LocalTraining,
    Oracle,
    Run,
    RunError,
    export_model,
    simulate,
)
from fedclade.core import (
    Clustered,
    ClusterSplit,
    GroupFounded,
    Joined,
    Node,
    ParameterTree,
    Rejected,
    TooFew,
    Withheld,
)
from fedclade.report import run_table
from fedclade.runs.small_clusters import is_withheld, merge_small
from tests.report.test_tables import lines
from tests.tiny import federation_of, linear

TRUTH = [0] * 8 + [1] * 6 + [3] * 2
FEDERATION = federation_of(TRUTH)
SMALL = (14, 15)


def tree() -> ParameterTree:
    """Return a root of 10 clients, split into 6 and 4, of which the 6 are split into 5 and 1."""
    models = torch.arange(5.0)[:, None]
    root = ParameterTree.root_only(range(10), models[0])
    one = [torch.ones(6, 2), torch.ones(4, 2)]
    split = root.split(
        0, [range(6), range(6, 10)], params=models[0], cached=one, round_number=1, criteria={}
    )
    two = [torch.ones(5, 2), torch.zeros(1, 2)]
    split = split.split(
        1, [range(5), [5]], params=models[1], cached=two, round_number=2, criteria={}
    )
    for leaf in (2, 3, 4):
        split = split.with_model(leaf, models[leaf])
    return split


def run(least=3, **more):
    options = {
        "rounds": 3,
        "local": LocalTraining(batch_size=10),
        "engine": "loop",
        "min_cluster_size": least,
    }
    algorithm = more.pop("algorithm", None) or Oracle(FEDERATION.true_clusters)
    return simulate(algorithm, linear(), FEDERATION, **options | more)


def test_a_small_cluster_goes_into_its_sibling_which_keeps_all_signatures():
    merged, events = merge_small(tree(), 2, [])
    assert merged.nodes[3].members == (0, 1, 2, 3, 4, 5)
    assert torch.equal(merged.nodes[3].cached, torch.tensor([[1.0, 1.0]] * 5 + [[0.0, 0.0]]))
    assert merged.nodes[4].members == ()
    assert torch.equal(merged.nodes[4].params, merged.nodes[3].params)
    assert events == [Withheld(0, 1, 2)]


def test_sums_of_a_group_of_few_founders_are_not_shown():
    few, enough = GroupFounded(3, 2, (0.5,), 0.1), GroupFounded(3, 3, (0.5,), 0.1)
    assert merge_small(tree(), 1, [few])[1] == [few]
    assert merge_small(tree(), 3, [few, enough])[1] == [enough, Withheld(0, 1, 3)]


def test_a_run_shows_no_group_of_few_founders():
    algorithm = FedGroup(groups=3, pretrain_scale=1)
    founded = [run(least, algorithm=algorithm, rounds=1).events for least in (1, 3)]
    kinds = [[event["kind"] for event in events] for events in founded]
    assert "group_founded" in kinds[0]
    assert "group_founded" not in kinds[1]


def test_larger_ones_follow_until_none_is_small():
    """At least 5: the one goes into the 5, and then the 4 into the 6, over the nearest node that has others."""
    merged, events = merge_small(tree(), 5, [])
    assert [leaf.members for leaf in merged.leaves] == [(), tuple(range(10)), ()]
    assert merged.nodes[1].members == tuple(range(10))  # all that are on a client's path hold it
    assert merged.nodes[3].cached is None  # made at another model, and not to be compared
    assert events == [Withheld(0, 2, 5)]


def test_where_all_are_one_cluster_it_stays():
    alone = ParameterTree.root_only([0, 1], torch.zeros(1))
    assert merge_small(alone, 3, []) == (alone, [])
    same = tree()
    assert merge_small(same, 1, [])[0] is same


def test_events_say_nothing_of_what_is_gone():
    split = ClusterSplit(1, clusters=((0, 1, 2, 3, 4), (5,)), children=(3, 4))
    three = ClusterSplit(0, clusters=((0, 1, 2), (3, 4), (5,)), children=(1, 2, 3))
    clustered = Clustered(
        0,
        metric="l2",
        linkage="ward",
        threshold=1.0,
        sizes=(5, 1),
        clients=(0, 1),
        merges=((0, 1, 1.0),),
    )
    given = [
        split,
        clustered,
        Joined(4, (5,)),
        Joined(3, (5,)),
        Joined(0, (5,)),
        TooFew(4, 1),
        TooFew(2, 1),
    ]
    _, events = merge_small(tree(), 2, given)
    assert events == [Joined(0, (5,)), TooFew(2, 1), Withheld(0, 1, 2)]
    nodes = [Node(0, None, tuple(range(6)), torch.zeros(1), split_in=1)]
    nodes += [
        Node(i, 0, members, torch.zeros(1)) for i, members in enumerate(three.clusters, start=1)
    ]
    _, events = merge_small(ParameterTree(tuple(nodes)), 2, [three])
    assert events[0] == replace(three, clusters=((0, 1, 2, 5), (3, 4)), children=(1, 2))


def says(row, node: int) -> bool:
    """Whether a line of a file is about a node."""
    return isinstance(row, dict) and row.get("node") == node and row["kind"] != "withheld"


def test_events_say_nothing_of_small_groups_where_none_is_gone():
    alone = ParameterTree.root_only(range(10), torch.zeros(1))
    rejected = Rejected(
        0, clusters=((7,), (0, 1, 2, 3, 4, 5, 6, 8, 9)), because="fewer than 2 members"
    )
    assert merge_small(alone, 5, [rejected, TooFew(0, 1)]) == (alone, [TooFew(0, 1)])


@pytest.mark.parametrize("algorithm", [FedEM(clusters=2), FedSoft(clusters=2, selection=4)])
def test_methods_whose_clients_belong_to_all_clusters_are_refused(algorithm):
    with pytest.raises(
        ConfigError, match=rf"every client trains all models of {type(algorithm).__name__}"
    ):
        simulate(algorithm, linear(), FEDERATION, rounds=1, min_cluster_size=3)


def test_of_a_small_cluster_nothing_is_reported(tmp_path):
    made = run(folder=tmp_path / "run")
    assert made.summary["clusters"]["sizes"] == [10, 6]
    small = next(leaf.id for leaf in made.tree.leaves if not leaf.members)
    assert all(row["node"] != small for row in made.cluster_rows if row["round"] > 0)
    assert all(row["cluster"] != small for row in made.client_rows)
    assert all(matrix.node != small for matrix in made.similarities)
    assert not [row for row in made.events if row["kind"] != "withheld" and row["node"] == small]
    for path in (tmp_path / "run").rglob("*.jsonl"):
        assert not [
            row for row in map(json.loads, path.read_text().splitlines()) if says(row, small)
        ]
    text = "\n".join(lines(run_table(made)))
    assert "1 cluster of fewer than 3 members, merged into others" in text


def test_the_model_of_a_small_cluster_is_not_kept_and_not_exported(tmp_path):
    made = run(folder=tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    small = next(leaf for leaf in loaded.tree.leaves if not leaf.members)
    assert is_withheld(loaded.tree, small.id, 3)
    assert any(
        torch.equal(small.params, leaf.params) or leaf.members for leaf in loaded.tree.leaves
    )
    with pytest.raises(
        RunError, match=f"node {small.id} has 0 members, fewer than privacy.min_cluster_size, 3"
    ):
        export_model(loaded, tmp_path / "model.safetensors", node=small.id)
    # that of the cluster that it is in now
    export_model(loaded, tmp_path / "client.safetensors", client=SMALL[0])
    assert made.tree.leaf_of[SMALL[0]] != small.id


def test_no_small_cluster_ever_trains():
    """That of the oracle is there from the start, and is merged before the first round."""
    made = run()
    assert {row["node"] for row in made.cluster_rows} == {
        leaf.id for leaf in made.tree.leaves if leaf.members
    }
    assert [row["round"] for row in made.events if row["kind"] == "withheld"] == [1]


def test_with_a_size_of_one_nothing_changes():
    plain, one = (
        run(least=1),
        simulate(
            Oracle(FEDERATION.true_clusters),
            linear(),
            FEDERATION,
            rounds=3,
            local=LocalTraining(batch_size=10),
            engine="loop",
        ),
    )
    assert plain.summary["clusters"] == one.summary["clusters"]
    assert "min_cluster_size" not in plain.config["privacy"]


def test_sizes_that_make_no_sense_are_named():
    with pytest.raises(ConfigError, match=r"privacy\.min_cluster_size should be at least 1, got 0"):
        run(least=0)
    with pytest.raises(
        ConfigError,
        match=r"privacy\.min_cluster_size should be at most the number of clients, 16, got 17",
    ):
        run(least=17)
