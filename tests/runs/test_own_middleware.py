"""Middleware of a user's own, at the server's end of a simulation."""

from __future__ import annotations

import pytest
import torch

from fedclade import CFL, FedAvg, Middleware, simulate
from fedclade.core import EvaluationQuery, TrainQuery, UpdateError
from tests.tiny import federation_of, linear

FEDERATION = federation_of([0, 1, 0, 1])


class Recording(Middleware):
    """Records what passes, and changes nothing."""

    queries = (TrainQuery, EvaluationQuery)

    def __init__(self, name: str, passed: list[str]) -> None:
        self.name = name
        self.passed = passed

    def before(self, query):
        self.passed.append(f"{self.name} before {type(query).__name__}")
        return query

    def after(self, query, reply):
        self.passed.append(f"{self.name} after {type(query).__name__}")
        return reply


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


class Identifying(Middleware):
    """Records the clients whose updates pass, and changes nothing."""

    queries = (TrainQuery,)

    def __init__(self) -> None:
        self.passed: list[tuple[int, ...]] = []

    def after(self, query, updates):
        self.passed.append(updates.ids)
        return updates


class LeavingOut(Middleware):
    """Sends nothing to client 3."""

    queries = (TrainQuery,)

    def around(self, query, ask):
        return ask(query.select([client for client in query.ids if client != 3]))


def models_of(**options) -> torch.Tensor:
    run = simulate(FedAvg(), linear(), FEDERATION, rounds=1, seed=4, **options)
    return run.tree.nodes[0].params


def test_queries_pass_the_last_first_and_replies_the_first():
    passed: list[str] = []
    middleware = [Recording("first", passed), Recording("last", passed)]
    alone = models_of()
    assert torch.equal(models_of(middleware=middleware), alone)
    assert passed[:4] == [
        "last before TrainQuery",
        "first before TrainQuery",
        "first after TrainQuery",
        "last after TrainQuery",
    ]
    assert "first after EvaluationQuery" in passed


def test_it_changes_updates():
    initial = models_of(middleware=[Freezing()])
    moved = models_of() - initial
    assert moved.norm() > 0
    torch.testing.assert_close(models_of(middleware=[Doubling()]) - initial, 2 * moved)


def test_it_may_leave_clients_out():
    identifying = Identifying()
    left_out = models_of(middleware=[LeavingOut(), identifying])
    assert identifying.passed == [(0, 1, 2)]
    assert not torch.equal(left_out, models_of())


def test_an_error_of_it_ends_the_run():
    class Refusing(Middleware):
        queries = (TrainQuery,)

        def before(self, query):
            raise UpdateError("not today")

    with pytest.raises(UpdateError, match="not today"):
        simulate(CFL(), linear(), FEDERATION, rounds=1, middleware=[Refusing()])
