"""Small steps get one thread; large ones all that there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade.training.threads import WORTH_SHARING, threads_of_step, using_threads


def test_only_steps_with_enough_work_get_more_than_one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    module = nn.Linear(1000, 1000)  # 2·1000² operations for each example
    enough = int(WORTH_SHARING / 2e6)
    assert threads_of_step(module, torch.zeros(3, 1000), enough) == 8
    assert threads_of_step(module, torch.zeros(3, 1000), enough - 1) == 1
    assert threads_of_step(module, torch.zeros(3, 1000), 5, clients=enough // 5) == 8
    assert threads_of_step(module, torch.zeros(3, 1000), 5, clients=enough // 5 - 1) == 1
    assert threads_of_step(nn.Linear(1000, 1), torch.zeros(3, 1000), enough) == 1


def test_where_there_is_but_one_thread_no_work_is_counted(monkeypatch: pytest.MonkeyPatch):
    """The counter would have to pass a batch through the model, and to import a compiler."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # such a batch does not fit the model
    assert threads_of_step(nn.Linear(3, 3), torch.zeros(1, 4), 1) == 1


def test_the_number_of_threads_is_put_back_even_after_an_error():
    before = torch.get_num_threads()
    inside: list[int] = []

    def fails() -> None:
        with using_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert inside == [before + 1]
    assert torch.get_num_threads() == before
