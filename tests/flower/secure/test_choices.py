"""Choices of a model under secure aggregation: one number leaves a client that discloses it, and is counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedclade import ConfigError, UpdateError, simulate
from fedclade.algorithms import FLUX, IFCA
from fedclade.core import PolicyError
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.policy import NotDisclosedError
from fedclade.flower.wire import Content
from tests.flower.grids import LOCAL, federated, grid_of, handler_of, reasons, spoil, worded
from tests.flower.test_client_handler import MODEL, ask
from tests.flower.test_closed_clients import SECURE, SIX, private_client, secure_run
from tests.tiny import federation_of, perceptron

CHOICE = replace(SECURE, disclose=("choice",))
CHOOSING = IFCA(reports="choice")
WORSE = MODEL + 3.0


def choose(client: ClientHandler, *models: torch.Tensor) -> Content:
    return ask(client, "choose", {str(place): model for place, model in enumerate(models)})


def test_a_choice_is_that_of_the_lowest_loss_and_one_number_alone(tmp_path: Path):
    client = handler_of(policy=CHOICE, folder=tmp_path)
    reply = dict(choose(client, WORSE, MODEL).values)
    assert reply.keys() == {"choice"}
    assert reply["choice"] == 1
    assert choose(client, torch.full_like(MODEL, math.nan), MODEL).values["choice"] == 1
    assert json.loads((tmp_path / "policy.json").read_text())["evaluations"] == 2


def test_a_closed_client_discloses_no_choice_unless_its_policy_says_so(tmp_path: Path):
    with pytest.raises(
        NotDisclosedError, match=r'the query .choose.: .* set disclose="choice" in its node config'
    ):
        choose(handler_of(policy=SECURE), MODEL, WORSE)
    assert choose(handler_of(), MODEL, WORSE).values["choice"] == 0
    with pytest.raises(
        ConfigError, match="clients with differential privacy do not reveal training losses"
    ):
        choose(private_client(tmp_path, replace(CHOICE, secure_aggregation=False)), MODEL, WORSE)


def test_choices_are_counted_as_scores_are():
    client = handler_of(policy=replace(CHOICE, max_evaluations=2))
    choose(client, MODEL, WORSE)
    choose(client, MODEL, WORSE)
    with pytest.raises(PolicyError, match="forbids 3 scored models in all; it allows at most 2"):
        choose(client, MODEL, WORSE)


def test_a_choice_is_from_some_models_and_not_from_too_many():
    with pytest.raises(
        UpdateError, match="the query for the client's choice of a model contains no model"
    ):
        choose(handler_of(policy=CHOICE))
    with pytest.raises(
        PolicyError, match=r"forbids 2 models in one query; it allows at most 1 .max-models"
    ):
        choose(handler_of(policy=replace(CHOICE, max_models=1)), MODEL, WORSE)


def test_ifca_by_choices_has_the_models_of_ifca_by_losses():
    settings: dict[str, Any] = {"rounds": 2, "local": LOCAL, "seed": 1}
    federation = federation_of(SIX)
    by_losses = simulate(IFCA(), perceptron, federation, **settings)
    by_choices = simulate(CHOOSING, perceptron, federation, **settings)
    over_network = federated(grid_of(federation), CHOOSING, **settings)
    expected = by_losses.tree
    for tree in (by_choices.tree, over_network.tree):
        assert tree.leaf_of == expected.leaf_of
        for node, expected_node in zip(tree.nodes, expected.nodes, strict=True):
            torch.testing.assert_close(node.params, expected_node.params)


def test_ifca_runs_under_secure_aggregation_where_clients_disclose_their_choice(
    caplog: pytest.LogCaptureFixture,
):
    run = secure_run(CHOOSING, {"disclose": "choice"})
    assert not reasons(run, of_training=True)
    assert "which of the models has the lowest loss" in caplog.text
    assert 'only with disclose="choice" in its node config' in caplog.text
    with pytest.raises(UpdateError, match=r'refuse the query .choose.; .* set disclose="choice"'):
        secure_run(CHOOSING, {})


def test_ifca_by_losses_stays_refused_under_secure_aggregation():
    with pytest.raises(ConfigError, match="IFCA queries training losses of each client"):
        secure_run(IFCA(), {"disclose": "choice"})


def test_sets_of_models_compete_by_losses_only():
    with pytest.raises(
        ConfigError,
        match=r"algorithm.restarts should be 1 with algorithm.reports = 'choice'.* got 2",
    ):
        IFCA(reports="choice", restarts=2)
    with pytest.raises(
        ConfigError, match=r"algorithm.reports should be 'losses' or 'choice', got 'scores'"
    ):
        IFCA(reports="scores")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("choice", [2, -1])
def test_a_choice_that_is_none_leaves_its_client_out(choice: int):
    grid = grid_of(federation_of((0, 1, 0)))
    spoil(grid, 2, "choose", worded(choice=choice))
    assert (
        f"the reply names model {choice} as the best, expected 0 to 1"
        in reasons(federated(grid, CHOOSING, rounds=1))[2]
    )


def test_flux_with_a_fixed_round_of_clustering_runs_where_clients_disclose_descriptors():
    config = {"disclose": "descriptors", "allow": "train evaluate descriptors"}
    run = secure_run(FLUX(earliest=1, latest=1, components=2), config)
    assert not any("descriptors" in why for why in reasons(run, of_training=True).values())
    assert len(run.tree.leaves) > 1
    with pytest.raises(ConfigError, match="FLUX queries training accuracies and descriptors"):
        secure_run(FLUX(), config)
