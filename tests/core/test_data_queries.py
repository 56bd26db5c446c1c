"""Queries that clients answer from their own data: what a class declares, and what engines do with its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fedclade import ConfigError, DataSpec, LocalData, LocalStore, RowQuery, has_replied
from fedclade.core import check_kind, field_types, models_of
from fedclade.data import Stage
from fedclade.training import SimulatedClients
from tests.tiny import LABELS, federation_of, linear, simulated


@dataclass(frozen=True, eq=False)
class Counts(RowQuery):
    """How many examples of each label a client has, and in the last round had."""

    kind = "counts"
    dtype = torch.int64
    stores = ("counts so far",)

    round: int
    scale: int = 1

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        return (2, spec.labels or 0)

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        now = self.scale * torch.bincount(data.targets.long(), minlength=data.spec.labels or 0)
        before = store.get("counts so far")
        store.keep("counts so far", now)
        return torch.stack([now, torch.zeros_like(now) if before is None else before])


@pytest.fixture
def clients() -> SimulatedClients:
    return simulated(federation_of([0, 1, 0]), linear())[0]


def test_every_client_answers_from_its_data_and_its_store(clients: SimulatedClients):
    first = clients.ask(Counts([2, 0], 1))
    assert first.shape == (2, 2, LABELS)
    assert first[:, 0].sum(1).tolist() == [24, 24]
    assert not first[:, 1].any()
    second = clients.ask(Counts([0, 2, 1], 2))
    assert torch.equal(second[0, 1], first[1, 0])
    assert torch.equal(second[1, 1], first[0, 0])
    assert not second[2, 1].any()
    again = clients.ask(Counts([0, 2, 1], 2))
    assert torch.equal(again, second), "a round that is repeated is answered alike"


def test_no_client_makes_no_row(clients: SimulatedClients):
    assert clients.ask(Counts([], 1)).shape == (0, 2, LABELS)


def test_rows_of_parts_are_merged_at_their_places():
    query = Counts([5, 7, 9], 1)
    rows = query.merge([([2, 0], torch.tensor([[9], [5]])), ([1], torch.tensor([[7]]))])
    assert rows.tolist() == [[5], [7], [9]]


def test_a_row_of_zeros_stands_for_no_reply():
    assert has_replied(torch.tensor([[0, 1], [0, 0]])).tolist() == [True, False]
    assert has_replied(torch.tensor([3, 0])).tolist() == [True, False]
    assert has_replied(torch.zeros(0, 4)).tolist() == []


def test_an_adversary_sends_the_honest_row_unless_the_class_says_otherwise():
    rows = torch.ones(2, 2, LABELS, dtype=torch.int64)
    assert torch.equal(Counts([0, 1], 1).falsify(rows, [0, 1]), rows)


class Wrong(Counts):
    """Answers with a row of another shape or type than it declares."""

    answers: Sequence[Tensor] = ()

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        return self.answers[0]


@pytest.mark.parametrize(
    ("row", "got"),
    [
        (torch.zeros(3, dtype=torch.int64), r"got shape \[3\] and type int64"),
        (torch.zeros(2, LABELS), r"got shape \[2, 4\] and type float32"),
    ],
)
def test_a_row_of_another_shape_or_type_is_an_error(
    clients: SimulatedClients, row: Tensor, got: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Wrong, "answers", (row,))
    why = rf"the method answer\(\) of Wrong should return a row of shape \[2, 4\] and type int64.*, {got}"
    with pytest.raises(ConfigError, match=why):
        clients.ask(Wrong([0], 1))


def test_a_query_stores_under_declared_names_alone(clients: SimulatedClients):
    class Careless(Counts):
        stores = ("more",)

    with pytest.raises(
        ConfigError,
        match=r"query class Careless declares that it stores 'more', so it cannot .* 'counts so far'",
    ):
        clients.ask(Careless([0], 1))


@pytest.mark.parametrize("name", ["model", "personal", "optimizer/x"])
def test_a_query_cannot_store_over_what_training_stores(clients: SimulatedClients, name: str):
    class Bold(Counts):
        stores = (name,)

        def answer(self, data: LocalData, store: LocalStore) -> Tensor:
            store.keep(name, torch.zeros(1))
            return torch.zeros(2, LABELS, dtype=torch.int64)

    with pytest.raises(ConfigError, match=f"query class Bold cannot store a tensor named '{name}'"):
        clients.ask(Bold([0], 1))


def test_fields_travel_by_their_types():
    @dataclass(frozen=True, eq=False)
    class Typed(Counts):
        model: Tensor = field(default_factory=partial(torch.zeros, 1))
        share: float = 0.5
        word: str = ""
        is_fast: bool = False

    types = field_types(Typed)
    assert types.plain == {"round": int, "scale": int, "share": float, "word": str, "is_fast": bool}
    assert types.models == ("model",)
    assert list(models_of(Typed([0], 1))) == ["model"]


@dataclass(frozen=True, eq=False)
class Listing(Counts):
    """A class with a field that cannot travel."""

    names: list[str] = ()  # type: ignore[assignment]


class Nameless(Counts):
    """A class without a name that can be one."""

    kind = "Label counts"


class Complex(Counts):
    """A class with rows of a type that does not travel."""

    dtype = torch.complex64


@dataclass(frozen=True, eq=False)
class Roundless(RowQuery):
    """A class that stores something and belongs to no round."""

    kind = "roundless"
    stores = ("something",)

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        return ()

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        return torch.zeros(())


class Noisy(Counts):
    mechanism = "noise"


class AsUpdate(Counts):
    discloses = "update"


class AsNothing(Counts):
    discloses = "nothing"


class Scored(Counts):
    counts_as = "scores"  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            Listing,
            r"field 'names' of Listing cannot be sent .* int, float, bool, str, or Tensor .* got list\[str\]",
        ),
        (Nameless, "kind of Nameless should be a name of lower-case letters.*, got 'Label counts'"),
        (Complex, "dtype of Complex should be one of float32, float64, int64, bool, got complex64"),
        (Noisy, "mechanism of Noisy should be 'none' or 'public', got 'noise'"),
        (AsUpdate, "discloses of AsUpdate should be a name for .*got 'update'"),
        (AsNothing, "discloses of AsNothing should be a name .*, got 'nothing'"),
        (Scored, "counts_as of Scored should be 'releases' or 'evaluations', got 'scores'"),
        (Roundless, "Roundless stores something from round to round, .*; add a field 'round: int'"),
    ],
)
def test_a_class_that_declares_something_impossible_is_refused(kind: type[RowQuery], why: str):
    with pytest.raises(ConfigError, match=why):
        check_kind(kind)


def test_the_types_of_fields_must_be_known():
    @dataclass(frozen=True, eq=False)
    class Unknown(Counts):
        more: Missing = 0  # noqa: F821  # pyright: ignore

    with pytest.raises(
        ConfigError, match=r"types of the fields of Unknown cannot be resolved .*Missing"
    ):
        check_kind(Unknown)


def test_clients_check_a_class_before_they_answer(clients: SimulatedClients):
    with pytest.raises(ConfigError, match="kind of Nameless"):
        clients.ask(Nameless([0], 1))


def test_the_data_of_a_query_is_that_of_its_round():
    """Client 0 sees all labels as label 0 from round 2 on."""
    federation = federation_of([0, 0])
    one_label = replace(federation.clients[0], label_map=torch.zeros(LABELS, dtype=torch.int64))
    staged = replace(federation, stages=(Stage(2, (one_label, federation.clients[1])),))
    clients, _ = simulated(staged, linear())
    assert clients.ask(Counts([0], 1))[0, 0].max() < 24
    assert clients.ask(Counts([0], 2))[0, 0].tolist() == [24, 0, 0, 0]
