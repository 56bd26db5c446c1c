"""FedALA gives the models of a literal twin, a plain PyTorch loop as in the authors' code."""

import copy

import numpy as np
import pytest
import torch
from fedclade_fedala import AlaTraining, FedALA
from torch import nn

import fedclade
from fedclade.core import named

LR = 0.1
ETA = 2.0


def network():
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def adapt(net, received, weights, inputs, targets):
    """Learn a client's weights and mix the models, tensor by tensor; return the weights."""
    is_first = weights is None
    own = [*net.parameters()]
    others = [*received.parameters()]
    for tensor, other in zip(own[:-2], others[:-2], strict=True):
        tensor.data = other.data.clone()
    old = [tensor.data.clone() for tensor in own[-2:]]
    new = [tensor.data.clone() for tensor in others[-2:]]
    if is_first:
        weights = [torch.ones_like(tensor) for tensor in old]
    losses = []
    for k in range(2):
        own[-2 + k].data = old[k] + (new[k] - old[k]) * weights[k]
    while True:
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        for k in range(2):
            step = ETA * own[-2 + k].grad * (new[k] - old[k])
            weights[k] = torch.clamp(weights[k] - step, 0, 1)
        for k in range(2):
            own[-2 + k].data = old[k] + (new[k] - old[k]) * weights[k]
        losses.append(float(loss))
        if not is_first or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
            return weights


def twin(federation, rounds):
    """Train as the authors' loop does, with one batch of all examples for each client and round."""
    received = network()
    models = {client: network() for client in federation.ids}
    weights = dict.fromkeys(federation.ids)
    for number in range(rounds):
        for client, net in models.items():
            inputs, targets = federation.examples(client, "train")
            if number > 0:
                weights[client] = adapt(net, received, weights[client], inputs, targets)
            net.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= LR * parameter.grad
        total = sum(federation.sizes.values())
        received = copy.deepcopy(received)
        with torch.no_grad():
            for tensors in zip(
                received.parameters(), *(net.parameters() for net in models.values()), strict=True
            ):
                parts = zip(models, tensors[1:], strict=True)
                tensors[0].copy_(sum(federation.sizes[c] / total * tensor for c, tensor in parts))
    return received, models


def vector_of(net):
    """Return the parameters of a network as a vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.fixture(name="federation", scope="module")
def _federation():
    return fedclade.load_federation("digits", clients=3, shift="label_permutation", clusters=2)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_the_models_are_those_of_the_twin(federation, rounds):
    local = fedclade.LocalTraining(lr=LR, steps=1, batch_size=10_000)
    method = FedALA(p=2, eta=ETA, s=1.0)
    run = fedclade.simulate(method, network(), federation, rounds=rounds, local=local)
    received, models = twin(federation, rounds)
    torch.testing.assert_close(run.tree.nodes[0].params, vector_of(received))
    for client, net in models.items():
        torch.testing.assert_close(run.kept[client]["model"], vector_of(net))


def test_the_package_registers_its_names():
    assert named("trainers", "fedala", {}, "trainer") is AlaTraining
    assert fedclade.algorithms.method_named("fedala").algorithm is FedALA


def test_the_first_learning_of_the_weights_ends():
    steps = AlaTraining(p=2, eta=1.0, s=1.0)
    wild = [float(k % 2) for k in range(100)]
    assert [k for k in range(101) if steps.is_done(wild[:k], is_first=True)] == [100]
    assert [k for k in range(5) if steps.is_done(wild[:k], is_first=False)] == [1]


@pytest.mark.parametrize(
    ("settings", "why"), [({"p": 0}, "p"), ({"eta": 0.0}, "eta"), ({"s": 1.5}, "s")]
)
def test_bad_settings_are_refused(settings, why):
    with pytest.raises(fedclade.ConfigError, match=f"algorithm.{why} should be"):
        FedALA(**settings)
