"""Models that cannot be trained on one example: how their batches are formed, the same in every engine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedclade import (
    APFL,
    ConfigError,
    Ditto,
    FedAvg,
    FedRep,
    LocalTraining,
    ModelError,
    PerFedAvg,
    Scaffold,
)
from fedclade.core import ClientWork, DataSpec, Layout, Nothing, Round, SplitPart, rng
from fedclade.tasks import FittedTask
from fedclade.training import SimulatedClients
from fedclade.training.batch_rule import BatchRule, smallest_batch_for
from fedclade.training.blocks import Block, Settings
from fedclade.training.jobs import PrivateSteps, batches
from fedclade.training.loop import LoopEngine
from tests.tiny import FEATURES, LABELS, federation_of, linear, own_models, play, simulated

SIZES = [21, 40, 41, 1, 39, 11]
"""Training examples of clients: with batches of 10, the last batches of 0, 2 and 5 have one example, and 3 has one."""

TRUTH = [0] * len(SIZES)
SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.1)
CPU = torch.device("cpu")


def normed(norm: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), norm or nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, LABELS)
    )


def pooled(size: int) -> nn.Module:
    """Return a model of 2 × 3 pictures with BatchNorm2d behind a pooling to maps of ``size`` × ``size``."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(size),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * size * size, LABELS),
    )


class Variance(nn.Module):
    """Normalises over the batch by hand, with a deviation that one example does not have."""

    def forward(self, x):
        return (x - x.mean(0)) / ((x - x.mean(0)).square().sum(0) / (len(x) - 1)).sqrt()


class InPlace(nn.Module):
    """Normalises by the function, with statistics of its own, and counts its calls where no vector has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


class FirstColumn(nn.Embedding):
    """Embeds the number in the first column."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x[:, 0].long())


class OneLess(nn.Module):
    """Drops the dimension of the batch where that has one example."""

    def forward(self, x):
        return (
            nn.functional.batch_norm(x.squeeze(), None, None, training=True) if self.training else x
        )


def rule_of(module: nn.Module, sizes=SIZES) -> BatchRule:
    return BatchRule.of(module, Layout.of(module), federation_of([0] * len(sizes), sizes), CPU)


@pytest.mark.parametrize(
    ("make", "smallest"),
    [
        (linear, 1),
        (normed, 2),
        (lambda: normed(nn.BatchNorm1d(8, affine=False)), 2),
        (lambda: normed(nn.SyncBatchNorm(8)), 2),
        (lambda: normed(nn.LayerNorm(8)), 1),
        (lambda: normed(nn.GroupNorm(2, 8)), 1),
        (lambda: normed(Variance()), 2),
        (lambda: pooled(1), 2),
        (lambda: pooled(2), 1),
    ],
    ids=[
        "linear",
        "1d",
        "no scale",
        "sync",
        "layer",
        "group",
        "by hand",
        "1 x 1 maps",
        "2 x 2 maps",
    ],
)
def test_a_model_needs_two_examples_where_one_cannot_be_normalised(make, smallest):
    """Of larger maps BatchNorm2d normalises the places of one example, as before."""
    assert rule_of(make()).smallest == smallest


def test_a_layer_at_rest_needs_no_batch():
    module = normed()
    module[1].eval().requires_grad_(False)
    assert rule_of(module).smallest == 1


def test_an_own_layer_is_found_by_what_it_does_and_keeps_its_buffers():
    module = normed(InPlace())
    module[2].eval()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = torch.get_rng_state()
    assert rule_of(module, [21, 40]).smallest == 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert [layer.training for layer in module] == [True, True, False, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_server_finds_the_same_without_data():
    """By the shape of the inputs, or of tokens."""
    schema = DataSpec("tiny", (FEATURES,), LABELS)
    for module, smallest in ((normed(), 2), (linear(), 1), (pooled(1), 2), (pooled(2), 1)):
        assert smallest_batch_for(module, Layout.of(module), schema) == smallest
    doubled = normed().double()
    assert smallest_batch_for(doubled, Layout.of(doubled), schema) == 2
    # random numbers are no indices
    columns = nn.Sequential(FirstColumn(), nn.BatchNorm1d(3), nn.Linear(3, LABELS))
    assert smallest_batch_for(columns, Layout.of(columns), schema) == 2
    tokens = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 9))
    assert (
        smallest_batch_for(tokens, Layout.of(tokens), DataSpec("words", (4,), 9, vocabulary_size=9))
        == 2
    )


ONE_PLACE = (
    "Expected more than 1 spatial element when training, got input size torch.Size([{}, 8, 1])"
)
INSTANCE_NORMS = {
    "of each input": (
        nn.InstanceNorm1d(8),
        "the model cannot take inputs of shape (6,) (tiny): " + ONE_PLACE.format(2),
    ),
    "running": (
        nn.InstanceNorm1d(8, track_running_stats=True),
        "the model accepts inputs of shape (6,) (tiny), but cannot be trained on them: "
        + ONE_PLACE.format(21)
        + "; layer '2' (InstanceNorm1d) normalises over the positions of an example, and needs more than one "
        "position; use GroupNorm or LayerNorm instead",
    ),
}


@pytest.mark.parametrize(("norm", "text"), INSTANCE_NORMS.values(), ids=INSTANCE_NORMS)
def test_instance_norm_of_one_place_is_refused_before_the_first_round(norm, text):
    """It fails for every batch; with two places it is fine."""

    def instance_normed(places: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8 * places),
            nn.Unflatten(1, (8, places)),
            norm,
            nn.Flatten(),
            nn.Linear(8 * places, LABELS),
        )

    federation = federation_of(TRUTH, SIZES)
    with pytest.raises(ModelError, match=re.escape(text)):
        SimulatedClients(federation, instance_normed(1))
    assert SimulatedClients(federation, instance_normed(2)).smallest_batch == 1


def test_a_client_with_one_example_that_nothing_can_be_done_for_is_named_before_the_first_round():
    """A layer without running statistics has nothing to normalise one example by."""
    module = normed(nn.BatchNorm1d(8, track_running_stats=False))
    text = (
        "client 3 ('c3') has one training example, on which the model cannot be trained, even with its normalisation "
        "layers in evaluation mode: Expected more than 1 value per channel when training, got input size torch.Size("
        "[1, 8]); give the client more examples, or leave it out"
    )
    with pytest.raises(ModelError, match=re.escape(text)):
        SimulatedClients(federation_of(TRUTH, SIZES), module)
    assert SimulatedClients(federation_of([0, 0], [21, 11]), module).smallest_batch == 2
    # says nothing of its data
    private = SimulatedClients(federation_of(TRUTH, SIZES), module, always_replies=True)
    assert private.smallest_batch == 2


def test_batches_of_one_example_are_refused():
    clients, params = simulated(federation_of(TRUTH, SIZES), normed())
    text = "local.batch_size should be at least 2 for a model that cannot be trained on fewer examples.*got 1"
    with pytest.raises(ConfigError, match=text):
        clients.train([0], params[None], [0], Round(1, replace(SPEC, batch_size=1)))


@pytest.mark.parametrize("norm", [InPlace, OneLess])
def test_example_privacy_refuses_a_model_that_needs_more_than_one_example(norm):
    text = "privacy.level = 'example' needs .* Sequential cannot be trained on one example at a time; use a model"
    with pytest.raises(ConfigError, match=text):
        SimulatedClients(federation_of([0], [20]), normed(norm()), private=PrivateSteps(1.0, 1.0))


def test_the_last_example_joins_the_batch_before():
    """21 examples in batches of 10 are 10 and 11 in the order drawn; 40 are as ever; one is one."""
    spec = SPEC.with_smallest_batch(2)
    for size, expected in ((21, [10, 11]), (40, [10] * 4), (22, [10, 10, 2]), (1, [1]), (11, [11])):
        draws = [rng.torch_generator(0, "t") for _ in range(2)]
        first, second = (torch.randperm(size, generator=draws[0]) for _ in range(2))
        steps = list(batches(size, spec, draws[1]))
        assert [len(step) for step in steps] == expected * 2 == spec.batch_sizes(size) * 2
        assert torch.equal(torch.cat(steps), torch.cat([first, second]))


def test_joined_batches_are_trained_on_as_by_hand():
    """One epoch of 11 examples is a step on all of them, in training mode."""
    federation, module = federation_of([0], [11]), normed()
    clients, params = simulated(federation, module)
    update = clients.train([0], params[None], [0], Round(1, replace(SPEC, epochs=1))).deltas[0]
    x, y = federation.examples(0, "train")
    own = normed().train()
    torch.nn.functional.cross_entropy(own(x), y).backward()
    weight = own[0].weight
    torch.testing.assert_close(
        update[: weight.numel()], -0.1 * weight.grad.flatten(), rtol=1e-4, atol=1e-6
    )
    # the running mean of 11 examples
    assert update[-17:-9] == pytest.approx((0.1 * own[0](x).mean(0)).detach())


def test_a_client_with_one_example_trains_with_the_statistics_that_it_is_sent():
    """As in evaluation mode but for dropout; its statistics stay."""
    federation, module = federation_of(TRUTH, SIZES), normed()
    module[1].running_mean.fill_(0.5)
    clients, params = simulated(federation, module)
    update = clients.train([3], params[None], [0], Round(1, replace(SPEC, epochs=1))).deltas[0]
    own = normed()
    clients.layout.load(params, own)
    x, y = federation.examples(3, "train")
    torch.nn.functional.cross_entropy(own.eval()(x), y).backward()
    expected = torch.cat([-0.1 * parameter.grad.flatten() for parameter in own.parameters()])
    torch.testing.assert_close(update, torch.cat([expected, torch.zeros(17)]), rtol=1e-4, atol=1e-6)


METHODS = {
    "fedavg": FedAvg(),
    "ditto": Ditto(),
    "scaffold": Scaffold(),
    "apfl": APFL(adaptive=True),
    "per_fedavg": PerFedAvg(variant="HF"),
}


@pytest.mark.parametrize(
    ("method", "engine"),
    [*((method, "stacked") for method in METHODS), ("fedavg", "auto"), ("fedavg", "workers")],
)
def test_every_engine_gives_what_the_loop_gives(method, engine):
    """For clients whose last batch is joined, and those with one example; in rules, and in models of their own, too."""
    spec = SPEC if method == "scaffold" else replace(SPEC, momentum=0.5)
    here, there = (
        play(METHODS[method], *simulated(federation_of(TRUTH, SIZES), normed(), name), 2, spec=spec)
        for name in ("loop", engine)
    )
    for ours, theirs in zip(here.states, there.states, strict=True):
        torch.testing.assert_close(
            theirs.tree.nodes[0].params, ours.tree.nodes[0].params, rtol=0, atol=1e-5
        )
    assert here.states[-1].tree.nodes[0].params.isfinite().all()
    for client, model in own_models(here).items():
        torch.testing.assert_close(own_models(there)[client], model, rtol=0, atol=1e-5)
    assert [log.losses for log in there.logs] == [
        pytest.approx(log.losses, abs=1e-5) for log in here.logs
    ]
    assert set(here.logs[-1].losses) == set(range(len(SIZES)))


@pytest.mark.parametrize(
    ("norm", "method"),
    [(lambda: nn.BatchNorm1d(8, track_running_stats=False), FedAvg()), (Variance, APFL())],
)
def test_models_that_vmap_can_map_agree_too(norm, method):
    federation = federation_of([0, 0, 0], [21, 40, 11])
    here, there = (
        play(method, *simulated(federation, normed(norm()), name), 1, spec=SPEC)
        for name in ("loop", "vmap")
    )
    assert there.clients.clients.engine == "vmap"
    last, of_vmap = here.states[-1].tree.nodes[0].params, there.states[-1].tree.nodes[0].params
    torch.testing.assert_close(of_vmap, last, rtol=0, atol=1e-5)
    assert last.isfinite().all()


def test_personal_layers_and_parts_of_the_data_follow_the_rule():
    """FedRep trains in two stages; of two parts of 41 examples one has 21, and one of 3 examples has one."""
    federation = federation_of(TRUTH, [41, 3, *SIZES[2:]])
    clients = SimulatedClients(federation, module := normed(), engine="stacked", personal=("3.*",))
    played = play(FedRep(head_epochs=2), clients, clients.layout.flatten(module), 2, spec=SPEC)
    assert set(played.logs[-1].losses) == set(range(len(SIZES)))
    clients, params = simulated(federation, normed(), "stacked")
    for part in range(2):
        work = ClientWork(data=SplitPart(part, 2), store=Nothing())
        updates = clients.train([0, 1], params[None], [0, 0], Round(1, SPEC), work)
        assert updates.ids == (0, 1)


def test_states_of_optimizers_are_kept_of_all_clients():
    spec = replace(SPEC, optimizer="adam", lr=0.01, momentum=None, keep_state=True)
    clients, params = simulated(federation_of(TRUTH, SIZES), normed(), "stacked")
    clients.train(clients.ids, params[None], [0] * 6, Round(1, spec))
    assert all(clients.store.latest(client) for client in clients.ids)


def test_a_workload_without_small_clients_is_the_engine_s_alone():
    seen = []

    class Engine:
        def train(self, work, out=None):
            seen.append((work, out))
            return LoopEngine().train(work, out)

    federation, module = federation_of([0, 0], [21, 11]), normed()
    clients, params = simulated(federation, module)
    rule = rule_of(module, [21, 11])
    block = Block([(0, *clients._stages.now.data.of(0))], params[None], [0], [None])
    work = clients._training._workload(block, Settings(Round(1, SPEC), SPEC))
    out = torch.empty(1, clients.layout.size)
    rule.train(Engine(), work, out)
    assert seen[0][0] is work
    assert seen[0][1] is out
    assert isinstance(work.task, FittedTask)


@pytest.mark.parametrize("sizes", [[10, 20, 30], [12, 25, 39]])
def test_other_federations_train_as_before(sizes):
    """Without a last batch of one example the rule changes no bit; nor does it where a model does not need it."""
    for make in (normed, linear):
        clients, params = simulated(federation_of([0, 0, 0], sizes), module := make())
        got = clients.train([0, 1, 2], params[None], [0, 0, 0], Round(1, SPEC))
        any_batch = replace(clients._batch_rule, smallest=1)
        clients._training = replace(clients._training, batch_rule=any_batch)
        before = clients.train([0, 1, 2], params[None], [0, 0, 0], Round(1, SPEC))
        assert torch.equal(got.deltas, before.deltas)
        assert got.losses.isfinite().all()
        assert clients.layout == Layout.of(module)
