"""Clients that compare the labels they have with those that they had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import ConfigError
from fedclade.algorithms import ShiftQuery
from fedclade.algorithms.shift_query import LABELS
from fedclade.training import ClientStore
from tests.tiny import federation_of, linear, simulated, task_federation


def test_a_client_compares_with_what_it_had_when_it_was_first_asked_or_last_said_so():
    was = federation_of([0, 0])
    one_label = torch.tensor((0, 0, 0, 0))
    now = replace(was, clients=(was.clients[0], replace(was.clients[1], label_map=one_label)))
    store = ClientStore()

    def asked(federation, number):
        clients, _ = simulated(federation, linear())
        clients.store = store
        return clients.ask(ShiftQuery([1, 0], number, 0.2, False)).tolist()

    assert asked(was, 1) == asked(was, 2) == [False, False]
    first = store.latest(1)[LABELS]
    assert asked(now, 3) == asked(now, 3) == [True, False], (
        "a round that is repeated is answered alike"
    )
    assert store.latest(1)[LABELS].tolist() == [int(first.sum()), 0, 0, 0]
    assert asked(now, 4) == [False, False]
    assert asked(was, 5) == [True, False]


def test_targets_that_are_no_labels_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"labels of a regression task cannot be counted.*algorithm\.migrate = false",
    ):
        ShiftQuery([0], 1, 0.2, False).shape(task_federation("regression", [0]).pool.schema)


@pytest.mark.parametrize(
    ("number", "share", "why"),
    [
        (0, 0.2, r"the round of a query for shifts should be at least 1, got 0"),
        (1, 2.5, r"algorithm\.shift_share should be in \[0, 2\], got 2\.5"),
    ],
)
def test_a_query_out_of_range_is_refused(number, share, why):
    with pytest.raises(ConfigError, match=why):
        ShiftQuery([0], number, share, False)
