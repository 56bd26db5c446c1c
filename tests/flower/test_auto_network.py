"""The method auto with clients that disclose scores but no losses, or no scores at all."""

from __future__ import annotations

import pytest

from fedclade import Auto, ConfigError, Signature
from fedclade.flower.local_grid import LocalGrid
from fedclade.runs import Run
from tests.flower.grids import federated, grid_of, network_of, node_of
from tests.tiny import federation_of

SIX = (0, 1, 0, 1, 0, 1)
CLOSED = {"secure-aggregation": True, "trust-server-keys": True, "min-honest": 2}


def grid_with(*disclose: str) -> LocalGrid:
    """Return six clients that insist on sums, and what each of them discloses."""
    grid = grid_of(federation_of(SIX, [60] * 6, validation=40), config=CLOSED)
    for client, words in enumerate(disclose):
        node = grid.nodes[node_of(client)]
        node.config = {**node.config, "disclose": words}
    return grid


def run_of(grid: LocalGrid) -> Run:
    return federated(
        grid,
        Auto(budget=8.0),
        network=network_of(grid, secure_aggregation=True, secure_fewest=3),
        signature=Signature(kind="signs", dim=9),
        rounds=4,
        evaluate_every=4,
    )


def test_models_are_chosen_by_scores_if_clients_send_no_losses():
    run = run_of(grid_with(*["sketch scores"] * 6))
    (event,) = [each for each in run.events if each["kind"] == "served"]
    assert {client for ids in event["clients"].values() for client in ids} == set(range(6))
    assert [row["loss_mean"] for row in run.metric_rows][-1] is None
    assert run.summary["served"] == {kind: len(ids) for kind, ids in event["clients"].items()}


def test_clients_without_scores_are_served_with_a_shared_model():
    run = run_of(grid_with("sketch scores", "sketch scores", "sketch scores", *["sketch"] * 3))
    (event,) = [each for each in run.events if each["kind"] == "served"]
    assert {client for ids in event["clients"].values() for client in ids} == {0, 1, 2}
    assert run.summary.get("own_models", 0) <= 3


def test_without_any_scores_there_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"round 4: the algorithm auto chooses .* \(client 0: "):
        run_of(grid_with(*["sketch"] * 6))
