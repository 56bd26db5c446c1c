"""Examples of several tensors over a network: results are those of a simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import Metric, Task, federation, simulate
from fedclade.core import DataSpec, Structure, UpdateError
from fedclade.flower.registration import read_schema, schema_values
from tests.flower.grids import LOCAL, federated, grid_of
from tests.structured import LABELS, Reader, examples, named

STRUCTURE = Structure.of(examples(0)[0], "inputs")
SPEC = DataSpec("d", (STRUCTURE.width,), LABELS, structure=STRUCTURE)


def test_a_network_trains_as_a_simulation_does():
    data = named()
    there = federated(grid_of(data, Reader), "fedavg", Reader, rounds=2)
    here = simulate("fedavg", Reader, data, local=LOCAL, rounds=2, engine="loop")
    assert torch.allclose(there.tree.nodes[0].model, here.tree.nodes[0].model, atol=1e-6)
    assert there.summary["accuracy"] == here.summary["accuracy"]


def test_segmentation_over_a_network():
    def pictures(client: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(client))
        return x, (x[:, 0] > 0.5).long()

    def network(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Conv2d(1, 2, 1)

    data = federation({f"c{k}": pictures(k) for k in range(3)}, "segmentation")
    there = federated(grid_of(data, network), "fedavg", network, rounds=2)
    here = simulate("fedavg", network, data, local=LOCAL, rounds=2, engine="loop")
    assert torch.allclose(there.tree.nodes[0].model, here.tree.nodes[0].model, atol=1e-6)
    assert there.summary["iou"]["mean"] == pytest.approx(here.summary["iou"]["mean"])


def test_targets_of_several_columns_over_a_network():
    def weighted(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return targets["weight"] * (outputs[:, 0] - targets["y"]).abs()

    def terms(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return (outputs[:, 0] - targets["y"]).abs().double()

    def numbers(client: int) -> Any:
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(client))
        return x, {"y": x[:, 0], "weight": x[:, 1].abs()}

    def network(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(3, 1)

    task = Task(loss=weighted, metrics=[Metric("error", False, terms=terms), "mean_loss"])
    data = federation({f"c{k}": numbers(k) for k in range(3)})
    there = federated(grid_of(data, network, task=task), "fedavg", network, rounds=2, task=task)
    here = simulate("fedavg", network, data, local=LOCAL, rounds=2, engine="loop", task=task)
    assert torch.allclose(there.tree.nodes[0].model, here.tree.nodes[0].model, atol=1e-6)
    assert there.summary["error"]["mean"] == pytest.approx(here.summary["error"]["mean"], rel=1e-5)


def test_clients_need_the_same_structure():
    x, y = examples(0)
    renamed = {"words" if name == "ids" else name: each for name, each in x.items()}
    data = named(2)
    other = federation({"c0": (renamed, y), "c1": (renamed, y)})
    grid = grid_of(data, Reader)
    stranger = grid_of(other, lambda seed: _Other(seed))
    grid.nodes = {**grid.nodes, 101: stranger.nodes[101]}
    with pytest.raises(UpdateError) as caught:
        federated(grid, "fedavg", Reader, rounds=1)
    assert "node 101 was refused: its examples have the properties" in str(caught.value)
    assert "{words: int" in str(caught.value)


class _Other(Reader):
    def forward(self, words: Tensor, mask: Tensor, numbers: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(words, mask, numbers)


def test_a_specification_travels():
    for spec in (SPEC, DataSpec("d", (3,), 2), replace(SPEC, target_structure=None)):
        assert read_schema(json.loads(json.dumps(schema_values(spec)))) == spec
    assert "structure" not in schema_values(DataSpec("d", (3,), 2))


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"fields": 5}, "the structure of a client's data is"),
        ({"fields": [{}], "is_named": True}, "the structure of a client's data is"),
        (
            {"fields": [{"name": "a", "kind": "int", "shape": [2]}], "is_named": True},
            "the structure of a client's data has 2 numbers, but its rows have the shape (13,)",
        ),
    ],
)
def test_a_malformed_structure_is_refused(structure: Any, message: str):
    values = {**schema_values(SPEC), "structure": structure}
    with pytest.raises((TypeError, ValueError)) as caught:
        read_schema(values)
    if message in str(caught.value):
        return
    assert isinstance(caught.value, TypeError)
