"""What a run over a grid takes: models, algorithms, settings; and what it refuses before anybody is waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from fedclade import LocalTraining
from fedclade.algorithms import build_algorithm
from fedclade.channel import CentralPrivacy
from fedclade.core.errors import ConfigError, ModelError, UpdateError
from fedclade.core.registry import DataSpec
from fedclade.flower import LocalGrid, Network, federate
from fedclade.flower.network import ModelFor
from tests.flower.grids import FOUR, federated, grid_of
from tests.tiny import federation_of, linear, perceptron


def test_a_model_may_depend_on_what_the_examples_look_like():
    grid = grid_of(federation_of(FOUR), linear)

    def make(schema: DataSpec, seed: int) -> nn.Module:
        assert (schema.input_shape, schema.outputs) == ((6,), 4)
        return linear(seed)

    run = federated(grid, "fedavg", ModelFor(make, "mine"), rounds=1)
    assert run.summary["model"] == "mine"


def test_an_algorithm_may_be_given_by_name_or_made_of_the_truth():
    grid = grid_of(federation_of(FOUR))
    assert federated(grid, "fl_hc", rounds=1).summary["algorithm"] == "fl_hc"
    run = federated(grid, lambda truth: build_algorithm("oracle", true_clusters=truth), rounds=1)
    assert run.summary["clusters"]["ari"] == 1.0


def test_the_oracle_needs_clients_that_tell_their_cluster():
    federation = federation_of(FOUR)
    secretive = type(federation)(federation.pool, federation.clients, None, "tiny")
    with pytest.raises(ConfigError, match="oracle"):
        federated(grid_of(secretive), "oracle", rounds=1)
    assert federated(grid_of(secretive), "fedavg", rounds=1).summary["clusters"]["ari"] is None


def test_an_algorithm_with_a_virtual_clock_runs_in_a_simulation_alone():
    with pytest.raises(
        ConfigError,
        match="FedBuff runs only in a simulation, since it draws the durations of training",
    ):
        federated(grid_of(federation_of(FOUR)), "fedbuff", rounds=1)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("algorithm", ["fedavg", "private_choice"])
def test_central_privacy_is_refused_before_anybody_is_waited_for(algorithm: str, secure: bool):
    network = Network(clients=4, wait=100.0, secure_aggregation=secure, secure_norm=8.0)
    with pytest.raises(
        ConfigError,
        match=r'"central".*no party of a network adds noise to sums of updates: .* single updates, or exact sums',
    ):
        federate(
            LocalGrid({}),
            algorithm,
            perceptron,
            network=network,
            privacy=CentralPrivacy(clip_norm=1.0),
        )


def test_server_and_clients_need_the_same_model():
    with pytest.raises(ModelError, match="the server's model differs from the clients' model"):
        federated(grid_of(federation_of(FOUR), perceptron), "fedavg", linear)


def test_a_server_without_clients_says_so():
    with pytest.raises(
        UpdateError,
        match=r"0 of 2 clients connected within 0.1 s; start more SuperNodes, or lower network",
    ):
        federate(LocalGrid({}), "fedavg", perceptron, network=Network(wait=0.1))


def test_settings_are_checked_before_anybody_is_waited_for():
    grid = LocalGrid({})
    with pytest.raises(ConfigError, match="rounds should be at least 0, got -1"):
        federate(grid, "fedavg", perceptron, rounds=-1, network=Network(wait=100.0))
    with pytest.raises(
        ConfigError,
        match=r"(?s)network.clients should be at least 1, got 0.*network.wait.*network.deadl",
    ):
        Network(clients=0, wait=0, deadline=-1)
    with pytest.raises(
        ConfigError, match=r"network.identity should be 'node' or 'number', got 'key'"
    ):
        Network(identity="key")  # type: ignore[arg-type]


def test_a_stream_that_cannot_be_is_refused():
    grid = grid_of(federation_of(FOUR))
    with pytest.raises(ConfigError, match="stream = true"):
        federated(grid, "cfl", stream=True)


def test_a_stream_of_whole_updates_is_as_good_where_none_are_compared():
    plain, stream = (
        federated(grid_of(federation_of(FOUR)), "fedavg", rounds=2, stream=each)
        for each in (False, True)
    )
    assert stream.config["stream"] is True
    torch.testing.assert_close(stream.tree.nodes[0].params, plain.tree.nodes[0].params)


def test_the_config_that_is_noted_says_what_was_run():
    run = federated(grid_of(federation_of(FOUR)), "fedavg", rounds=1, local=LocalTraining(lr=0.2))
    assert run.config["local"]["lr"] == 0.2
    assert run.config["algorithm"]["name"] == "fedavg"
    assert run.config["network"]["clients"] == 4
    assert run.config["data"] == {"name": "tiny", "description": "tiny"}


def test_what_a_federation_writes_only_its_owner_reads(tmp_path: Path):
    """Its models tell of the clients' data."""
    federation = federation_of(FOUR)
    grid = grid_of(federation)
    before = os.umask(0o022)
    try:
        federated(grid, "cfl", folder=tmp_path / "run", rounds=2, checkpoint_every=1)
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    modes = {
        path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }
    assert modes.pop(Path("other")) == 0o644  # the rule is as it was
    names = {path.name for path in modes}
    assert {"run", "config.toml", "clients.json", "tree.safetensors"} <= names
    assert {path: mode for path, mode in modes.items() if mode & 0o077} == {}
