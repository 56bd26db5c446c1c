"""Models with several inputs and outputs train in every engine as in a plain loop."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import (
    ConfigError,
    Federation,
    LocalTraining,
    ModelError,
    Run,
    Task,
    federation,
    simulate,
)
from fedclade.core import Layout
from fedclade.training import ENGINES
from tests.structured import LABELS, OfDict, Reader, by_place, named

FULL = LocalTraining(epochs=3, batch_size=100, lr=0.5)
"""Every step uses all of a client's examples, so that their order does not matter."""


def run_of(data: Federation, module: nn.Module, **options: Any) -> Run:
    options = {"engine": "loop", "local": FULL, "rounds": 2, "references": False, **options}
    return simulate("fedavg", module, data, **options)


def model_of(run: Run) -> Tensor:
    return run.tree.nodes[0].model


def literal(data: Federation, module: nn.Module) -> Tensor:
    """Return FedAvg's model after two rounds, by plain torch on the dicts themselves."""
    layout = Layout.of(module)
    model = layout.flatten(module)
    structure = data.pool.structure
    assert structure is not None
    for _ in range(2):
        total, count = torch.zeros_like(model), 0
        for client in data.clients:
            layout.load(model, module)
            rows, y = data.examples(client.id, "train")
            x = structure.unpack(rows)
            assert isinstance(x, dict)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                functional.cross_entropy(module(**x), y).backward()
                optimizer.step()
            total += len(y) * (layout.flatten(module).detach() - model)
            count += len(y)
        model = model + total / count
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_the_plain_loop(engine: str):
    data = named()
    found = model_of(run_of(data, Reader(), engine=engine))
    assert torch.allclose(found, literal(data, Reader()), atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_of_every_engine_are_those_of_the_loop(engine: str):
    small = LocalTraining(epochs=2, batch_size=5, lr=0.3, momentum=0.9)
    found = model_of(run_of(named(), Reader(), engine=engine, local=small))
    assert torch.allclose(found, model_of(run_of(named(), Reader(), local=small)), atol=1e-5)


@pytest.mark.parametrize(
    ("data", "module"), [(by_place(), Reader()), (named(), OfDict())], ids=["tuple", "dict"]
)
def test_inputs_by_position_and_as_one_dict(data: Federation, module: nn.Module):
    assert torch.equal(model_of(run_of(data, module)), model_of(run_of(named(), Reader())))


def test_the_module_of_the_user_stays_as_it_was():
    module = Reader()
    run_of(named(), module)
    assert not module._forward_pre_hooks
    assert module(**_inputs()).shape == (2, LABELS)


def _inputs() -> dict[str, Tensor]:
    return {
        "ids": torch.zeros(2, 5, dtype=torch.int64),
        "mask": torch.ones(2, 5, dtype=torch.bool),
        "numbers": torch.zeros(2, 3),
    }


def test_augmentation_gets_and_returns_the_rows():
    """An augmentation of several inputs gets them as the examples have them."""

    def without_numbers(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**inputs, "numbers": torch.zeros_like(inputs["numbers"])}

    found = run_of(named(augment=without_numbers), Reader())
    column = Layout.of(Reader()).unflatten(model_of(found))["output.weight"]
    first = Reader().output.weight
    assert torch.equal(column[:, 4:], first[:, 4:])  # no gradient from zeros
    assert not torch.equal(column[:, :4], first[:, :4])


@pytest.mark.parametrize("method", ["pacfl", "flux", "rcfl", "ifca", "ditto", "fedem", "fedper"])
def test_methods_with_questions_about_the_inputs(method: str):
    def maker(seed: int) -> nn.Module:
        return Reader(seed)

    options: dict[str, Any] = {"personal": ["output.*"]} if method == "fedper" else {}
    run = simulate(method, maker, named(), rounds=2, references=False, local=FULL, **options)
    assert run.summary["accuracy"]["mean"] >= 0


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


Pair = namedtuple("Pair", ["logits", "hidden"])


class Returning(Reader):
    """Returns the scores in an object, together with others."""

    def __init__(self, kind: Any, only_in_training: bool = False) -> None:
        super().__init__()
        self._kind = kind
        self._only_in_training = only_in_training

    def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> Any:
        scores = super().forward(ids, mask, numbers)
        if self._only_in_training and not self.training:
            return scores
        if self._kind is dict:
            return {"hidden": numbers, "logits": scores}
        if self._kind is tuple:
            return numbers, scores
        return self._kind(scores, numbers)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "output"), [(dict, None), (tuple, 1), (Output, None), (Pair, None), (dict, "logits")]
)
def test_the_scored_entry_of_several_outputs(kind: Any, output: Any, engine: str):
    found = run_of(named(), Returning(kind), engine=engine, task=Task(output=output))
    assert torch.allclose(model_of(found), model_of(run_of(named(), Reader())), atol=1e-5)
    assert found.summary["accuracy"] == run_of(named(), Reader()).summary["accuracy"]


def test_outputs_that_are_several_in_training_alone():
    found = run_of(named(), Returning(tuple, only_in_training=True), task=Task(output=1))
    assert torch.equal(model_of(found), model_of(run_of(named(), Reader())))


@pytest.mark.parametrize(
    ("module", "task", "message"),
    [
        (
            Returning(tuple),
            Task(),
            "the model Returning returns the tensors 0, 1; state the one that is scored, such as "
            "Task(output=0) or task.output in a config",
        ),
        (
            Returning(dict),
            Task(output="score"),
            "returns the tensors hidden, logits; has no tensor 'score'",
        ),
        (
            Returning(lambda scores, numbers: "text"),
            Task(),
            "the model Returning should return a tensor, or a tuple or dict of tensors, got str",
        ),
        (
            nn.Bilinear(3, 3, 2),
            Task(),
            "the forward method of Bilinear has the parameters input1, input2, but the inputs are "
            "named ids, mask, numbers",
        ),
    ],
)
def test_models_that_do_not_fit(module: nn.Module, task: Task, message: str):
    with pytest.raises(ModelError) as caught:
        run_of(named(), module, task=task)
    assert message in str(caught.value)


def test_a_model_that_fails_is_told_the_inputs():
    class Wrong(Reader):
        def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> Any:
            raise ValueError("no")

    with pytest.raises(ModelError) as caught:
        run_of(named(), Wrong())
    assert "cannot take the inputs {ids: int [5], mask: bool [5], numbers: float [3]}" in str(
        caught.value
    )


@pytest.mark.parametrize("output", [-1, 1.5, "", True])
def test_entries_that_no_output_has(output: Any):
    with pytest.raises(ConfigError, match=r"task\.output should be the name or the position"):
        Task(output=output)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_input_by_name(engine: str):
    numbers = named().pool.x[:24, 10:]
    labels = torch.arange(24) % 2

    def model(x: Any, engine: str) -> Tensor:
        torch.manual_seed(0)
        return model_of(run_of(federation({"a": (x, labels)}), nn.Linear(3, 2), engine=engine))

    expected = model(numbers, "loop")
    assert torch.allclose(model({"numbers": numbers}, engine), expected, atol=1e-6)
