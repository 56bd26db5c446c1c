"""MOON gives the models of a literal twin, a plain PyTorch loop as in the authors' code."""

import copy

import pytest
import torch
from fedclade_moon import Moon, MoonTraining
from torch import nn

import fedclade
from fedclade.core import named

MU = 2.0
TAU = 0.5
LR = 0.1


def network():
    """Return a small network whose last linear layer takes the representation."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def twin(federation, rounds):
    """Train as the authors' loop does, with one batch of all examples for each client and round."""
    received = network()
    earlier = {}
    for _ in range(rounds):
        trained = {}
        for client in federation.ids:
            net = copy.deepcopy(received)
            inputs, targets = federation.examples(client, "train")
            projected = net[:3](inputs)
            loss = nn.functional.cross_entropy(net[3](projected), targets)
            if client in earlier:
                cosine = nn.CosineSimilarity(dim=-1)
                with torch.no_grad():
                    others = [received[:3](inputs), earlier[client][:3](inputs)]
                columns = [cosine(projected, other).reshape(-1, 1) for other in others]
                logits = torch.cat(columns, dim=1) / TAU
                labels = torch.zeros(len(inputs), dtype=torch.int64)
                loss = loss + MU * nn.functional.cross_entropy(logits, labels)
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= LR * parameter.grad
                    parameter.grad = None
            trained[client] = net
        earlier = trained
        total = sum(federation.sizes.values())
        with torch.no_grad():
            for tensors in zip(
                received.parameters(), *(net.parameters() for net in trained.values()), strict=True
            ):
                parts = zip(trained, tensors[1:], strict=True)
                tensors[0].copy_(sum(federation.sizes[c] / total * tensor for c, tensor in parts))
    return torch.cat([parameter.detach().flatten() for parameter in received.parameters()])


@pytest.fixture(name="federation", scope="module")
def _federation():
    return fedclade.load_federation("digits", clients=3, shift="label_permutation", clusters=2)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_models_are_those_of_the_twin(federation, rounds):
    local = fedclade.LocalTraining(lr=LR, steps=1, batch_size=10_000)
    run = fedclade.simulate(Moon(mu=MU, tau=TAU), network(), federation, rounds=rounds, local=local)
    torch.testing.assert_close(run.tree.nodes[0].params, twin(federation, rounds))


def test_without_the_contrastive_loss_it_is_fedavg(federation):
    moon = fedclade.simulate(Moon(mu=0.0), network(), federation, rounds=2, engine="loop")
    fedavg = fedclade.simulate("fedavg", network(), federation, rounds=2, engine="loop")
    assert torch.equal(moon.tree.nodes[0].params, fedavg.tree.nodes[0].params)


def test_the_package_registers_its_names():
    assert named("trainers", "moon", {}, "trainer") is MoonTraining
    assert fedclade.algorithms.method_named("moon").algorithm is Moon


@pytest.mark.parametrize(("settings", "why"), [({"mu": -1.0}, "mu"), ({"tau": 0.0}, "tau")])
def test_bad_settings_are_refused(settings, why):
    with pytest.raises(fedclade.ConfigError, match=f"algorithm.{why} should be"):
        Moon(**settings)
