"""Events as rows, and rows as events."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from fedclade.core import (
    Checked,
    Clustered,
    ClusterSplit,
    Empty,
    Event,
    Joined,
    LeftOut,
    Refused,
    Regrouped,
    Rejected,
    Released,
    Restart,
    Retried,
)
from fedclade.runs import events_of
from fedclade.runs.store.event_rows import event_of

CRITERIA = {"mean_norm": 0.1, "max_norm": 2.0, "alpha_cross_max": -0.5, "gamma_bound": 0.9}
CHECK = {"p_value": 0.5, "gain": 0.1, "gain_before": 0.0, "level": 0.01}

ROWS = [
    (
        ClusterSplit(0, **CRITERIA, clusters=((0, 2), (1,)), children=(1, 2)),
        {"kind": "split", "node": 0, **CRITERIA, "clusters": [[0, 2], [1]], "children": [1, 2]},
    ),
    (
        ClusterSplit(0, mean_norm=0.1, max_norm=2.0, clusters=((0,), (1,)), children=(1, 2)),
        {
            "kind": "split",
            "node": 0,
            "mean_norm": 0.1,
            "max_norm": 2.0,
            "clusters": [[0], [1]],
            "children": [1, 2],
        },
    ),
    (
        Rejected(3, **CRITERIA, clusters=((0,), (1,)), because="small"),
        {"kind": "rejected", "node": 3, **CRITERIA, "clusters": [[0], [1]], "because": "small"},
    ),
    (
        Checked(0, **CHECK, gamma=None, clusters=((0, 1),)),
        {"kind": "checked", "node": 0, **CHECK, "gamma": None, "clusters": [[0, 1]]},
    ),
    (
        Clustered(
            0,
            metric="l1",
            linkage="ward",
            threshold=None,
            sizes=(2,),
            clients=(4, 7),
            merges=((0, 1, 0.5),),
        ),
        {
            **{
                "kind": "clustered",
                "node": 0,
                "metric": "l1",
                "linkage": "ward",
                "threshold": None,
            },
            **{"sizes": [2], "clients": [4, 7], "merges": [[0, 1, 0.5]]},
        },
    ),
    (Joined(2, (4, 5)), {"kind": "joined", "node": 2, "clients": [4, 5]}),
    (Empty(2), {"kind": "empty", "node": 2}),
    (
        Restart(0, 1, (0.5, 0.25)),
        {"kind": "restart", "node": 0, "chosen": 1, "losses": [0.5, 0.25]},
    ),
    (
        LeftOut(0, "train", {2: "asleep"}),
        {"kind": "left_out", "node": 0, "query": "train", "clients": {"2": "asleep"}},
    ),
    (Released(0, {2: 1}), {"kind": "released", "node": 0, "clients": {"2": 1}}),
    (
        Refused(0, {2**40: "unknown"}),
        {"kind": "refused", "node": 0, "nodes": {str(2**40): "unknown"}},
    ),
    (
        Retried(0, "train", 3, 1),
        {"kind": "retried", "node": 0, "query": "train", "clients": 3, "answered": 1},
    ),
]


@pytest.mark.parametrize(("event", "row"), ROWS, ids=lambda each: type(each).__name__)
def test_an_event_is_a_row_with_its_fields_in_order_and_comes_back(
    event: Event, row: dict[str, object]
):
    written = json.dumps(event.to_row(5))
    assert written == json.dumps({"round": 5, **row})
    assert event_of(json.loads(written), type(event)) == event


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (ClusterSplit, {}),
        (ClusterSplit, {"children": [1], "clusters": [1]}),
        (ClusterSplit, {"children": [1], "clusters": [[0]], "gamma_bound": "large"}),
        (Checked, {**CHECK, "clusters": [[0]]}),
        (LeftOut, {"query": "train", "clients": {"two": "asleep"}}),
        (Joined, {"clients": 3}),
        (Joined, {"clients": [-1]}),
        (Clustered, {"merges": [[0, 1]]}),
    ],
)
def test_a_row_that_lacks_what_its_kind_has_is_no_event(kind: type[Event], row: dict[str, object]):
    assert event_of({"round": 1, "kind": kind.kind, "node": 0, **row}, kind) is None


@pytest.mark.parametrize(
    "merges",
    [
        [],
        [[0, 1, 0.5]],
        [[0, 1, 0.5], [0, 2, 1.0]],
        [[0, 0, 0.5], [1, 2, 1.0]],
        [[0, 1, 0.5], [2, 3.0, 1.0]],
    ],
)
def test_merges_join_two_clusters_of_before_until_there_is_one(merges: list[list[float]]):
    row = {"metric": "l1", "linkage": "ward", "threshold": 1.0, "sizes": [3], "clients": [4, 7, 9]}
    good = {"round": 1, "kind": "clustered", "node": 0, **row, "merges": [[0, 1, 0.5], [2, 3, 1.0]]}
    assert event_of(good, Clustered) is not None
    assert event_of({**good, "merges": merges}, Clustered) is None


def test_events_of_some_types_come_in_order_with_their_rounds():
    joined, checked = Joined(2, (4, 5)), Checked(0, **CHECK, gamma=0.5, clusters=((0, 1),))
    rows = [
        checked.to_row(1),
        {"round": 2, "kind": "joined", "node": 0},
        joined.to_row(3),
        Empty(1).to_row(3),
    ]
    assert events_of(rows, Joined, Checked, Regrouped) == [(1, checked), (3, joined)]


def test_a_method_of_ones_own_has_events_of_its_own():
    @dataclass(frozen=True)
    class Grouped(Event):
        kind = "k_means"
        sizes: tuple[int, ...]

    row = Grouped(0, (3, 2)).to_row(4)
    assert row == {"round": 4, "kind": "k_means", "node": 0, "sizes": [3, 2]}
    assert events_of([row], Grouped) == [(4, Grouped(0, (3, 2)))]
