"""Training of the last layer alone: what changes, whatever trains, and what stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.core import ClientWork, FromStored, LastLayer, LocalModel, NoReply, Round
from fedclade.training import OWN_MODEL, SimulatedClients
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

LOCAL = LocalTraining(epochs=2, batch_size=10, lr=0.3)
FEDERATION = federation_of([0, 1, 2], [24, 31, 40])
ROUND = Round(3, LOCAL, 5)
ENGINES = ["loop", "stacked", "workers"]


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, LABELS))


def without_bias() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, LABELS, bias=False))


def trained(engine: str, module: nn.Module, local: LocalTraining = LOCAL) -> tuple[Tensor, Tensor]:
    """Return the model, and the updates of all clients that trained its last layer."""
    clients = SimulatedClients(FEDERATION, module, engine=engine)
    params = clients.layout.flatten(module)
    this_round = Round(3, local, 5)
    work = ClientWork(steps=LastLayer())
    return params, clients.train([0, 1, 2], params[None], [0] * 3, this_round, work).deltas


def in_last_layer(module: nn.Module) -> Tensor:
    """Return which entries of the model's vector are in the last layer ``[F]``."""
    clients = SimulatedClients(FEDERATION, module, engine="loop")
    mask = torch.zeros(len(clients.layout.flatten(module)), dtype=torch.bool)
    last = list(module.state_dict())[-1].rpartition(".")[0]
    for slot in clients.layout.full.parameters:
        if slot.name.startswith(f"{last}."):
            mask[slot.start : slot.stop] = True
    assert 0 < mask.sum() < len(mask)
    return mask


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [perceptron, normed, without_bias])
def test_only_entries_of_the_last_layer_change(engine, make):
    """Not even the statistics of BatchNorm, which training moves."""
    _, deltas = trained(engine, make())
    mask = in_last_layer(make())
    assert (deltas[:, mask] != 0).any(dim=1).all()
    assert not deltas[:, ~mask].any()


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("make", [perceptron, normed])
def test_all_engines_give_the_updates_of_the_loop(engine, make):
    _, expected = trained("loop", make())
    _, deltas = trained(engine, make())
    torch.testing.assert_close(deltas, expected, rtol=0, atol=1e-5)


def test_it_is_plain_training_of_a_model_whose_other_layers_are_frozen():
    _, deltas = trained("loop", perceptron())
    frozen = perceptron()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(name.startswith(list(frozen.state_dict())[-1].rpartition(".")[0]))
    clients = SimulatedClients(FEDERATION, frozen, engine="loop")
    start = clients.layout.flatten(frozen)
    plain = clients.train([0, 1, 2], start[None], [0] * 3, ROUND).deltas
    mask = in_last_layer(perceptron())
    kept = deltas[:, mask]
    if plain.shape[1] == deltas.shape[1]:
        plain = plain[:, mask]
    torch.testing.assert_close(kept, plain, rtol=0, atol=1e-6)


def test_a_loop_written_out_by_hand_gives_the_same():
    """Gradient descent on the last layer, in batches of all examples."""
    module = perceptron()
    _, deltas = trained("loop", module, LocalTraining(epochs=3, batch_size=100, lr=0.3))
    client = FEDERATION.clients[0]  # which sees the labels as they are
    x, y = FEDERATION.pool.x[client.train], FEDERATION.pool.y[client.train]
    copy = perceptron()
    last = list(copy.parameters())[-2:]
    for _ in range(3):  # one batch of all examples, so their order does not matter
        loss = nn.functional.cross_entropy(copy(x), y)
        for parameter, gradient in zip(last, torch.autograd.grad(loss, last), strict=True):
            parameter.data -= 0.3 * gradient
    before = dict(perceptron().named_parameters())
    moved = torch.cat([(p - before[n]).flatten() for n, p in copy.named_parameters()])
    torch.testing.assert_close(deltas[0], moved.detach(), rtol=0, atol=1e-5)


def test_a_stored_copy_has_the_received_body_and_a_trained_head():
    module = normed()
    clients = SimulatedClients(FEDERATION, module, engine="stacked")
    params = clients.layout.flatten(module)
    work = ClientWork(start=FromStored(), steps=LastLayer(), store=LocalModel(), reply=NoReply())
    clients.train([0, 1, 2], params[None], [0] * 3, ROUND, work)
    mask = in_last_layer(normed())
    for client in range(3):
        stored = clients.store.latest(client)[OWN_MODEL]
        assert torch.equal(stored[~mask], params[~mask])
        assert not torch.equal(stored[mask], params[mask])


def test_it_counts_as_many_steps_as_training_of_all_layers():
    assert LastLayer().count_steps(LOCAL, 24) == LOCAL.steps_with(24) == 6
