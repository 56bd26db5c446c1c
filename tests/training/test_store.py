"""What clients keep: two generations, and their way through a file."""

from __future__ import annotations

import pytest
import torch

from fedclade.training import ClientStore


def kept(store: ClientStore, number: int, client: int = 3) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in store.before(number, client).items()}


def filled(*rounds: int) -> ClientStore:
    store = ClientStore()
    for number in rounds:
        store.keep(number, 3, {"a": torch.tensor(float(number))})
    return store


def test_a_round_starts_from_what_was_kept_before_it_however_often_it_is_asked_for():
    store = filled(1, 2)
    for _ in range(2):
        assert kept(store, 3) == {"a": 2}
        store.keep(3, 3, {"a": torch.tensor(3.0)})
    assert (kept(store, 4), float(store.latest(3)["a"])) == ({"a": 3}, 3)


def test_other_names_stay_as_they_are():
    store = filled(1)
    store.keep(1, 3, {"b": torch.tensor(7.0)})
    store.keep(2, 3, {"b": torch.tensor(8.0)})
    assert (kept(store, 2), kept(store, 3)) == ({"a": 1, "b": 7}, {"a": 1, "b": 8})


def test_what_nobody_kept_is_nothing():
    assert (ClientStore().before(5, 3), ClientStore().latest(3), kept(filled(2), 2)) == ({}, {}, {})


def test_the_first_round_begins_anew():
    store = filled(4, 5)
    assert kept(store, 1) == {}
    store.keep(1, 3, {"b": torch.tensor(1.0)})
    assert kept(store, 2) == {"b": 1}


def test_a_server_that_goes_on_from_long_before_gets_the_oldest_that_is_known():
    store = filled(11, 12)
    assert kept(store, 9) == {"a": 11}
    store.keep(9, 3, {"a": torch.tensor(9.0)})
    assert (kept(store, 9), kept(store, 10), float(store.latest(3)["a"])) == (
        {"a": 11},
        {"a": 9},
        9,
    )


@pytest.mark.parametrize("before", [False, True])
def test_it_comes_back_from_its_tensors(before: bool):
    store = filled(4, 6)
    again = ClientStore()
    again.load(store.tensors(before=before))
    assert kept(again, 7) == {"a": 6}
    assert kept(again, 6) == ({"a": 4} if before else {})


def test_it_keeps_copies():
    store, tensor = ClientStore(), torch.zeros(1)
    store.keep(1, 0, {"a": tensor})
    tensor += 1
    assert float(store.latest(0)["a"]) == 0


def test_what_is_added_lies_beside_what_was_kept_last():
    store = filled(1, 2)
    store.add(3, {"b": torch.tensor(7.0)})
    assert (kept(store, 2), kept(store, 3)) == ({"a": 1}, {"a": 2, "b": 7})
    store.add(4, {"b": torch.tensor(5.0)})
    assert kept(store, 1, 4) == {}
    assert float(store.latest(4)["b"]) == 5
    again = ClientStore()
    again.load(store.tensors(before=True))
    assert {client: float(again.latest(client)["b"]) for client in (3, 4)} == {3: 7, 4: 5}
    store.keep(1, 4, {"a": torch.tensor(1.0)})
    assert kept(store, 2, 4)["a"] == 1
