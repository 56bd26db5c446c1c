"""Clients answer a repeated query from memory, within a limit, and only if the reply is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedclade import LocalTraining
from fedclade.channel import (
    Channel,
    Meter,
    Middleware,
    Remembering,
    ReplyMemory,
    StepCounting,
    is_repeatable,
)
from fedclade.core import (
    ClientWork,
    FromStored,
    FullGradient,
    Layout,
    LocalModel,
    Nothing,
    Round,
    Splits,
    Updates,
    count_steps,
)
from tests.tiny import linear

SPEC = LocalTraining(epochs=2, batch_size=10)
CHECK = ClientWork(data=Splits(2, 10), store=Nothing())
LAYOUT = Layout.of(linear(), ())
MODEL = torch.zeros(1, LAYOUT.size)
SIZES = {0: 20, 1: 20, 2: 20}


def rows_of(number: float) -> dict[str, torch.Tensor]:
    """Return a reply of 8 bytes."""
    return {"deltas": torch.full((2,), float(number))}


def test_a_client_stores_its_latest_reply():
    memory = ReplyMemory()
    for number, digest in enumerate("ab"):
        memory.store(7, digest, rows_of(number))
        memory.store(8, digest, rows_of(-number))
    assert memory.recall(7, "a") is None
    assert memory.recall(9, "b") is None
    for client, first in ((7, 1.0), (8, -1.0)):
        reply = memory.recall(client, "b")
        assert reply is not None
        assert reply["deltas"].tolist() == [first, first]


def test_all_replies_together_have_a_limit_and_the_oldest_go_first():
    memory = ReplyMemory(budget=3 * 8)
    for client in range(4):
        memory.store(client, "a", rows_of(client))
    assert [memory.recall(client, "a") is not None for client in range(4)] == [False, *[True] * 3]
    memory.recall(1, "a")  # now the reply of client 2 is the oldest
    memory.store(4, "a", rows_of(4))
    memory.store(5, "a", {"deltas": torch.zeros(7)})  # 28 bytes are too many for any memory
    assert [name.split("/")[1] for name in memory.tensors()] == ["3", "1", "4"]
    memory.store(4, "b", {"deltas": torch.zeros(7)})
    assert [name.split("/")[1] for name in memory.tensors()] == ["3", "1"]


def test_a_reply_that_replaces_itself_counts_once():
    memory = ReplyMemory(budget=2 * 8)
    memory.store(0, "a", rows_of(0))
    for number in range(5):
        memory.store(1, "a", rows_of(number))
    assert memory.recall(0, "a") is not None


def test_a_loaded_memory_forgets_in_the_same_order():
    memory = ReplyMemory(budget=3 * 8)
    for client in (12, 3, 7):
        memory.store(client, "a", rows_of(client))
    memory.recall(12, "a")
    loaded = ReplyMemory(budget=3 * 8)
    loaded.store(5, "x", rows_of(5))
    loaded.load(dict(reversed(memory.tensors().items())))
    for each in (memory, loaded):
        each.store(2, "b", rows_of(2))
        assert list(each.tensors()) == ["0/7/a/deltas", "1/12/a/deltas", "2/2/b/deltas"]
    with pytest.raises(ValueError, match="not enough values to unpack"):
        loaded.load({"0/1/a": torch.zeros(1)})


def test_a_stored_reply_does_not_change_with_the_tensor_that_was_stored():
    memory = ReplyMemory()
    row = torch.zeros(2)
    memory.store(0, "a", {"deltas": row})
    row += 1
    reply = memory.recall(0, "a")
    assert reply is not None
    assert not reply["deltas"].any()


@pytest.mark.parametrize(
    "work",
    [
        ClientWork(),
        replace(CHECK, data=Splits(2)),  # a trained model's parts are drawn again in every round
        replace(CHECK, data=Splits(2, 10, compared=False)),
        replace(CHECK, start=FromStored()),
        replace(CHECK, store=LocalModel()),
        ClientWork(steps=FullGradient(), store=Nothing()),
    ],
)
def test_training_that_moves_on_is_not_remembered(work: ClientWork):
    assert is_repeatable(CHECK, Round(1, SPEC), LAYOUT)
    assert not is_repeatable(work, Round(1, SPEC), LAYOUT)
    assert not is_repeatable(CHECK, Round(2, SPEC), LAYOUT)


def test_training_that_depends_on_stored_tensors_is_not_remembered():
    spec = LocalTraining(momentum=0.9, keep_state=True)
    assert not is_repeatable(CHECK, Round(1, spec), LAYOUT)
    assert not is_repeatable(CHECK, Round(1, SPEC), Layout.of(linear(), ("weight",)))


@dataclass
class Training(Middleware):
    """Clients whose updates, with signatures of two parts, are random, so that each is another one."""

    asked: list[list[int]] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)

    def around(self, query: Any, ask: Any) -> Updates:
        self.asked.append(list(query.ids))
        ids = tuple(client for client in query.ids if client not in self.left_out)
        n = len(ids)
        return Updates.of(
            ids=ids,
            sizes=torch.full((n,), 20.0, dtype=torch.float64),
            losses=torch.rand(n),
            norms=torch.rand(n, dtype=torch.float64),
            n_parameters=LAYOUT.n_parameters,
            deltas=torch.rand(n, LAYOUT.size),
            parts=torch.rand(n, 2, 5),
            left_out={c: why for c, why in self.left_out.items() if c in query.ids},
        )


class Setting:
    """Clients that remember, behind a count of their steps."""

    def __init__(self) -> None:
        self.training = Training()
        self.memory = ReplyMemory()
        self.meter = Meter()
        remembering = Remembering(self.memory, LAYOUT, lambda number: int(number >= 10))
        counting = StepCounting(self.meter, lambda _: SIZES)
        nobody: Any = None
        self.channel = Channel(nobody, self.training, remembering, counting)

    def check(
        self,
        ids: Sequence[int] = (0, 1, 2),
        models: Tensor = MODEL,
        number: int = 1,
        work: ClientWork = CHECK,
        data_round: int = 0,
        **changes: Any,
    ) -> tuple[Updates, int]:
        """Return the updates of a check, and the number of steps that were counted for it."""
        before = self.meter.steps
        query = replace(Round(number, SPEC), **changes)
        channel = Channel(self.channel, _Asking(data_round)) if data_round else self.channel
        updates = channel.train(list(ids), models, [0] * len(ids), query, work)
        return updates, self.meter.steps - before


@dataclass
class _Asking(Middleware):
    number: int

    def before(self, query: Any) -> Any:
        return replace(query, data_round=self.number)


def equal(one: Updates, other: Updates) -> bool:
    """Return whether updates are the same to the last bit."""
    return (
        one.ids == other.ids
        and one.columns.keys() == other.columns.keys()
        and all(torch.equal(one.columns[name], other.columns[name]) for name in one.columns)
        and one.n_parameters == other.n_parameters
    )


def test_a_repeated_query_has_the_same_reply_and_takes_no_step():
    setting = Setting()
    first, steps = setting.check()
    again, more = setting.check(query=3)  # the number of the query in its round does not count
    assert equal(first, again)
    assert setting.training.asked == [[0, 1, 2]]
    assert (steps, more) == (count_steps(CHECK, SPEC, SIZES, [0, 1, 2]), 0)
    assert steps == 3 * 2 * 2 * 2  # clients, parts, epochs, batches of 5 examples


def test_only_clients_that_do_not_remember_train():
    setting = Setting()
    setting.training.left_out = {1: "dropped out"}
    first, _ = setting.check(ids=(0, 1))
    assert first.left_out == {1: "dropped out"}
    setting.training.left_out = {}
    again, steps = setting.check()
    assert setting.training.asked == [[0, 1], [1, 2]]
    assert again.ids == (0, 1, 2)
    assert not again.left_out
    assert torch.equal(again.required_deltas[0], first.required_deltas[0])
    assert steps == count_steps(CHECK, SPEC, SIZES, [1, 2])
    assert equal(setting.check()[0], again)


@pytest.mark.parametrize(
    "change",
    [
        {"models": MODEL + 1e-7},
        {"number": 2},
        {"seed": 1},
        {"purpose": "replicate"},
        {"local": replace(SPEC, lr=0.3)},
        {"work": replace(CHECK, data=Splits(2, 9))},
        {"data_round": 10},  # the data has changed
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_query_or_other_data_has_another_reply(change: dict[str, Any]):
    setting = Setting()
    first, _ = setting.check()
    assert not equal(setting.check(**change)[0], first)
    assert len(setting.training.asked) == 2


def test_data_that_stayed_the_same_until_a_later_round_has_the_same_reply():
    setting = Setting()
    first, _ = setting.check()
    assert equal(setting.check(data_round=9)[0], first)


def test_training_of_another_kind_passes():
    setting = Setting()
    for _ in range(2):
        setting.check(work=ClientWork(data=Splits(2), store=Nothing()))
    assert setting.training.asked == [[0, 1, 2]] * 2
    assert not setting.memory.tensors()
