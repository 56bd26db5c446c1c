"""A run that is interrupted and resumed ends in the same bytes as one that is not, whatever it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from fedclade import (
    CFL,
    Auto,
    ExamplePrivacy,
    FedGroup,
    LocalTraining,
    RunInterrupted,
    Signature,
    simulate,
)
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.channel.retry import Faults
from fedclade.runs import rounds
from fedclade.runs.store import Run
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

ROUNDS = 3
FEDERATION = federation_of([0, 1, 2, 3, 0, 1, 2, 3])

OPTIONS = {
    "cfl": {"eps2": 1e-3, "split_rounds": (1, 2), "fallback": True},
    "feddrift": {"step_rounds": 1, "delta": 0.02},
    "fedgroup": {"groups": 2, "pretrain_scale": 2},
    "fedem": {"clusters": 2},
    "fedrc": {"clusters": 2},
    "fedsoft": {"selection": 3},
    "clove": {"clusters": 2, "stable_rounds": 1},
    "fesem": {"clusters": 2},
    "flexcfl": {"groups": 2, "pretrain_scale": 2, "pretrain_steps": 3},
    "fl_hc": {"rounds_before": 2, "n_clusters": 3},
    "ifca": {"clusters": 2, "restarts": 2, "restart_rounds": 2},
    "pacfl": {"n_clusters": 3},
    "flux": {"earliest": 1, "latest": 2},
    "stocfl": {"tau": 0.5, "anchor_epochs": 2},
}

WAYS = {
    "plain": {},
    "some clients": {"client_fraction": 0.5, "evaluate_every": 2},
    "permuted": {"permute": True},
    "personal": {"personal": "head", "client_fraction": 0.5},
    "projected": {"signature": Signature(kind="projected", dim=16)},
    "faulty": {"faults": Faults(dropout=0.2, corrupt=0.05)},
    "private": {
        "privacy": DifferentialPrivacy(clip_norm=1.0, noise_multiplier=0.01),
        "client_fraction": 0.5,
    },
    "private examples": {
        "privacy": ExamplePrivacy(clip_norm=1.0, noise_multiplier=2.0),
        "local": LocalTraining(batch_size=10, momentum=0.9, lr=0.05, keep_state=True),
        "engine": "stacked",
        "client_fraction": 0.5,
    },
    "kept optimizers": {
        "local": LocalTraining(batch_size=10, optimizer="adam", lr=0.05, keep_state=True),
        "client_fraction": 0.5,
    },
    "streamed": {"signature": Signature(kind="projected", dim=16), "stream": True},
}


def run_of(algorithm, folder: Path, **settings) -> None:
    settings = {"local": LocalTraining(batch_size=12), "engine": "loop"} | settings
    model = settings.pop("model", lambda seed: perceptron(seed))
    simulate(algorithm, model, FEDERATION, folder=folder, **settings)


def interrupted_run_of(algorithm, folder: Path, **settings) -> None:
    """Run with an interrupt after every round."""
    for number in range(1, settings["rounds"]):
        with pytest.raises(
            RunInterrupted, match=f"interrupted after round {number}; the same call continues from"
        ):
            run_of(algorithm, folder, **settings, stop=lambda: True)
    run_of(algorithm, folder, **settings, stop=lambda: True)


def bytes_of(folder: Path) -> dict[str, bytes | str]:
    """Return all that a run promises to be the same: everything but the seconds."""
    run = Run.load(folder)
    metrics = [
        {key: value for key, value in row.items() if not key.startswith("seconds")}
        for row in run.metric_rows
    ]
    summary = {key: value for key, value in run.summary.items() if key != "seconds"}
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    timed = {"metrics.parquet", "summary.json", "manifest.json"}
    files = {
        str(n): (folder / n).read_bytes()
        for n in names
        if str(n) not in timed and n.parts[0] != "checkpoints"
    }
    return {**files, "metrics": json.dumps(metrics), "summary": json.dumps(summary)}


def assert_same_end(algorithm, tmp_path: Path, **settings) -> dict[str, bytes | str]:
    settings = {"rounds": ROUNDS} | settings
    run_of(algorithm, tmp_path / "whole", **settings)
    interrupted_run_of(algorithm, tmp_path / "resumed", **settings)
    whole, resumed = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "resumed")
    assert {
        "tree/tree.safetensors",
        "tree/tree.json",
        "events.jsonl",
        "clients.parquet",
    } <= whole.keys()
    assert resumed.keys() == whole.keys()
    assert [name for name in whole if resumed[name] != whole[name]] == []
    return whole


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_resumes_to_the_same_bytes(name, tmp_path):
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), FEDERATION.true_clusters)
    normed = {"model": nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))}
    rounds = 4 if name == "rcfl" else ROUNDS  # which goes apart after the third
    assert_same_end(algorithm, tmp_path, rounds=rounds, **(normed if name == "fedbn" else {}))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_finished_run_continues_from_its_end_to_the_bytes_of_one_run(name, tmp_path, caplog):
    """No recorded round is computed again: their rows keep even the measured seconds."""
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), FEDERATION.true_clusters)
    normed = {"model": nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))}
    settings = normed if name == "fedbn" else {}
    run_of(algorithm, tmp_path / "continued", rounds=2, checkpoint_every=0, **settings)
    first = Run.load(tmp_path / "continued").metric_rows
    run_of(algorithm, tmp_path / "continued", rounds=4, checkpoint_every=0, **settings)
    last = Run.load(tmp_path / "continued").metric_rows
    assert [row["round"] for row in last] == [1, 2, 3, 4]
    assert last[:2] == first
    assert algorithm.requires.plans_rounds == (name == "auto")
    warned = "differs from a run of 4 rounds from the start" in caplog.text
    assert warned == algorithm.requires.plans_rounds
    if algorithm.requires.plans_rounds:
        return
    run_of(algorithm, tmp_path / "whole", rounds=4, checkpoint_every=0, **settings)
    whole, continued = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "continued")
    assert continued.keys() == whole.keys()
    assert [name for name in whole if continued[name] != whole[name]] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_splits_continues_from_its_end_in_every_way(way, tmp_path, caplog):
    algorithm = CFL(**OPTIONS["cfl"])
    for rounds_ in (2, 4):
        run_of(algorithm, tmp_path / "continued", rounds=rounds_, **WAYS[way])
    run_of(algorithm, tmp_path / "whole", rounds=4, **WAYS[way])
    whole, continued = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "continued")
    assert [name for name in whole if continued[name] != whole[name]] == []
    assert "rounds from the start" not in caplog.text


def test_an_evaluation_that_was_due_to_the_end_stays_and_is_warned_of(tmp_path, caplog):
    settings = {"evaluate_every": 2, "client_fraction": 0.5}
    for rounds_ in (3, 4):
        run_of("fedavg", tmp_path / "continued", rounds=rounds_, **settings)
    assert "the evaluation of a last round that evaluate_every leaves out" in caplog.text
    run_of("fedavg", tmp_path / "whole", rounds=4, **settings)
    whole, continued = Run.load(tmp_path / "whole"), Run.load(tmp_path / "continued")
    assert whole.tree.nodes[0].model.equal(continued.tree.nodes[0].model)
    evaluated = [
        [row["round"] for row in run.metric_rows if row["loss_mean"] is not None]
        for run in (whole, continued)
    ]
    assert evaluated == [[2, 4], [2, 3, 4]]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_splits_resumes_to_the_same_bytes_in_every_way(way, tmp_path):
    whole = assert_same_end(CFL(**OPTIONS["cfl"]), tmp_path, **WAYS[way])
    assert b'"kind": "split"' in whole["events.jsonl"]


def test_a_run_that_splits_by_a_test_resumes_to_the_same_bytes(tmp_path):
    whole = assert_same_end(
        CFL(criterion="replicated", level=0.5, fallback=True),
        tmp_path,
        rounds=4,
        local=LocalTraining(epochs=6, lr=0.3),
    )
    assert b'"kind": "split"' in whole["events.jsonl"]


@pytest.mark.parametrize(
    "algorithm",
    [
        CFL(eps1=0.09, eps2=0.1, stop_done_clusters=True, children_start="own_mean"),
        FedGroup(groups=2, pretrain_scale=2, rac=True, rac_redraws=True),
    ],
    ids=["done clusters", "redrawn clients"],
)
def test_what_switches_keep_in_the_state_resumes_to_the_same_bytes(algorithm, tmp_path):
    """The first cluster of CFL is done after round 3, and two more are after round 4."""
    assert_same_end(algorithm, tmp_path, rounds=5)


@pytest.mark.parametrize("engine", ["loop", "stacked", "workers"])
def test_a_module_that_draws_and_has_buffers_resumes_to_the_same_bytes(engine, tmp_path):
    """There is no random state in a checkpoint: dropout draws by round and client, too."""
    module = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, LABELS)
    )
    assert_same_end(CFL(**OPTIONS["cfl"]), tmp_path, engine=engine, model=module)


OWN = federation_of([0, 1, 2, 3], [120] * 4, validation=60)
"""Four clients that see labels in four ways, and so need models of their own."""


@pytest.mark.parametrize("way", ["plain", "some clients", "faulty", "permuted"])
def test_auto_resumes_to_the_same_bytes_own_models_included(way, tmp_path, monkeypatch):
    """Clients train own models from the fourth round on, and make copies in the last one."""
    monkeypatch.setattr("tests.properties.test_resume.FEDERATION", OWN)
    settings = WAYS[way] | {"rounds": 9, "local": LocalTraining(epochs=2, batch_size=12, lr=0.3)}
    whole = assert_same_end(Auto(budget=5.0, level=0.5), tmp_path, **settings)
    assert b'"kind": "served"' in whole["events.jsonl"]
    assert "personal.safetensors" in whole


def test_auto_that_is_killed_after_its_last_round_has_the_same_bytes(tmp_path, monkeypatch):
    """After the checkpoint of the last round, and before the summary is written."""
    monkeypatch.setattr("tests.properties.test_resume.FEDERATION", OWN)
    algorithm = Auto(budget=5.0, level=0.5)
    settings = {"rounds": 7, "local": LocalTraining(epochs=2, batch_size=12, lr=0.3)}
    run_of(algorithm, tmp_path / "whole", **settings)
    with monkeypatch.context() as patched:
        patched.setattr(rounds, "_build_run", _die)
        with pytest.raises(KeyboardInterrupt):
            run_of(algorithm, tmp_path / "killed", **settings)
    assert not (tmp_path / "killed" / "summary.json").exists()
    run_of(algorithm, tmp_path / "killed", **settings)
    whole, killed = bytes_of(tmp_path / "whole"), bytes_of(tmp_path / "killed")
    assert killed.keys() == whole.keys()
    assert [name for name in whole if killed[name] != whole[name]] == []
    assert "personal.safetensors" in whole


def _die(*arguments):
    raise KeyboardInterrupt
