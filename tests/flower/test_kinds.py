"""The table of kinds: how a class of queries gets into it, and how its queries and rows travel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import Tensor

from fedclade import ConfigError, DataSpec, LocalData, LocalStore, RowQuery, UpdateError
from fedclade.algorithms import DescriptorQuery, FedAvg, ShiftQuery, SubspaceQuery
from fedclade.core import DataQuery, PolicyError, plugins
from fedclade.flower import kinds
from fedclade.flower.kinds import KINDS, allowable, check_travels, register_query
from fedclade.flower.policy import Policy
from fedclade.flower.row_messages import (
    largest_reply,
    read_query,
    read_row,
    reply_with,
    values_of,
    vectors_of,
)
from fedclade.flower.wire import Content, record
from tests.flower.grids import federated, grid_of, handler_of
from tests.flower.test_client_handler import ask
from tests.tiny import federation_of


@dataclass(frozen=True, eq=False)
class Fields(RowQuery):
    """A query with a field of each type; the row is a vector of two numbers, or a single one."""

    kind = "fields"

    round: int
    model: Tensor
    share: float
    word: str
    is_single: bool = False

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        return () if self.is_single else (2,)

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        return torch.zeros(self.shape(data.spec))


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    """Let the process forget kinds that a test has added."""
    before = dict(KINDS)
    yield
    KINDS.clear()
    KINDS.update(before)


def sent(query: RowQuery) -> Content:
    """Return the message of a query, as a client reads it."""
    return Content.of(record(values_of(query), vectors_of(query)))


def test_a_query_arrives_as_it_was_sent():
    query = Fields([3, 5], 2, torch.tensor([1.5, -2.0]), 1, "word", is_single=True)
    content = sent(query)
    assert (content.values["share"], type(content.values["share"])) == (1.0, float)

    def read_model(name: str) -> Tensor:
        return torch.frombuffer(bytearray(content.vectors[name]), dtype=torch.float32)

    read: Any = read_query(Fields, 5, content, read_model)
    assert list(read.ids) == [5]
    assert (read.round, read.share, read.word, read.is_single) == (2, 1.0, "word", True)
    assert torch.equal(read.model, query.model)


def test_the_messages_of_built_in_kinds_are_what_they_were():
    model = torch.zeros(3)
    assert values_of(SubspaceQuery([0], 3, True)) == {"vectors": 3, "per_label": True}
    assert values_of(ShiftQuery([0], 2, 0.2, False)) == {
        "round": 2,
        "share": 0.2,
        "by_label": False,
    }
    descriptor = DescriptorQuery([0], model, 7, 4)
    assert values_of(descriptor) == {"seed": 7, "components": 4, "per_label": True}
    assert list(vectors_of(descriptor)) == ["model"]
    replies = [
        (SubspaceQuery([0], 3, True), torch.zeros(1, 2, 3), [], ["subspaces"]),
        (ShiftQuery([0], 2, 0.2, False), torch.tensor(True), ["round", "shifted"], []),
        (descriptor, torch.zeros(4, 4), [], ["descriptor"]),
    ]
    for query, row, values, vectors in replies:
        content = Content.of(reply_with(query, row))
        assert list(content.values) == sorted(values)
        assert list(content.vectors) == vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_row_arrives_as_it_was_sent(dtype: torch.dtype, shape: tuple[int, ...]):
    class Typed(Fields):
        pass

    Typed.dtype = dtype
    query = Typed([0], 4, torch.zeros(1), 0.5, "")
    row = torch.randint(0, 2, shape).to(dtype)
    arrived = read_row(query, Content.of(reply_with(query, row)), shape)
    assert arrived.dtype == dtype
    assert torch.equal(arrived, row)
    assert largest_reply(query, shape) == (row.nbytes if shape else 0)


QUERY = Fields([0], 4, torch.zeros(1), 0.5, "")


@pytest.mark.parametrize(
    ("reply", "shape", "why"),
    [
        (record({"round": 3, "fields": 1.0}), (), "the reply has the round 3, expected 4"),
        (record({"fields": 1.0}), (), "'round' should be of type int, got None"),
        (record({"round": 4, "fields": 1}), (), "'fields' should be of type float, got 1"),
        (
            record({"round": 4, "fields": float("nan")}),
            (),
            "the numbers in the reply to the query 'fields' are not finite, or outside the range that the query allows",
        ),
        (record({"round": 4}), (2,), "the message has no vector 'fields'"),
        (reply_with(QUERY, torch.zeros(3)), (2,), "fields has 12 bytes, expected 8"),
        (
            reply_with(QUERY, torch.tensor([1.0, float("inf")])),
            (2,),
            "the numbers in the reply to the query 'fields' are not finite, or outside the range that the query allows",
        ),
        (reply_with(QUERY, torch.zeros(2)), (), "the message contains 1 unexpected vectors"),
    ],
)
def test_a_row_that_cannot_be_is_refused(reply: Any, shape: tuple[int, ...], why: str):
    with pytest.raises(UpdateError, match=why):
        read_row(QUERY, Content.of(reply), shape)


def test_numbers_of_a_type_that_cannot_hold_them_are_refused():
    class Whole(Fields):
        dtype = torch.int64

    class Bits(Fields):
        dtype = torch.bool

    whole = Whole([0], 4, torch.zeros(1), 0.5, "")
    with pytest.raises(
        UpdateError,
        match=r"'fields' of the reply should be a number of type torch\.int64, got 9223372036854775808",
    ):
        read_row(whole, Content({"round": 4, "fields": 2**63}), ())
    bits = Bits([0], 4, torch.zeros(1), 0.5, "")
    with pytest.raises(
        UpdateError, match="vector 'fields' of the reply should contain only 0 and 1, got 7"
    ):
        read_row(bits, Content({"round": 4}, {"fields": bytes([1, 7])}), (2,))


def test_a_query_with_impossible_values_is_refused():
    content = Content({"round": 1, "share": 3.0, "by_label": True})
    with pytest.raises(
        UpdateError, match=r"the query for shifts has an invalid value: .* in \[0, 2\], got 3"
    ):
        read_query(ShiftQuery, 0, content, lambda name: torch.zeros(1))


# Registration


def test_a_class_is_registered_once_and_again_when_it_is_defined_again():
    register_query(Fields)
    assert "fields" in allowable()
    again = type("Fields", (Fields,), {"__module__": Fields.__module__, "__qualname__": "Fields"})
    register_query(again)
    assert KINDS["fields"].row_query is again


class Taken(Fields):
    """A class with the name of another kind."""

    kind = "subspaces"


class ReservedRow(Fields):
    """A class whose row has a name that messages use."""

    reply_name = "run"


@dataclass(frozen=True, eq=False)
class ReservedField(Fields):
    """A class with a field of a name that messages use."""

    layout: str = ""


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (Taken, "kind 'subspaces' of Taken is the name of another kind of query"),
        (ReservedRow, "the reply to a ReservedRow cannot have the name 'run'"),
        (ReservedField, "field 'layout' of ReservedField has a name that is reserved"),
        (dict, r"queries should be subclasses of fedclade\.RowQuery, got <class 'dict'>"),
    ],
)
def test_a_class_that_cannot_be_registered_is_named(query: Any, why: str):
    before = dict(KINDS)
    with pytest.raises(ConfigError, match=why):
        register_query(query)
    assert before == KINDS


def test_a_server_puts_no_query_that_cannot_travel():
    with pytest.raises(ConfigError, match="the reply to a ReservedRow cannot have the name 'run'"):
        check_travels(ReservedRow)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package be installed that brings :class:`Fields` as kind ``fields``, and another under a wrong name."""
    monkeypatch.setitem(sys.modules, "queries_of_a_package", sys.modules[__name__])
    group = "fedclade.queries"
    points = {
        "fields": EntryPoint("fields", "queries_of_a_package:Fields", group),
        "misnamed": EntryPoint("misnamed", "queries_of_a_package:Fields", group),
    }
    original = plugins.installed
    monkeypatch.setattr(
        kinds, "installed", lambda kind: points if kind == "queries" else original(kind)
    )


@pytest.mark.usefixtures("installed")
def test_a_kind_of_an_installed_package_is_loaded_if_a_policy_allows_it():
    assert "fields" in allowable()
    Policy()
    assert "fields" not in KINDS
    Policy(allow=("fields",))
    assert KINDS["fields"].row_query is Fields


@pytest.mark.usefixtures("installed")
def test_an_entry_point_has_the_name_of_its_kind():
    with pytest.raises(
        ConfigError, match=r"entry point 'misnamed' of the group fedclade\.queries is .* 'fields'"
    ):
        Policy(allow=("misnamed",))


def test_a_reply_reads_the_clients_own_model_and_counts_in_its_policy(tmp_path: Any):
    register_query(Fields)
    client = handler_of(policy=Policy(allow=("fields",), max_releases=1), folder=tmp_path)
    fields = {"round": 1, "share": 0.5, "word": "", "is_single": True}
    assert ask(client, "fields", **fields).values["fields"] == 0.0
    with pytest.raises(PolicyError, match="forbids 2 updates in all; it allows at most 1"):
        ask(client, "fields", **fields)


def test_a_client_with_few_examples_refuses_rows_that_need_many(tmp_path: Any):
    register_query(Fields)
    client = handler_of(policy=Policy(allow=("fields",), min_part=30))
    with pytest.raises(
        PolicyError, match="forbids fields of 24 training examples, since they need at least 30"
    ):
        ask(client, "fields", round=1, share=0.5, word="", is_single=True)


def test_another_class_of_data_queries_cannot_be_put_over_a_network():
    @dataclass(frozen=True, eq=False)
    class Whole(DataQuery[int]):
        kind = "whole"

        def answer_all(self, clients: Any) -> int:
            return 0

        def merge(self, parts: Any) -> int:
            return 0

    class Puts(FedAvg):
        def step(self, state, cohort, clients, this_round):
            clients.ask(Whole(cohort))

    with pytest.raises(
        ConfigError, match=r"a Whole cannot be sent over a network; make it a subclass"
    ):
        federated(grid_of(federation_of([0, 0])), Puts(), rounds=1)
