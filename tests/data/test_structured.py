"""Examples of several tensors are read from pairs, columns and data sets of dicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tests.structured import NUMBERS, by_place, examples, named

from fedclade import ConfigError, DataError, federation, load_federation
from fedclade.core import Structure
from fedclade.data import Pool, one_client, open_folder, pool_from_torch, write_federation

N = 24


def columns(client: int = 0) -> dict[str, Any]:
    x, y = examples(client)
    return {**x, "label": y}


def hugging_face(client: int = 0) -> Any:
    return datasets.Dataset.from_dict(
        {**{name: each.tolist() for name, each in columns(client).items()}, "text": N * ["a b"]}
    )


FORMS = {
    "pair": examples(0),
    "columns": columns(),
    "data set": hugging_face(),
    "list of rows": [*hugging_face()],
    "training and test data": (columns(), hugging_face()),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_examples(form: str):
    part = FORMS[form]
    pool = federation({"a": part}).pool
    expected = named(1).pool
    assert torch.equal(pool.x[:N], expected.x)
    assert torch.equal(pool.y[:N], expected.y)
    assert len(pool.x) == (2 * N if form.startswith("training") else N)
    assert pool.structure is not None
    assert pool.structure.names == ("ids", "mask", "numbers")


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._rows[row]


def test_a_tuple_has_positions_as_names():
    structure = by_place(1).pool.structure
    assert structure is not None
    assert structure.described == "(0: int [5], 1: bool [5], 2: float [3])"
    assert torch.equal(by_place(1).pool.x, named(1).pool.x)


def test_rows_are_pairs_of_a_tuple_and_a_label():
    rows = [((torch.ones(2, 2), np.arange(3.0)), 0), ((torch.zeros(2, 2), np.ones(3)), 1)]
    pool = pool_from_torch(_Rows(rows))
    assert pool.structure is not None
    assert pool.structure.described == "(0: float [2, 2], 1: float [3])"
    assert pool.x[0].tolist() == [1, 1, 1, 1, 0, 1, 2]


def test_columns_are_named_for_the_model():
    given = {"a": columns()}
    one = federation(given, inputs={"input_ids": "ids"}).pool
    assert one.structure is not None
    assert one.structure.described == "{input_ids: int [5]}"
    several = federation(given, inputs=["numbers", "ids"]).pool
    assert several.structure is not None
    assert several.structure.names == ("numbers", "ids")
    single = federation(given, inputs="numbers").pool
    assert single.structure is None
    assert single.x.shape[1:] == (NUMBERS,)
    other = federation(given, inputs="ids", target="numbers").pool
    assert (other.task, other.outputs) == ("regression", NUMBERS)


def test_texts_of_rows_are_the_input_if_there_are_no_numbers():
    rows = datasets.Dataset.from_dict({"text": ["a b", "b c", "c d"], "label": [0, 1, 0]})
    assert federation({"a": rows}).pool.vocabulary


def test_targets_may_be_several_columns():
    x, _ = examples(0)
    survival = {"time": torch.rand(N), "event": torch.ones(N, dtype=torch.bool)}
    pool = federation({"a": (x["numbers"], survival)}).pool
    assert (pool.task, pool.outputs) == ("regression", 2)
    assert pool.target_structure is not None
    assert pool.target_structure.described == "{time: float [], event: bool []}"
    rows = {**x, **survival}
    by_name = federation({"a": rows}, inputs="numbers", target=["time", "event"]).pool
    assert torch.equal(by_name.y, pool.y)
    with pytest.raises(ConfigError, match="need task='regression', got task='classification'"):
        federation({"a": (x["numbers"], survival)}, task="classification")


def test_one_client_of_a_network_has_the_same_structure():
    rows = _Rows([*hugging_face()])
    pool = one_client(rows, rows, labels=2).pool
    assert pool.structure == named(1).pool.structure


def test_a_pool_of_dicts():
    x, y = examples(0)
    everything = np.arange(N)
    pool = Pool.of_examples("own", x, y, everything, everything[:0])  # pyright: ignore[reportArgumentType]
    assert pool.structure == named(1).pool.structure
    assert pool.schema.structure == pool.structure
    assert replace(pool, name="other").structure == pool.structure
    with pytest.raises(DataError, match="should be rows of 13 numbers"):
        replace(pool, x=pool.x[:, 1:])
    with pytest.raises(ConfigError, match="inputs_are should be 'auto'"):
        pool.with_inputs_as("tokens")


def test_a_folder_keeps_the_structure(tmp_path: Path):
    x, _ = examples(0)
    survival = {"time": torch.rand(N), "event": torch.ones(N)}
    whole = federation({"a": (x, survival), "b": (x, survival)})
    write_federation(whole, tmp_path / "out")
    found = open_folder(tmp_path / "out")
    assert found.pool.structure == whole.pool.structure
    assert found.pool.target_structure == whole.pool.target_structure
    for ours, theirs in zip(found.examples(0, "train"), whole.examples(0, "train"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_fingerprint_depends_on_names():
    x, y = examples(0)
    renamed = {"other" if name == "ids" else name: each for name, each in x.items()}
    one, other = federation({"a": (x, y)}), federation({"a": (renamed, y)})
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"a": columns()}, {"target": "labl"}, "has no column 'labl', only ids, mask, numbers"),
        ({"a": columns()}, {"inputs": ["id"]}, "has no column 'id', only ids, mask, numbers"),
        ({"a": examples(0)}, {"inputs": "ids"}, "is a pair (x, y), which has none"),
        ({"a": columns()}, {"inputs_are": "tokens"}, "inputs_are should be 'auto'"),
        ({"a": columns()}, {"standardize": "federated"}, "standardize should be 'none'"),
        (
            {"a": {"x": torch.zeros(3, 2)}},
            {},
            "has the columns x, none of which is named labels, label, target, targets, y",
        ),
        (
            {"a": {"note": ["a", "b"], "name": ["c", "d"], "label": [0, 1]}},
            {},
            "none of the columns besides the target has numbers",
        ),
        (
            {"a": examples(0), "b": (examples(0)[0]["ids"], examples(0)[1])},
            {},
            "inputs of training data of 'b' should have the type and shape of inputs of",
        ),
        (
            {"a": {"ids": torch.zeros(3, 2), "m": torch.zeros(2, 2), "label": [0, 1, 0]}},
            {},
            "should have the same number of examples in all tensors, got {'ids': 3, 'm': 2}",
        ),
        (
            {"a": ({"x": torch.zeros(3, 2)}, torch.zeros(2))},
            {},
            "should be arrays x and y of the same length, got shapes [3] and [2]",
        ),
        (
            {"a": ({"x": torch.zeros(3, 2)}, {"y": torch.zeros(2)})},
            {},
            "should have as many inputs as targets, got 3 inputs and 2 targets",
        ),
        (
            {"a": _Rows([{"ids": [1, 2], "label": 0}, {"ids": [1], "label": 1}])},
            {},
            "pad texts to one length",
        ),
    ],
)
def test_what_cannot_be_read(given: Any, options: Any, message: str):
    with pytest.raises((ConfigError, DataError)) as caught:
        federation(given, **options)
    assert message in str(caught.value)


def test_masks():
    x = torch.rand(6, 1, 4, 4)
    masks = torch.randint(3, (6, 4, 4))
    masks[:, 0] = 255
    pool = federation({"a": (x, masks)}, task="segmentation", ignored=255).pool
    assert (pool.task, pool.outputs) == ("segmentation", 3)
    assert bool((pool.y[:, 0] == -100).all())
    channel = federation({"a": (x, masks[:, None])}, task="segmentation", ignored=255).pool
    assert torch.equal(channel.y, pool.y)
    rows = _Rows([*zip(x, masks, strict=True)])
    assert torch.equal(federation({"a": rows}, task="segmentation", ignored=255).pool.y, pool.y)
    with pytest.raises(DataError, match=r"should be masks \[N, H, W\]"):
        federation({"a": (x, masks[:, 0, 0])}, task="segmentation")
    with pytest.raises(ConfigError, match="ignored = 255 marks pixels of masks"):
        federation({"a": (x, masks[:, 0, 0])}, ignored=255)


def test_masks_are_not_rotated():
    pool = federation(
        {"a": (torch.rand(6, 1, 4, 4), torch.zeros(6, 4, 4).long())}, "segmentation"
    ).pool
    trained = replace(pool, train=np.arange(6))
    with pytest.raises(DataError, match="shift 'rotation' rotates inputs only"):
        load_federation(trained, clients=2, shift="rotation")


def test_labels_with_a_second_dimension():
    x, y = examples(0)
    pool = federation({"a": (x["numbers"], y[:, None])}).pool
    assert torch.equal(pool.y, y)
    rows = _Rows([(each, label[None]) for each, label in zip(x["numbers"], y, strict=True)])
    assert torch.equal(federation({"a": rows}).pool.y, y)


def test_images_as_targets():
    pool = federation({"a": (torch.rand(6, 1, 4, 4), torch.rand(6, 2, 4, 4))}).pool
    assert (pool.task, pool.outputs) == ("regression", 32)
    assert pool.y.shape == (6, 2, 4, 4)


def test_structures_are_equal_by_value():
    assert Structure.of(examples(0)[0], "x") == Structure.of(examples(1)[0], "x")
