"""Middleware of a user's own, at the server's end and at a client's end of a network."""

from __future__ import annotations

import torch

from fedclade import FedAvg, Middleware
from fedclade.core import TrainQuery
from tests.flower.grids import FOUR, federated, grid_of
from tests.tiny import federation_of


class Doubling(Middleware):
    """Doubles updates."""

    queries = (TrainQuery,)

    def after(self, query, updates):
        return updates.with_columns(deltas=2 * updates.required_deltas)


class Freezing(Middleware):
    """Lets no model move."""

    queries = (TrainQuery,)

    def after(self, query, updates):
        return updates.with_columns(deltas=torch.zeros_like(updates.required_deltas))


def model_of(*, of_clients=(), of_server=()) -> torch.Tensor:
    """Return the model after a round with middleware at the clients' ends and at the server's."""
    grid = grid_of(federation_of(FOUR), middleware=of_clients)
    run = federated(grid, FedAvg(), rounds=1, middleware=of_server)
    return run.tree.nodes[0].params


def test_it_changes_updates_at_either_end():
    initial = model_of(of_server=[Freezing()])
    assert torch.equal(model_of(of_clients=[Freezing()]), initial)
    moved = model_of() - initial
    assert moved.norm() > 0
    for where in ("of_clients", "of_server"):
        doubled = model_of(**{where: [Doubling()]})
        torch.testing.assert_close(doubled - initial, 2 * moved)


class Restarting(Middleware):
    """Lets clients train from a model of zeros, which it writes into the received model."""

    queries = (TrainQuery,)

    def before(self, query):
        query.models.vectors.zero_()
        return query


def test_it_may_change_a_received_model_in_place():
    initial = model_of(of_server=[Freezing()])
    from_zeros = model_of(of_clients=[Restarting()])
    assert torch.isfinite(from_zeros).all()
    assert not torch.equal(from_zeros, initial)  # as no update would come if the message changed
    assert not torch.equal(from_zeros, model_of())
