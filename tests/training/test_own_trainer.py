"""Training code of a user in simulations: functions and classes that train one client."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fedclade
from fedclade import (
    ClientTrainer,
    ClientWork,
    ConfigError,
    DataError,
    DifferentialPrivacy,
    ExamplePrivacy,
    LocalTraining,
    Run,
    State,
)
from fedclade.training import own_trainer
from tests.structured import Reader, named
from tests.tiny import federation_of, perceptron

LOCAL = LocalTraining(lr=0.1, epochs=2, batch_size=10)
FEDERATION = federation_of([0, 0, 1], [24, 31, 17])


def plain(model: Any, batches: Any, context: Any) -> float:
    """Take the steps of SGD, as a client does without a trainer."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=context.lr)
    total = seen = 0.0
    for inputs, targets in batches:
        loss = context.loss(model(inputs), targets) + context.penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(inputs)
        seen += len(inputs)
    return total / seen


def trained(algorithm: Any = "fedavg", model: Any = None, engine: str = "loop", **more: Any) -> Run:
    settings: dict[str, Any] = {"local": LOCAL, "rounds": 2, **more}
    return fedclade.simulate(
        algorithm, model or perceptron(), FEDERATION, engine=engine, **settings
    )


def root_of(run: Run) -> Tensor:
    return run.tree.nodes[0].params


@pytest.mark.parametrize("engine", ["loop", "workers", "auto", "stacked", "vmap"])
def test_a_function_that_takes_the_usual_steps_gives_the_usual_updates(engine: str):
    expected = trained()
    run = trained(engine=engine, trainer=plain)
    assert torch.equal(root_of(run), root_of(expected))
    losses = [[row["train_loss"] for row in each.metric_rows] for each in (run, expected)]
    assert losses[0] == pytest.approx(losses[1])
    assert run.summary["steps"] == expected.summary["steps"]


def half_of_the_batches(model: Any, batches: Any, context: Any) -> float:
    """Read every batch, but report half as many steps."""
    context.count_steps(len(batches) // 2)
    return plain(model, batches, context)


@pytest.mark.parametrize(
    "settings", [{"engine": "loop"}, {"engine": "workers"}, {"engine": "loop", "stream": True}]
)
def test_a_run_counts_the_steps_that_a_function_reports(settings: dict[str, Any]):
    usual = trained()
    run = trained(trainer=half_of_the_batches, **settings)
    assert run.summary["steps"]["total"] == usual.summary["steps"]["total"] // 2
    assert run.summary["steps"]["of_cohorts"] == usual.summary["steps"]["of_cohorts"]
    assert run.metric_rows[0]["bytes_up"] == usual.metric_rows[0]["bytes_up"]


@pytest.mark.parametrize(
    "more",
    [
        {"privacy": DifferentialPrivacy(clip_norm=0.05, noise_multiplier=0.5)},
        {"algorithm": fedclade.ReplicatedCFL()},
    ],
)
def test_otherwise_a_run_counts_the_steps_of_the_settings(more: dict[str, Any]):
    """A run that is private, or whose clients train on parts of their data."""
    expected = trained(**more).summary["steps"]
    assert trained(trainer=half_of_the_batches, **more).summary["steps"] == expected


def test_all_methods_train_by_the_function():
    """Also fine-tuning, personal models with a proximal term, and replicates."""
    for algorithm in (
        fedclade.CFL(),
        fedclade.Ditto(lam=0.5),
        fedclade.FineTune(),
        fedclade.FedRep(head_epochs=1),
        fedclade.IFCA(clusters=2),
    ):
        model: Any = perceptron
        expected = trained(algorithm, model)
        run = trained(algorithm, model, trainer=plain)
        torch.testing.assert_close(root_of(run), root_of(expected), msg=str(algorithm))
        assert run.summary["accuracy"] == pytest.approx(expected.summary["accuracy"])


@pytest.mark.slow
def test_ray_actors_train_by_the_function():
    pytest.importorskip("ray")
    actors = fedclade.Actors(count=2, cores=1)
    expected = trained()
    run = fedclade.simulate(
        "fedavg", perceptron(), FEDERATION, engine="ray", actors=actors, local=LOCAL, rounds=2,
        trainer=plain,
    )  # fmt: skip
    torch.testing.assert_close(root_of(run), root_of(expected))


def test_minimize_takes_the_steps_of_the_loop():
    """With all settings: the clipping of gradients, the optimizer's options and a proximal term."""

    def minimal(model: Any, batches: Any, context: Any) -> float:
        return context.minimize(model, batches, lambda x, y: context.loss(model(x), y))

    for local in (
        replace(LOCAL, clip_norm=0.1, momentum=0.5, weight_decay=0.01),
        replace(LOCAL, mu=0.3),
        LocalTraining(optimizer="adam", options={"betas": (0.8, 0.9)}, lr=0.01, steps=7),
    ):
        run = trained(local=local, trainer=minimal)
        assert torch.equal(root_of(run), root_of(trained(local=local)))


def test_the_proximal_term_is_the_one_of_the_loop():
    local = replace(LOCAL, mu=0.3)
    torch.testing.assert_close(
        root_of(trained(local=local, trainer=plain)), root_of(trained(local=local))
    )

    def forgetful(model: Any, batches: Any, context: Any) -> float:
        return 0.0

    why = r"trainer forgetful leaves out the proximal term, but its weight μ is 0.3; add context.pe"
    with pytest.raises(ConfigError, match=why):
        trained(local=local, trainer=forgetful)


def test_a_function_may_use_a_loader_of_its_own_and_report_its_steps(caplog: Any):
    def loaded(model: Any, batches: Any, context: Any) -> float:
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(context.dataset, batch_size=4)
        context.count_steps(len(loader))
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = context.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return loss.detach()

    own_trainer._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fedclade"):
        run = trained(trainer=loaded)
    assert not torch.equal(root_of(run), root_of(trained()))
    assert caplog.text == ""
    batches = sum(-(-size // 4) for size in FEDERATION.sizes.values())
    assert run.summary["steps"]["total"] == 2 * batches
    assert run.config["local"]["trainer"] == "loaded"


def test_a_run_says_if_a_function_does_not_count_its_steps(caplog: Any):
    def idle(model: Any, batches: Any, context: Any) -> float:
        return 0.5

    own_trainer._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "fedclade"):
        run = trained(trainer=idle)
    assert "trainer idle reads no batches and does not report its steps" in caplog.text
    assert run.summary["steps"] == trained().summary["steps"]
    assert torch.equal(root_of(run), root_of(trained(trainer=idle, rounds=1)))


def test_a_client_gets_a_copy_of_the_model():
    """A change of the module itself, such as a hook, does not reach the next client."""
    seen: list[int] = []

    def greedy(model: Any, batches: Any, context: Any) -> float:
        seen.append(len(model._forward_hooks))
        model.register_forward_hook(lambda *_: None)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.eval()
        return 0.0

    trained(trainer=greedy)
    assert seen == [0] * 6


def test_the_context_describes_the_round():
    seen: list[Any] = []

    def curious(model: Any, batches: Any, context: Any) -> float:
        start = context.model_of(context.start)
        same = all(
            torch.equal(a, b) for a, b in zip(start.parameters(), model.parameters(), strict=True)
        )
        frozen = not any(parameter.requires_grad for parameter in start.parameters())
        vector = torch.equal(context.vector_of(model), context.start)
        anchor = torch.equal(context.anchor, context.start)
        seen.append((context.round, context.lr, len(batches), len(context.dataset)))
        assert same
        assert frozen
        assert vector
        assert anchor
        return 0.0

    trained(trainer=curious, local=replace(LOCAL, lr_decay=0.5))
    assert seen[0] == (1, 0.1, 6, 24)
    assert seen[3] == (2, 0.05, 6, 24)


def returns_nothing(model: Any, batches: Any, context: Any) -> None:
    """Return no loss."""


def fails(model: Any, batches: Any, context: Any) -> float:
    raise ZeroDivisionError("too few")


def stores(model: Any, batches: Any, context: Any) -> float:
    context.store("memory", torch.zeros(1))
    return 0.0


@pytest.mark.parametrize("engine", ["loop", "workers"])
@pytest.mark.parametrize(
    ("trainer", "kind", "why"),
    [
        (returns_nothing, ConfigError, "should return the mean training loss, a number, got None"),
        (fails, DataError, "trainer .*:fails failed: ZeroDivisionError: too few; correct its code"),
        (stores, ConfigError, r"uses a stored tensor 'memory' .* with stores = \('memory',\)"),
    ],
)
def test_faults_of_a_function_are_reported(trainer: Any, kind: Any, why: str, engine: str):
    with pytest.raises(kind, match=why):
        trained(trainer=trainer, engine=engine)


def test_frozen_parameters_stay_as_they_are():
    def careless(model: Any, batches: Any, context: Any) -> float:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        return 0.0

    name = next(name for name, _ in perceptron().named_parameters())
    with pytest.raises(
        ConfigError, match=f"trainer careless changes the frozen parameter '{name}'"
    ):
        trained(trainer=careless, freeze=(name,))
    frozen = trained(trainer=plain, freeze=(name,))
    assert torch.equal(root_of(frozen), root_of(trained(freeze=(name,))))


@dataclass(frozen=True)
class Counting(ClientTrainer):
    """SGD with a step size that depends on the number of earlier rounds of the client."""

    stores = ("rounds",)

    def train_client(self, model: nn.Module, batches: Any, context: Any) -> float:
        before = context.stored("rounds")
        rounds = torch.ones(1) if before is None else before + 1
        context.store("rounds", rounds)
        context.lr = context.lr / float(rounds)
        return plain(model, batches, context)


@dataclass(frozen=True, kw_only=True)
class Own(fedclade.FedAvg):
    """FedAvg with a trainer as the steps of the clients."""

    steps: Any = Counting()

    def step(self, state: Any, cohort: Any, clients: Any, this_round: Any) -> Any:
        work = ClientWork(steps=self.steps)
        parts = fedclade.train_clusters(state, cohort, clients, this_round, work)
        return State(fedclade.move_clusters(state.tree, parts)), fedclade.log_of(parts)


def test_clients_store_tensors_from_round_to_round():
    """The step size in round r is lr / r, so the run equals one with the decayed step sizes."""
    params = perceptron()
    expected = trained(model=params, rounds=1)
    run = trained(Own(), rounds=1)
    assert torch.equal(root_of(run), root_of(expected))
    second = trained(Own(), rounds=2)
    halved = trained(rounds=2, local=replace(LOCAL, lr_decay=0.5))
    torch.testing.assert_close(root_of(second), root_of(halved))


def test_an_interrupted_run_is_continued_with_what_clients_stored(tmp_path: Path):
    whole = trained(Own(), rounds=3, folder=tmp_path / "whole")
    with pytest.raises(fedclade.RunInterrupted):
        trained(Own(), rounds=3, folder=tmp_path / "stopped", stop=iter([False, True]).__next__)
    resumed = trained(Own(), rounds=3, folder=tmp_path / "stopped")
    assert torch.equal(root_of(resumed), root_of(whole))


def test_worker_processes_refuse_what_they_cannot_get_or_return():
    def inside(model: Any, batches: Any, context: Any) -> float:
        return plain(model, batches, context)

    why = "engine 'workers' cannot train this model: trainer inside cannot be sent to worker proces"
    with pytest.raises(ConfigError, match=why):
        trained(engine="workers", trainer=inside)
    with pytest.raises(ConfigError, match="cannot return the tensors that own trainers store betw"):
        trained(Own(), engine="workers")
    assert torch.equal(root_of(trained(Own(), engine="auto")), root_of(trained(Own())))


@pytest.mark.slow
def test_a_run_folder_imports_a_function_only_if_it_is_trusted(tmp_path: Path):
    (tmp_path / "my_training.py").write_text(MY_TRAINING)
    (tmp_path / "my.toml").write_text(MY_CONFIG)
    command = [sys.executable, "-m", "fedclade"]
    here = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, "run", "my.toml", "--out", "run", "-q"], **here)
    assert done.returncode == 0, done.stderr
    resume = [*command, "resume", "run", "--rounds", "2", "-q"]
    refused = subprocess.run(resume, **here)
    assert refused.returncode != 0
    assert "trainer 'my_training:train' is not imported" in refused.stderr
    assert subprocess.run([*resume, "--trust"], **here).returncode == 0


MY_CONFIG = """
rounds = 1
[local]
trainer = "my_training:train"
[data]
name = "digits"
clients = 2
[model]
name = "mclr"
[algorithm]
name = "fedavg"
"""

MY_TRAINING = """
def train(model, batches, context):
    return context.minimize(model, batches, lambda x, y: context.loss(model(x), y))
"""


def test_a_run_records_the_name_of_its_function(tmp_path: Path):
    run = trained(trainer=plain, folder=tmp_path / "run")
    assert run.config["local"]["trainer"] == "tests.training.test_own_trainer:plain"
    found = Run.load(tmp_path / "run")
    assert found.config["local"]["trainer"] == run.config["local"]["trainer"]
    assert "trainer" not in trained().config["local"]


def test_privacy_of_clients_covers_updates_by_own_code():
    """Updates are clipped and get the same noise as updates of the usual steps."""
    privacy = DifferentialPrivacy(clip_norm=0.05, noise_multiplier=0.5)
    run = trained(trainer=plain, privacy=privacy)
    assert torch.equal(root_of(run), root_of(trained(privacy=privacy)))


def test_dp_sgd_refuses_own_code():
    privacy = ExamplePrivacy(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(
        ConfigError, match=r"local.trainer should be left out with privacy.level = 'e"
    ):
        trained(trainer=plain, privacy=privacy)
    with pytest.raises(ConfigError, match="Counting does not declare that it trains with DP-SGD"):
        trained(Own(), privacy=privacy)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (
            fedclade.FedEM(clusters=2),
            "cannot train a mixture of models, which weights the examples",
        ),
        (fedclade.Scaffold(), "local.trainer should be left out with the local rule 'control_var"),
        (Own(), r"left out with an algorithm whose clients take steps of its own \(Counting\)"),
    ],
)
def test_methods_with_other_steps_refuse_a_function(algorithm: Any, why: str):
    with pytest.raises(ConfigError, match=why):
        trained(algorithm, perceptron, trainer=plain)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"trainer": "no_module:fn"}, "trainer 'no_module:fn' cannot be imported"),
        ({"trainer": "moonlight"}, "unknown trainer 'moonlight'.* write 'module:name'"),
        ({"trainer": partial(plain)}, "trainer should be a function, got functools.partial"),
        ({"trainer": Counting}, "trainer should be a function, got the class Counting"),
        ({"trainer": lambda model: 0.0}, r"should have the parameters \(model, batches, context\)"),
        (
            {"trainer": 3},
            "trainer of LocalTraining should be a string or a function or left out, got 3",
        ),
        (
            {"trainer": plain, "keep_state": True},
            "local.keep_state should be false with local.trainer, which creates its own optimizer",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        LocalTraining(**settings)


def test_code_gets_the_tensors_of_inputs_that_are_dicts():
    """The model takes the rows that store them, so the same code as for one tensor trains it."""
    given = {}

    def looking(model: Any, batches: Any, context: Any) -> float:
        inputs, _ = next(iter(batches))
        given.update(context.unpack(inputs))
        return plain(model, batches, context)

    run = fedclade.simulate(
        "fedavg", Reader(), named(), engine="loop", local=LOCAL, rounds=2, trainer=looking
    )
    without = fedclade.simulate(
        "fedavg", Reader(), named(), engine="loop", local=LOCAL, rounds=2, trainer=plain
    )
    plain_loop = fedclade.simulate(
        "fedavg", Reader(), named(), engine="loop", local=LOCAL, rounds=2
    )
    assert {name: each.dtype for name, each in given.items()} == {
        "ids": torch.int64,
        "mask": torch.bool,
        "numbers": torch.float32,
    }
    assert torch.equal(root_of(without), root_of(plain_loop))
    assert run.summary["rounds"] == 2


def test_inputs_of_one_tensor_are_unpacked_as_they_are():
    def looking(model: Any, batches: Any, context: Any) -> float:
        inputs, _ = next(iter(batches))
        assert context.unpack(inputs) is inputs
        return plain(model, batches, context)

    assert trained(trainer=looking).summary["rounds"] == 2
