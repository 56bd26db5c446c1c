"""Columns of a table as the inputs of a model with several inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from fedclade import ConfigError, DataError, Federation, federation_from_frame, simulate
from fedclade.config import read_config
from fedclade.data import DataSchema
from fedclade.data.schema import SchemaError

ROWS = 12
FRAME = pa.table(
    {
        "who": ["a"] * ROWS + ["b"] * ROWS,
        "age": [float(k % 7) for k in range(2 * ROWS)],
        "sex": ["f", "m"] * ROWS,
        "iron": [None if k == 3 else k / 2 for k in range(2 * ROWS)],
        "sick": [k % 3 == 0 for k in range(2 * ROWS)],
    }
)
GROUPS: dict[str, Any] = {"person": ("age", "sex"), "blood": "iron"}


def build(inputs: Any, **options: Any) -> Federation:
    return federation_from_frame(FRAME, "who", "sick", inputs, "binary", **options)


class Branches(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.person, self.blood = nn.Linear(3, 2), nn.Linear(1, 2)
        self.output = nn.Linear(4, 1)

    def forward(self, person: Tensor, blood: Tensor) -> Tensor:
        return self.output(torch.cat([self.person(person), self.blood(blood)], 1))


def test_rows_are_those_of_the_plain_table():
    grouped, plain = build(GROUPS).pool, build(("age", "sex", "iron")).pool
    assert torch.equal(grouped.x, plain.x)
    assert grouped.columns == plain.columns
    assert plain.structure is None
    assert grouped.structure is not None
    assert grouped.structure.described == "{person: float [3], blood: float [1]}"


def test_a_model_with_a_branch_for_each_group_trains():
    run = simulate("fedavg", Branches, build(GROUPS), rounds=2)
    assert run.summary["inputs"]["structure"] == "{person: float [3], blood: float [1]}"
    assert run.summary["accuracy"]["mean"] >= 0


def test_indicators_belong_to_the_group_of_their_column():
    structure = build(GROUPS, missing="indicator").pool.structure
    assert structure is not None
    assert structure.described == "{person: float [3], blood: float [2]}"


def test_a_config_names_the_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(
            "age,sex,iron,sick\n" + "".join(f"{k},{'fm'[k % 2]},{k},{k % 2}\n" for k in range(9))
        )
    file = tmp_path / "my.toml"
    file.write_text(
        'algorithm.name = "fedavg"\ntask.name = "binary"\n[data]\nfiles = "*.csv"\n'
        'target = "sick"\ninputs = { person = ["age", "sex"], blood = "iron" }\n'
    )
    pool = read_config(file).federation().pool
    assert pool.structure is not None
    assert pool.structure.described == "{person: float [3], blood: float [1]}"


def test_a_function_in_a_config_returns_rows_whose_columns_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rows_of_mine.py").write_text(
        "import torch\n"
        "def rows():\n"
        "    one = {'ids': torch.arange(12).view(4, 3), 'mask': torch.ones(4, 3), 'y': [0, 1, 0, 1]}\n"
        "    return {'a': one, 'b': one}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "my.toml"
    file.write_text(
        'algorithm.name = "fedavg"\n[data]\nname = "rows_of_mine:rows"\n'
        'inputs = { input_ids = "ids", attention_mask = "mask" }\ntarget = "y"\n'
    )
    structure = read_config(file).federation().pool.structure
    assert structure is not None
    assert structure.described == "{input_ids: int [3], attention_mask: float [3]}"
    file.write_text(file.read_text() + "ignored = 255\n")
    with pytest.raises(ConfigError, match="ignored = 255 marks pixels of masks"):
        read_config(file).federation()


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"x": ("age", "age")}, {}, "each column should belong to one input, got 'age' twice"),
        ({"x": ("age",), "y": ()}, {}, "the input 'y' should have at least 1 column, got none"),
        ({"x": ("age", "sick")}, {}, "inputs should name other columns than target and client"),
        ({"x": ("old",)}, {}, "'old'"),
        (
            GROUPS,
            {
                "schema": DataSchema.read(
                    {"inputs": {"age": "number", "iron": "number", "sex": ["f", "m"]}}
                )
            },
            "the schema should list the columns of each input together, got 'sex' after",
        ),
    ],
)
def test_groups_that_do_not_fit(inputs: Any, options: Any, message: str):
    with pytest.raises((ConfigError, DataError)) as caught:
        build(inputs, **options)
    assert message in str(caught.value)


def test_an_empty_group():
    frame = FRAME.set_column(3, "iron", pa.nulls(2 * ROWS, pa.float64()))
    with pytest.raises(SchemaError, match="all columns of the input 'blood' are empty"):
        federation_from_frame(frame, "who", "sick", GROUPS, "binary")
