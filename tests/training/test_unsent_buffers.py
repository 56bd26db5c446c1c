"""Buffers that are no running statistics: in no vector, the same for all clients, and exact wherever they are kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedclade
from fedclade import LocalTraining, ModelError
from fedclade.core import DataSpec
from fedclade.core.params import Layout
from fedclade.runs.store.export import export_model
from fedclade.training.unsent_buffers import note_unsent_buffers
from tests.flower.grids import federated, grid_of
from tests.tiny import FEATURES, LABELS, federation_of

SPEC = DataSpec("tiny", (FEATURES,), LABELS)
LARGE = 2**31 - 1
"""A whole number that float32 cannot hold."""

LOCAL = LocalTraining(batch_size=8, lr=0.1)
ENGINES = ("loop", "stacked", "vmap", "workers")

CONSTANTS = {
    "ids": torch.arange(300, 300 + FEATURES),
    "seed": torch.tensor([LARGE, -LARGE]),
    "mask": torch.tensor([0.0, -torch.inf, torch.nan]),
    "rotation": torch.tensor([1j, 2 - 1j]),
    "flags": torch.tensor([True, False]),
    "table": torch.linspace(0, 1, FEATURES, dtype=torch.float64),
    "few_digits": torch.tensor([0.1], dtype=torch.bfloat16),
}
"""Buffers of every kind that training does not change."""


class WithConstants(nn.Module):
    """A linear model that uses a constant, with others beside it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.output = nn.Linear(FEATURES, LABELS)
        for name, value in CONSTANTS.items():
            self.register_buffer(name, value.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x + self.table.to(x.dtype))


class Changing(nn.Module):
    """A linear model one buffer of which every pass in training mode changes."""

    def __init__(self, value: Tensor, persistent: bool = True, replaces: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.output = nn.Linear(FEATURES, LABELS)
        self.replaces = replaces
        self.register_buffer("steps", value.clone(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.steps.abs().float().clamp(max=100).mean()
        if self.training:
            if self.replaces:
                self.steps = self.steps + 1
            else:
                self.steps += 1
        return self.output(x) * scale


class Late(Changing):
    """Begins to change its buffer in a later step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training and self.calls > 6:
            self.steps += 1
        return self.output(x)


def check_constants(state: dict[str, Tensor]) -> None:
    assert set(CONSTANTS) <= set(state)
    for name, value in CONSTANTS.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name].nan_to_num(7), value.nan_to_num(7)), name


def run_of(model: Any, **settings: Any) -> fedclade.Run:
    settings = {"rounds": 2, "engine": "loop", "local": LOCAL, **settings}
    return fedclade.simulate("fedavg", model, federation_of([0, 1, 2]), **settings)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_is_in_no_vector_whatever_its_type(name: str):
    module = WithConstants()
    note_unsent_buffers(module, SPEC)
    layout = Layout.of(module)
    assert layout.buffers == ()
    assert layout.size == FEATURES * LABELS + LABELS
    assert name in layout.unsent
    assert name in layout.frozen


@pytest.mark.parametrize("name", ["ids", "seed", "mask", "rotation", "flags"])
def test_the_type_of_a_buffer_is_enough_where_no_data_is_known(name: str):
    layout = Layout.of(WithConstants())
    assert name in layout.unsent
    assert {slot.name for slot in layout.buffers} == {"table", "few_digits"}


@pytest.mark.parametrize("engine", ENGINES)
def test_constants_are_exact_and_change_no_result_in_every_engine(engine: str):
    run = run_of(WithConstants(), engine=engine)
    state = run.layout.state_dict(run.tree.nodes[0].params)
    check_constants(state)
    loop = run_of(WithConstants(), engine="loop")
    torch.testing.assert_close(run.tree.nodes[0].params, loop.tree.nodes[0].params)


def test_a_saved_run_and_its_export_have_the_same_constants(tmp_path: Path):
    run_of(WithConstants(), folder=tmp_path / "run", checkpoint_every=1)
    run = fedclade.Run.load(tmp_path / "run")
    check_constants(run.layout.state_dict(run.tree.nodes[0].params))
    export_model(run, tmp_path / "model.safetensors", node=0)
    check_constants(load_file(tmp_path / "model.safetensors"))
    module = WithConstants(seed=1)
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_constants_are_agreed_on_over_a_network_and_never_sent():
    federation = federation_of([0, 1, 0, 1])
    run = federated(
        grid_of(federation, WithConstants), "fedavg", WithConstants, rounds=2, local=LOCAL
    )
    here = fedclade.simulate(
        "fedavg", WithConstants, federation, rounds=2, local=LOCAL, engine="loop"
    )
    assert torch.equal(run.tree.nodes[0].params, here.tree.nodes[0].params)
    check_constants(run.layout.state_dict(run.tree.nodes[0].params))


def test_clients_with_other_constants_are_not_waited_for():
    def other(seed: int) -> nn.Module:
        module = WithConstants(seed)
        module.seed += 1
        return module

    with pytest.raises(ModelError, match="buffers that training does not change count as frozen"):
        federated(grid_of(federation_of([0, 1, 0, 1]), other), "fedavg", WithConstants, rounds=1)


def test_noise_is_not_put_on_constants(caplog: pytest.LogCaptureFixture):
    privacy = fedclade.DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    run = run_of(WithConstants(), privacy=privacy, rounds=1)
    check_constants(run.layout.state_dict(run.tree.nodes[0].params))
    assert "noise is also added to" not in caplog.text


@pytest.mark.parametrize("engine", ["stacked", "vmap"])
@pytest.mark.parametrize("replaces", [False, True])
def test_clients_of_a_counter_are_not_trained_together(engine: str, replaces: bool):
    with pytest.raises(fedclade.ConfigError, match=f"engine '{engine}' cannot train this model"):
        run_of(Changing(torch.tensor(0), replaces=replaces), engine=engine)


@pytest.mark.parametrize("engine", ["loop", "workers"])
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_every_client_starts_from_the_models_counter_and_leaves_it(
    engine: str, replaces: bool, persistent: bool
):
    """A client's training does not depend on who trained before it in the same process."""
    module = Changing(
        torch.tensor(LARGE - 5) if persistent else torch.tensor(0), persistent, replaces
    )
    federation = federation_of([0, 1, 2])
    together = fedclade.simulate("local", module, federation, rounds=1, engine=engine, local=LOCAL)
    for client in federation.ids:
        alone = fedclade.simulate(
            "local", module, federation.alone(client), rounds=1, engine="loop", local=LOCAL
        )
        assert torch.equal(together.kept[client]["model"], alone.kept[client]["model"])
    state = together.layout.state_dict(together.tree.nodes[0].params)
    assert {name: int(value) for name, value in state.items() if name == "steps"} == (
        {"steps": LARGE - 5} if persistent else {}
    )


def test_a_counter_is_named_in_the_log_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        run_of(Changing(torch.tensor(0)), rounds=1)
    found = [
        line
        for line in caplog.messages
        if "training changes buffer 'steps' of Changing (int64)" in line
    ]
    assert len(found) == 1
    assert "every client starts each round from the buffer's initial value" in found[0]


def test_a_float_that_training_changes_is_averaged_as_before():
    module = Changing(torch.zeros(3))
    note_unsent_buffers(module, SPEC)
    layout = Layout.of(module)
    assert [slot.name for slot in layout.buffers] == ["steps"]
    assert layout.unsent == {}
    assert module.steps.tolist() == [0, 0, 0]  # the trial leaves no trace
    assert module.training


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.tensor([1j]), "of complex numbers"),
        (torch.tensor([1.0, torch.inf]), "with a value that is NaN or infinite"),
    ],
)
def test_what_changes_and_has_no_mean_is_refused(value: Tensor, kind: str):
    with pytest.raises(
        ModelError,
        match=f"training changes buffer 'steps' of Changing, {kind}, which cannot be aver",
    ):
        run_of(Changing(value))


def test_a_buffer_that_changes_only_later_is_refused():
    with pytest.raises(
        ModelError,
        match="training changes buffer 'steps' of Late, but the first forward passes did n",
    ):
        run_of(Late(torch.zeros(3)))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES, affine=False, momentum=None)]
)
def test_the_statistics_of_batch_norm_stay_in_the_vector(norm: nn.Module):
    module = nn.Sequential(norm, nn.Linear(FEATURES, LABELS))
    note_unsent_buffers(module, SPEC)
    names = [slot.name for slot in Layout.of(module).buffers]
    assert names == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def test_a_model_that_takes_none_of_the_inputs_that_are_tried_keeps_its_floats_in_the_vector():
    class Picky(WithConstants):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not these")

    module = Picky()
    note_unsent_buffers(module, SPEC)
    assert {slot.name for slot in Layout.of(module).buffers} == {"table", "few_digits"}


@pytest.mark.parametrize(
    "spec", [DataSpec("texts", (5,), 2, vocabulary_size=9), DataSpec("own", (5,), 2)]
)
def test_a_model_of_tokens_is_tried_on_tokens(spec: DataSpec):
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.register_buffer("positions", torch.ones(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.embedding(x) + self.positions).mean(1)

    module = Reads()
    note_unsent_buffers(module, spec)
    assert set(Layout.of(module).unsent) == {"positions"}
