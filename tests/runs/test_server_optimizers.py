"""Server optimizers within clusters: literal NumPy twins of Algorithm 2, splits, engines, and continued runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import CFL, ConfigError, LocalTraining, RunInterrupted, ServerOptimizer, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.config import check_config
from fedclade.core import ParameterTree, ServerSteps
from fedclade.runs import rounds as rounds_module
from tests.flower.grids import FOUR, federated, grid_of
from tests.properties.test_resume import OPTIONS, bytes_of
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

OPTIMIZERS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
LOCAL = LocalTraining(batch_size=8, lr=0.2)


def literal(name: str, deltas: list[np.ndarray], eta: float, b1: float, b2: float, tau: float):
    """Steps of Algorithm 2 of Reddi et al. 2021, line by line; FedAvgM is Hsu et al. 2019, Algorithm 1."""
    m = np.zeros_like(deltas[0])
    v = np.full_like(deltas[0], tau**2)
    steps = []
    for delta in deltas:
        if name == "fedavgm":
            m = b1 * m + delta
            steps.append(eta * m)
            continue
        m = b1 * m + (1 - b1) * delta
        if name == "fedadagrad":
            v = v + delta**2
        elif name == "fedyogi":
            v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        else:
            v = b2 * v + (1 - b2) * delta**2
        steps.append(eta * m / (np.sqrt(v) + tau))
    return steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_algorithm_2(name: str):
    draw = np.random.default_rng(0)
    deltas = [draw.normal(size=50) * 10.0 ** draw.integers(-3, 2, 50) for _ in range(8)]
    how = ServerOptimizer(optimizer=name, lr=0.3, beta1=0.8, beta2=0.95, tau=0.01)
    server = ServerSteps(how, {}, 50)
    expected = literal(name, deltas, 0.3, 0.8, 0.95, 0.01)
    for delta, step in zip(deltas, expected, strict=True):
        found = server.step([0], torch.from_numpy(delta))
        np.testing.assert_allclose(found.numpy(), step, rtol=1e-12)


def test_buffers_move_by_the_mean():
    server = ServerSteps(ServerOptimizer(optimizer="fedadam"), {}, 3)
    found = server.step([0], torch.tensor([1.0, 2.0, 3.0, 40.0, 50.0]))
    assert found[3:].tolist() == [40.0, 50.0]
    assert (found[:3] != torch.tensor([1.0, 2.0, 3.0])).all()


def run_of(server: ServerOptimizer | None = None, algorithm: Any = "fedavg", **settings: Any):
    settings = {"rounds": 4, "engine": "loop", "local": LOCAL} | settings
    federation = settings.pop("federation", None) or federation_of(FOUR)
    model = settings.pop("model", perceptron)
    return simulate(algorithm, model, federation, server=server, **settings)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Node, mean update and change of its model, for every move of a run."""
    listed: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    moved = ParameterTree.moved

    def watched(self: ParameterTree, node: int, delta: torch.Tensor) -> ParameterTree:
        after = moved(self, node, delta)
        change = after.nodes[node].params - self.nodes[node].params
        listed.append((node, delta, change))
        return after

    monkeypatch.setattr(ParameterTree, "moved", watched)
    return listed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_moves_its_model_by_these_steps(name: str, moves: list[Any]):
    run_of(ServerOptimizer(optimizer=name, lr=0.05))
    deltas = [delta.double().numpy() for _, delta, _ in moves]
    expected = literal(name, deltas, 0.05, 0.9, 0.99, 1e-3)
    assert len(moves) == 4
    for (_, _, change), step in zip(moves, expected, strict=True):
        np.testing.assert_allclose(change.numpy(), step, rtol=1e-3, atol=1e-6)


def test_children_inherit_a_copy_of_their_parents_moments(moves: list[Any]):
    algorithm = CFL(split_rounds=(2,), eps2=1e-6)
    run = run_of(ServerOptimizer(optimizer="fedadam", lr=0.05), algorithm, rounds=5)
    nodes = sorted({node for node, *_ in moves})
    assert nodes == [0, 1, 2] == [node.id for node in run.tree.nodes]
    of_root = [delta.double().numpy() for node, delta, _ in moves if node == 0]
    for child in (1, 2):
        own = [(d.double().numpy(), change) for node, d, change in moves if node == child]
        expected = literal("fedadam", of_root + [d for d, _ in own], 0.05, 0.9, 0.99, 1e-3)
        for (_, change), step in zip(own, expected[len(of_root) :], strict=True):
            np.testing.assert_allclose(change.numpy(), step, rtol=1e-3, atol=1e-6)


def test_none_and_a_plain_momentum_of_zero_are_the_mean():
    plain = run_of().tree.nodes[0].params
    assert run_of(ServerOptimizer()).tree.nodes[0].params.equal(plain)
    momentum = run_of(ServerOptimizer(optimizer="fedavgm", lr=1.0, beta1=0.0))
    assert momentum.tree.nodes[0].params.equal(plain)
    other = run_of(ServerOptimizer(optimizer="fedavgm"))
    assert not other.tree.nodes[0].params.allclose(plain)


@pytest.mark.parametrize("engine", ["stacked", "workers"])
def test_every_engine_equals_the_loop(engine: str):
    how = ServerOptimizer(optimizer="fedavgm")
    torch.testing.assert_close(
        run_of(how, engine=engine).tree.nodes[0].params, run_of(how).tree.nodes[0].params
    )


def test_a_network_and_a_stream_equal_a_simulation():
    how = ServerOptimizer(optimizer="fedadam", lr=0.05, tau=0.01)
    expected = run_of(how).tree.nodes[0].params
    run = federated(grid_of(federation_of(FOUR)), "fedavg", local=LOCAL, server=how)
    torch.testing.assert_close(run.tree.nodes[0].params, expected, rtol=1e-4, atol=1e-5)
    assert run.config["server"]["optimizer"] == "fedadam"
    streamed = run_of(how, stream=True).tree.nodes[0].params
    torch.testing.assert_close(streamed, expected, rtol=1e-4, atol=1e-5)


REFUSED = ("fedsoft", "fesem", "local")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_method_resumes_with_its_moments_or_refuses(name: str, tmp_path: Path):
    federation = federation_of([0, 1, 2, 3] * 2)
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), federation.true_clusters)
    how = ServerOptimizer(optimizer="fedadam", lr=0.02)
    normed = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))
    settings = {"federation": federation, "rounds": 3, "local": LocalTraining(batch_size=12)}
    settings |= {"model": normed} if name == "fedbn" else {}
    if name in REFUSED:
        with pytest.raises(ConfigError, match="needs an algorithm that moves models by mean"):
            run_of(how, algorithm, **settings)
        return
    run_of(how, algorithm, folder=tmp_path / "whole", **settings)
    for number in (1, 2):
        with pytest.raises(RunInterrupted, match=f"after round {number}"):
            run_of(how, algorithm, folder=tmp_path / "cut", stop=lambda: True, **settings)
    run_of(how, algorithm, folder=tmp_path / "cut", **settings)
    whole, cut = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "cut")
    assert [each for each in whole if whole[each] != cut[each]] == []
    plain = run_of(None, algorithm, **settings)
    moved = run_of(how, algorithm, **settings)
    same = [
        a.model.equal(b.model) for a, b in zip(plain.tree.nodes, moved.tree.nodes, strict=False)
    ]
    assert not all(same), "the optimizer made no step"


def test_a_finished_run_continues_with_its_moments(tmp_path: Path):
    how = ServerOptimizer(optimizer="fedyogi")
    algorithm = CFL(split_rounds=(2,), eps2=1e-6)
    for rounds in (3, 5):
        run_of(how, algorithm, folder=tmp_path / "continued", rounds=rounds)
    run_of(how, algorithm, folder=tmp_path / "whole", rounds=5)
    whole, continued = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "continued")
    assert [each for each in whole if whole[each] != continued[each]] == []


def test_a_round_that_fails_leaves_the_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    how = ServerOptimizer(optimizer="fedadam")
    whole = run_of(how)
    check = rounds_module.check_models
    failures = iter([False, False, True, False, False])

    def fails(number: int, *trees: ParameterTree) -> None:
        if next(failures):
            raise RuntimeError("a failure in round 3")
        check(number, *trees)

    monkeypatch.setattr(rounds_module, "check_models", fails)
    with pytest.raises(RuntimeError, match="a failure in round 3"):
        run_of(how, folder=tmp_path / "run")
    again = run_of(how, folder=tmp_path / "run")
    assert again.tree.nodes[0].params.equal(whole.tree.nodes[0].params)


def test_a_config_has_a_section_for_it():
    config = check_config({"server": {"optimizer": "fedadam", "lr": 0.03}})
    assert config.settings.server == ServerOptimizer(optimizer="fedadam", lr=0.03)
    assert config.as_dict()["server"]["tau"] == 1e-3
    assert "server" not in check_config({}).as_dict()
    assert ServerOptimizer(optimizer="fedadam").step_size == 0.1
    assert ServerOptimizer(optimizer="fedavgm").step_size == 1.0


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"optimizer": "adam"}, "optimizer of [server] should be 'none' or 'fedavgm' or"),
        ({"optimizer": "fedadam", "lr": 0.0}, "server.lr should be greater than 0, got 0"),
        ({"optimizer": "fedadam", "beta1": 1.0}, "server.beta1 should be in [0, 1), got 1.0"),
        ({"optimizer": "fedadam", "beta2": -0.1}, "server.beta2 should be in [0, 1), got -0.1"),
        ({"optimizer": "fedadam", "tau": 0.0}, "server.tau should be greater than 0, got 0"),
        ({"lr": 0.1}, "server.lr should be left out with server.optimizer = 'none', got 0.1"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_config({"server": section})
