"""Every method aggregates by the rule of the run, or says why it does not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedclade import Aggregation, Run, Signature, simulate
from fedclade.algorithms import (
    ALGORITHMS,
    CFL,
    Algorithm,
    FedAvg,
    FedBuff,
    FedDrift,
    FedSoft,
    Scaffold,
    build_algorithm,
)
from fedclade.algorithms.scaffold import _sum_control_steps
from fedclade.core import ConfigError, LocalTraining, RoundPlan, Updates, mean
from fedclade.core import aggregate as rules
from fedclade.core.aggregate import mean_of_all
from fedclade.runs import RunSettings, decide_stream
from tests.tiny import FEATURES, LABELS, federation_of, linear

TRUTH = (0, 0, 0, 0, 1, 1, 1, 1)

MEDIAN = Aggregation(rule="median")

OPTIONS: dict[str, dict[str, Any]] = {
    "cfl": {"split_rounds": (2,), "eps2": 1e-6},
    "fl_hc": {"rounds_before": 1, "n_clusters": 2},
    "fedgroup": {"groups": 2, "eta_g": 0.0},  # groups do not move along each other's models
    "flexcfl": {"groups": 2, "pretrain_steps": 4},
    "ifca": {"clusters": 2},
    "clove": {"clusters": 2},
    "fesem": {"clusters": 2},
    "fedsoft": {"clusters": 2, "selection": 3},
    "feddrift": {"step_rounds": 1, "delta": 0.2},
    "fedem": {"clusters": 2},
    "fedrc": {"clusters": 2},
    "pacfl": {"n_clusters": 2},
    "fedbuff": {"buffer_size": 5},
}
"""What the methods need on so few clients."""


def normed(seed: int = 0) -> nn.Module:
    """Return a model with a head, a body, a layer that normalises, and buffers."""
    torch.manual_seed(seed)
    layers = (
        nn.Flatten(),
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, LABELS),
    )
    return nn.Sequential(*layers)


def run_of(algorithm: Algorithm, aggregation: Aggregation = MEDIAN, **settings: Any) -> Run:
    local = LocalTraining(batch_size=8, lr=0.2)
    settings = {"rounds": 3, "evaluate_every": 3, "local": local, "engine": "loop", **settings}
    return simulate(algorithm, normed, federation_of(TRUTH), aggregate=aggregation, **settings)


ONE_STEP = LocalTraining(batch_size=24, lr=0.2)
"""Of each client in a round."""


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if name != "local"]
)  # which aggregates nothing
def test_no_model_moves_but_by_the_rule(name: str, monkeypatch: pytest.MonkeyPatch):
    """With a rule by which nothing moves, every model stays what it was, and with a real one it does not."""
    algorithm = build_algorithm(name, OPTIONS.get(name), federation_of(TRUTH).true_clusters)
    moved = run_of(algorithm, local=ONE_STEP)
    monkeypatch.setattr(
        "fedclade.core.aggregate.robust", lambda rows, *_: torch.zeros_like(rows[0])
    )
    still, before = run_of(algorithm, local=ONE_STEP), run_of(algorithm, rounds=1, local=ONE_STEP)
    for run in (still, before):
        assert run.config["aggregate"]["rule"] == "median"
    began = [node.params for node in before.tree.nodes]
    for node in still.tree.leaves:
        assert any(torch.allclose(node.params, each, rtol=0, atol=1e-6) for each in began)
    there = [node.params for node in still.tree.leaves if node.members]
    assert not any(
        torch.allclose(node.params, each, atol=1e-4)
        for node in moved.tree.leaves
        if node.members
        for each in there
    )


@cache
def by_the_mean(name: str) -> Run:
    return run_of(build_algorithm(name, OPTIONS.get(name), None), Aggregation())


@pytest.mark.parametrize("rule", ["krum", "bulyan", "geometric_median", "centred_clipping"])
@pytest.mark.parametrize("name", ["cfl", "fedbuff", "scaffold", "fedsoft", "fedem"])
def test_every_rule_goes_with_every_kind_of_method(name: str, rule: Any):
    algorithm = build_algorithm(name, OPTIONS.get(name), None)
    by_rule = run_of(algorithm, Aggregation(rule=rule, mixing=True))
    models = [run.tree.leaves[0].params for run in (by_rule, by_the_mean(name))]
    assert 1e-4 < float(torch.linalg.vector_norm(models[0] - models[1])) < 10


def deltas_of(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def updates_of(
    deltas: Tensor, sizes: list[int] | None = None, rule: Aggregation | None = MEDIAN
) -> Updates:
    n = len(deltas)
    updates = Updates.received(range(n), sizes or [1] * n, deltas, 3, torch.zeros(n), 1)
    return updates.with_common(aggregation=rule)


def test_fedbuff_weighs_what_is_stale_before_the_rule():
    deltas, stale = deltas_of(5), {0: 0, 1: 3, 2: 0, 3: 8, 4: 0}
    weights = torch.tensor([1.0, 1 / 2, 1.0, 1 / 3, 1.0])
    found = FedBuff()._average_discounted(updates_of(deltas), stale)
    torch.testing.assert_close(found, rules.median(weights[:, None] * deltas))


def test_scaffolds_control_variate_moves_by_the_rule():
    """Of one step of size 0.5, c_i⁺ − c_i = −c − Δ/(K η); with equal sizes the mean rule gives their mean."""
    deltas, control = deltas_of(5), torch.tensor([0.1, 0.2, 0.3, 0.0])
    this_round = RoundPlan(1, LocalTraining(steps=2, lr=0.5))
    each = -deltas / (2 * 0.5) - control
    found = _sum_control_steps(control, updates_of(deltas), torch.ones(5), 10, this_round)
    torch.testing.assert_close(found[:3], rules.median(each[:, :3]) * 5 / 10)
    assert found[3] == 0
    plain = _sum_control_steps(
        control, updates_of(deltas, rule=None), torch.ones(5), 10, this_round
    )
    torch.testing.assert_close(plain[:3], each[:, :3].mean(0) * 5 / 10)


def test_feddrift_aggregates_all_that_train_a_model_together(monkeypatch: pytest.MonkeyPatch):
    """A client alone with data of an earlier step would be a group of one, and move the model as it likes."""
    trained: list[list[int]] = []

    def noting(came: list[Updates]) -> Tensor:
        trained.append([len(each.ids) for each in came])
        return mean_of_all(came)

    monkeypatch.setattr("fedclade.algorithms.feddrift.mean_of_all", noting)
    run_of(FedDrift(step_rounds=2, delta=0.05, start="together"), Aggregation())
    assert [1, 7] in trained, (
        "one of eight opened a model, and trains the first on its data of the first step"
    )
    alone, others = deltas_of(1, seed=1) * 1000, deltas_of(4)
    together = mean_of_all([updates_of(alone), updates_of(others)])
    torch.testing.assert_close(together, rules.median(torch.cat([alone, others])))


def test_fedsoft_refuses_centres_that_only_weights_tell_apart():
    told = r"FedSoft cannot use aggregate.rule = 'median' if .* set algorithm.selection below 8, the number of clients"
    with pytest.raises(ConfigError, match=told):
        run_of(FedSoft(clusters=2, selection=8))
    with pytest.raises(ConfigError, match="below 4, the number of clients in a round"):
        run_of(FedSoft(clusters=2, selection=5), client_fraction=0.5)
    # of how many is not known
    RunSettings(aggregate=MEDIAN).check_algorithm(FedSoft(clusters=2, selection=8))


def test_rules_that_need_single_updates_do_not_stream():
    with pytest.raises(
        ConfigError, match=r"stream = true: aggregate.rule = 'krum' needs .*set stream = false"
    ):
        run_of(FedAvg(), Aggregation(rule="krum"), stream=True)
    large = 10**12
    assert decide_stream(RunSettings(), FedAvg(), large, 10**6)
    assert not decide_stream(RunSettings(aggregate=MEDIAN), FedAvg(), large, 10**6)


def test_limits_alone_do_stream():
    limits = Aggregation(largest_norm=20.0)
    settings: dict[str, Any] = {"signature": Signature(kind="projected", dim=8), "stream": True}
    run = run_of(FedAvg(), limits, **settings)
    assert run.config["stream"] is True
    assert run.config["aggregate"]["largest_norm"] == 20.0


def test_a_run_that_stops_goes_on_by_the_same_rule(tmp_path: Any):
    whole = run_of(CFL(**OPTIONS["cfl"]), MEDIAN, rounds=4)
    run_of(CFL(**OPTIONS["cfl"]), MEDIAN, rounds=2, folder=tmp_path / "run")
    again = run_of(CFL(**OPTIONS["cfl"]), MEDIAN, rounds=4, folder=tmp_path / "run")
    assert whole.tree.nodes
    for one, other in zip(whole.tree.nodes, again.tree.nodes, strict=True):
        assert torch.equal(one.model, other.model)


def test_the_mean_is_no_rule_to_note():
    run = simulate(
        FedAvg(), linear, federation_of(TRUTH), rounds=1, engine="loop", aggregate=Aggregation()
    )
    assert "aggregate" not in run.config


def test_of_a_rule_algorithms_of_ones_own_need_to_know_nothing():
    updates = updates_of(deltas_of(5))
    assert torch.equal(mean(updates, weighted=False), rules.median(updates.required_deltas))


@pytest.mark.parametrize("scaffold", [Scaffold(), Scaffold(server_lr=0.5)])
def test_scaffold_runs_by_a_rule(scaffold: Scaffold):
    assert run_of(scaffold).summary["accuracy"]["mean"] > 0.3
