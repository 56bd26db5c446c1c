"""Runs over a network that finish before their last round, or keep the models of the best one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedclade import (
    FINISH,
    Callback,
    ConfigError,
    EarlyStopping,
    Run,
    RunInterrupted,
    UpdateError,
    export_model,
)
from fedclade.algorithms import build_algorithm
from fedclade.flower import LocalGrid, Network, federate
from tests.flower.grids import CFL_OF_TWO, FOUR, LOCAL, federated, grid_of
from tests.properties.test_resume import bytes_of
from tests.runs.test_stopping import scripted
from tests.tiny import federation_of, perceptron

NONE = Network(clients=4, wait=0.01)


class At(Callback):
    """Answers after one round."""

    def __init__(self, number: int, answer: object) -> None:
        self.number, self.answer = number, answer

    def on_round(self, record, /):
        return self.answer if record.round == self.number else None


def test_a_run_stops_early_keeps_the_best_round_and_does_so_after_an_interruption(
    tmp_path, monkeypatch
):
    scripted(monkeypatch, 0.1, 0.4, 0.3, 0.2, 0.9, 0.9)
    settings = {"early_stopping": EarlyStopping(patience=2), "keep_best": True, "rounds": 6}
    federated(grid_of(federation_of(FOUR)), CFL_OF_TWO, folder=tmp_path / "whole", **settings)
    for number in (1, 3):
        grid = grid_of(federation_of(FOUR))
        with pytest.raises(RunInterrupted):
            federated(
                grid, CFL_OF_TWO, folder=tmp_path / "cut", callbacks=[At(number, True)], **settings
            )
    run = federated(grid_of(federation_of(FOUR)), CFL_OF_TWO, folder=tmp_path / "cut", **settings)
    assert (run.summary["stopped"]["round"], run.model_round) == (4, 2)
    short = federated(grid_of(federation_of(FOUR)), CFL_OF_TWO, rounds=2)
    assert len(run.tree.nodes) == len(short.tree.nodes) == 3
    assert all(
        a.model.equal(b.model) for a, b in zip(run.tree.nodes, short.tree.nodes, strict=True)
    )
    whole, cut = Run.load(tmp_path / "whole"), Run.load(tmp_path / "cut")
    assert whole.summary["chosen"] == cut.summary["chosen"]
    assert (
        bytes_of(tmp_path / "whole")["tree/tree.safetensors"]
        == bytes_of(tmp_path / "cut")["tree/tree.safetensors"]
    )
    export_model(cut, tmp_path / "m.safetensors", client=1)


def test_a_callback_finishes_a_run_after_a_round_that_was_not_to_be_evaluated():
    grid = grid_of(federation_of(FOUR))
    run = federated(grid, "finetune", rounds=6, evaluate_every=5, callbacks=[At(2, FINISH)])
    short = federated(grid_of(federation_of(FOUR)), "finetune", rounds=2, evaluate_every=5)
    assert run.summary["stopped"] == {"round": 2, "by": "At", "why": "on_round returned FINISH"}
    assert run.summary["accuracy"] == short.summary["accuracy"]
    assert run.summary["own_models"] == short.summary["own_models"] == 4


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"early_stopping": EarlyStopping(patience=3)}, "stop.patience = 3"),
        ({"keep_best": True}, "keep_best = true"),
        ({"evaluate_validation": True}, "evaluate_validation = true"),
    ],
)
def test_clients_without_validation_data_are_a_clear_error_after_the_first_round(
    setting, name, tmp_path
):
    grid = grid_of(federation_of(FOUR, validation=0))
    text = (
        f"round 1: {name} needs scores on validation data, but no client has sent any (client 0: "
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        federated(grid, "fedavg", folder=tmp_path / "run", **setting)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("algorithm", "settings", "what"),
    [
        ("fedavg", {"personal": "head"}, "a part of their model (model.personal = 'head')"),
        ("fedper", {}, "a part of their model (model.personal = 'head')"),
        ("ditto", {}, "models of their own with Ditto"),
        ("fedsoft", {}, "models of their own with FedSoft"),
        (
            build_algorithm("rcfl", {"personalize": True}),
            {},
            "models of their own with ReplicatedCFL",
        ),
        ("auto", {}, "models of their own with Auto"),
        ("fedem", {}, "the weights of their mixture with FedEM"),
        ("fedrc", {}, "the weights of their mixture with FedRC"),
    ],
    ids=["personal", "fedper", "ditto", "fedsoft", "rcfl", "auto", "fedem", "fedrc"],
)
def test_what_only_clients_keep_cannot_be_brought_back_from_an_earlier_round(
    algorithm, settings, what, tmp_path
):
    personal = {"personal": settings["personal"]} if settings else {}
    parted = {"personal": "head"} if settings or algorithm == "fedper" else {}
    grid = grid_of(federation_of(FOUR), **parted)
    model = lambda seed: perceptron(seed)  # noqa: E731
    text = (
        "keep_best = true is not possible: over a network clients store "
        f"{what}, of which only the state after the last round"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        federated(grid, algorithm, model, keep_best=True, folder=tmp_path / "run", **personal)
    assert not (tmp_path / "run" / "config.toml").exists()


def interrupted(folder: Path, every: int) -> None:
    grid = grid_of(federation_of(FOUR))
    with pytest.raises(RunInterrupted):
        federated(
            grid, CFL_OF_TWO, folder=folder, evaluate_every=every, callbacks=[At(3, True)], rounds=6
        )


def test_an_interrupted_run_is_finished_without_its_clients(tmp_path):
    interrupted(tmp_path / "run", every=1)
    settings = {
        "network": NONE,
        "local": LOCAL,
        "rounds": 6,
        "finish": True,
        "folder": tmp_path / "run",
    }
    run = federate(LocalGrid({}), CFL_OF_TWO, perceptron, **settings)
    assert run.summary["stopped"] == {
        "round": 3,
        "by": "user",
        "why": "finished by hand after an interruption",
    }
    short = federated(grid_of(federation_of(FOUR)), CFL_OF_TWO, rounds=3)
    assert run.summary["accuracy"] == short.summary["accuracy"]
    assert export_model(Run.load(tmp_path / "run"), tmp_path / "m.safetensors", client=1).exists()


def test_its_clients_are_needed_where_its_last_round_was_not_evaluated(tmp_path):
    interrupted(tmp_path / "run", every=4)
    settings = {
        "local": LOCAL,
        "rounds": 6,
        "finish": True,
        "folder": tmp_path / "run",
        "evaluate_every": 4,
    }
    text = "the last round, 3, cannot be evaluated, since no client has connected within 0.01 s; start the SuperNodes"
    with pytest.raises(UpdateError, match=re.escape(text)):
        federate(LocalGrid({}), CFL_OF_TWO, perceptron, network=NONE, **settings)
    run = federate(grid_of(federation_of(FOUR)), CFL_OF_TWO, perceptron, network=NONE, **settings)
    short = federated(grid_of(federation_of(FOUR)), CFL_OF_TWO, rounds=3)
    assert run.summary["stopped"]["round"] == 3
    assert run.summary["accuracy"] == short.summary["accuracy"]
