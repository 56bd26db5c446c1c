"""Schemas: declared ones, and those that clients agree on."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest

from fedclade import DataSchema, FedcladeError, federation, federation_from_frame
from fedclade.config import check_config, read_config
from fedclade.core import ConfigError, DataError
from fedclade.data import Proposal, SchemaError, agree, encode_federation

CITIES = {
    "inputs": {"age": "number", "city": ["oslo", "bern", "rome"]},
    "target": ["back"],
    "labels": ["yes", "no"],
}
FRAME: dict[str, list[Any]] = {
    "id": ["a", "b"] * 3,
    "city": ["bern", "oslo"] * 3,
    "age": [30, 41, 52, 63, 30, 41],
    "back": ["no", "yes", "yes", "no", "no", "yes"],
}


def schema(**changes: Any) -> DataSchema:
    return DataSchema.read({**CITIES, "task": "classification", **changes})


def test_a_schema_survives_a_file(tmp_path: Path):
    declared = schema(labels=[1, 2.5], task="binary")
    declared.save(tmp_path / "schema.json")
    assert DataSchema.load(tmp_path / "schema.json") == declared
    assert DataSchema.read(declared.as_dict()).digest == declared.digest
    assert declared.digest != replace(declared, inputs=declared.inputs[::-1]).digest


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (3, "a schema should be a table with keys such as inputs and labels, got 3"),
        ({"input": {}}, "unknown key of a schema: 'input'; did you mean 'inputs'?"),
        ({}, "a schema should have inputs or words, got neither"),
        (
            {"inputs": ["age"]},
            "inputs of a schema should be a table with the type of each input column",
        ),
        (
            {"inputs": {"": "number"}},
            "inputs of a schema should be names of 1 to 1,000 characters, got ''",
        ),
        (
            {"inputs": {"age": "numbr"}},
            "column 'age' of a schema should be 'number', 'text' or a list of categories, got",
        ),
        (
            {"inputs": {"city": []}},
            "column 'city' of a schema should have at least 1 category, got none",
        ),
        (
            {"inputs": {"city": [1]}},
            "categories of column 'city' of a schema should be names of 1 to 1,000 characters, got 1",
        ),
        (
            {"inputs": {"city": ["a", "a"]}},
            "categories of column 'city' of a schema should be different names, got 'a' more than once",
        ),
        (
            {"inputs": {"note": "text", "age": "number"}},
            "a column of kind 'text' should be the only input of a schema, got the inputs ",
        ),
        (
            {**CITIES, "inputs": {"c": [str(k) for k in range(1001)]}},
            "should be at most 1,000 names, got 1,001",
        ),
        ({**CITIES, "task": "mining"}, "unknown task of a schema: 'mining'"),
        ({**CITIES, "target": 3}, "target of a schema should be a list of names, got 3"),
        ({**CITIES, "labels": 0}, "labels of a schema should be at least 1, got 0"),
        (
            {**CITIES, "labels": "yes"},
            "labels of a schema should be a list of names, or the number of labels, got 'yes'",
        ),
        (
            {**CITIES, "labels": [1, 1]},
            "labels of a schema should be 1 to 1000 different names, got [1, 1]",
        ),
        (
            {**CITIES, "labels": ["a", 1]},
            "labels of a schema should be names of 1 to 1,000 characters, got 1",
        ),
        ({"words": "a"}, "words of a schema should be a list, got 'a'"),
        (
            {"words": ["a", "b"]},
            "words of a schema should begin with '<pad>', '<unk>', got ['a', 'b']",
        ),
    ],
)
def test_values_that_are_no_schema(values: Any, why: str):
    with pytest.raises(ConfigError) as caught:
        DataSchema.read(values)
    assert why in str(caught.value)


def test_a_file_that_holds_no_schema_is_named(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"cannot read the schema .*none\.json, which should be a JSON file"
    ):
        DataSchema.load(tmp_path / "none.json")
    (tmp_path / "s.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"the schema in .*s\.json is invalid: a schema should have inputs"
    ):
        DataSchema.load(tmp_path / "s.json")


def test_a_declared_schema_says_how_a_frame_is_encoded():
    """Its order counts, and categories and labels that no row has; other columns are no inputs."""
    made = federation_from_frame(
        pa.table({**FRAME, "room": [1] * 6}), "id", "back", schema=schema(), standardize="none"
    )
    assert made.pool.columns is not None
    assert made.pool.columns.inputs == ("age", "city=oslo", "city=bern", "city=rome")
    assert made.pool.columns.labels == ("yes", "no")
    assert made.pool.x[:2].tolist() == [[30, 0, 1, 0], [41, 1, 0, 0]]
    assert made.pool.y.tolist() == [1, 0, 0, 1, 1, 0]
    assert made.pool.outputs == 2


def test_labels_that_no_row_has_are_outputs_too():
    assert (
        federation_from_frame(
            pa.table(FRAME), "id", "back", schema=schema(labels=["no", "?", "yes"])
        ).pool.outputs
        == 3
    )
    numbered = pa.table({**FRAME, "back": [0, 1] * 3})
    assert federation_from_frame(numbered, "id", "back", schema=schema(labels=5)).pool.outputs == 5


def test_a_binary_target_of_numbers_is_encoded_in_the_order_of_the_labels():
    frame = pa.table({**FRAME, "back": [1.5, 2.0] * 3})
    made = federation_from_frame(
        frame, "id", "back", task="binary", schema=schema(task="binary", labels=[2, 1.5])
    )
    assert made.pool.y.tolist() == [1, 0] * 3


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        (
            {"inputs": {"city": ["oslo"]}},
            "column 'city' has 'bern' in row 1, which is no category of the schema (oslo)",
        ),
        (
            {"labels": ["yes"]},
            "column 'back' has 'no' in row 1, which is no label of the schema (yes); add it to the schema",
        ),
        (
            {"labels": 2},
            "the labels of the schema are the numbers 0 to 1, but the target 'back' has texts",
        ),
        (
            {"labels": [0, 1]},
            "the labels of the schema are numbers, but the target 'back' has texts",
        ),
        (
            {"inputs": {"city": "number"}},
            "column 'city' should have numbers according to the schema, got texts",
        ),
        (
            {"inputs": {"age": ["30"]}},
            "column 'age' has '41' in row 2 (and 2 more), which is no category of the schema (30)",
        ),
        ({"inputs": {"town": "number"}}, "unknown column of the data frame: 'town'"),
        ({"target": ["age"]}, "the target is 'back', but the target of the schema is 'age'"),
        (
            {"inputs": {}, "words": ["<pad>", "<unk>"]},
            "the schema is for texts, but the data frame has the input columns 'city', 'a",
        ),
    ],
)
def test_rows_that_a_declared_schema_does_not_know(declared: dict[str, Any], why: str):
    with pytest.raises(FedcladeError) as caught:
        federation_from_frame(pa.table(FRAME), "id", "back", schema=schema(**declared))
    assert why in str(caught.value)


def test_rows_above_the_number_of_labels_are_named():
    frame = pa.table({**FRAME, "back": [0, 1, 2] * 2})
    with pytest.raises(
        SchemaError,
        match=r"column 'back' has 2\.0 in row 3, which is no label of the schema \(0, \.\.\.",
    ):
        federation_from_frame(frame, "id", "back", schema=schema(labels=2))


def test_chosen_inputs_are_those_of_the_schema():
    with pytest.raises(
        SchemaError,
        match=r"should have the input columns of the schema, but lacks 'age', 'city' and also has",
    ):
        federation_from_frame(
            pa.table({**FRAME, "room": [1] * 6}), "id", "back", ("room",), schema=schema()
        )


def test_the_task_is_that_of_the_schema():
    with pytest.raises(
        SchemaError, match="the task is binary, but the task of the schema is classification"
    ):
        federation_from_frame(pa.table(FRAME), "id", "back", task="binary", schema=schema())


def test_a_text_needs_words():
    made = federation_from_frame(pa.table({**FRAME, "id": ["a"] * 6}), "id", "back", text="city")
    with pytest.raises(
        SchemaError, match="as the only input is the text column 'city', got no words"
    ):
        encode_federation(made, schema())


TEXTS = (["we stay", "you go"] * 3, [0, 1] * 3)


def test_texts_are_encoded_by_declared_words():
    words = DataSchema.read({"words": ["<pad>", "<unk>", "go", "we"], "labels": 3})
    made = federation({"a": TEXTS}, schema=words, max_words=2)
    assert made.pool.x[:2].tolist() == [[3, 1], [1, 2]]
    assert (made.pool.vocabulary, made.pool.outputs) == (("<pad>", "<unk>", "go", "we"), 3)


def test_schemas_of_tables_are_none_of_texts_or_numbers(tmp_path: Path):
    with pytest.raises(
        SchemaError, match="the schema is for a table, but the data is texts outside of a table"
    ):
        federation({"a": TEXTS}, schema=schema())
    with pytest.raises(
        ConfigError,
        match=r"the schema of federation\(\) can be set only if inputs are texts, but the inputs are",
    ):
        federation({"a": ([[1.0]] * 6, [0, 1] * 3)}, schema=schema())
    words = DataSchema.read({"words": ["<pad>", "<unk>"], "task": "binary"})
    with pytest.raises(
        SchemaError, match="the task is classification, but the task of the schema is binary"
    ):
        federation({"a": TEXTS}, schema=words)


def test_a_config_declares_a_schema_in_a_table_or_a_file(tmp_path: Path):
    for name in ("a", "b"):
        rows = ["city,back", "bern,no", "oslo,yes", "oslo,yes"]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    inputs = {"inputs": {"city": ["rome", "oslo", "bern"]}, "labels": ["yes", "no"]}
    (tmp_path / "schema.json").write_text(json.dumps(inputs))
    (tmp_path / "c.toml").write_text(
        "[data]\nfiles = '*.csv'\ntarget = 'back'\nschema = 'schema.json'\n"
    )
    section = {"files": str(tmp_path / "*.csv"), "target": "back", "schema": inputs}
    for config in (check_config({"data": section}), read_config(tmp_path / "c.toml")):
        pool = config.federation().pool
        assert pool.columns is not None
        assert pool.columns.inputs == ("city=rome", "city=oslo", "city=bern")
        assert pool.y[:3].tolist() == [1, 0, 0]
    with pytest.raises(ConfigError, match="a schema should have inputs or words, got neither"):
        check_config({"data": {**section, "schema": {}}})


def test_categories_that_pandas_declares_are_columns_of_a_simulation_too():
    frame = pandas.DataFrame(FRAME).astype(
        {"city": pandas.CategoricalDtype(["rome", "oslo", "bern"])}
    )
    pool = federation_from_frame(frame, "id", "back").pool
    assert pool.columns is not None
    assert pool.columns.inputs == ("city=bern", "city=oslo", "city=rome", "age")
    labels = pandas.DataFrame(FRAME).astype(
        {"back": pandas.CategoricalDtype(["no", "maybe", "yes"])}
    )
    assert federation_from_frame(labels, "id", "back").pool.outputs == 3


def test_a_dictionary_of_arrow_declares_nothing():
    """Its entries may be left over from rows that were filtered out."""
    city = pa.DictionaryArray.from_arrays([0, 1] * 3, ["bern", "oslo", "rome"])
    pool = federation_from_frame(pa.table({**FRAME, "city": city}), "id", "back").pool
    assert pool.columns is not None
    assert pool.columns.inputs == ("city=bern", "city=oslo", "age")


def alone(**changes: list[Any]) -> Any:
    frame = pa.table({**FRAME, "id": ["a"] * 6, **changes})
    return federation_from_frame(frame, "id", "back", standardize="none")


def test_one_client_is_encoded_again_and_several_are_not():
    agreed = schema(labels=["no", "yes"])
    made = encode_federation(alone(), agreed)
    assert made.pool.x[0].tolist() == [30, 0, 1, 0]
    assert made.encoding is not None
    assert made.encoding.schema == agreed
    assert encode_federation(made, agreed) is made
    both = federation_from_frame(pa.table(FRAME), "id", "back")
    with pytest.raises(
        SchemaError,
        match="this client's data is encoded by another schema than the agreed schema: column 1 is 'city' in",
    ):
        encode_federation(both.alone(0), agreed)
    with pytest.raises(SchemaError, match="this client's data has no named columns and no texts"):
        encode_federation(federation({"a": ([[1.0]] * 6, [0, 1] * 3)}), agreed)


def test_ids_and_keys_that_were_changed_stay_so():
    made = alone()
    made = replace(made, clients=(replace(made.clients[0], id=7, key=5),))
    assert [
        client.id for client in encode_federation(made, schema(labels=["no", "yes"])).clients
    ] == [7]


def test_other_processes_get_no_rows_to_encode_again():
    again = pickle.loads(pickle.dumps(alone()))
    assert again.encoding.source is None
    assert again.encoding.schema == alone().encoding.schema


def proposal(**changes: Any) -> Proposal:
    return Proposal(schema(**changes))


def test_categories_and_labels_are_united_and_columns_keep_the_order_of_the_first():
    second = proposal(inputs={"city": ["paris"], "age": "number"}, labels=["maybe"])
    found = agree({5: proposal(), 2: second})
    assert found.refused == {}
    assert found.schema == schema(
        inputs={"age": "number", "city": ["bern", "oslo", "paris", "rome"]},
        labels=["maybe", "no", "yes"],
    )


def test_who_brings_too_many_categories_is_refused():
    many = proposal(inputs={"age": "number", "city": [str(k) for k in range(999)]})
    found = agree({0: proposal(), 1: many, 2: proposal()})
    assert list(found.refused) == [1]
    assert found.refused[1].startswith(
        "column 'city' should have at most 1,000 categories over all clients, got 1,002 with the"
    )
    assert found.schema.inputs[1].categories == ("bern", "oslo", "rome")


def test_who_brings_a_third_label_of_a_binary_target_is_refused():
    binary = {"task": "binary", "labels": ["no", "yes"]}
    found = agree(
        {0: proposal(**binary), 1: proposal(task="binary", labels=["maybe"]), 2: proposal(**binary)}
    )
    assert found.refused == {
        1: "the target should have at most 2 labels over all clients, got the labels maybe in "
        "addition to the labels no, yes of other clients; correct the target, or leave this client "
        "out"
    }


def test_a_binary_target_needs_two_labels():
    one = proposal(task="binary", labels=["no"])
    with pytest.raises(
        DataError,
        match="the target 'back' of a binary task should have 2 different values, got only 'no'",
    ):
        agree({0: one, 1: one})


def test_a_schema_that_few_declare_is_one_proposal_among_others():
    """So that one client alone cannot say by what all encode."""
    declared = Proposal(schema(labels=["yes", "no"]), is_fixed=True)
    found = agree({0: declared, 1: proposal(), 2: proposal()})
    assert found.schema.labels == ("no", "yes")
    assert agree({0: declared, 1: proposal()}).schema == declared.schema


def test_words_are_ranked_by_the_counts_of_all_clients():
    def of(words: list[str], *counts: int, size: int = 5) -> Proposal:
        return Proposal(DataSchema.read({"words": ["<pad>", "<unk>", *words]}), False, counts, size)

    found = agree({0: of(["go", "we"], 5, 1), 1: of(["we", "stay", "a"], 4, 5, 1)})
    assert found.schema.words == ("<pad>", "<unk>", "go", "stay", "we")
    other = agree({0: of(["go"], 5), 1: of(["go"], 4), 2: of(["go"], 4, size=6)})
    assert other.refused == {
        2: "vocabulary_size is 6 for this client's data and 5 for the other clients' data"
    }


def test_differences_are_named_and_only_the_first_few():
    one = schema(
        inputs={"age": "number", "a": "number", "b": "number", "c": "number", "d": "number"}
    )
    found = agree({0: proposal(), 1: Proposal(one), 2: proposal()}).refused[1]
    assert found == (
        "column 'a' is only in this client's data; column 'b' is only in this "
        "client's data; column 'c' is only in this client's data; and 2 more"
    )


def test_no_schema_declares_a_column_without_values(tmp_path: Path):
    """Only proposals have such columns."""
    values = {"inputs": {"age": "number", "note": "empty"}}
    (tmp_path / "schema.json").write_text(json.dumps(values))
    section = {"files": "*.csv", "target": "back", "client": "id", "schema": values}
    for build in (
        lambda: federation_from_frame(
            pa.table(FRAME), "id", "back", schema=DataSchema.read(values)
        ),
        lambda: federation_from_frame(
            pa.table(FRAME), "id", "back", schema=tmp_path / "schema.json"
        ),
        lambda: check_config({"data": section}),
    ):
        with pytest.raises(ConfigError, match="column 'note' of a schema should be 'number'"):
            build()
