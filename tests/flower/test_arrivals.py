"""Updates that arrive one by one, in whatever order."""

from __future__ import annotations

import math

import torch

from fedclade.flower.arrivals import Arrivals
from fedclade.flower.wire import Answer

MODELS = torch.zeros(1, 3)
PARAMETERS = 2
"""Of three entries in a model; the last is a buffer."""


def answer(value: float, size: int = 5, loss: float | None = 0.5) -> Answer:
    return Answer(size, loss, torch.full((3,), value))


def test_updates_lie_in_the_rows_that_they_were_put_in():
    arrivals = Arrivals(3, 3, MODELS)
    arrivals.put(30, answer(3.0, size=7), 2)
    arrivals.put(10, answer(1.0), 0)
    assert not arrivals.full
    arrivals.put(20, answer(2.0, loss=0.25), 1)
    assert arrivals.full
    updates = arrivals.checked(PARAMETERS, 1)
    assert updates.ids == (10, 20, 30)
    assert updates.required_deltas[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert updates.signatures.shape == (3, PARAMETERS)
    assert updates.sizes.tolist() == [5, 5, 7]
    assert updates.losses.tolist() == [0.5, 0.25, 0.5]


def test_without_rows_updates_lie_in_the_order_in_which_they_came():
    arrivals = Arrivals(3, 3, MODELS)
    arrivals.put(30, answer(3.0))
    arrivals.put(10, answer(1.0))
    updates = arrivals.checked(PARAMETERS, 1)
    assert updates.ids == (30, 10)
    assert updates.required_deltas.tolist() == [[3.0] * 3, [1.0] * 3]


def test_whose_rows_stay_empty_is_not_there():
    arrivals = Arrivals(3, 3, MODELS)
    arrivals.put(30, answer(3.0), 2)
    assert arrivals.checked(PARAMETERS, 1).ids == (30,)
    assert arrivals.checked(PARAMETERS, 1).required_deltas.tolist() == [[3.0] * 3]
    nobody = Arrivals(3, 3, MODELS).checked(PARAMETERS, 1)
    assert (nobody.ids, nobody.required_deltas.shape) == ((), (0, 3))


def test_an_update_that_cannot_be_used_is_left_out_alone():
    arrivals = Arrivals(2, 3, MODELS)
    arrivals.put(10, answer(math.nan))
    arrivals.put(20, answer(2.0))
    updates = arrivals.checked(PARAMETERS, 1)
    assert updates.ids == (20,)
    assert updates.left_out == {10: "3 of 3 entries are NaN or infinite"}


def test_losses_that_clients_keep_to_themselves_are_nan_and_no_reason_to_leave_them_out():
    arrivals = Arrivals(3, 3, MODELS)
    arrivals.put(10, answer(1.0, loss=None))
    arrivals.put(20, answer(math.inf, loss=None))
    arrivals.put(30, answer(3.0))
    updates = arrivals.checked(PARAMETERS, 1)
    assert updates.ids == (10, 30)
    assert math.isnan(updates.losses[0])
    assert updates.losses[1] == 0.5
