"""Hold-out of test and validation rows: by time, by group, and in strata."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv
from torch.utils.data import TensorDataset

from fedclade import ConfigError, DataError, Federation, federation, federation_from_frame
from fedclade.config import check_config
from fedclade.data import DataSchema, encode_federation, one_client, open_folder, write_federation
from fedclade.data.hold_out import HoldOut
from fedclade.data.partition import set_aside

ROWS = 40


def frame(**changes: Any) -> Any:
    """Return visits of ten patients at two sites; one visit in eight ends badly."""
    row = np.arange(ROWS)
    columns = {
        "site": ["a", "b"] * (ROWS // 2),
        "visit": [f"{1 + (7 * k) % ROWS % 28}.{1 + (7 * k) % ROWS // 28}.2020" for k in row],
        "patient": [f"p{k // 4}" for k in row],
        "age": 40.0 + row,
        "bad": ["yes" if k % 8 in (0, 3) else "no" for k in row],
    }
    return pa.table({**columns, **changes})


def days() -> list[int]:
    return [(7 * k) % ROWS for k in range(ROWS)]


def made(table: Any = None, **options: Any) -> Federation:
    settings: dict[str, Any] = {"standardize": "none", **options}
    return federation_from_frame(
        frame() if table is None else table, "site", settings.pop("target", "bad"), **settings
    )


def test_the_last_rows_by_a_column_are_held_out() -> None:
    """Dates, in another order than the rows; validation data comes before the test data."""
    split = made(test="last", order="visit", validation_fraction=0.25)
    day = np.array(days())
    for client in split.clients:
        train, validation, test = (
            day[part] for part in (client.train, client.validation, client.test)
        )
        assert len(test) == 4
        assert len(validation) == 4
        assert train.max() < validation.min() <= validation.max() < test.min()


def test_the_order_and_the_groups_are_inputs_only_if_they_are_named() -> None:
    columns = made(test="last", order="visit", groups="patient").pool.columns
    assert columns is not None
    assert columns.inputs == ("age",)
    columns = made(test="last", order="visit", inputs=("age", "visit")).pool.columns
    assert columns is not None
    assert columns.inputs == ("age", "visit")
    # with inputs that are named, the order is read all the same
    named = made(test="last", order="visit", inputs=("age",))
    assert (
        named.clients[0].test.tolist() == made(test="last", order="visit").clients[0].test.tolist()
    )


def test_without_a_column_the_last_rows_are_held_out() -> None:
    assert made(test="last").clients[0].test.tolist() == [32, 34, 36, 38]
    x, y = np.arange(20.0)[:, None], np.arange(20) % 2
    arrays = federation({"a": (x, y)}, test="last", validation_fraction=0.25)
    assert arrays.clients[0].test.tolist() == [16, 17, 18, 19]
    assert arrays.clients[0].validation.tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("options", [{}, {"test": "last", "order": "visit"}])
def test_a_group_is_never_on_both_sides(options: Any) -> None:
    split = made(groups="patient", validation_fraction=0.2, **options)
    for client in split.clients:
        patients = [
            set((part // 4).tolist()) for part in (client.train, client.validation, client.test)
        ]
        assert all(patients)
        assert not patients[0] & patients[1]
        assert not patients[0] & patients[2]
        assert not patients[1] & patients[2]
        assert len(client.test) == 4


def test_with_an_order_the_groups_of_the_latest_rows_are_held_out() -> None:
    split = made(groups="patient", test="last", order="age")
    assert [set((client.test // 4).tolist()) for client in split.clients] == [{8, 9}, {8, 9}]


def test_a_client_of_one_group_is_refused() -> None:
    alone = frame(patient=["p0"] * ROWS)
    with pytest.raises(
        DataError, match=r"client 'a' should have rows of at least 2 groups of 'patient'"
    ):
        made(alone, groups="patient")


def test_rows_of_a_table_are_held_out_in_the_shares_of_the_labels() -> None:
    rare = frame(bad=["yes" if k % 20 in (0, 1) else "no" for k in range(ROWS)], site=["a"] * ROWS)
    for seed in range(5):
        client = made(rare, test_fraction=0.25, seed=seed).clients[0]
        bad = {0, 1, 20, 21}
        assert len(bad & set(client.test.tolist())) == 1
        assert len(client.test) == 10
    assert (
        made(rare, seed=0).clients[0].test.tolist() != made(rare, seed=1).clients[0].test.tolist()
    )


def test_strata_can_be_turned_off_and_the_draw_is_then_that_of_arrays() -> None:
    client = made(stratify="none").clients[0]
    rows = np.arange(0, ROWS, 2)
    _, expected = set_aside(rows, 0.2, "test", seed=0, client=0)
    assert client.test.tolist() == expected.tolist()


def test_arrays_are_held_out_as_before_unless_the_user_asks_for_strata() -> None:
    x = np.arange(40.0)[:, None]
    y = (np.arange(40) % 10 == 0).astype(int)
    _, expected = set_aside(np.arange(40), 0.25, "test", seed=0, client=0)
    plain = federation({"a": (x, y)}, test_fraction=0.25).clients[0]
    assert plain.test.tolist() == expected.tolist()
    for seed in range(4):
        strata = federation({"a": (x, y)}, test_fraction=0.25, stratify="labels", seed=seed)
        assert y[strata.clients[0].test].sum() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": "first"}, "unknown value of test: 'first'"),
        ({"stratify": "label"}, "unknown value of stratify: 'label'; did you mean 'labels'?"),
        ({"order": "visit"}, "order should be left out unless test = 'last', got 'visit'"),
        ({"test": "last", "stratify": "labels"}, "stratify should be 'none' with groups or test"),
        (
            {"stratify": "labels", "target": "age", "task": "regression"},
            "stratify should be 'none' for targets",
        ),
        (
            {"test": "last", "order": "site"},
            "order should name a column of numbers or dates, got 'site', a column of texts",
        ),
        ({"test": "last", "order": "hour"}, "'hour'"),
        ({"groups": "person"}, "'person'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        made(**options)
    assert message in str(caught.value)


def test_arrays_have_no_columns_to_order_or_group_by() -> None:
    data = {"a": (np.ones((9, 2)), np.arange(9) % 2)}
    with pytest.raises(ConfigError, match="order should be left out for data other than tables"):
        federation(data, test="last", order="visit")
    rule = "groups should be a mapping of the name of each client to the groups of its examples"
    with pytest.raises(ConfigError, match=f"{rule}, got 'patient'"):
        federation(data, groups="patient")  # pyright: ignore[reportArgumentType]


def test_arrays_have_groups_of_examples() -> None:
    data = {name: (np.arange(40.0)[:, None], np.arange(40) % 2) for name in ("a", "b")}
    names = np.array([f"p{k // 2}" for k in range(40)])
    groups = {"a": names, "b": (np.arange(40) // 8).tolist()}
    split = federation(data, groups=groups, validation_fraction=0.2)
    related = split.pool.related
    assert related is not None
    for client, size in zip(split.clients, (2, 8), strict=True):
        parts = [client.train, client.validation, client.test]
        together = [set(related[part].tolist()) for part in parts]
        assert not together[0] & together[1] | together[0] & together[2] | together[1] & together[2]
        assert sorted(np.unique(np.concatenate([related[part] for part in parts])).tolist()) == (
            sorted(set.union(*together))
        )
        assert len(client.test) % size == 0
        own = split.find_related(client.id)
        assert own is not None
        assert own.tolist() == related[client.train].tolist()
    own = [set(related[client.train].tolist()) for client in split.clients]
    assert not own[0] & own[1], "groups of two clients have different numbers"
    plain = federation(data)
    assert plain.pool.related is plain.find_related(0) is None
    assert plain.undivided == frozenset()
    assert split.undivided == {1}
    train = {name: (arrays, arrays) for name, arrays in data.items()}
    assert federation(train, groups=groups).fingerprint != federation(train).fingerprint


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, r"groups should name every client .* missing or unknown are: \['a'\]"),
        ({"a": [1] * 9, "b": [1]}, r"missing or unknown are: \['b'\]"),
        (
            {"a": [1, 2]},
            r"the groups of client 'a' should be 9 whole numbers .* got .* shape \[2\]",
        ),
        ({"a": [0.5] * 9}, "whole numbers or texts, one for each training example, .* float64"),
        ({"a": ["p"] * 9}, "client 'a' should have rows of at least 2 groups of 'groups'"),
    ],
)
def test_groups_of_arrays_that_do_not_fit_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        federation({"a": (np.ones((9, 2)), np.arange(9) % 2)}, groups=groups)


def test_one_client_has_groups_of_its_training_examples() -> None:
    mine = TensorDataset(torch.rand(20, 3), torch.arange(20) % 2)
    alone = one_client(mine, mine, labels=2, groups=np.arange(20) // 2)
    assert np.bincount(alone.find_related(0)).tolist() == [2] * 10  # pyright: ignore
    assert one_client(mine, mine, labels=2).find_related(0) is None
    with pytest.raises(DataError, match="the groups of client 'client' should be 20 whole numbers"):
        one_client(mine, mine, labels=2, groups=[1, 2])


def test_groups_and_strata_of_arrays_exclude_each_other() -> None:
    data = {"a": (np.ones((9, 2)), np.arange(9) % 2)}
    rule = "stratify should be 'none' or 'auto' with groups, which determine the held-out examples"
    with pytest.raises(ConfigError, match=rule):
        federation(data, groups={"a": np.arange(9)}, stratify="labels")


def test_texts_have_groups_of_examples() -> None:
    texts = [f"word{k} again" for k in range(20)]
    split = federation({"a": (texts, np.arange(20) % 2)}, groups={"a": np.arange(20) // 4})
    related = split.pool.related
    assert related is not None
    (client,) = split.clients
    assert not set(related[client.train].tolist()) & set(related[client.test].tolist())
    assert len(client.test) == 4


def test_the_groups_of_a_table_travel_with_its_rows(tmp_path: Path) -> None:
    split = made(groups="patient")
    related = split.pool.related
    assert related is not None
    patient = np.arange(ROWS) // 4
    for client in split.clients:
        same_group = related[client.train][:, None] == related[client.train]
        same_patient = patient[client.train][:, None] == patient[client.train]
        assert (same_group == same_patient).all()
    write_federation(split, tmp_path / "built")
    opened = open_folder(tmp_path / "built")
    for client in (0, 1):
        found, expected = opened.find_related(client), split.find_related(client)
        assert found is not None
        assert expected is not None
        assert found.tolist() == expected.tolist()
    write_federation(made(), tmp_path / "plain")
    assert open_folder(tmp_path / "plain").find_related(0) is None


def test_a_client_of_a_network_holds_out_the_same_rows_by_an_agreed_schema() -> None:
    one = frame(site=["a"] * ROWS).drop(["patient"])
    own = made(one, test="last", order="visit")
    agreed = DataSchema.read({"inputs": {"age": "number"}, "labels": ["no", "perhaps", "yes"]})
    strata = made(one, inputs=("age",))
    for held_out in (own, strata):
        encoded = encode_federation(held_out, agreed)
        rows = encoded.clients[0].test
        assert rows.tolist() == held_out.clients[0].test.tolist()
        assert encoded.pool.x[rows, 0].tolist() == held_out.pool.x[rows, 0].tolist()
        bad = held_out.pool.y[rows] == 1
        assert bad.any()
        # the label "yes" is 1 of the client's own labels, and 2 of the agreed ones
        assert encoded.pool.y[rows].tolist() == (2 * bad).tolist()


def test_a_config_holds_out_rows_and_saves_how(tmp_path: Path) -> None:
    csv.write_csv(frame(), tmp_path / "all.csv")
    data = {"files": str(tmp_path / "all.csv"), "client": "site", "target": "bad"}
    asked = check_config({"data": {**data, "test": "last", "order": "visit", "groups": "patient"}})
    assert asked.federation().pool.columns.inputs == ("age",)  # pyright: ignore
    saved = asked.as_dict()["data"]
    assert (saved["test"], saved["order"], saved["groups"]) == ("last", "visit", "patient")
    plain = check_config({"data": {**data, "stratify": "none"}}).as_dict()
    assert {"test", "stratify"}.isdisjoint(plain["data"])
    assert check_config(plain).as_dict() == plain
    assert check_config({"data": data}).as_dict()["data"]["stratify"] == "auto"


def test_strata_take_as_many_rows_as_without() -> None:
    draw = np.random.default_rng(0)
    for size in (2, 3, 7, 50):
        labels = draw.integers(0, 4, size)
        rest, held = HoldOut(labels=labels).set_aside(
            np.arange(size), 0.2, "test", seed=1, client=2, name="a"
        )
        _, plain = set_aside(np.arange(size), 0.2, "test", seed=1, client=2)
        assert len(held) == len(plain)
        assert sorted([*rest, *held]) == list(range(size))


def test_the_order_is_reported_as_no_input(caplog: pytest.LogCaptureFixture) -> None:
    visits: list[Any] = [*range(1, ROWS + 1)]
    with caplog.at_level(logging.WARNING, "fedclade"):
        made(frame(visit=visits), test="last", order="visit")
    assert "visit" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedclade"):
        made(frame(visit=visits), test="last", order="visit", inputs=("age", "visit"))
    assert "column 'visit' numbers the rows, but is an input" in caplog.text


def test_rows_are_not_dropped_for_an_empty_cell_of_the_order() -> None:
    visits = [None, *range(2, ROWS + 1)]
    with pytest.raises(DataError, match="column 'visit' has an empty cell in row 1"):
        made(frame(visit=visits), test="last", order="visit", missing="drop")


def test_an_order_of_different_texts_is_refused_as_such() -> None:
    visits = [f"visit {row}" for row in range(ROWS)]
    with pytest.raises(
        DataError, match="order should name a column of numbers or dates, got 'visit'"
    ):
        made(frame(visit=visits), test="last", order="visit")
