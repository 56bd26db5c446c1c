"""Limits on what a single client can do: who is left out, shortened or weighs less, and who is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedclade import Aggregation, Signature, simulate
from fedclade.algorithms import CFL, FedAvg
from fedclade.channel import Channel, Limiting, Middleware, Retrying
from fedclade.channel.limits import StartModel
from fedclade.core import (
    OWN,
    Clients,
    ClientWork,
    DistanceToAnchor,
    Em,
    Evaluation,
    EvaluationQuery,
    FromStored,
    Limits,
    LocalModel,
    LocalTraining,
    Mixture,
    Models,
    NoReply,
    OfRounds,
    Query,
    R,
    Round,
    Sink,
    TrainQuery,
    Updates,
)
from tests.tiny import federation_of, perceptron

D = 2
"""Parameters of a model, in front of one buffer."""


class Sending(Clients):
    """Clients that send updates of given norms, and of given buffers."""

    def __init__(
        self,
        norms: Mapping[int, float],
        buffers: float = 0.0,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        self.norms, self.buffers, self._sizes = norms, buffers, sizes or {}

    @property
    def ids(self) -> Sequence[int]:
        return list(self.norms)

    @property
    def sizes(self) -> Mapping[int, int]:
        return {client: self._sizes.get(client, 1) for client in self.ids}

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        assert isinstance(query, TrainQuery)
        ids = [client for client in query.ids if client in self.norms]
        deltas = torch.tensor([[self.norms[client], 0.0, self.buffers] for client in ids])
        sizes = [self.sizes[client] for client in ids]
        return Updates.received(ids, sizes, deltas, D, torch.zeros(len(ids)), 1)  # type: ignore[return-value]


def query_of(
    ids: Sequence[int],
    rows: Sequence[int] | None = None,
    models: Tensor | None = None,
    number: int = 1,
    *,
    work: ClientWork | None = None,
    anchors: Sequence[int] | None = None,
) -> TrainQuery:
    models = torch.zeros(3, D + 1) if models is None else models
    sent = Models(models, list(rows or [0] * len(ids)), anchors)
    return TrainQuery(list(ids), sent, Round(number, LocalTraining()), work or ClientWork())


def limited(norms: Mapping[int, float], limits: Limits | None = None, **more: Any) -> Updates:
    """Return what arrives of updates of some norms, of one cluster, in a first round."""
    limits = limits or Limits(largest_norm=20.0)
    return under(limits, norms, **more)


def under(
    limits: Limits, norms: Mapping[int, float], limiting: Limiting | None = None, **more: Any
) -> Updates:
    sending = Sending(norms, more.pop("buffers", 0.0), more.pop("sizes", None))
    limiting = limiting or Limiting(limits, D, lambda: sending.sizes)
    return Channel(sending, limiting).ask(more.pop("query", query_of(sending.ids)))


LONG = Limits(largest_norm=20.0)


def test_who_is_asked_again_alone_is_measured_by_the_others():
    """Of one update there is no median: those of the first time still count."""
    limiting = Limiting(LONG, D, dict)
    first = under(LONG, {0: 1.0, 1: 1.1, 2: 900.0, 3: 0.9}, limiting)
    assert first.ids == (0, 1, 3)
    again = under(LONG, {2: 900.0}, limiting)
    assert again.ids == ()
    assert again.left_out == {2: "norm 900, more than 20 times the median norm of its cluster, 1"}
    # nothing to measure it by
    alone = under(LONG, {2: 900.0}, limiting, query=query_of([2], number=2))
    assert alone.ids == (2,)


def test_clusters_are_measured_each_by_itself_whatever_the_query():
    """Queries of one round about the same model, or about others, in which it has other rows."""
    limiting = Limiting(LONG, D, dict)
    models = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    small = dict.fromkeys((0, 1, 2), 1.0)
    assert under(LONG, small, limiting, query=query_of([0, 1, 2], [0] * 3, models)).ids == (0, 1, 2)
    large = dict.fromkeys((3, 4, 5), 50.0)
    assert under(LONG, large, limiting, query=query_of([3, 4, 5], [1] * 3, models)).ids == (3, 4, 5)
    late = query_of([6, 7], [0, 0], models[1:])
    assert under(LONG, {6: 50.0, 7: 1001.0}, limiting, query=late).ids == (6,)


def test_in_a_cluster_of_two_the_measure_is_the_model_or_all_others():
    models = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = limited({0: 1.0, 1: 41.0}, query=query_of([0, 1], models=models))
    assert found.left_out == {1: "norm 41, more than 20 times the norm of its start model, 2"}
    norms = {2: 3.0, 3: 3.0, 4: 3.0, 0: 1.0, 1: 41.0}
    assert limited(norms, query=query_of(list(norms), [1, 1, 1, 0, 0], models)).left_out == {}


def test_buffers_are_measured_by_themselves():
    limiting, models = Limiting(LONG, D, dict), torch.ones(1, D + 1)
    query = query_of([0, 1, 2], models=models)
    assert (
        under(LONG, dict.fromkeys((0, 1, 2), 1.0), limiting, buffers=0.5, query=query).left_out
        == {}
    )
    query = query_of([3], models=models)
    assert under(LONG, {3: 1.0}, limiting, buffers=11.0, query=query).left_out == {
        3: "norm of its buffers 11, more than 20 times the median norm of its cluster, 0.5"
    }


def test_without_anything_to_measure_by_nobody_is_left_out():
    assert limited({0: 1.0, 1: 1e6}).ids == (0, 1)


CLIPPED = Limits(largest_norm=20.0, clip_above=5.0)


def test_long_updates_are_shortened_and_longer_ones_left_out():
    found = limited({0: 1.0, 1: 1.0, 2: 1.0, 3: 5.0, 4: 10.0, 5: 20.0, 6: 21.0}, LONG)
    # of seven the median is 5
    assert found.norms.tolist() == [1.0, 1.0, 1.0, 5.0, 10.0, 20.0, 21.0]
    found = limited({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 5.0, 5: 20.0, 6: 21.0}, CLIPPED)
    assert found.norms.tolist() == [1.0, 1.0, 1.0, 1.0, 5.0, 5.0]
    assert list(found.left_out) == [6]
    assert list(found.limited) == [5]


def test_what_is_shortened_keeps_its_direction():
    found = limited({0: 1.0, 1: 1.0, 2: 1.0, 3: -10.0}, CLIPPED)
    torch.testing.assert_close(found.required_deltas[3], torch.tensor([-5.0, 0.0, 0.0]))
    assert found.norms[3] == 5.0
    assert found.limited == {3: "norm 10, scaled down to 5 times the median norm of its cluster, 1"}
    assert found.left_out == {}


def test_buffers_are_shortened_by_themselves():
    limiting, models = Limiting(CLIPPED, D, dict), torch.ones(1, D + 1)
    under(
        CLIPPED,
        dict.fromkeys((0, 1, 2), 1.0),
        limiting,
        buffers=0.5,
        query=query_of([0, 1, 2], models=models),
    )
    found = under(CLIPPED, {3: 1.0}, limiting, buffers=5.0, query=query_of([3], models=models))
    assert found.required_deltas.tolist() == [[1.0, 0.0, 2.5]]
    assert found.limited == {
        3: "norm of its buffers 5, scaled down to 5 times the median norm of its cluster, 0.5"
    }


def test_a_weight_is_at_most_so_many_times_the_median_clients():
    sizes = {0: 5, 1: 50, 2: 51, 3: 1}
    limits = Limits(largest_weight=10.0)
    found = limited(dict.fromkeys(sizes, 1.0), limits, sizes=sizes)
    assert found.sizes.tolist() == [5, 50, 50, 1]
    assert found.limited == {
        2: "weight 51, limited to 50: 10 times the median weight of all clients"
    }
    limiting = Limiting(limits, D, lambda: sizes)
    assert limiting.weights(sizes) == {0: 5, 1: 50, 2: 50, 3: 1}
    assert limiting.weights({0: 10**9}) == {0: 10**9}
    assert limiting.weights({}) == {}
    assert Limiting(LONG, D, lambda: sizes).weights({0: 1, 1: 10**9}) == {0: 1, 1: 10**9}


class Scoring(Sending):
    """Clients that claim to have scored so many examples."""

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        assert isinstance(query, EvaluationQuery)
        examples = torch.tensor([self._sizes[client] for client in query.ids])
        nothing = torch.zeros(len(query.ids), dtype=torch.float64)
        return Evaluation(tuple(query.ids), nothing[:, None], nothing, examples)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("split", "expected"), [("validation", 120), ("train", 120), ("test", 2**53)]
)
def test_scores_that_choices_are_made_by_weigh_no_more_than_the_limit(split: Any, expected: int):
    clients = Scoring({0: 1.0, 1: 1.0, 2: 1.0}, sizes={0: 60, 1: 2**53, 2: 50})
    limiting = Limiting(Limits(largest_weight=2.0), D, lambda: clients.sizes)
    found = Channel(clients, limiting).evaluate([0, 1, 2], torch.zeros(1, D + 1), [0, 0, 0], split)
    assert found.examples.tolist() == [60, expected, 50]


def test_what_is_said_of_a_client_is_all_said():
    limits = Limits(largest_weight=1.0, clip_above=5.0)
    found = limited({0: 1.0, 1: 1.0, 2: 10.0}, limits, sizes={2: 7})
    assert found.limited == {
        2: "weight 7, limited to 1: 1 times the median weight of all clients; "
        "norm 10, scaled down to 5 times the median norm of its cluster, 1"
    }


def test_clients_that_train_on_more_than_they_hold_are_measured_by_each_other():
    sizes, limits = dict.fromkeys(range(4), 10), Limits(largest_weight=2.0)
    sending = Sending(dict.fromkeys(range(4), 1.0), sizes={**sizes, 3: 500})
    query = query_of(range(4), work=ClientWork(data=OfRounds(dict.fromkeys(range(4), (1, 2)))))
    sending._sizes = {0: 50, 1: 50, 2: 50, 3: 500}
    found = Channel(sending, Limiting(limits, D, lambda: sizes)).ask(query)
    assert found.sizes.tolist() == [50, 50, 50, 100]


def test_channels_count_with_what_limits_let_through():
    sending = Sending(dict.fromkeys(range(3), 1.0), sizes={0: 2, 1: 2, 2: 10**9})
    channel = Channel(
        sending,
        Retrying(),
        Limiting(Limits(largest_weight=3.0), D, lambda: sending.sizes),
        Middleware(),
    )
    assert channel.sizes == {0: 2, 1: 2, 2: 6}


def test_updates_in_pieces_are_measured_as_they_come():
    class InPieces(Sending):
        def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
            assert sink is not None
            assert isinstance(query, TrainQuery)
            sink(super().ask(query.select([0, 1, 2])))
            return super().ask(query.select([3, 4]))  # type: ignore[return-value]

    taken: list[Updates] = []
    clients = InPieces({**dict.fromkeys((0, 1, 2), 1.0), 3: 10.0, 4: 1000.0})
    last = Channel(clients, Limiting(CLIPPED, D, dict)).ask(query_of(range(5)), taken.append)
    assert taken[0].limited == {}
    assert list(last.limited) == [3]
    assert list(last.left_out) == [4]


def test_what_clients_keep_is_not_limited():
    work = ClientWork(start=FromStored(), store=LocalModel(), reply=NoReply())
    query = query_of(range(3), [OWN] * 3, work=work)
    sending = Sending({0: 1.0, 1: 1.0, 2: 1e9})
    assert Channel(sending, Limiting(CLIPPED, D, dict)).ask(query).ids == (0, 1, 2)


def test_what_clients_share_of_their_own_starts_from_the_anchor():
    models = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    work = ClientWork(start=FromStored(), store=LocalModel(), reply=DistanceToAnchor())
    query = query_of(range(2), [OWN] * 2, models, work=work, anchors=[1, 1])
    found = Channel(Sending({0: 1.0, 1: 41.0}), Limiting(CLIPPED, D, dict)).ask(query)
    assert found.left_out == {1: "norm 41, more than 20 times the norm of its start model, 2"}


def test_models_of_a_mixture_are_measured_together():
    models = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    query = query_of(range(2), models=models, work=ClientWork(steps=Em(Mixture(False))))

    class Mixing(Sending):
        def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
            deltas = torch.tensor(
                [[0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [101.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
            )
            return Updates.received([0, 1], [1, 1], deltas, 2 * D, torch.zeros(2), 1)  # type: ignore[return-value]

    found = Channel(Mixing({0: 1.0, 1: 101.0}), Limiting(CLIPPED, D, dict)).ask(query)
    assert found.left_out == {1: "norm 101, more than 20 times the norm of its start model, 5"}


def test_limits_of_a_run_are_those_that_are_set_or_that_lies_call_for():
    none, all_of_them = Limits(), Limits(2.0, 20.0, 2.0)
    assert Aggregation().limits(untrusted=False) == none
    assert Aggregation().limits(untrusted=True) == all_of_them
    assert Aggregation().limits(untrusted=True, largest_weight=3.0, largest_norm=9.0) == Limits(
        3.0, 9.0, 2.0
    )
    assert Aggregation().limits(untrusted=True, largest_norm=math.inf).clip_above == math.inf
    assert Aggregation(rule="median").limits(untrusted=True) == Limits(2.0, 20.0, math.inf), (
        "it stands out less"
    )
    given = Aggregation(largest_weight=4.0, largest_norm=math.inf, clip_above=2.0)
    for untrusted in (False, True):
        assert given.limits(untrusted=untrusted) == Limits(4.0, math.inf, 2.0)
    assert Limiting.within(none, D, dict) is None
    assert isinstance(Limiting.within(all_of_them, D, dict), Limiting)


TIGHT = Aggregation(largest_weight=1.0, largest_norm=10.0, clip_above=1.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_simulation_tells_who_was_limited(stream: bool):
    federation = federation_of((0, 0, 0, 0, 0), sizes=[24, 24, 24, 24, 60])
    settings: dict[str, Any] = {"stream": stream, "signature": Signature(kind="projected", dim=8)}
    run = simulate(
        FedAvg(), perceptron, federation, rounds=2, engine="loop", aggregate=TIGHT, **settings
    )
    events = [event for event in run.events if event["kind"] in ("limited", "left_out")]
    assert {event["round"] for event in events} == {1, 2}
    told = {text for event in events for text in event["clients"].values()}
    assert any(text.startswith("weight 60, limited to 24") for text in told)
    assert any("scaled down to 1.01 times" in text for text in told)
    assert all(event["query"] == "train" for event in events)
    honest = simulate(FedAvg(), perceptron, federation, rounds=2, engine="loop", **settings)
    assert [event for event in honest.events if event["kind"] in ("limited", "left_out")] == []


@pytest.mark.parametrize("algorithm", [FedAvg(), CFL(split_rounds=(2,), eps2=1e-6)])
def test_limits_that_nobody_meets_change_no_bit(algorithm: Any):
    federation = federation_of((0, 1, 0, 1, 0, 1), sizes=[12, 24, 48, 24, 24, 40])
    far = Aggregation(largest_weight=2.0, largest_norm=20.0, clip_above=5.0)
    one, other = (
        simulate(algorithm, perceptron, federation, rounds=3, engine="loop", aggregate=each)
        for each in (far, Aggregation())
    )
    assert one.events == other.events
    assert all(
        torch.equal(a.model, b.model) for a, b in zip(one.tree.nodes, other.tree.nodes, strict=True)
    )


def test_the_model_that_updates_start_from_is_known_by_what_it_is():
    one, other = torch.tensor([3.0, 4.0, 2.0]), torch.tensor([4.0, 3.0, 2.0])
    assert StartModel.of(one, 2) == StartModel.of(one.clone(), 2)
    assert StartModel.of(one, 2).norms == StartModel.of(other, 2).norms == (5.0, 2.0)
    assert StartModel.of(one, 2).name != StartModel.of(other, 2).name


def test_where_liars_are_most_of_a_cluster_the_median_of_all_is_what_an_update_is_shortened_to():
    clip, models = Limits(clip_above=5.0), torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    norms = {**dict.fromkeys(range(5), 1.0), 5: 40.0, 6: 40.0, 7: 1.0}
    found = under(clip, norms, query=query_of([*norms], [0] * 5 + [1] * 3, models))
    assert found.norms.tolist() == [1.0] * 5 + [5.0, 5.0, 1.0]
    assert found.limited[5] == "norm 40, scaled down to 5 times the median norm of all clients, 1"


def test_a_whole_cluster_of_longer_updates_is_not_left_out():
    long, models = (
        Limits(largest_norm=20.0, clip_above=5.0),
        torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]),
    )
    norms = {**dict.fromkeys(range(5), 1.0), 5: 4.0, 6: 4.0, 7: 30.0}
    found = under(long, norms, query=query_of([*norms], [0] * 5 + [1] * 3, models))
    assert found.norms.tolist() == [1.0] * 5 + [4.0, 4.0, 5.0]


def going_on(norms: Mapping[int, float], limits: Limits, models: Tensor) -> Updates:
    """Return what arrives from clients that each go on from a model of its own."""
    query = query_of([*norms], list(range(len(norms))), models)
    query = replace(query, models=replace(query.models, sent_before=True))
    return under(limits, norms, query=query)


def test_clients_that_go_on_from_models_of_their_own_are_measured_by_each_other():
    """Equal models, as clients that lie may make theirs, are not a cluster of these clients."""
    norms = {**dict.fromkeys(range(5), 1.0), 5: 40.0, 6: 40.0, 7: 3.0}
    for models in (100.0 + torch.rand(9, D + 1), torch.full((9, D + 1), 100.0)):
        found = going_on(norms, Limits(largest_norm=20.0, clip_above=2.0), models)
        assert found.left_out.keys() == {5, 6}
        assert found.left_out[5] == "norm 40, more than 20 times the median norm of its cluster, 1"
        assert found.norms.tolist() == [1.0] * 5 + [2.0]


def test_two_that_go_on_are_measured_by_the_models_that_they_began_with():
    models = torch.tensor([[3.0, 4.0, 0.0], [6.0, 8.0, 0.0], [0.0, 0.0, 0.0]])
    found = going_on({0: 1.0, 1: 40.0}, Limits(largest_norm=20.0, clip_above=2.0), models)
    assert found.norms.tolist() == [1.0, 10.0]
    assert found.limited[1] == "norm 40, scaled down to 2 times the norm of its start model, 5"
