from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedclade
from fedclade import (
    CFL,
    ConfigError,
    ExamplePrivacy,
    FedAvg,
    FedGroup,
    LocalTraining,
    MissingExtraError,
    ReplicatedCFL,
    Run,
    RunSettings,
    assign,
    simulate,
)
from fedclade.algorithms import DescriptorQuery, ShiftQuery, SubspaceQuery
from fedclade.channel import Answering, CentralPrivacy, client_side, privatizing
from fedclade.channel.accounting import Budget, Ledger, epsilon_of
from fedclade.channel.middleware import Channel, Middleware
from fedclade.channel.privacy import (
    DifferentialPrivacy,
    Privatizing,
    booked,
    keyed_noise,
    system_noise,
)
from fedclade.channel.retry import Faults
from fedclade.core import ClientWork, Delta, Models, NoReply, Sink, TrainQuery
from fedclade.core.errors import PrivacyError
from fedclade.core.queries import Query, Round
from fedclade.tasks import Task
from tests.tiny import (
    FEATURES,
    LABELS,
    Fake,
    ScriptedClients,
    federation_of,
    linear,
    perceptron,
    renamed,
    simulated,
)

ROUND = Round(3, LocalTraining(), seed=1)
PRIVACY = DifferentialPrivacy(clip_norm=2.0, noise_multiplier=0.5)
N, S = 6, 400
KEYS = {client: client for client in range(N)}


def scripted(magnitude: float = 1.0) -> ScriptedClients:
    deltas = magnitude * torch.randn(N, S, generator=torch.Generator().manual_seed(0))
    return ScriptedClients(dict(enumerate(deltas.tolist())))


class Crash(Middleware):
    """Training that runs out of memory."""

    def around(self, query, ask):
        raise MemoryError


def asked(clients, what="train", ids=range(N), this_round=ROUND, **more):
    return getattr(clients, what)(list(ids), torch.zeros(1, S), [0] * len(ids), this_round, **more)


def private(privacy=PRIVACY, keys=None, magnitude=1.0) -> Channel:
    return Channel(scripted(magnitude), Privatizing(privacy, keyed_noise(keys or KEYS)))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("clip_norm", 0.0, "greater than 0 and finite"),
        ("clip_norm", math.inf, "greater than 0 and finite"),
        ("noise_multiplier", -0.1, "at least 0 and finite"),
        ("noise_multiplier", math.nan, "at least 0 and finite"),
        ("delta", 0.0, "greater than 0 and less than 1"),
        ("delta", 1.0, "greater than 0 and less than 1"),
    ],
)
def test_a_setting_out_of_range_is_named(name, value, rule):
    with pytest.raises(ConfigError, match=f"privacy.{name} should be {rule}, got {value}"):
        DifferentialPrivacy(**{"clip_norm": 1.0, name: value})


@given(st.integers(0, 1000), st.floats(1e-6, 1e12), st.floats(1e-3, 1e3))
def test_clipping_bounds_the_norm_and_keeps_the_direction(seed, magnitude, clip):
    """And leaves an update that is short enough as it is, to the last bit. Float32 rounds by 2^-24 of an entry."""
    update = magnitude * torch.randn(50, generator=torch.Generator().manual_seed(seed))
    clipped = DifferentialPrivacy(clip_norm=clip).released(update, torch.zeros(50))
    assert float(clipped.double().norm()) <= clip * (1 + 2.0**-23)
    if float(update.double().norm()) <= clip:
        assert torch.equal(clipped, update)
    else:
        expected = update.double() * clip / update.double().norm()
        torch.testing.assert_close(clipped.double(), expected, rtol=1e-6, atol=0)


def test_two_clipped_updates_lie_two_clip_norms_apart_at_most():
    """The sensitivity that ε is computed with: reached by opposite updates."""
    update = torch.randn(50, generator=torch.Generator().manual_seed(0))
    sent = [
        DifferentialPrivacy(clip_norm=0.1).released(u, torch.zeros(50)).double()
        for u in (update, -update)
    ]
    assert float((sent[0] - sent[1]).norm()) == pytest.approx(2 * 0.1)


def test_noise_is_that_of_the_numbers_given_times_multiplier_and_clip_norm():
    normal = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    assert PRIVACY.released(torch.tensor([0.0, 0.5, 1.0]), normal).tolist() == [1.0, -1.5, 1.0]


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_released_as_noise_alone(entry):
    """A refusal would reveal that training diverged on this client's data."""
    normal = torch.tensor([1.0, -2.0], dtype=torch.float64)
    sent = PRIVACY.released(torch.tensor([1.0, entry]), normal)
    assert torch.equal(sent, PRIVACY.released(torch.zeros(2), normal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_longest_updates_are_clipped_as_all_others_are(dtype):
    largest = torch.finfo(dtype).max
    sent = PRIVACY.released(torch.tensor([largest, -largest, 0.0], dtype=dtype), torch.zeros(3))
    assert float(sent.double().norm()) == pytest.approx(PRIVACY.clip_norm, rel=1e-6)
    assert sent[0] == -sent[1]


def test_a_client_that_fails_in_training_has_spent_as_much_as_one_that_replies(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json")
    client = Channel(scripted(), Crash(), booked(PRIVACY, ledger, "run"))
    with pytest.raises(MemoryError):
        asked(client, ids=[4])
    assert [entry.releases for entry in ledger.entries()] == [1]


@pytest.mark.parametrize("noise", [keyed_noise({0: 5}), system_noise])
def test_noise_is_standard_normal(noise):
    """Of 200,000 numbers mean, variance and kurtosis are within 5 standard errors of 0, 1 and 3."""
    n = 200_000
    numbers = noise(n, 0, ROUND, "updates")
    assert numbers.dtype == torch.float64
    assert abs(float(numbers.mean())) < 5 / math.sqrt(n)
    assert abs(float(numbers.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(numbers.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    assert len(numbers.unique()) == n


def test_the_systems_noise_is_never_the_same():
    assert not torch.isin(
        system_noise(1000, 0, ROUND, "updates"), system_noise(1000, 0, ROUND, "updates")
    ).any()


@pytest.mark.parametrize("what", ["train", "gradients"])
def test_clients_send_clipped_and_noisy_updates_only(what):
    """Over 6 × 400 entries the noise's standard deviation of 0.5 · 2 is met within 5 standard errors 1/√(2·2400)."""
    updates = asked(private(), what)
    clipped = torch.tensor(list(scripted().deltas.values()))
    clipped *= 2 / clipped.norm(dim=1, keepdim=True)
    assert float((updates.required_deltas - clipped).std()) == pytest.approx(
        1.0, abs=5 / math.sqrt(2 * N * S)
    )
    assert updates.ids == tuple(range(N))
    torch.testing.assert_close(updates.norms, updates.required_deltas.double().norm(dim=1))
    assert updates.losses.isnan().all()


def test_without_noise_updates_are_clipped_only():
    updates = asked(private(replace(PRIVACY, noise_multiplier=0.0)))
    assert updates.norms.tolist() == pytest.approx([2.0] * N)


def test_noise_belongs_to_the_client_whoever_else_is_asked():
    everybody = asked(private())
    for some in ([3], [5, 1], range(N)[::-1]):
        assert torch.equal(
            asked(private(), ids=some).required_deltas, everybody.required_deltas[list(some)]
        )


def test_noise_belongs_to_the_key_not_to_the_name():
    moved = {client: (client + 2) % N for client in range(N)}
    tiny = private(magnitude=1e-12)  # so that the noise is all there is, but for rounding
    there = asked(private(keys=moved, magnitude=1e-12)).required_deltas
    torch.testing.assert_close(
        there,
        asked(tiny).required_deltas[[moved[client] for client in range(N)]],
        atol=1e-9,
        rtol=0,
    )


@pytest.mark.parametrize(
    "change", [{"number": 4}, {"query": 1}, {"purpose": "pretrain"}, {"seed": 2}]
)
def test_each_query_has_noise_of_its_own(change):
    first, second = (
        asked(private(), this_round=r).required_deltas for r in (ROUND, replace(ROUND, **change))
    )
    assert (first != second).all()


def test_updates_and_gradients_of_one_query_have_noise_of_their_own():
    assert (asked(private()).required_deltas != asked(private(), "gradients").required_deltas).all()


def test_what_does_not_travel_is_left_as_it_is_but_for_its_losses():
    class Heedless(ScriptedClients):
        """Clients that send their updates whatever they are to reply."""

        def train(self, *query, **_):
            return super().train(*query[:4])

    clients = Channel(Heedless(scripted().deltas), Privatizing(PRIVACY, keyed_noise(KEYS)))
    at_home = asked(clients, work=ClientWork(reply=NoReply()))
    assert torch.equal(at_home.required_deltas, torch.tensor(list(scripted().deltas.values())))
    assert at_home.losses.isnan().all()


class WithColumn(ScriptedClients):
    """Clients whose steps send a further number, to which no noise is added."""

    def train(self, *args, **kwargs):
        updates = super().train(*args, **kwargs)
        return updates.with_columns(hardness=torch.ones(len(updates.ids)))


@pytest.mark.parametrize("reply", [Delta(), NoReply()], ids=lambda reply: type(reply).__name__)
@pytest.mark.parametrize(
    "mechanism", [Privatizing(PRIVACY, keyed_noise(KEYS)), Answering(CentralPrivacy(clip_norm=1.0))]
)
def test_what_has_no_noise_does_not_leave_with_an_update(mechanism, reply):
    clients = WithColumn(scripted().deltas)
    work = ClientWork(reply=reply)
    assert "hardness" in asked(clients, work=work).columns
    assert set(asked(Channel(clients, mechanism), work=work).columns) == {
        "sizes",
        "losses",
        "norms",
        "deltas",
    }


def test_updates_that_arrive_early_have_noise_too():
    class OneByOne(ScriptedClients):
        def ask(self, query, sink=None):
            for client in query.ids[:-1]:
                sink(super().ask(query.select([client])))
            return super().ask(query.select(query.ids[-1:]))

    early = []
    query = TrainQuery(list(range(N)), Models(torch.zeros(1, S), [0] * N), ROUND)
    clients = Channel(OneByOne(scripted().deltas), Privatizing(PRIVACY, keyed_noise(KEYS)))
    last = clients.ask(query, early.append)
    whole = asked(private())
    sent = torch.cat([updates.required_deltas for updates in [*early, last]])
    assert torch.equal(sent, whole.required_deltas)
    assert all(updates.losses.isnan().all() for updates in early)


def test_who_is_left_out_before_stays_left_out():
    clients = ScriptedClients({0: [1.0, math.nan], 1: [1.0, 1.0]})
    updates = Channel(clients, Privatizing(PRIVACY, keyed_noise({0: 0, 1: 1}))).train(
        [0, 1], torch.zeros(1, 2), [0, 0], ROUND
    )
    assert updates.ids == (1,)
    assert updates.left_out == {0: "1 of 2 entries of the update are NaN or infinite"}


def test_training_losses_are_refused_and_other_scores_are_not():
    clients, params = simulated(federation_of([0, 1]), linear())
    behind = Channel(clients, Privatizing(PRIVACY, keyed_noise({0: 0, 1: 1})))
    for split in ("validation", "test"):
        told = behind.evaluate([0, 1], params[None], [0, 0], split)
        assert torch.equal(
            told.losses, clients.evaluate([0, 1], params[None], [0, 0], split).losses
        )
    with pytest.raises(
        ConfigError, match="clients with differential privacy do not reveal training losses"
    ):
        behind.evaluate([0, 1], params[None], [0, 0], "train")
    with pytest.raises(ConfigError, match="do not reveal subspaces of their data"):
        behind.ask(SubspaceQuery([0, 1], 2, False))
    with pytest.raises(ConfigError, match="do not reveal shifts of their data"):
        behind.ask(ShiftQuery([0, 1], 1, 0.2, False))
    with pytest.raises(ConfigError, match="do not reveal descriptors of their data"):
        behind.ask(DescriptorQuery([0, 1], params, 1))


# A real client


def test_a_real_client_books_every_release(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json")
    client = Channel(scripted(), booked(PRIVACY, ledger, "run 7"))
    sent = [
        asked(client, ids=[4]).required_deltas,
        asked(client, ids=[4]).required_deltas,
        asked(client, "gradients", [4]).required_deltas,
    ]
    asked(client, ids=[4], work=ClientWork(reply=NoReply()))
    assert len(torch.cat(sent).unique()) > 0.99 * 3 * S  # of so many float32 some meet by chance
    assert [(e.run, e.round, e.releases) for e in ledger.entries()] == [("run 7", 3, 3)]
    assert ledger.spent(PRIVACY.delta) == PRIVACY.epsilon(3) == epsilon_of({0.5: 3}, 1e-5)


def test_a_real_client_whose_budget_is_spent_sends_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", Budget(epsilon=1.1 * PRIVACY.epsilon(1)))
    client = Channel(scripted(), booked(PRIVACY, ledger, "run"))
    asked(client, ids=[4])
    with pytest.raises(PrivacyError, match="more than its budget of"):
        asked(client, ids=[4])


def test_a_real_client_with_a_damaged_ledger_sends_nothing(tmp_path):
    (tmp_path / "ledger.json").write_text('{"format": 1, "entries": [{"run":')
    client = Channel(scripted(), booked(PRIVACY, Ledger(tmp_path / "ledger.json"), "run"))
    with pytest.raises(PrivacyError, match="is damaged"):
        asked(client, ids=[4])


# A whole run

TRUTH = [0, 3] * 4


def run_of(algorithm=None, privacy=PRIVACY, federation=None, rounds=3, **settings):
    federation = federation or federation_of(TRUTH, [20 + 3 * i for i in range(8)], seed=1)
    model = settings.pop("model", linear(1))
    return simulate(
        algorithm or CFL(),
        model,
        federation,
        rounds=rounds,
        engine="loop",
        privacy=privacy,
        **settings,
    )


def without_seconds(rows):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


def test_a_run_states_what_its_clients_spent():
    run = run_of()
    assert run.summary["privacy"] == {
        **{
            "epsilon": PRIVACY.epsilon(3),
            "delta": 1e-5,
            "clip_norm": 2.0,
            "noise_multiplier": 0.5,
            "releases": 3,
        },
        **{"level": "client", "towards": "everybody"},
    }
    assert run.config["privacy"] == {
        "permute": False,
        "clip_norm": 2.0,
        "noise_multiplier": 0.5,
        "delta": 1e-5,
    }
    assert [row["train_loss"] for row in run.metric_rows] == [None] * 3
    assert "privacy" not in run_of(privacy=None).summary


def test_without_noise_a_run_states_no_epsilon(tmp_path):
    run = run_of(privacy=DifferentialPrivacy(clip_norm=2.0))
    assert run.summary["privacy"]["epsilon"] is None
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").summary["privacy"] == run.summary["privacy"]


def test_the_client_that_sent_most_counts():
    """Half of the clients in a round; FedGroup's pre-training is a release besides."""
    run = run_of(FedGroup(groups=2, pretrain_scale=2), client_fraction=0.5, rounds=4)
    sent = Counter(
        client
        for e in run.events
        if e["kind"] == "released"
        for client in Counter(e["clients"]).elements()
    )
    assert run.summary["privacy"]["releases"] == max(sent.values())
    assert len(set(sent.values())) > 1


def test_without_noise_and_with_a_large_norm_a_run_is_as_without_privacy():
    """But for the losses, which are withheld."""
    plain, clipped = run_of(privacy=None), run_of(privacy=DifferentialPrivacy(clip_norm=1e9))
    assert plain.tree.nodes
    for ours, theirs in zip(plain.tree.nodes, clipped.tree.nodes, strict=True):
        assert torch.equal(ours.params, theirs.params)


def test_a_private_run_does_not_depend_on_blocks_or_names():
    run, small = run_of(), run_of(memory=1)
    assert without_seconds(run.metric_rows) == without_seconds(small.metric_rows)
    federation = federation_of(TRUTH, [20 + 3 * i for i in range(8)], seed=1)
    names = {client: 7 - client for client in range(8)}
    other = run_of(federation=renamed(federation, names))
    torch.testing.assert_close(
        other.tree.nodes[0].params, run.tree.nodes[0].params, rtol=0, atol=1e-5
    )


def test_privacy_goes_with_permutation_and_faults():
    run = run_of(permute=True, faults=Faults(dropout=0.1, slow=0.1, corrupt=0.2), rounds=6)
    released = [event for event in run.events if event["kind"] == "released"]
    lost = [
        why
        for event in run.events
        if event["kind"] == "left_out"
        for why in event["clients"].values()
    ]
    assert sum(why == "dropped out" for why in lost) > 0
    assert sum(sum(event["clients"].values()) for event in released) == 6 * 8 - lost.count(
        "dropped out"
    )


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [
        ("ifca", "training losses that IFCA"),
        ("fedem", "the component that they weigh most that FedEM"),
        ("pacfl", "subspaces.*PACFL"),
        ("flux", "training accuracies and descriptors.*FLUX"),
    ],
)
def test_an_algorithm_that_asks_for_more_is_refused_before_the_run(algorithm, what):
    with pytest.raises(
        ConfigError, match=f"clients with differential privacy do not reveal {what}"
    ):
        run_of(algorithm)


def test_labels_that_weigh_by_their_counts_are_refused_too():
    balanced = RunSettings(privacy=PRIVACY, task=Task(class_weights="balanced"))
    with pytest.raises(
        ConfigError, match="do not reveal how many examples of each label they have"
    ):
        balanced.check_algorithm(FedAvg())
    replace(balanced, privacy=None).check_algorithm(FedAvg())
    replace(balanced, task=Task(class_weights=[1.0, 2.0])).check_algorithm(FedAvg())


def test_columns_scaled_by_the_sums_of_all_clients_are_refused_as_they_are_over_a_network():
    tables = {
        str(k): (torch.arange(60.0).reshape(20, 3).cos() + k, torch.arange(20) % 2)
        for k in range(3)
    }
    both = {name: (table, table) for name, table in tables.items()}
    with pytest.raises(ConfigError, match="do not reveal sums of their data"):
        run_of(
            FedAvg(), federation=fedclade.federation(both, standardize="federated"), model="mclr"
        )
    run_of(FedAvg(), federation=fedclade.federation(both, standardize="client"), model="mclr")


@dataclass(frozen=True, eq=False)
class LongestInput(Query[Tensor]):
    """A class of queries that a package could add: how long each client's longest input is."""


@dataclass(frozen=True, eq=False)
class DeclaredLongestInput(LongestInput):
    mechanism = "none"
    discloses = "longest_input"


@dataclass(frozen=True, eq=False)
class HowManyAreThere(LongestInput):
    mechanism = "public"
    discloses = "nothing"


class Answering(Fake):
    """Clients that know the new kinds of queries."""

    def ask(self, query: Query[Any], /, sink: Sink | None = None) -> Any:
        return torch.ones(len(query.ids)) if isinstance(query, LongestInput) else super().ask(query)


@pytest.mark.parametrize(
    "privacy",
    [PRIVACY, ExamplePrivacy(clip_norm=1.0), CentralPrivacy(clip_norm=1.0)],
    ids=["client", "example", "central"],
)
def test_a_new_kind_of_query_is_closed_to_private_clients(privacy: Any):
    clients = Answering()
    private = Channel(clients, *client_side(privatizing(privacy, {0: 9}, {0: 0})))
    with pytest.raises(
        ConfigError,
        match=r"refuse queries of the class LongestInput, which declares mechanism = '' and discloses = ''; in the",
    ):
        private.ask(LongestInput([0]))
    with pytest.raises(
        ConfigError, match=r"do not reveal longest_input \(a DeclaredLongestInput\)"
    ):
        private.ask(DeclaredLongestInput([0]))
    assert private.ask(HowManyAreThere([0])).tolist() == [1.0]
    assert Channel(clients, *client_side()).ask(LongestInput([0])).tolist() == [1.0]


def test_clients_do_not_know_a_kind_of_query_that_they_cannot_answer():
    clients, _ = simulated(federation_of([0, 0]), perceptron())
    with pytest.raises(
        ConfigError, match="clients cannot reply to a query of the class LongestInput"
    ):
        clients.ask(LongestInput([0]))


def test_what_is_asked_besides_may_depend_on_how_many_clients_there_are():
    """Of more than a thousand clients, rcfl sends those of a cohort the clusters' models for their losses."""
    few, some = 1000, RunSettings(privacy=PRIVACY, client_fraction=0.01)
    some.check_algorithm(ReplicatedCFL(), few)
    replace(some, client_fraction=1.0).check_algorithm(ReplicatedCFL(), few + 1)
    with pytest.raises(
        ConfigError, match="do not reveal training losses that ReplicatedCFL requests"
    ):
        some.check_algorithm(ReplicatedCFL(), few + 1)


def test_without_dp_accounting_a_run_does_not_begin(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtraError, match="stating ε needs the package 'dp-accounting'"):
        run_of()


def test_a_model_with_buffers_is_warned_of(caplog):
    norm = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, LABELS))
    run_of(
        model=norm, rounds=1, federation=federation_of(TRUTH), local=LocalTraining(batch_size=12)
    )
    assert "noise is also added to 9 buffers of the model" in caplog.text


def test_newcomers_to_a_private_run_are_private():
    """To the tree of FedGroup they come by their losses, which they do not tell."""
    federation = federation_of(TRUTH)
    newcomers = replace(federation, clients=federation.clients[:2], true_clusters=None)
    run = run_of(FedGroup(groups=2, pretrain_scale=2), federation=federation)
    with pytest.raises(ConfigError, match="do not reveal training losses"):
        assign(run, newcomers, model=linear(1))
    single = run_of(federation=federation)
    assert [each.node for each in assign(single, newcomers, model=linear(1)).assignments] == [0, 0]


def test_the_budget_on_a_network_is_the_clients_own():
    """The run's config, which another may have written, has no say in it: at a δ near 1 nothing would cost anything."""
    budget_of = pytest.importorskip("fedclade.flower.from_config").budget_of

    def given(**node_config):
        return budget_of(
            SimpleNamespace(node_config=node_config, run_config={"privacy.delta": 0.99})
        )

    assert given() is None
    assert given(delta=1e-6) is None
    assert given(epsilon=3) == Budget(epsilon=3.0, delta=1e-5)
    assert given(epsilon=3.5, delta=1e-6) == Budget(epsilon=3.5, delta=1e-6)
    with pytest.raises(
        ConfigError, match="epsilon in the node config should be a number, got 'much'"
    ):
        given(epsilon="much")
    with pytest.raises(
        ConfigError, match=r"budget\.delta should be greater than 0 and less than 1, got 1\.0"
    ):
        given(epsilon=1, delta=1)
