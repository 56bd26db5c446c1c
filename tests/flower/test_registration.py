from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedclade.core.errors import UpdateError
from fedclade.core.registry import DataSpec
from fedclade.flower import wire
from fedclade.flower.registration import RegisteredClient, Registration, read_schema
from fedclade.flower.wire import Content, Signer
from tests.flower.grids import handler_of, worded

HELLO = handler_of(1).answer(Content.of(wire.record({"what": "hello"})))

SCHEMA = {
    "data": "tiny",
    "input_shape": [6],
    "outputs": 4,
    "task": "classification",
    "vocabulary_size": 0,
}


def read(**changes: Any) -> Registration:
    content = Content.of(worded(**changes)(HELLO))
    return Registration.read(replace(content, signer=Signer("ab" * 32, lasts=True)), 101)


def with_schema(**changes: Any) -> dict[str, str]:
    return {"schema": json.dumps({**SCHEMA, **changes})}


def test_a_client_says_who_it_is_and_what_its_examples_look_like():
    one = read()
    assert (one.number, one.client) == (1, RegisteredClient(101, "c1", 24, 1, "ab" * 32, True))
    assert one.schema == DataSpec("tiny", (6,), 4)
    assert one.shape == ((6,), 4, "classification", 0)
    assert one.secret == ""
    assert one.task == "classification: cross_entropy; accuracy"
    assert one.kind == (one.layout, one.shape, "", one.task, "")


def test_what_it_keeps_to_itself_is_none():
    one = read(number=-1, true_cluster=-1)
    assert one.number is None
    assert one.client.true_cluster is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": 0}, r"'size' should be 1 to 2\*\*53 examples, got 0"),
        ({"size": 2**60}, "examples, got 1152921504606846976"),
        ({"size": True}, "'size' should be of type int, got True"),
        ({"number": 2**31}, "'number' should be at most 2147483647, got 2147483648"),
        ({"number": "1"}, "'number' should be of type int, got '1'"),
        (
            {"true_cluster": 2**62},
            "'true_cluster' should be at most 2147483647, got 4611686018427387904",
        ),
        ({"true_cluster": 0.5}, "'true_cluster' should be of type int, got 0.5"),
        ({"name": 7}, "'name' should be of type str, got 7"),
        ({"task": 7}, "'task' should be of type str, got 7"),
        ({"task": None}, "'task' should be of type str, got None"),
        ({"name": None}, "'name' should be of type str, got None"),
        ({"layout": "mine"}, "'layout' should be a digest in hexadecimal, got 'mine'"),
        ({"encoding": "mine"}, "'encoding' should be a digest in hexadecimal, got 'mine'"),
        ({"encoding": None}, "'encoding' should be of type str, got None"),
        ({"secret": "ab" * 500}, "'secret' should be a digest in hexadecimal, got 'ababab"),
        ({"schema": "{"}, "'schema' in the message is not JSON"),
        ({"schema": "[" * 5000}, "'schema' in the message is not JSON"),
        ({"schema": "[6]"}, r"'schema' in the message should be a JSON object, got \[6\]"),
        (
            {"schema": "1" * 20_000},
            "'schema' in the message has 20000 characters, expected at most 10000",
        ),
        (
            {"schema": "{}"},
            "the data schema in the registration is malformed: .* missing 3 required",
        ),
        (
            with_schema(colour="red"),
            "the data schema in the registration is malformed: .* unexpected keyword argument 'colour'",
        ),
        (
            with_schema(input_shape=6),
            "the data schema in the registration is malformed: 'int' object is not iterable",
        ),
        (
            with_schema(input_shape=["6"]),
            r"'input_shape' of a client's data is \('6',\), expected whole numbers of at least 1",
        ),
        (
            with_schema(input_shape=[0]),
            r"'input_shape' of a client's data is \(0,\), expected whole numbers of at least 1",
        ),
        (
            with_schema(input_shape=[True]),
            r"'input_shape' of a client's data is \(True,\), expected whole numbers of at least 1",
        ),
        (
            with_schema(input_shape=[2**13, 2**13]),
            r"'input_shape' of a client's data is \(8192, 8192\), expected .* product of at most 2\*\*24",
        ),
        (
            with_schema(outputs=10**12),
            "'outputs' of a client's data is .1000000000000,., expected whole numbers of at least 1 with a product of",
        ),
        (
            with_schema(vocabulary_size=-1),
            "'vocabulary_size' of a client's data is .-1,., expected whole numbers of at least 0",
        ),
        (
            with_schema(task="mining"),
            "'task' of a client's data is 'mining', expected one of classification, binary, multilabel, regr",
        ),
        (
            with_schema(scaled=[0.5]),
            "the data schema in the registration is malformed: not enough values to unpack",
        ),
        (
            with_schema(scaled=[math.nan, 1]),
            r"'scaled' of a client's data, .*, is \[nan, 1\], expected two finite numbers",
        ),
        (
            with_schema(scaled=[10**400, 1]),
            "the data schema in the registration is malformed: int too large to convert to float",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str):
    with pytest.raises(UpdateError, match=why) as raised:
        read(**changes)
    assert len(str(raised.value)) < 400


def test_texts_are_made_fit_to_be_shown():
    hostile = "\x1b[2J\u202eevil\n" + 5_000 * "x"
    one = read(name=hostile, description=hostile, **with_schema(data=hostile))
    for text, longest in ((one.client.name, 60), (one.description, 200), (one.schema.data, 60)):
        assert longest - 1 <= len(text) <= longest
        assert text.isprintable()
        assert text.startswith(("[2J evil xxx", " [2J evil xxx"))
    assert read(name=" \n").client.name == "node 101"


@given(
    st.dictionaries(
        st.sampled_from([*SCHEMA, "scaled"]),
        st.one_of(st.integers(), st.text(), st.lists(st.floats())),
    )
)
def test_no_schema_raises_anything_else(changes: dict[str, Any]):
    try:
        schema = read_schema({**SCHEMA, **changes})
    except (TypeError, ValueError):
        return
    assert math.prod(schema.input_shape) <= 2**24
