"""A local rule that is defined outside of fedclade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade
from fedclade import ClientWork, ConfigError, LocalRule, LocalTraining, State
from fedclade.core import or_kept
from tests.tiny import federation_of, perceptron

LOCAL = LocalTraining(lr=0.1, epochs=2, batch_size=10, momentum=0.5, weight_decay=0.01)
FEDERATION = federation_of([0, 0, 1], [24, 31, 17])


@dataclass(frozen=True, kw_only=True)
class Slower(LocalRule):
    """SGD with steps that a factor shortens, more in each round of a client."""

    factor: float = 1.0

    def begin(self, models: Tensor, anchors: Tensor, kept: Any) -> Any:
        return {"rounds": or_kept(models.new_zeros(len(models), 1), kept, "rounds")}

    def step(self, now: Any, step: Any) -> None:
        shorter = self.factor ** now["rounds"]
        step.move("w", shorter * step.gradient(now["w"]))

    def end(self, now: Any, models: Tensor, steps: Tensor, lr: float) -> Any:
        assert lr == LOCAL.lr
        return {"rounds": now["rounds"] + 1}


@dataclass(frozen=True, kw_only=True)
class Mixed(LocalRule):
    """Steps that mix the rows of different clients, which no rule may do."""

    def step(self, now: Any, step: Any) -> None:
        step.move("w", step.gradient(now["w"]).mean(0, keepdim=True).expand(len(now["w"]), -1))


@dataclass(frozen=True, kw_only=True)
class ByRule(fedclade.FedAvg):
    """FedAvg whose clients take the steps of a local rule."""

    rule: Any = None

    def step(self, state: Any, cohort: Any, clients: Any, this_round: Any) -> Any:
        work = ClientWork(steps=self.rule)
        parts = fedclade.train_clusters(state, cohort, clients, this_round, work)
        return State(fedclade.move_clusters(state.tree, parts)), fedclade.log_of(parts)


def trained(algorithm: Any, engine: str, rounds: int = 2, **settings: Any) -> Tensor:
    settings = {"local": LOCAL, **settings}
    run = fedclade.simulate(
        algorithm, perceptron(), FEDERATION, engine=engine, rounds=rounds, **settings
    )
    return run.tree.nodes[0].params


@pytest.mark.parametrize("engine", ["loop", "vmap", "auto", "stacked", "workers"])
def test_a_rule_that_takes_the_usual_steps_gives_the_usual_model(engine: str):
    expected = trained(fedclade.FedAvg(), "loop")
    torch.testing.assert_close(trained(ByRule(rule=Slower()), engine), expected)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_clients_store_the_tensors_of_a_rule(engine: str):
    """The factor of the step size in round r is factorʳ⁻¹, as with a decayed step size."""
    decayed = LocalTraining(
        lr=0.1, epochs=2, batch_size=10, momentum=0.5, weight_decay=0.01, lr_decay=0.5
    )
    expected = trained(fedclade.FedAvg(), "loop", local=decayed)
    torch.testing.assert_close(trained(ByRule(rule=Slower(factor=0.5)), engine), expected)


def test_a_rule_that_mixes_clients_is_trained_by_the_loop():
    mixed = ByRule(rule=Mixed())
    assert torch.equal(trained(mixed, "auto"), trained(mixed, "loop"))
    with pytest.raises(ConfigError, match=r"engine 'vmap' cannot train this model: .* updates"):
        trained(mixed, "vmap")


def test_a_rule_is_named_as_its_class_unless_it_has_a_name():
    assert Slower.name == "Slower"

    class Named(Slower):
        """A rule with a name."""

        name = "named"

    assert Named.name == "named"
    with pytest.raises(ConfigError, match="0 with the local rule 'Slower', which takes steps of S"):
        Slower().check_training(LocalTraining(mu=0.1))


def test_a_rule_needs_a_step():
    @dataclass(frozen=True, kw_only=True)
    class Empty(LocalRule):
        """A rule without a step."""

    with pytest.raises(TypeError, match=r"abstract .*Empty.*step"):
        Empty()  # pyright: ignore[reportAbstractUsage]


def test_private_steps_refuse_a_rule():
    privacy = fedclade.ExamplePrivacy(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="the local rule Slower does not train with DP-SGD steps"):
        trained(ByRule(rule=Slower()), "loop", privacy=privacy)
