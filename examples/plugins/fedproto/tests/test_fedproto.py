"""FedProto gives the models and prototypes of a literal twin, a plain PyTorch loop."""

import pytest
import torch
from fedclade_fedproto import FedProto, ProtoTraining, PrototypeQuery
from torch import nn

import fedclade
from fedclade.core import named

LAM = 3.0
LR = 0.1


def network():
    """Return a small network whose last linear layer takes the representation of 16 entries."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def twin(federation, rounds):
    """Train as the authors' loop does, with one batch of all examples; return models, prototypes."""
    models = {client: network() for client in federation.ids}
    prototypes = {}
    for _ in range(rounds):
        found = {}
        for client, net in models.items():
            inputs, targets = federation.examples(client, "train")
            features = net[:3](inputs)
            goals = features.detach().clone()
            for row, label in enumerate(targets.tolist()):
                if label in prototypes:
                    goals[row] = prototypes[label]
            loss = nn.functional.cross_entropy(net[3](features), targets)
            loss = loss + LAM * nn.functional.mse_loss(features, goals)
            net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= LR * parameter.grad
                features = net[:3](inputs)
            for label in set(targets.tolist()):
                rows = [row for row, target in enumerate(targets.tolist()) if target == label]
                found.setdefault(label, []).append(sum(features[row] for row in rows) / len(rows))
        prototypes = {label: sum(some) / len(some) for label, some in found.items()}
    return models, prototypes


@pytest.fixture(name="federation", scope="module")
def _federation():
    return fedclade.load_federation(
        "digits", clients=3, samples_per_client=8
    )  # no client has all labels


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_models_are_those_of_the_twin(federation, rounds):
    local = fedclade.LocalTraining(lr=LR, steps=1, batch_size=10_000)
    method = FedProto(size=16, lam=LAM)
    run = fedclade.simulate(method, network(), federation, rounds=rounds, local=local)
    models, _ = twin(federation, rounds)
    for client, net in models.items():
        vector = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
        torch.testing.assert_close(run.kept[client]["model"], vector)


def test_the_prototypes_are_those_of_the_twin(federation):
    seen = []

    class Watched(FedProto):
        """FedProto that shows its state."""

        def step(self, *arguments):
            result = super().step(*arguments)
            seen.append(result[0].prototypes)
            return result

    local = fedclade.LocalTraining(lr=LR, steps=1, batch_size=10_000)
    method = Watched(size=16, lam=LAM)
    fedclade.simulate(method, network(), federation, rounds=2, local=local)
    _, prototypes = twin(federation, 2)
    for label, row in enumerate(seen[-1]):
        if label in prototypes:
            torch.testing.assert_close(row, torch.cat([prototypes[label], torch.ones(1)]))
        else:
            assert not row.any()


def test_the_package_registers_its_names():
    assert named("trainers", "fedproto", {}, "trainer") is ProtoTraining
    assert named("queries", "prototypes", {}, "query") is PrototypeQuery
    assert fedclade.algorithms.method_named("fedproto").algorithm is FedProto


def test_a_wrong_size_is_refused(federation):
    with pytest.raises(fedclade.ConfigError, match=r"shape \[10, 8\].* got shape \[10, 17\]"):
        fedclade.simulate(FedProto(size=7), network(), federation, rounds=1)


def test_private_clients_refuse_to_report_prototypes(federation):
    privacy = fedclade.DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(fedclade.ConfigError, match="mean representations of their labels"):
        fedclade.simulate(FedProto(size=16), network(), federation, rounds=1, privacy=privacy)
