"""Runs over models of which a part is frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedclade import (
    CFL,
    ConfigError,
    LocalTraining,
    RunSettings,
    Signature,
    load_federation,
    simulate,
)
from fedclade.algorithms import FLHC, IFCA, FedGroup, ReplicatedCFL
from fedclade.models import LoRA
from fedclade.training import ENGINES


@pytest.fixture(scope="module")
def federation():
    return load_federation("digits", clients=4, partition="iid", samples_per_client=20)


def body_and_head(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return nn.Sequential(body, nn.Linear(32, 10))


def test_what_is_frozen_stays_and_is_not_sent(federation):
    model = body_and_head()
    settings = {"rounds": 2, "local": LocalTraining(epochs=1, lr=0.1), "engine": "stacked"}
    run = simulate(CFL(), model, federation, freeze=["0.*"], **settings)
    assert run.layout.size == 32 * 10 + 10
    assert (
        run.metric_rows[0]["bytes_up"]
        < simulate(CFL(), model, federation, **settings).metric_rows[0]["bytes_up"] / 5
    )
    state = run.layout.state_dict(run.tree.nodes[0].params)
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value) == name.startswith("0.")
    assert run.config["model"] == {"name": "Sequential", "freeze": ("0.*",)}


@pytest.mark.parametrize(
    "parts", [{"freeze": ["0.*"]}, {"adapter": LoRA(targets=("0.1", "1"), rank=2)}]
)
def test_every_engine_gives_the_same(federation, parts):
    def deltas(engine: str) -> torch.Tensor:
        local = LocalTraining(epochs=1, lr=0.1)
        return (
            simulate(
                CFL(), body_and_head, federation, rounds=2, engine=engine, local=local, **parts
            )
            .tree.nodes[0]
            .params
        )

    expected = deltas("loop")
    for engine in ENGINES:
        if parts.get("freeze") or engine != "vmap":  # which does not map BatchNorm that learns
            assert torch.allclose(deltas(engine), expected, atol=1e-5), engine


def test_a_pattern_for_nothing_is_said_before_the_first_round(federation):
    with pytest.raises(
        ConfigError,
        match=r"model.freeze = 'body' matches no parameter of the model; did you mean '1",
    ):
        simulate(CFL(), body_and_head, federation, freeze=["body"])


@pytest.mark.parametrize("kind", ["full", "projected"])
@pytest.mark.parametrize(
    "algorithm",
    [
        CFL(split_rounds=(1,)),
        FLHC(rounds_before=1, n_clusters=2),
        FedGroup(groups=2),
        ReplicatedCFL(check_every=1),
    ],
    ids=["cfl", "fl_hc", "fedgroup", "rcfl"],
)
def test_clients_are_compared_by_the_parameters_named(federation, algorithm, kind):
    """With everything else frozen, what is found is what comparing all of it finds."""
    settings = {
        "rounds": 2,
        "local": LocalTraining(epochs=1, lr=0.1),
        "engine": "stacked",
        "seed": 3,
    }
    apart = {"freeze": ["0.1.weight", "1.bias", "0.2"], **settings}
    some = Signature(kind=kind, dim=30, of=["1.weight", "0.1.bias"])
    here = simulate(algorithm, body_and_head(), federation, signature=some, **apart)
    there = simulate(
        algorithm, body_and_head(), federation, signature=Signature(kind=kind, dim=30), **apart
    )
    assert here.events == there.events
    for mine, theirs in zip(here.tree.nodes, there.tree.nodes, strict=True):
        assert torch.equal(mine.params, theirs.params)
    assert here.config["signature"]["of"] == ("1.weight", "0.1.bias")


def test_permuted_parameters_have_no_names():
    text = r"signature.of should be left out with privacy.permute = true, .*, got \['head'\]"
    with pytest.raises(ConfigError, match=text):
        RunSettings(signature=Signature(of="head"), permute=True)


def test_adapters_are_no_different_models_to_start_from(federation):
    adapter = LoRA(targets=("1",))
    with pytest.raises(
        ConfigError,
        match="IFCA starts from 2 different models, but models that differ only in LoRA adapters",
    ):
        simulate(IFCA(clusters=2), body_and_head, federation, adapter=adapter)
    run = simulate(
        IFCA(clusters=2),
        body_and_head,
        federation,
        adapter=replace(adapter, train=("0.1",)),
        rounds=1,
    )
    assert not torch.equal(run.tree.nodes[1].params, run.tree.nodes[2].params)
