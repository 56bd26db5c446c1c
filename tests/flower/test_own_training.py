"""Training code of a user over a network: clients run it if their policy names it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade
from fedclade import (
    ClientTrainer,
    ClientWork,
    ConfigError,
    DifferentialPrivacy,
    ExamplePrivacy,
    LocalRule,
    LocalTraining,
    State,
    Steps,
)
from fedclade.channel import Budget
from fedclade.core import Models, PolicyError, Round, TrainQuery, UpdateError
from fedclade.flower import wire
from fedclade.flower.local_grid import LocalGrid
from fedclade.flower.models_sent import ModelsSent, training_values
from fedclade.flower.own_steps import names_in, read_steps
from fedclade.flower.policy import Policy
from fedclade.flower.wire import Content
from tests.flower.grids import federated, grid_of, housed, network_of, node_of
from tests.tiny import federation_of, perceptron

FOUR = [0, 0, 1, 1]
LOCAL = LocalTraining(lr=0.1, epochs=2, batch_size=10)
HERE = "tests.flower.test_own_training"


def plain(model: Any, batches: Any, context: Any) -> float:
    """Take the steps of SGD, as a client does without a trainer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=context.lr)
    total = seen = 0.0
    for inputs, targets in batches:
        loss = context.loss(model(inputs), targets) + context.penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(inputs)
        seen += len(inputs)
    return total / seen


@dataclass(frozen=True, eq=False)
class Pulled(ClientTrainer):
    """SGD, after a move of the first entries of the model; counts its rounds in a stored tensor."""

    stores = ("rounds",)

    by: Tensor
    factor: float = 1.0

    def train_client(self, model: Any, batches: Any, context: Any) -> float:
        before = context.stored("rounds")
        rounds = torch.ones(1) if before is None else before + 1
        context.store("rounds", rounds)
        with torch.no_grad():
            first = next(model.parameters())
            first.flatten()[: self.by.numel()].add_(
                self.by.flatten().to(first), alpha=self.factor * float(rounds)
            )
        return plain(model, batches, context)


@dataclass(frozen=True, kw_only=True)
class Halved(LocalRule):
    """SGD with a fraction of the step size; counts its rounds in a stored tensor."""

    share: float

    def begin(self, models: Any, anchors: Any, kept: Any) -> Any:
        return {"rounds": fedclade.core.or_kept(models.new_zeros(len(models), 1), kept, "rounds")}

    def step(self, now: Any, step: Any) -> None:
        step.move("w", self.share * step.gradient(now["w"]) / (1 + now["rounds"]))

    def end(self, now: Any, models: Any, steps: Any, lr: float) -> Any:
        return {"rounds": now["rounds"] + 1}


@dataclass(frozen=True)
class Damped(Steps):
    """Local training after which each model moves only a share of the way."""

    share: float
    adds_column: bool = False

    def run(self, trainer: Any) -> Any:
        made = trainer.train()
        columns = {"length": made.moved.norm(dim=1)} if self.adds_column else {}
        return fedclade.Made(self.share * made.moved, made.losses, columns=columns)


@dataclass(frozen=True, kw_only=True)
class Own(fedclade.FedAvg):
    """FedAvg with other steps of the clients."""

    steps: Any = None

    requires = fedclade.Requires()

    def step(self, state: Any, cohort: Any, clients: Any, this_round: Any) -> Any:
        work = ClientWork(steps=self.steps)
        parts = fedclade.train_clusters(state, cohort, clients, this_round, work)
        return State(fedclade.move_clusters(state.tree, parts)), fedclade.log_of(parts)


STEPS = {
    "trainer": Pulled(torch.tensor([[0.1, -0.2], [0.3, 0.0]]), factor=0.5),
    "rule": Halved(share=0.5),
    "steps": Damped(share=0.5),
}


def root_of(run: Any) -> Tensor:
    return run.tree.nodes[0].params


@pytest.mark.parametrize("kind", STEPS)
def test_clients_of_a_network_take_own_steps_as_simulated_clients_do(kind: str):
    steps = STEPS[kind]
    name = f"{HERE}:{type(steps).__name__}"
    federation = federation_of(FOUR)
    grid = grid_of(federation, config={"trainers": name})
    run = federated(grid, Own(steps=steps), local=LOCAL, rounds=3)
    simulated = fedclade.simulate(
        Own(steps=steps), perceptron(), federation, local=LOCAL, rounds=3, engine="loop"
    )
    assert torch.equal(root_of(run), root_of(simulated))


@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_clients_of_a_network_train_by_a_function(mu: float):
    local = replace(LOCAL, mu=mu)
    grid = grid_of(federation_of(FOUR), config={"trainers": f"{HERE}:plain"})
    run = federated(grid, fedclade.FedAvg(), trainer=plain, local=local)
    expected = federated(grid_of(federation_of(FOUR)), fedclade.FedAvg(), local=local)
    torch.testing.assert_close(root_of(run), root_of(expected))
    assert run.config["local"]["trainer"] == f"{HERE}:plain"


@pytest.mark.parametrize("closed", [{}, {"secure-aggregation": True, "trust-server-keys": True}])
def test_the_default_policy_refuses_and_says_how_to_allow(closed: dict[str, Any], tmp_path: Path):
    secure = bool(closed)
    grid = grid_of(federation_of(FOUR, [20] * 4), config=closed)
    network = {"network": None}
    if secure:
        grid = housed(grid, tmp_path)
        network = {"network": network_of(grid, secure_aggregation=True)}
    why = (
        f"the client's policy forbids the training code '{HERE}:plain', which is not part of "
        f'fedclade; if you trust the code, allow it with trainers="{HERE}:plain"'
    )
    with pytest.raises(UpdateError, match=why):
        federated(grid, fedclade.FedAvg(), trainer=plain, local=LOCAL, **network)


def test_a_secure_sum_of_updates_by_own_code_is_the_sum_of_the_updates(tmp_path: Path):
    config = {"secure-aggregation": True, "trust-server-keys": True, "trainers": f"{HERE}:plain"}
    federation = federation_of(FOUR, [20] * 4)
    grid = housed(grid_of(federation, config=config), tmp_path)
    network = network_of(grid, secure_aggregation=True)
    run = federated(grid, fedclade.FedAvg(), trainer=plain, local=LOCAL, network=network, rounds=2)
    expected = fedclade.simulate("fedavg", perceptron(), federation, local=LOCAL, rounds=2)
    torch.testing.assert_close(root_of(run), root_of(expected), atol=1e-4, rtol=1e-3)


def test_a_function_without_a_name_is_refused_before_any_message():
    def inside(model: Any, batches: Any, context: Any) -> float:
        return plain(model, batches, context)

    with pytest.raises(ConfigError, match="trainer inside cannot be requested over a network, sin"):
        federated(grid_of(federation_of(FOUR)), fedclade.FedAvg(), trainer=inside)


def test_columns_of_own_steps_are_refused_over_a_network():
    grid = grid_of(federation_of(FOUR), config={"trainers": f"{HERE}:Damped"})
    why = "the steps Damped add the column 'length' to the update, which clients in a network"
    with pytest.raises(UpdateError, match=why):
        federated(grid, Own(steps=Damped(share=0.5, adds_column=True)), rounds=1)


def content_of(steps: Steps, **changes: Any) -> Content:
    """Return the content of the message for a training query."""
    models = Models(torch.zeros(1, 3), [0])
    query = TrainQuery([2], models, Round(1, LOCAL), ClientWork(steps=steps))
    values = {**training_values(query, None), **changes}
    return Content.of(wire.record({"what": "train", **values}, ModelsSent.of(query).vectors[2]))


def test_fields_of_steps_travel_exactly():
    steps = read_steps(content_of(STEPS["trainer"]))
    assert isinstance(steps, Pulled)
    assert torch.equal(steps.by, STEPS["trainer"].by)
    assert steps.factor == 0.5
    assert read_steps(content_of(STEPS["rule"])) == STEPS["rule"]
    assert read_steps(content_of(fedclade.Sgd())) is None
    assert names_in(content_of(STEPS["steps"])) == [f"{HERE}:Damped"]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ('{"name": "os:getcwd"}', "'os:getcwd' should be a dataclass of fedclade.Steps, got"),
        (f'{{"name": "{HERE}:Damped", "shares": 1}}', "unknown field of Damped: 'shares'"),
        (f'{{"name": "{HERE}:Damped"}}', "the fields of Damped do not fit the message: .*'share'"),
        (f'{{"name": "{HERE}:Damped", "share": "a"}}', "share of .* should be a number, got 'a'"),
        (
            f'{{"name": "{HERE}:Pulled", "by": {{"shape": [3], "type": "float32"}}}}',
            "the tensor 'by' of a query has 16 bytes, expected shape",
        ),
        (
            f'{{"name": "{HERE}:Pulled", "by": {{"shape": [-1], "type": "float32"}}}}',
            "the tensor 'by' of a query is malformed",
        ),
    ],
)
def test_a_client_refuses_malformed_steps(rule: str, why: str):
    with pytest.raises(UpdateError, match=why):
        read_steps(content_of(STEPS["trainer"], rule=rule))


def test_a_policy_lists_trainers():
    policy = Policy.of({"trainers": "moon, my_training:train"})
    policy.check_trainer("moon")
    policy.check_trainer("my_training:train")
    with pytest.raises(PolicyError, match='trainers="moon my_training:train other"'):
        policy.check_trainer("other")


PRIVATE = {
    "client": DifferentialPrivacy(clip_norm=0.5, noise_multiplier=1e-6),
    "example": ExamplePrivacy(clip_norm=0.5, noise_multiplier=1.0),
}


def private_grid(level: Any, folder: Path, **config: Any) -> LocalGrid:
    """Return a grid of clients with differential privacy, which know where the code is."""
    budget = Budget(epsilon=math.inf, level=level)
    federation = federation_of(FOUR, [20] * 4)
    return housed(grid_of(federation, config=config, privacy=PRIVATE[level], budget=budget), folder)


def test_clients_with_privacy_clip_and_book_updates_by_own_code(tmp_path: Path):
    """With next to no noise, the clipped updates are those of the usual steps."""
    runs: list[Any] = []
    for name, more in (("usual", {}), ("own", {"trainer": plain})):
        grid = private_grid("client", tmp_path / name, trainers=f"{HERE}:plain")
        runs.append(
            federated(
                grid, fedclade.FedAvg(), rounds=2, privacy=PRIVATE["client"], local=LOCAL, **more
            )
        )
        ledger = json.loads((tmp_path / name / str(node_of(0)) / "privacy.json").read_text())
        assert len(ledger["entries"]) == 2
    torch.testing.assert_close(root_of(runs[0]), root_of(runs[1]), atol=1e-4, rtol=1e-3)


def test_clients_with_privacy_of_examples_refuse_own_code(tmp_path: Path):
    """The server does not say that clients are private, so that they have to refuse by themselves."""
    names = f"{HERE}:plain {HERE}:Pulled"
    grid = private_grid("example", tmp_path, trainers=names)
    with pytest.raises(UpdateError, match=r"local.trainer.*, to whose steps no noise is added"):
        federated(grid, fedclade.FedAvg(), rounds=1, trainer=plain, local=LOCAL)
    with pytest.raises(UpdateError, match="Pulled does not declare that it trains with DP-SGD"):
        federated(grid, Own(steps=STEPS["trainer"]), rounds=1, local=LOCAL)
