"""Regression on standardized targets: the loss is of these, scores are in the user's unit."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from fedclade import (
    ConfigError,
    DifferentialPrivacy,
    ExamplePrivacy,
    Federation,
    LocalTraining,
    Run,
    assign,
    export_model,
    federation_from_frame,
    load_export,
    simulate,
)
from fedclade.algorithms import FedAvg, FedEM, PerFedAvg
from fedclade.core import DataSpec
from fedclade.runs import clip_by_default
from fedclade.tasks import TargetScale, Task

UNIT = 1000.0
MEAN = 50_000.0


def frame(rows: int = 40, target: str = "cost") -> Any:
    draw = np.random.default_rng(0)
    size = draw.normal(size=rows)
    return pa.table(
        {
            "site": ["a", "b"] * (rows // 2),
            "size": size,
            target: MEAN + UNIT * size,
            "other": 3.0 + 0.01 * size,
        }
    )


def table(**options: Any) -> Federation:
    settings: dict[str, Any] = {"inputs": ("size",), **options}
    return federation_from_frame(frame(), "site", settings.pop("target", "cost"), **settings)


METRICS = ["mae", "rmse", "mse", "r2", "mape"]


def linear(made: Federation, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(made.pool.input_shape[0], made.pool.outputs)


def run_of(made: Federation, task: Task | None = None, **options: Any) -> Run:
    return simulate(
        options.pop("algorithm", "fedavg"),
        lambda seed: linear(made, seed),
        made,
        rounds=options.pop("rounds", 4),
        local=LocalTraining(epochs=5, batch_size=8, lr=0.1),
        task=task or Task("regression", metrics=METRICS),
        device="cpu",
        **options,
    )


def errors_of(run: Run, made: Federation) -> dict[str, float]:
    """Return the mean of clients' errors by the root's model, computed by hand."""
    columns = made.pool.columns
    assert columns is not None
    model = nn.Linear(made.pool.input_shape[0], made.pool.outputs)
    model.load_state_dict(run.layout.state_dict(run.tree.nodes[0].model))  # pyright: ignore
    mae: list[float] = []
    mse: list[float] = []
    for client in made.ids:
        x, y = made.examples(client, "test")
        with torch.no_grad():
            outputs = model(x).double()
        scaled = outputs.view(y.shape)
        predicted = scaled
        if columns.target_mean is not None:
            predicted = scaled * torch.tensor(columns.target_std) + torch.tensor(
                columns.target_mean
            )
        mae.append(float((predicted - y).abs().mean()))
        mse.append(float((predicted - y).square().mean()))
    return {"mae": float(np.mean(mae)), "mse": float(np.mean(mse))}


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
def test_scores_are_in_the_users_unit_whatever_the_engine(engine: str) -> None:
    made = table()
    run = run_of(made, engine=engine)
    expected = errors_of(run, made)
    assert run.summary["mae"]["mean"] == pytest.approx(expected["mae"], rel=1e-2)
    assert run.summary["mse"]["mean"] == pytest.approx(expected["mse"], rel=1e-2)
    assert run.summary["mae"]["mean"] < UNIT / 10
    assert run.summary["r2"]["mean"] > 0.98
    assert run.summary["mape"]["mean"] < 0.01
    # the loss is of standardized targets
    assert run.metrics["loss_mean"].iloc[-1] < 0.1


def test_engines_train_alike_on_standardized_targets() -> None:
    made = table()
    loop, stacked = (run_of(made, engine=engine, rounds=2) for engine in ("loop", "stacked"))
    torch.testing.assert_close(
        loop.tree.nodes[0].model, stacked.tree.nodes[0].model, rtol=1e-4, atol=1e-5
    )


def test_targets_are_taken_as_they_are_if_the_user_says_so() -> None:
    run = run_of(table(standardize_target="none"), Task("regression"), rounds=1)
    assert "target_mean" not in run.summary["inputs"]
    assert run.metrics["loss_mean"].iloc[-1] > UNIT


def test_several_targets_of_different_scale_are_scored_each_in_its_unit() -> None:
    made = table(target=("cost", "other"), task="regression")
    run = run_of(made, Task("regression", metrics=["mae"]))
    assert run.summary["mae"]["mean"] == pytest.approx(errors_of(run, made)["mae"], rel=1e-3)
    assert run.summary["inputs"]["target_mean"][1] == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("loss", ["poisson_nll", "own"])
def test_a_loss_that_measures_no_difference_gets_targets_as_they_are(
    loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[float] = []

    def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(float(targets.max()))
        return 1e-9 * (outputs - targets).square()

    task = Task("regression", loss=own if loss == "own" else loss)
    with caplog.at_level(logging.WARNING, "fedclade"):
        run = simulate(
            "fedavg",
            "mlp",
            table(),
            rounds=1,
            local=LocalTraining(lr=1e-9),
            task=task,
            engine="loop",
            device="cpu",
        )
    assert "target_mean" not in run.summary["inputs"]
    assert "targets are not standardized, since the loss is not one of mse, mae" in caplog.text
    if loss == "own":
        assert max(seen) > MEAN


@pytest.mark.parametrize(
    "privacy",
    [
        DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0),
        ExamplePrivacy(clip_norm=1.0, noise_multiplier=1.0),
    ],
    ids=["client", "example"],
)
def test_private_clients_scale_nothing_by_default_and_the_log_says_so(
    privacy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        run = run_of(table(), Task("regression"), rounds=1, privacy=privacy)
    assert {"mean", "target_mean"}.isdisjoint(run.summary["inputs"])
    assert "the default scaling of inputs and targets is turned off, because" in caplog.text
    raw = table(standardize="none", standardize_target="none")
    same = run_of(raw, Task("regression"), rounds=1, privacy=privacy)
    assert torch.equal(run.tree.nodes[0].model, same.tree.nodes[0].model)


@pytest.mark.parametrize("key", ["standardize", "standardize_target"])
def test_private_clients_refuse_scaling_that_the_user_chose(key: str) -> None:
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="sums of their data"):
        run_of(table(**{key: "federated"}), Task("regression"), rounds=1, privacy=privacy)


def test_newcomers_are_scored_in_the_users_unit() -> None:
    made = table(newcomers=1, samples_per_client=20)
    run = run_of(made, Task("regression"), rounds=4)
    assert made.newcomers is not None
    (row,) = assign(
        run, made.newcomers, model=lambda seed: nn.Linear(1, 1), device="cpu", engine="loop"
    ).rows
    assert row["mae"] < UNIT / 5


def test_an_exported_model_predicts_in_the_users_unit(tmp_path: Path) -> None:
    made = table()
    run = run_of(made, Task("regression"))
    export_model(run, tmp_path / "m.safetensors", node=0)
    model = load_export(tmp_path / "m.safetensors", nn.Linear(1, 1))
    x, y = made.examples(0, "test")
    with torch.no_grad():
        assert float((model(x)[:, 0] - y).abs().mean()) < UNIT / 5
    card = (tmp_path / "m.md").read_text()
    assert "| targets | output × " in card
    assert "It was trained on standardized targets" in card


def test_a_module_into_which_another_model_is_loaded_has_the_unit_of_that_model(
    tmp_path: Path,
) -> None:
    made = table()
    scaled = run_of(made, Task("regression"))
    plain = run_of(table(standardize_target="none"), Task("regression"), rounds=1)
    export_model(scaled, tmp_path / "scaled.safetensors", node=0)
    export_model(plain, tmp_path / "plain.safetensors", node=0)
    module = nn.Linear(1, 1)
    x, _ = made.examples(0, "test")

    def predict(name: str, model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return load_export(tmp_path / f"{name}.safetensors", model)(x)

    expected = predict("scaled", nn.Linear(1, 1))
    assert torch.equal(predict("scaled", module), expected)
    assert torch.equal(predict("scaled", module), expected)
    assert torch.equal(predict("scaled", copy.deepcopy(module)), expected)
    assert torch.equal(predict("plain", module), predict("plain", nn.Linear(1, 1)))


def test_a_mixture_of_copies_of_a_loaded_module_restores_the_unit_once(tmp_path: Path) -> None:
    made = table()
    single = run_of(made, Task("regression"))
    export_model(single, tmp_path / "single.safetensors", node=0)
    mixed = run_of(made, Task("regression"), algorithm=FedEM(clusters=2), rounds=2)
    export_model(mixed, tmp_path / "mixed.safetensors", client=0)
    x, _ = made.examples(0, "test")
    with torch.no_grad():
        expected = load_export(tmp_path / "mixed.safetensors", nn.Linear(1, 1))(x)
        module = load_export(tmp_path / "single.safetensors", nn.Linear(1, 1))
        before = module(x)
        assert torch.equal(load_export(tmp_path / "mixed.safetensors", module)(x), expected)
        assert torch.equal(module(x), before)


def test_a_run_continues_with_the_same_scale(tmp_path: Path) -> None:
    whole = run_of(table(), rounds=4)
    run_of(table(), rounds=2, folder=tmp_path / "run", checkpoint_every=1)
    again = run_of(table(), rounds=4, folder=tmp_path / "run", checkpoint_every=1)
    assert torch.equal(again.tree.nodes[0].model, whole.tree.nodes[0].model)
    assert again.summary["mae"] == whole.summary["mae"]


def test_a_scale_of_targets_has_an_inverse() -> None:
    scale = TargetScale((2.0, 5.0), (4.0, 0.5))
    y = torch.tensor([[6.0, 5.5], [2.0, 4.0]])
    assert scale.standardize(y).tolist() == [[1.0, 1.0], [0.0, -2.0]]
    assert scale.restore(scale.standardize(y)).tolist() == y.tolist()
    one = TargetScale((2.0,), (4.0,))
    assert one.standardize(torch.tensor([6.0])).tolist() == [1.0]
    assert one.restore(torch.tensor([[1.0]])).tolist() == [[6.0]]
    fitted = Task().of(DataSpec("d", (1,), 1, "regression"), target_scale=one)
    assert fitted.losses(torch.tensor([[1.0]]), torch.tensor([6.0])).tolist() == [0.0]
    assert fitted.predictions(torch.tensor([[1.0]])).tolist() == [[6.0]]


@pytest.mark.parametrize(
    ("local", "clip_norm"),
    [
        (LocalTraining(), 1.0),
        (LocalTraining(clip_norm=7.0), 7.0),
        (LocalTraining(optimizer="adam"), None),
    ],
)
def test_gradients_on_standardized_targets_are_clipped_unless_the_user_says_otherwise(
    local: LocalTraining, clip_norm: float | None
) -> None:
    assert clip_by_default(local, FedAvg()).clip_norm == clip_norm


def test_an_algorithm_that_takes_no_clipping_gets_none() -> None:
    second_order = PerFedAvg(variant="HF")
    assert clip_by_default(LocalTraining(), second_order).clip_norm is None


def test_a_far_row_does_not_make_the_default_step_size_diverge() -> None:
    columns = frame(80).to_pydict()
    plain = federation_from_frame(frame(80), "site", "cost")
    columns["size"][int(plain.clients[0].train[0])] = 300.0
    far = federation_from_frame(pa.table(columns), "site", "cost")
    run = simulate("fedavg", "mlp", far, rounds=3, device="cpu", engine="loop")
    assert "diverged" not in run.summary
    assert run.summary["mae"]["mean"] < 2 * UNIT
