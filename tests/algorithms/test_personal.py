"""Personal parameters: the papers' methods against plain loops, and clusters of what is shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import (
    ConfigError,
    FedAvg,
    FedBN,
    FedPer,
    FedRep,
    HeadThenBody,
    LGFedAvg,
    LocalTraining,
    Run,
    RunFacts,
    Signature,
    simulate,
)
from fedclade.algorithms import CFL, FLHC, IFCA, FedGroup, ReplicatedCFL
from fedclade.channel import CentralPrivacy, DifferentialPrivacy, Faults
from fedclade.data.federation import Federation
from fedclade.training import SimulatedClients
from tests.reference.personal import federated
from tests.tiny import FEATURES, LABELS, federation_of, perceptron, play

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, momentum=0.5, weight_decay=0.01)
SIZES = [20, 26, 32, 15]
HEAD, BODY = ("3.weight", "3.bias"), ("1.weight", "1.bias")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = (
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, LABELS),
        )

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


STATISTICS = (
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
)


def ran(algorithm, module: nn.Module | None = None, **settings) -> Run:
    settings = {"local": SPEC, "rounds": 3, "seed": 3, "engine": "loop", **settings}
    federation = settings.pop("federation", None) or federation_of([0, 1, 0, 1], SIZES, seed=2)
    return simulate(algorithm, module or perceptron(), federation, **settings)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("algorithm", "module", "personal", "head_epochs"),
    [
        (FedPer(), perceptron(), HEAD, 0),
        (LGFedAvg(), perceptron(), BODY, 0),
        (FedBN(), Normed(), STATISTICS, 0),
        (FedRep(head_epochs=3), perceptron(), HEAD, 3),
        (FedRep(head_epochs=1), Normed(), ("last.weight", "last.bias"), 1),
    ],
)
def test_a_method_equals_its_plain_loop(algorithm, module, personal, head_epochs, engine):
    run = ran(algorithm, module, engine=engine)
    federation = federation_of([0, 1, 0, 1], SIZES, seed=2)
    shared, own = federated(
        federation, module, SPEC, personal, seed=3, rounds=3, head_epochs=head_epochs
    )
    assert run.layout is not None
    ours = run.layout.unflatten(run.tree.nodes[0].params)
    assert ours.keys() == shared.keys()
    for name, value in shared.items():
        if not value.is_floating_point():  # a mean of counts, which is rounded whenever it is used
            continue
        np.testing.assert_allclose(ours[name].numpy(), value.numpy(), atol=1e-4)
    for client, mine in own.items():
        assert run.personal(client).keys() == mine.keys()
        for name, value in run.personal(client).items():
            np.testing.assert_allclose(value.numpy(), mine[name].numpy(), atol=1e-4)


@pytest.mark.parametrize("head_epochs", [3, 12])
def test_the_last_round_of_fedrep_fits_all_heads_as_the_authors_code_does(head_epochs):
    """All clients, though each round samples half of them; the representation is that of the round before."""
    run = ran(FedRep(head_epochs=head_epochs, last_fit=3))
    federation = federation_of([0, 1, 0, 1], SIZES, seed=2)
    arguments = {"seed": 3, "rounds": 3, "head_epochs": head_epochs}
    shared, own = federated(federation, perceptron(), SPEC, HEAD, last_fit=True, **arguments)
    assert run.layout is not None
    ours = run.layout.unflatten(run.tree.nodes[0].params)
    for name, value in shared.items():
        np.testing.assert_allclose(ours[name].numpy(), value.numpy(), atol=1e-4)
    for client, mine in own.items():
        for name, value in run.personal(client).items():
            np.testing.assert_allclose(value.numpy(), mine[name].numpy(), atol=1e-4)


def test_in_the_last_round_of_fedrep_all_clients_train_and_no_update_is_used():
    clients = SimulatedClients(
        federation_of([0, 1, 0, 1], SIZES), module := perceptron(), engine="loop", personal=HEAD
    )
    params = clients.layout.flatten(module)
    played = play(FedRep(head_epochs=1, last_fit=2), clients, params, 2, spec=SPEC, fraction=0.5)
    assert [len(log.losses) for log in played.logs] == [2, 4]
    before, after = (state.tree.nodes[0].params for state in played.states[1:])
    assert torch.equal(before, after)
    assert played.logs[1].discrepancy is None
    last = played.clients.calls[-1]
    assert last.work.steps == HeadThenBody(10)
    assert last.work.sends_update
    assert played.logs[1].criteria == {}


def test_the_last_fit_is_in_a_round():
    with pytest.raises(
        ConfigError, match=r"algorithm\.last_fit should be at least 1, or left out, got 0"
    ):
        FedRep(last_fit=0)


def test_a_last_fit_that_never_happens_is_told():
    run = RunFacts(rounds=5)
    assert "set algorithm.last_fit = 5, or leave it out" in FedRep(last_fit=9).check(run)[0]
    assert FedRep(last_fit=5).check(run) == FedRep().check(run) == ()


def test_private_clients_release_their_updates_in_the_last_fit_as_in_any_round():
    privacy = DifferentialPrivacy(clip_norm=0.5, noise_multiplier=8.0)
    run = ran(FedRep(head_epochs=1, last_fit=3), privacy=privacy)
    assert run.summary["privacy"]["releases"] == 3
    assert run.summary["bytes_up"] == ran(FedRep(head_epochs=1)).summary["bytes_up"]
    assert {row["round"] for row in run.cluster_rows} == {1, 2}
    losses = {row["round"]: row["train_loss"] for row in run.metric_rows}
    assert losses[3] is None


def test_the_last_fit_is_refused_with_central_privacy():
    text = r'privacy\.model = "central": FedRep with last_fit trains all clients .* leave out algorithm\.last_fit'
    with pytest.raises(ConfigError, match=text):
        ran(FedRep(last_fit=3), privacy=CentralPrivacy(clip_norm=0.5))
    assert ran(FedRep(), privacy=CentralPrivacy(clip_norm=0.5)).summary["privacy"]["releases"] == 3


def test_patterns_say_it_as_well_and_win_over_the_methods_own():
    assert torch.equal(
        ran(FedPer()).tree.nodes[0].params, ran(FedAvg(), personal=("3.*",)).tree.nodes[0].params
    )
    assert ran(FedPer(), personal=("1.bias",)).personal(0).keys() == {"1.bias"}


def test_what_stays_is_not_sent():
    whole, body = ran(FedAvg()), ran(FedPer())
    shared = sum(p.numel() for name, p in perceptron().named_parameters() if name in BODY)
    assert body.summary["bytes_up"] == body.summary["bytes_down"] == 3 * 4 * shared * 4
    assert whole.summary["bytes_up"] > body.summary["bytes_up"]


@pytest.mark.parametrize(
    "way",
    [
        {"memory": 60_000},
        {"permute": True},
        {"stream": True, "signature": {"kind": "projected", "dim": 16}},
        {"faults": Faults(corrupt=0.01)},
    ],
)
def test_blocks_permutation_and_streams_change_nothing(way):
    if "signature" in way:
        way = {**way, "signature": Signature(**way["signature"])}
    plain, other = ran(FedPer()), ran(FedPer(), **way)
    torch.testing.assert_close(
        other.tree.nodes[0].params, plain.tree.nodes[0].params, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        other.kept[2]["personal"], plain.kept[2]["personal"], rtol=0, atol=1e-5
    )


def test_noise_is_put_on_what_is_sent_alone():
    spec, private = (
        LocalTraining(batch_size=10, lr=0.1),
        DifferentialPrivacy(clip_norm=1e-9, noise_multiplier=0.0),
    )
    run = ran(FedPer(), local=spec, rounds=1, privacy=private)
    assert torch.equal(
        run.kept[0]["personal"], ran(FedPer(), local=spec, rounds=1).kept[0]["personal"]
    )
    assert run.layout is not None
    torch.testing.assert_close(run.tree.nodes[0].params, run.layout.flatten(perceptron()))


def test_who_drops_out_keeps_what_it_has():
    before, after = (ran(FedPer(), rounds=rounds, faults=Faults(dropout=0.5)) for rounds in (2, 3))
    trained = {
        client: not torch.equal(after.kept[client]["personal"], before.kept[client]["personal"])
        for client in range(4)
    }
    silent = {
        client
        for event in after.events
        if event["kind"] == "left_out" and event["round"] == 3
        for client in map(int, event["clients"])
    }
    assert {client for client, moved in trained.items() if not moved} == silent != set()


def test_the_head_must_be_trained_for_an_epoch():
    with pytest.raises(ConfigError, match=r"algorithm\.head_epochs should be at least 1, got 0"):
        FedRep(head_epochs=0)


def turned(truth, size: int = 60, seed: int = 0) -> Federation:
    """Clients whose inputs, not labels, differ between clusters: those of the second have other features first."""
    federation = federation_of([0] * len(truth), [size] * len(truth), seed)
    pool = federation.pool
    x = pool.x.clone()
    for client, cluster in zip(federation.clients, truth, strict=True):
        mine = np.concatenate([client.train, client.validation, client.test])
        x[mine] = x[mine].roll(3 * cluster, dims=1)
    return replace(federation, pool=replace(pool, x=x), true_clusters=dict(enumerate(truth)))


TRUTH = (0, 1, 0, 1, 0, 1, 0, 1)

CLUSTERED = {
    "cfl": CFL(eps2=1e-3, split_rounds=(4,)),
    "fl_hc": FLHC(rounds_before=3, n_clusters=2),
    "fedgroup": FedGroup(groups=2, pretrain_scale=4),
    "rcfl": ReplicatedCFL(level=0.2, check_every=4),
    "ifca": IFCA(clusters=2, restarts=3),
}


def hidden(x: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, x), nn.ReLU(), nn.Linear(x, LABELS))


def drawn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return hidden()


CLUSTER_SETTINGS = {
    "local": LocalTraining(epochs=3, batch_size=10, lr=0.1),
    "personal": "head",
    "rounds": 8,
    "engine": "stacked",
}


@pytest.mark.parametrize("name", CLUSTERED)
def test_every_method_clusters_a_shared_body_under_personal_heads(name):
    seed = 2 if name == "ifca" else 1  # whose initial models decide
    run = simulate(CLUSTERED[name], drawn, turned(TRUTH), **CLUSTER_SETTINGS, seed=seed)
    assert run.summary["clusters"]["ari"] == 1.0
    assert run.layout is not None
    assert {slot.name for slot in run.layout.personal} == {"2.weight", "2.bias"}
