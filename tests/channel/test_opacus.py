"""DP-SGD beside Opacus: a step without noise is the mean of the same clipped gradients.

Of Opacus only its gradients of single examples and its optimizer are used:
``pip install --no-deps opacus`` is enough.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import ExamplePrivacy, FedAvg, LocalTraining, simulate
from fedclade.core import Layout
from tests.tiny import FEATURES, LABELS, federation_of

LR = 0.5


@pytest.fixture(scope="module")
def opacus() -> Any:
    """Return the modules of Opacus that compute a step."""
    if importlib.util.find_spec("opacus") is None:
        pytest.skip("opacus is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("opacus.grad_sample"), importlib.import_module(
            "opacus.optimizers"
        )


def network() -> nn.Module:
    """Return a model with two dense layers, normalisation of each example, and an unusual shape."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(FEATURES, 7),
        nn.LayerNorm(7),
        nn.Tanh(),
        nn.Linear(7, LABELS, bias=False),
    )


def step_of_opacus(opacus: Any, module: nn.Module, x: Tensor, y: Tensor, norm: float) -> Tensor:
    """Return how a step of Opacus moves the model, and check that it clips some gradients only."""
    grad_sample, optimizers = opacus
    layout = Layout.of(module)
    before = layout.flatten(module)
    wrapped = grad_sample.GradSampleModule(copy.deepcopy(module), loss_reduction="mean")
    optimizer = optimizers.DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=LR),
        noise_multiplier=0.0,
        max_grad_norm=norm,
        expected_batch_size=len(x),
        loss_reduction="mean",
    )
    nn.functional.cross_entropy(wrapped(x), y).backward()
    squares = [p.grad_sample.flatten(1).square().sum(1) for p in wrapped.parameters()]
    norms = torch.stack(squares).sum(0).sqrt()
    if norm < 1e6:
        assert 0 < int((norms > norm).sum()) < len(x)
    optimizer.step()
    return layout.flatten(wrapped._module) - before


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
@pytest.mark.parametrize("norm", [2.0, 1e9])
def test_a_step_without_noise_is_that_of_opacus(opacus: Any, engine: str, norm: float):
    federation = federation_of([0], [40], seed=5)
    (client,) = federation.clients
    module = network()
    run = simulate(
        FedAvg(),
        copy.deepcopy(module),
        federation,
        rounds=1,
        engine=engine,
        device="cpu",
        # the whole of a client's data is one batch, so that each example is drawn
        local=LocalTraining(batch_size=1000, epochs=1, lr=LR),
        privacy=ExamplePrivacy(clip_norm=norm, noise_multiplier=0.0),
    )
    moved = run.tree.nodes[0].params - Layout.of(module).flatten(module)
    x = torch.as_tensor(federation.pool.x[client.train])
    y = torch.as_tensor(federation.pool.y[client.train])
    theirs = step_of_opacus(opacus, module, x, y, norm)
    assert float(theirs.norm()) > 0.01
    torch.testing.assert_close(moved, theirs, rtol=1e-4, atol=1e-6)
