"""The example of personal methods outside of the package: the same models as those of the package's methods."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import fedclade
from fedclade import Algorithm, LocalTraining
from tests.papers.test_public_names import imports_of, is_public
from tests.tiny import federation_of, perceptron

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_personal_method.py"
OWN = runpy.run_path(str(EXAMPLE), run_name="example")

SPEC = LocalTraining(epochs=2, batch_size=8, lr=0.1)

PAIRS: dict[str, tuple[Algorithm, Algorithm]] = {
    "ditto": (OWN["Ditto"](lam=0.3), fedclade.Ditto(lam=0.3)),
    "scaffold": (OWN["Scaffold"](), fedclade.Scaffold()),
    "fedem": (OWN["FedEM"](n_models=2), fedclade.FedEM(clusters=2)),
}


def run_of(method: Algorithm, fraction: float) -> fedclade.Run:
    """Run a method on six clients of two kinds."""
    return fedclade.simulate(
        method,
        perceptron,
        federation_of([0, 1] * 3),
        rounds=4,
        seed=3,
        local=SPEC,
        client_fraction=fraction,
        engine="loop",
    )


def test_the_example_is_one_file_with_public_names():
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 220
    assert [each for each in imports_of(source) if not is_public(*each)] == []


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", PAIRS)
def test_models_and_scores_are_bit_for_bit_those_of_the_package(name: str, fraction: float):
    own, built_in = (run_of(method, fraction) for method in PAIRS[name])
    nodes = zip(own.tree.nodes, built_in.tree.nodes, strict=True)
    assert all(torch.equal(mine.params, theirs.params) for mine, theirs in nodes)
    assert own.tree.leaf_of == built_in.tree.leaf_of
    columns = ("train_loss", "accuracy_mean", "bytes_up", "bytes_down")
    for mine, theirs in zip(own.metric_rows, built_in.metric_rows, strict=True):
        assert [mine[column] for column in columns] == [theirs[column] for column in columns]
    assert own.client_rows == built_in.client_rows
