"""Tables over a network: default scaling of inputs and targets by the statistics of all clients."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fedclade import Federation, Task, federation_from_frame, simulate
from fedclade.channel import Budget, DifferentialPrivacy
from fedclade.core import Aggregation
from fedclade.flower import LocalGrid, LocalNode, client_app
from fedclade.flower.from_config import RunConfig
from tests.flower.grids import LOCAL, federated, node_of

TASK = Task("regression", metrics=["mae", "r2"])
CLIENTS = 4
SLOW = replace(LOCAL, lr=1e-9)


def rows_of(k: int, size: int) -> dict[str, Any]:
    draw = np.random.default_rng([3, k])
    price = draw.normal(3000 + 40 * k, 9 + k, size)
    width = draw.normal(k, 0.1, size)
    return {
        "site": [f"site {k}"] * size,
        "price": price,
        "width": width,
        "cost": 1e4 + 30 * price + 100 * width,
    }


def table_of(*numbers: int, **options: Any) -> Federation:
    parts = [pa.table(rows_of(k, 20 + 4 * k)) for k in numbers]
    return federation_from_frame(pa.concat_tables(parts), "site", "cost", **options)


def alone(k: int, **options: Any) -> Federation:
    """Return one client of the federation, as an app whose node has all files makes it."""
    return table_of(*range(CLIENTS), **options).alone(k)


def grid_of(node: dict[str, Any] | None = None, task: Task = TASK, **settings: Any) -> LocalGrid:
    options = settings.pop("options", {})
    app = client_app(
        "mlp",
        lambda context: alone(int(context.node_config["partition-id"]), **options),
        task=task,
        **settings,
    )
    nodes = {
        node_of(k): LocalNode(app, {"partition-id": k, **(node or {})}) for k in range(CLIENTS)
    }
    return LocalGrid(nodes)


def run_settings(**options: Any) -> dict[str, Any]:
    unclipped = Aggregation(clip_above=math.inf)
    return {"task": TASK, "local": LOCAL, "rounds": 2, "aggregate": unclipped, **options}


def test_a_network_scales_targets_as_a_simulation_does(tmp_path: Path) -> None:
    there = federated(grid_of(), "fedavg", "mlp", folder=tmp_path / "run", **run_settings())
    here = simulate("fedavg", "mlp", table_of(*range(CLIENTS)), engine="loop", **run_settings())
    for key in ("mean", "std", "target_mean", "target_std"):
        assert there.summary["inputs"][key] == pytest.approx(here.summary["inputs"][key], rel=1e-6)
    for metric in ("mae", "r2"):
        ours, theirs = (run.summary[metric]["mean"] for run in (there, here))
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert here.summary["mae"]["mean"] > 1
    again = federated(grid_of(), "fedavg", "mlp", folder=tmp_path / "run", **run_settings(rounds=3))
    assert again.summary["inputs"]["target_std"] == there.summary["inputs"]["target_std"]


def test_targets_alone_are_scaled_if_the_user_says_so() -> None:
    options = {"standardize": "none", "standardize_target": "federated"}
    run = federated(grid_of(options=options), "fedavg", "mlp", **run_settings(rounds=1, local=SLOW))
    assert "mean" not in run.summary["inputs"]
    assert run.summary["inputs"]["target_std"][0] > 1


def test_a_loss_that_measures_no_difference_asks_for_no_statistics_of_targets() -> None:
    task = Task("regression", loss="poisson_nll")
    run = federated(
        grid_of(task=task), "fedavg", "mlp", **run_settings(task=task, rounds=1, local=SLOW)
    )
    assert "target_mean" not in run.summary["inputs"]
    assert "mean" in run.summary["inputs"]


def test_private_clients_of_a_network_scale_nothing_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    apps = {
        node_of(k): LocalNode(
            client_app(
                "mlp",
                lambda context: alone(int(context.node_config["partition-id"])),
                task=TASK,
                privacy=privacy,
                budget=Budget(epsilon=50.0),
            ),
            {"partition-id": k, "folder": str(tmp_path / str(k)), "share-schema": True},
        )
        for k in range(CLIENTS)
    }
    with caplog.at_level(logging.WARNING, "fedclade"):
        run = federated(LocalGrid(apps), "fedavg", "mlp", **run_settings(rounds=1, privacy=privacy))
    assert {"mean", "target_mean"}.isdisjoint(run.summary["inputs"])
    assert "the default scaling of inputs and targets is turned off, because" in caplog.text


def test_secure_aggregation_scales_only_if_the_config_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {
        "data.files": "data/*.csv",
        "data.target": "cost",
        "network.secure_aggregation": True,
        "network.clients": 4,
        "network.secure_norm": 10.0,
    }
    with caplog.at_level(logging.WARNING, "fedclade"):
        data = RunConfig.read(config).config.data
    assert (data["standardize"], data["standardize_target"]) == ("none", "none")
    assert "clients do not disclose with network.secure_aggregation" in caplog.text
    asked = RunConfig.read({**config, "data.standardize": "federated"}).config.data
    assert (asked["standardize"], asked["standardize_target"]) == ("federated", "none")
