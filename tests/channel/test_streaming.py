from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import (
    CFL,
    ConfigError,
    FedAvg,
    FeSEM,
    Local,
    LocalTraining,
    Oracle,
    ReplicatedCFL,
    RunSettings,
    Signature,
    simulate,
)
from fedclade.algorithms import Algorithm
from fedclade.channel import (
    Absence,
    Channel,
    CountSketch,
    FaultInjection,
    Faults,
    Meter,
    Sketching,
    Streaming,
    Timing,
    Traffic,
)
from fedclade.core import TrainQuery
from fedclade.core.aggregate import mean
from fedclade.core.clients import Clients
from fedclade.core.queries import Round
from fedclade.core.updates import Updates
from fedclade.runs import decide_stream
from tests.tiny import (
    ScriptedClients,
    SpyClients,
    federation_of,
    linear,
    play,
    replicating,
    simulated,
    streamed,
)

SIZES = {0: 4, 1: 9, 2: 9, 3: 2, 4: 5}
ASSIGNMENT = [1, 0, 1, 2, 0]
"""Rows of clients 4, 3, 2, 1 and 0, in the order in which they are asked."""

TRUTH = [0, 1, 2, 3, 0, 1, 2, 3]
EXAMPLES = [20, 26, 31, 24, 40, 22, 28, 35]
SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)


def scripted(n_entries: int = 6) -> ScriptedClients:
    deltas = torch.randn(5, n_entries, generator=torch.Generator().manual_seed(0))
    return ScriptedClients(
        dict(enumerate(deltas.tolist())), SIZES, right=lambda client, model: client / 8
    )


def asked(clients: Clients, what: str = "train", models: torch.Tensor | None = None) -> Updates:
    models = torch.zeros(3, 6) if models is None else models
    return getattr(clients, what)([4, 3, 2, 1, 0], models, ASSIGNMENT, Round(1, LocalTraining()))


@pytest.mark.parametrize("what", ["train", "gradients"])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_what_is_kept_are_sums_signatures_and_numbers(what, at_once):
    """Σ |D_i| Δθ_i for each model: clients 3 and 0 have row 0, 4 and 2 row 1, 1 row 2."""
    plain, stream = asked(scripted(), what), asked(streamed(scripted(), at_once), what)
    assert stream.deltas is None
    d = torch.tensor([scripted().deltas[client] for client in range(5)])
    expected = torch.stack([2 * d[3] + 4 * d[0], 5 * d[4] + 9 * d[2], 9 * d[1]])
    torch.testing.assert_close(stream.sums.groups, expected)
    assert stream.sums.group.tolist() == ASSIGNMENT
    assert stream.ids == plain.ids
    for name in ("sizes", "losses", "norms", "signatures"):
        assert getattr(stream, name).tolist() == getattr(plain, name).tolist(), name
    assert stream.n_parameters == plain.n_parameters
    for members in ([0, 3], [4, 2], [1], range(5)):
        torch.testing.assert_close(mean(stream.select(members)), mean(plain.select(members)))


def test_clients_are_asked_a_few_at_a_time_the_largest_first():
    spy = SpyClients(scripted())
    models = torch.arange(3.0)[:, None].expand(3, 6)
    asked(streamed(spy, 2), models=models)
    assert [call.ids for call in spy.calls] == [(1, 2), (4, 0), (3,)]
    given = {client: float(model[0]) for call in spy.calls for client, model in call.models.items()}
    assert given == {4: 1, 3: 0, 2: 1, 1: 2, 0: 0}


def test_no_update_outlives_its_slice():
    """Full signatures are a view of the updates, and would hold all of them."""
    updates = asked(streamed(scripted(600), 2), models=torch.zeros(3, 600))
    assert updates.signatures.untyped_storage().nbytes() == updates.signatures.nbytes == 5 * 600 * 4
    projected = Channel(scripted(600), Sketching(CountSketch(0, 600, 8)))
    sketched = asked(streamed(projected, 2), models=torch.zeros(3, 600))
    assert sketched.signatures.untyped_storage().nbytes() == 5 * 8 * 4
    assert torch.equal(sketched.signatures, CountSketch(0, 600, 8).apply(updates.signatures))


class Silent(ScriptedClients):
    """Clients of whom two do not answer."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = (
            super()
            .train(ids, models, assignment, this_round)
            .select([i for i in ids if i not in (2, 3)])
        )
        return replace(updates, left_out={client: "asleep" for client in ids if client in (2, 3)})


@pytest.mark.parametrize("at_once", [1, 3])
def test_who_does_not_answer_is_in_no_sum(at_once):
    """Be it that nobody of a slice does."""
    plain = scripted()
    stream = asked(streamed(Silent(plain.deltas, plain.sizes), at_once))
    assert stream.left_out == {2: "asleep", 3: "asleep"}
    assert stream.ids == (4, 1, 0)
    d = torch.tensor([plain.deltas[client] for client in range(5)])
    torch.testing.assert_close(stream.sums.groups, torch.stack([4 * d[0], 5 * d[4], 9 * d[1]]))
    assert stream.sums.group.tolist() == [1, 2, 0]


class OneByOne(ScriptedClients):
    """Clients that reply one by one, all but the last early if there is a sink."""

    def ask(self, query, /, sink=None):
        self.early = 0
        if sink is None or not isinstance(query, TrainQuery):
            return super().ask(query)
        *first, last = query.ids
        for client in first:
            sink(super().ask(query.select([client])))
            self.early += 1
        return super().ask(query.select([last]))


def test_updates_that_arrive_early_pass_the_middleware_below():
    """A middleware that sends queries itself passes them on by default, such as one that counts seconds."""
    plain, sketch = scripted(), CountSketch(0, 6, 4)
    expected = asked(Channel(plain, Sketching(sketch), Streaming()))
    clients = OneByOne(plain.deltas, plain.sizes)
    meter = Meter()
    middleware = (Timing(meter), Traffic(meter), Sketching(sketch), Absence(6, None), Streaming())
    stream = asked(Channel(clients, *middleware))
    assert clients.early == 4
    assert stream.ids == expected.ids
    assert torch.equal(stream.signatures, expected.signatures)
    torch.testing.assert_close(stream.sums.groups, expected.sums.groups)
    assert meter.bytes_up == 5 * 6 * 4


def test_no_update_arrives_early_where_a_middleware_needs_all():
    clients = OneByOne(scripted().deltas, SIZES)
    faults = FaultInjection(Faults(corrupt=1.0), dict(enumerate(range(5))), 6)
    stream = asked(Channel(clients, faults, Streaming()))
    assert clients.early == 0
    assert stream.ids == ()
    assert len(stream.left_out) == 5


def test_evaluations_pass_through():
    stream = streamed(scripted(), 2)
    assert stream.evaluate([1, 4], torch.zeros(1, 6), [0, 0], "test").scores[:, 0].tolist() == [
        1 / 8,
        4 / 8,
    ]
    assert stream.ids == (0, 1, 2, 3, 4)
    assert stream.sizes == SIZES


ALGORITHMS = [
    FedAvg(),
    Local(),
    Oracle(dict(enumerate(TRUTH))),
    CFL(eps1=0.3, eps2=0.6),
    ReplicatedCFL(level=0.2, check_every=3),
    CFL(eps2=0.3, split_rounds=(3, 6), similarity="gradients"),
]


def played(algorithm: Algorithm, fraction: float, at_once: int | None):
    clients, params = replicating(federation_of(TRUTH, EXAMPLES, seed=1), linear(1))
    world = clients if at_once is None else streamed(clients, at_once)
    return play(algorithm, world, params, 8, spec=SPEC, seed=1, fraction=fraction)


@pytest.mark.parametrize(("fraction", "at_once"), [(1.0, 1), (0.6, 3)])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_a_run_that_streams_is_the_run_that_does_not_but_for_rounding(algorithm, fraction, at_once):
    """Trees, models, criteria, similarities and cached signatures, after every round, whatever the slices."""
    assert not algorithm.requires.updates
    plain, stream = played(algorithm, fraction, None), played(algorithm, fraction, at_once)
    for ours, theirs in zip(plain.states, stream.states, strict=True):
        assert [node.members for node in theirs.tree.nodes] == [
            node.members for node in ours.tree.nodes
        ]
        for a, b in zip(ours.tree.nodes, theirs.tree.nodes, strict=True):
            torch.testing.assert_close(b.params, a.params, rtol=0, atol=1e-5)
            assert (a.cached is None) == (b.cached is None)
            if a.cached is not None:
                torch.testing.assert_close(b.cached, a.cached, rtol=0, atol=1e-5)
    for ours, theirs in zip(plain.logs, stream.logs, strict=True):
        assert theirs.losses.keys() == ours.losses.keys()
        for node, criteria in ours.criteria.items():
            assert theirs.criteria[node].members == criteria.members
            assert theirs.criteria[node].numbers == pytest.approx(
                criteria.numbers, rel=1e-3, abs=1e-5
            )
    assert isinstance(algorithm, CFL | ReplicatedCFL) == any(log.events for log in plain.logs)


def test_the_order_of_clients_in_a_call_changes_nothing_in_a_stream():
    clients, params = simulated(federation_of(TRUTH, EXAMPLES, seed=1), linear(1))
    stream = streamed(clients, 3)
    this_round = Round(1, SPEC, 1)
    orders = [list(range(8)), [5, 2, 7, 0, 1, 4, 6, 3]]
    one, other = (stream.train(order, params[None], [0] * 8, this_round) for order in orders)
    assert torch.equal(one.sums.groups, other.sums.groups)
    assert torch.equal(one.signatures, other.select(range(8)).signatures)


def test_a_method_that_compares_nothing_streams_without_sketches():
    federation, settings = (
        federation_of(TRUTH, EXAMPLES, seed=1),
        {"rounds": 2, "local": SPEC, "engine": "loop"},
    )
    plain, stream = (
        simulate(FedAvg(), linear(1), federation, stream=each, **settings) for each in (False, True)
    )
    torch.testing.assert_close(stream.tree.nodes[0].model, plain.tree.nodes[0].model)
    with pytest.raises(ConfigError, match="stream = true: signatures of kind 'full'"):
        simulate(CFL(), linear(1), federation, stream=True, **settings)
    assert not any(
        kind.requires.signatures for kind in (FedAvg(), Local(), Oracle(dict(enumerate(TRUTH))))
    )


@pytest.mark.parametrize(
    ("algorithm", "signature", "streams"),
    [
        (FedAvg(), Signature(), True),
        (CFL(), Signature(), False),
        (CFL(), Signature(kind="projected"), True),
        (FeSEM(), Signature(kind="projected"), False),
    ],
)
def test_updates_that_come_from_elsewhere_are_summed_there_where_that_will_do(
    algorithm, signature, streams
):
    settings = RunSettings(signature=signature)
    assert decide_stream(settings, algorithm, 1000, 10**9, remote=True) == streams
    assert not decide_stream(settings, algorithm, 1000, 10**9)
    assert decide_stream(settings, algorithm, 10**9, 10**9) == streams
