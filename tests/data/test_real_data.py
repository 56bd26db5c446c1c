"""The real data sets, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedclade.config import find_configs, read_scenarios
from fedclade.data import load_federation, load_pool
from fedclade.sweeps import TunedComparison, select_methods

# Found when the module is read: each test runs without the variable.
REAL_DATA = Path(
    os.environ.get("FEDCLADE_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data"
)

pytestmark = pytest.mark.skipif(
    not REAL_DATA.is_dir(),
    reason="the real data is not here: set FEDCLADE_DATA_DIR to the folder that has it",
)


@pytest.mark.slow
def test_mnist_label_swap() -> None:
    federation = load_federation(
        "mnist", shift="label_swap", samples_per_client=300, data_dir=REAL_DATA
    )
    assert federation.pool.x.shape == (70_000, 1, 28, 28)
    assert [len(client.train) for client in federation.clients] == [300] * 20
    assert len(federation.clients[0].test) == 10_000
    inputs = federation.pool.inputs(federation.pool.train)
    assert (float(inputs.mean()), float(inputs.std())) == pytest.approx((0, 1), abs=1e-3)


@pytest.mark.slow
def test_cifar10() -> None:
    pool = load_pool("cifar10", data_dir=REAL_DATA)
    assert pool.x.shape == (60_000, 3, 32, 32)
    assert np.bincount(pool.groups[pool.train]).tolist() == [5000] * 10
    inputs = pool.inputs(pool.train[::10])
    assert (float(inputs.mean()), float(inputs.std())) == pytest.approx((0, 1), abs=0.02)


def test_ag_news_by_topic() -> None:
    federation = load_federation(
        "ag_news", partition="label_groups", clusters=4, data_dir=REAL_DATA
    )
    pool = federation.pool
    assert (pool.x.shape[1:], pool.outputs, len(pool.vocabulary)) == ((32,), 10_000, 10_000)
    for client in federation.clients:
        assert set(pool.groups[client.train]) == {client.id % 4}


def test_tiny_shakespeare_by_speaker() -> None:
    federation = load_federation("tiny_shakespeare", partition="natural", data_dir=REAL_DATA)
    assert [client.name for client in federation.clients[:3]] == [
        "GLOUCESTER",
        "DUKE VINCENTIO",
        "KING RICHARD II",
    ]


@pytest.mark.slow
def test_every_set_of_the_natural_suite_has_its_files_and_trains(tmp_path: Path) -> None:
    (path,) = find_configs("natural")
    scenarios = select_methods(read_scenarios(path, scale="smoke"), ["fedavg", "local"])
    runs = TunedComparison(scenarios, tmp_path, REAL_DATA, seeds=1, device="cpu").run()
    assert not [run.failure for run in runs if run.failure]
    clients = {run.set: run.clients for run in runs}
    assert clients == {
        "heart": 4,
        "student": 4,
        "tcga_brca": 6,
        "exam": 63,
        "parkinsons": 42,
        "landmine": 29,
        "wisdm": 36,
    }
    metrics = {run.set: run.metric for run in runs}
    assert [name for name, metric in metrics.items() if metric == "auroc"] == [
        "tcga_brca",
        "landmine",
    ]
