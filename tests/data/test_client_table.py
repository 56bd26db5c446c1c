"""A federation whose clients are in arrays is the federation of the same clients as objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.tiny import LABELS, federation_of, linear, task_federation

from fedclade import simulate
from fedclade.core import DataError, Split
from fedclade.data import ClientTable, Federation, SplitRows, StatisticsQuery, compute_statistics

TRUTH = [0, 1, 2, 0]
SIZES = [24, 7, 30, 12]


def side_by_side(federation: Federation) -> Federation:
    """Return a federation with clients that lie behind each other in the pool in a table, as files have them."""
    table = ClientTable.of(federation.clients)
    begins = np.array([client.train[0] for client in federation.clients])
    splits, behind = dict[str, SplitRows](), np.zeros_like(begins)
    for split in get_args(Split):
        counts = table.split(split).counts
        splits[split] = SplitRows(begins + behind, counts)
        behind = behind + counts
    return replace(federation, clients=replace(table, **splits))


def in_arrays(federation: Federation) -> Federation:
    return replace(federation, clients=ClientTable.of(federation.clients))


TABLES = pytest.mark.parametrize("as_table", [in_arrays, side_by_side])


@TABLES
def test_clients_of_a_table_are_those_it_was_made_of(as_table: Callable[[Federation], Federation]):
    plain = federation_of(TRUTH, SIZES)
    turned = tuple(replace(c, id=9 - c.id, quarter_turns=c.id % 2) for c in plain.clients)
    plain = replace(plain, clients=turned, true_clusters=None)
    table = as_table(plain)
    assert (
        len(table),
        list(table.ids),
        dict(table.sizes),
        dict(table.keys),
        dict(table.roster.names),
    ) == (
        len(plain),
        list(plain.ids),
        dict(plain.sizes),
        dict(plain.keys),
        dict(plain.roster.names),
    )
    for mine, theirs in zip(table.clients, plain.clients, strict=True):
        assert (mine.id, mine.key, mine.name, mine.quarter_turns) == (
            *(theirs.id, theirs.key, theirs.name),
            theirs.quarter_turns,
        )
        for split in get_args(Split):
            assert getattr(mine, split).tolist() == getattr(theirs, split).tolist()
        y = torch.arange(LABELS)
        assert mine.labels(y).tolist() == theirs.labels(y).tolist()
    assert [client.id for client in table.clients[1:3]] == [8, 7]
    assert table.clients[-1].id == 6


@TABLES
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_is_the_same_bit_for_bit(as_table: Callable[[Federation], Federation], engine: str):
    plain = federation_of(TRUTH, SIZES)
    runs = [
        simulate(
            "fedavg",
            linear(),
            federation,
            rounds=3,
            client_fraction=0.5,
            engine=engine,
            device="cpu",
        )
        for federation in (plain, as_table(plain))
    ]
    mine, theirs = (
        [{k: v for k, v in row.items() if "seconds" not in k} for row in run.metric_rows]
        for run in runs
    )
    assert mine == theirs
    assert [row["accuracy"] for row in runs[0].client_rows] == [
        row["accuracy"] for row in runs[1].client_rows
    ]
    assert torch.equal(runs[0].tree.nodes[0].params, runs[1].tree.nodes[0].params)


@TABLES
def test_labels_are_counted_as_clients_see_them(as_table: Callable[[Federation], Federation]):
    plain = federation_of(TRUTH, SIZES)
    query = StatisticsQuery((1, 3), labels=LABELS)
    mine, theirs = compute_statistics(plain, query), compute_statistics(as_table(plain), query)
    assert mine.count == theirs.count == SIZES[1] + SIZES[3]
    assert torch.equal(mine.labels, theirs.labels)


@TABLES
def test_what_is_wrong_is_told_as_of_objects(as_table: Callable[[Federation], Federation]):
    plain = federation_of(TRUTH, SIZES)
    clients = as_table(plain).clients
    assert isinstance(clients, ClientTable)

    def told(changed: Federation | None = None, **changes: Any) -> str:
        with pytest.raises(DataError) as caught:
            replace(changed or plain, clients=replace(clients, **changes))
        return str(caught.value)

    nothing = np.array([24, 0, 30, 12])
    assert (
        told(ids=np.array([0, 1, 1, 3]))
        == "client ids should be distinct, got these more than once: [1]"
    )
    assert "client 1 ('c1') has no training examples" in told(
        train=replace(clients.train, counts=nothing)
    )
    assert "the starts and ends of the clients' test examples should lie in" in told(
        test=replace(clients.test, starts=clients.test.starts + 10**6)
    )
    x = plain.pool.x.clone()
    row = int(plain.clients[2].train[4])
    x[row, 3] = torch.nan
    with pytest.raises(
        DataError,
        match=rf"client 2 \('c2'\) has nan in column 3 of train example 4 \(example {row} of",
    ):
        replace(plain, pool=replace(plain.pool, x=x), clients=clients)


def test_label_maps_need_labels():
    plain = task_federation("regression", TRUTH)
    table = ClientTable.of(plain.clients)
    seeing = replace(table, label_maps=torch.tensor([[1, 0]]), view=np.array([0, -1, -1, 0]))
    with pytest.raises(
        DataError, match="label_map only if targets are labels, got targets of a regression task"
    ):
        replace(plain, clients=seeing)
    with pytest.raises(DataError, match="should have the same length"):
        replace(table, keys=np.arange(3))


def test_the_fingerprint_tells_who_holds_what():
    plain = side_by_side(federation_of(TRUTH, SIZES))
    clients = plain.clients
    assert isinstance(clients, ClientTable)
    prints = {
        plain.fingerprint,
        replace(plain, clients=replace(clients, keys=clients.keys[::-1])).fingerprint,
        replace(plain, clients=replace(clients, label_maps=None, view=None)).fingerprint,
        replace(plain, pool=replace(plain.pool, y=plain.pool.y.flip(0))).fingerprint,
    }
    assert len(prints) == 4
    assert side_by_side(federation_of(TRUTH, SIZES)).fingerprint == plain.fingerprint


@TABLES
def test_newcomers_join_in_arrays(as_table: Callable[[Federation], Federation]):
    everyone = as_table(federation_of(TRUTH, SIZES))
    clients = everyone.clients
    assert isinstance(clients, ClientTable)
    first, last = (
        replace(everyone, clients=clients[part], true_clusters=None)
        for part in (slice(0, 3), slice(3, None))
    )
    joined = first.join(last)
    assert isinstance(joined.clients, ClientTable)
    assert [client.train.tolist() for client in joined.clients] == [
        client.train.tolist() for client in clients
    ]
    assert list(joined.ids) == [0, 1, 2, 3]


def test_a_million_clients_take_less_than_200_bytes_each():
    n = 10**4
    starts, counts = np.arange(n) * 30, np.full(n, 10)
    train, validation, test = (SplitRows(starts + 10 * k, counts) for k in range(3))
    table, truth = (
        ClientTable(np.arange(n), np.arange(n), train, validation, test),
        np.arange(n) % 4,
    )
    assert table.nbytes + truth.nbytes < 200 * n
    assert table.lies_in_order
    assert table.positions.sequence == range(n)
