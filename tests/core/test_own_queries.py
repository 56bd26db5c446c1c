"""Queries that are defined outside of fedclade, of all base classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import fedclade
from fedclade import ConfigError, DataQuery, DifferentialPrivacy
from fedclade.core import LocalClients, Query
from tests.flower.grids import federated, grid_of
from tests.tiny import federation_of, perceptron

FEDERATION = federation_of([0, 0, 1, 1])
Summary = dict[int, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Summaries(DataQuery[Summary]):
    """Query for a dictionary about each client's data, of any structure."""

    kind = "summaries"
    mechanism = "none"
    discloses = "summaries"
    reveals = "summaries of their data"

    digits: int

    def answer_all(self, clients: LocalClients) -> Summary:
        replies: Summary = {}
        for client in self.ids:
            data = clients.data(client)
            mean = data.inputs.mean().item()
            replies[client] = {"mean": round(mean, self.digits), "rows": len(data.targets)}
        return replies

    def merge(self, parts: Sequence[tuple[Sequence[int], Summary]]) -> Summary:
        return {client: reply for _, some in parts for client, reply in some.items()}


@dataclass(frozen=True, eq=False)
class Bare(Query[Any]):
    """Query that clients have no means to reply to."""


@dataclass(frozen=True, kw_only=True)
class Asking(fedclade.FedAvg):
    """FedAvg that sends a query in each round."""

    query: Any = None

    def step(self, state: Any, cohort: Any, clients: Any, this_round: Any) -> Any:
        SEEN.append(clients.ask(self.query(sorted(clients.ids))))
        return super().step(state, cohort, clients, this_round)


SEEN: list[Any] = []


def summaries(ids: Sequence[int]) -> Summaries:
    return Summaries(ids, digits=3)


@pytest.mark.parametrize(
    ("engine", "more"),
    [("loop", {}), ("auto", {}), ("loop", {"faults": fedclade.Faults(dropout=0.3)})],
)
def test_a_data_query_gets_replies_of_any_structure(engine: str, more: dict[str, Any]):
    SEEN.clear()
    fedclade.simulate(
        Asking(query=summaries), perceptron(), FEDERATION, rounds=1, engine=engine, **more
    )
    inputs, targets = FEDERATION.examples(2, "train")
    mean = round(inputs.mean().item(), 3)
    assert SEEN[0][2] == {"mean": mean, "rows": len(targets)}
    assert sorted(SEEN[0]) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_data_query_runs_on_ray_actors():
    pytest.importorskip("ray")
    SEEN.clear()
    actors = fedclade.Actors(count=2, cores=1)
    fedclade.simulate(
        Asking(query=summaries), perceptron(), FEDERATION, rounds=1, engine="ray", actors=actors
    )
    assert [SEEN[0][client]["rows"] for client in range(4)] == [24] * 4


def test_a_data_query_over_a_network_says_what_to_do():
    with pytest.raises(
        ConfigError, match="a Summaries cannot be sent over a network; make it a su"
    ):
        federated(grid_of(FEDERATION), Asking(query=summaries), rounds=1)


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"aggregate": fedclade.Aggregation(rule="median")}, {"stream": True}]
)
def test_a_query_without_a_reply_is_refused(network: bool, more: dict[str, Any]):
    why = (
        "clients cannot reply to a query of the class Bare; derive the class from TrainQuery, Eval"
    )
    run: Any = partial(fedclade.simulate, model=perceptron(), federation=FEDERATION)
    if network:
        run = partial(federated, grid_of(FEDERATION))
    with pytest.raises(ConfigError, match=why):
        run(algorithm=Asking(query=Bare), rounds=1, **more)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"faults": fedclade.Faults(dropout=0.3)}, "clients cannot reply to a query of the class"),
        (
            {"adversary": fedclade.Adversary(kind="sign_flip", share=0.5)},
            "clients cannot reply to a query of the class Bare",
        ),
        (
            {"privacy": DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)},
            "refuse queries of the class Bare, which declares mechanism = ''",
        ),
    ],
)
def test_middleware_passes_on_or_refuses_a_query_that_it_does_not_know(
    more: dict[str, Any], why: str
):
    with pytest.raises(ConfigError, match=why):
        fedclade.simulate(Asking(query=Bare), perceptron(), FEDERATION, rounds=1, **more)


def test_private_clients_refuse_a_data_query():
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="summaries of their data"):
        fedclade.simulate(
            Asking(query=summaries), perceptron(), FEDERATION, rounds=1, privacy=privacy
        )
