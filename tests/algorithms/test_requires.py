"""Requirements and hooks of algorithms, and how runs use them."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedclade import (
    Algorithm,
    Clients,
    ConfigError,
    EvaluatedModels,
    FedAvg,
    LocalTraining,
    ReplicatedCFL,
    Requires,
    RunFacts,
    State,
    load_federation,
    simulate,
)
from fedclade.algorithms import METHODS, Method, OwnModels, build_algorithm
from fedclade.channel import Absence, Channel
from fedclade.config import check_config
from fedclade.core import Mixture
from fedclade.runs.store.served_models import requires_of
from tests.tiny import simulated

MANY = 10**6
"""More clients than any number beyond which a method reports more."""


def hooks() -> list[str]:
    """Return what a subclass of Algorithm may define."""
    return [
        name
        for name, value in vars(Algorithm).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    ]


def built(method: Method) -> Algorithm:
    return build_algorithm(method.name, dict(method.options), {})


each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def test_an_algorithm_has_twelve_hooks():
    assert set(hooks()) == {
        "state_type",
        "requires",
        "check",
        "init",
        "step",
        "finished",
        "sample_cohort",
        "models_for",
        "tune",
        "tuning_events",
        "join",
        "assign",
    }


@each_method
def test_methods_define_no_name_in_place_of_a_former_hook(method: Method):
    former = "needs_updates compares asks_for serve keepers mixture tuned check_clients too_short"
    assert not set(former.split()) & set(dir(method.algorithm))


@each_method
def test_the_record_of_a_method_states_its_requirements(method: Method):
    assert isinstance(method.requires, Requires)
    assert isinstance(built(method).requires, Requires)


@pytest.mark.parametrize(
    "method",
    [method for method in METHODS if issubclass(method.algorithm, OwnModels)],
    ids=lambda method: method.name,
)
def test_a_method_with_own_models_requires_them(method: Method):
    assert method.requires.own_models


def test_requirements_depend_on_hyper_parameters():
    assert build_algorithm("ifca", {"clusters": 3, "restarts": 2}).requires.initial_models == 6
    assert build_algorithm("rcfl", {"personalize": True}).requires.own_models
    assert not build_algorithm("rcfl").requires.own_models
    assert build_algorithm("fedrep", {"last_fit": 3}).requires.clients_outside_cohort
    assert not build_algorithm("fedrep").requires.clients_outside_cohort
    assert build_algorithm("fl_hc", {"metric": "cosine"}).requires.lengths is False
    assert build_algorithm("fl_hc", {"metric": "l2"}).requires.lengths


def test_what_clients_report_can_depend_on_their_number_and_fraction():
    always = Requires(reports="losses")
    assert always.reports_in(0, 1.0) == always.reports_in(MANY, 0.1) == "losses"
    beyond = Requires(reports="losses", reports_beyond=100)
    assert beyond.reports_in(101, 0.5) == "losses"
    assert beyond.reports_in(100, 0.5) == beyond.reports_in(101, 1.0) == ""
    rcfl = build_algorithm("rcfl").requires
    assert (rcfl.reports_in(MANY, 0.1), rcfl.reports_in(20, 0.1)) == ("training losses", "")


def test_the_number_of_clusters_is_checked_once_clients_are_known():
    ifca = build_algorithm("ifca", {"clusters": 4})
    assert ifca.check(RunFacts()) == ifca.check(RunFacts(clients=4)) == ()
    text = "algorithm.clusters should be at most the number of clients, 3, got 4"
    with pytest.raises(ConfigError, match=text):
        ifca.check(RunFacts(clients=3))


@dataclass(frozen=True)
class Warns(FedAvg):
    """Warns of short runs, and of few clients."""

    def check(self, run: RunFacts) -> Any:
        return tuple(
            f"{name} is {value}"
            for name, value in (("rounds", run.rounds), ("clients", run.clients))
            if value is not None
        )


@dataclass(frozen=True)
class Silent(FedAvg):
    """Checks, and returns nothing."""

    def check(self, run: RunFacts) -> Any:
        if run.rounds is not None and run.rounds < 2:
            raise ConfigError(f"2 rounds are needed, got {run.rounds}")


@pytest.fixture(scope="module")
def digits():
    return load_federation("digits", clients=4, samples_per_client=20, validation_fraction=0.3)


def test_warnings_are_logged_once_when_the_run_begins(digits, caplog):
    with caplog.at_level(logging.WARNING):
        simulate(Warns(), "mclr", digits, rounds=1)
    lines = [record.message for record in caplog.records if " is " in record.message]
    assert lines == ["rounds is 1", "clients is 4"]


def test_a_check_may_return_nothing(digits):
    simulate(Silent(), "mclr", digits, rounds=2)
    with pytest.raises(ConfigError, match="2 rounds are needed, got 1"):
        simulate(Silent(), "mclr", digits, rounds=1)


@dataclass(frozen=True)
class Undeclared(FedAvg):
    """Evaluates clients with models that it does not require."""

    mixes: bool = False

    def models_for(self, state: State, clients: Clients) -> EvaluatedModels:
        nodes = state.tree.leaf_of
        if self.mixes:
            return EvaluatedModels(nodes=nodes, mixture=Mixture())
        return EvaluatedModels(nodes=nodes, own=(1,))


@pytest.mark.parametrize(
    ("mixes", "text"),
    [
        (
            False,
            "Undeclared.models_for() returns clients with models of their own, which the algorithm does not",
        ),
        (True, "Undeclared.models_for() returns a mixture of models, which the algorithm does not"),
    ],
)
def test_what_clients_are_evaluated_with_must_be_required(mixes: bool, text: str, digits):
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate(Undeclared(mixes=mixes), "mclr", digits, rounds=1)


def test_a_config_takes_the_personal_part_that_its_hyper_parameters_require():
    config = {"data": {"name": "digits"}, "model": {"name": "mlp"}}
    for name, part in (("fedrep", "head"), ("lg_fedavg", "body"), ("fedavg", ())):
        assert check_config({**config, "algorithm": {"name": name}}).parts.personal == part
    own = check_config(
        {"data": {"name": "digits"}, "model": {"personal": "body"}, "algorithm": {"name": "fedrep"}}
    )
    assert own.parts.personal == "body"


def test_models_of_clients_are_found_without_replies(digits):
    clients, params = simulated(digits, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    absence = Absence(clients.layout.n_parameters, digits.pool.schema)
    absence.away = frozenset(clients.ids)
    for name in ("ditto", "finetune", "rcfl"):
        options = {"personalize": True, "fallback": True} if name == "rcfl" else {}
        algorithm = build_algorithm(name, options)
        state = algorithm.init(params, clients)
        state = replace(state, keepers=(1, 2))
        found = algorithm.models_for(state, Channel(clients, absence))
        assert isinstance(found, EvaluatedModels)
        assert (tuple(found.own), set(found.nodes)) == ((1, 2), set(clients.ids))


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [
        (build_algorithm("finetune"), 4),
        (build_algorithm("rcfl", {"personalize": True, "fallback": True}), 4),
        (build_algorithm("fedavg"), 0),
    ],
    ids=["finetune", "rcfl", "fedavg"],
)
def test_a_run_that_is_continued_after_its_last_evaluation_keeps_the_models_of_its_clients(
    algorithm: Algorithm, number: int, digits, tmp_path: Path, monkeypatch
):
    settings: dict[str, Any] = {"local": LocalTraining(lr=0.1), "rounds": 2, "checkpoint_every": 1}
    if isinstance(algorithm, ReplicatedCFL):
        # Labels differ between these clients, so that fine-tuned models are clearly better.
        settings["local"] = LocalTraining(lr=0.1, epochs=5)
        digits = load_federation(
            "digits",
            clients=4,
            samples_per_client=200,
            shift="label_permutation",
            clusters=4,
            validation_fraction=0.3,
        )
    whole = simulate(algorithm, "mclr", digits, **settings)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedclade.runs.checkpointer.Checkpointer.finish", fail)
        with pytest.raises(KeyboardInterrupt):
            simulate(algorithm, "mclr", digits, **settings, folder=tmp_path / "run")
    again = simulate(algorithm, "mclr", digits, **settings, folder=tmp_path / "run")
    assert again.summary.get("own_models") == whole.summary.get("own_models")
    assert again.summary.get("own_models", 0) == len(whole.kept) == number
    assert again.kept.keys() == whole.kept.keys()
    for client, tensors in whole.kept.items():
        assert again.kept[client].keys() == tensors.keys() == {"model"}
        assert torch.equal(again.kept[client]["model"], tensors["model"])


def test_a_run_of_a_method_that_is_not_installed_has_no_requirements(digits):
    run = simulate("ditto", "mclr", digits, rounds=1)
    requires = requires_of(run)
    assert requires is not None
    assert requires.own_models
    unknown = replace(run, config={**run.config, "algorithm": {"name": "gone:Method"}})
    assert requires_of(unknown) is None
    described = replace(
        run, config={**run.config, "algorithm": {"name": "fedem", "clusters": "described"}}
    )
    requires = requires_of(described)
    assert requires is not None
    assert requires.mixture is not None
