"""A run that ends early, or keeps an earlier round, is what a run of that number of rounds is, whatever it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedclade import FINISH, Callback, LocalTraining, Run, RunInterrupted, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.runs import best_round as best_round_module
from fedclade.runs import rounds as rounds_module
from tests.properties.test_resume import FEDERATION, OPTIONS
from tests.tiny import FEATURES, LABELS, perceptron

TOLD_APART = (
    "tree",
    "personal.safetensors",
    "clients.parquet",
    "clusters.parquet",
    "events.jsonl",
    "similarities.npz",
)
"""What the two have in common: everything but the config, the summary, the metrics and their sums."""


class FinishAt(Callback):
    """Finishes a run after a round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_round(self, record, /):
        return FINISH if record.round == self.number else None


class StopAfter(Callback):
    """Interrupts a run after a round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_round(self, record, /):
        return record.round == self.number


def last_round(name: str) -> int:
    return 4 if name == "rcfl" else 2  # which has clusters after the third


def run_of(name: str, folder: Path, **settings) -> Run:
    options = {**OPTIONS.get(name, {}), **({"personalize": True} if name == "rcfl" else {})}
    algorithm = build_algorithm(name, options, FEDERATION.true_clusters)
    model = lambda seed: perceptron(seed)  # noqa: E731
    if name == "fedbn":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))
    spec = LocalTraining(batch_size=12)
    return simulate(
        algorithm, model, FEDERATION, local=spec, engine="loop", folder=folder, **settings
    )


def files_of(folder: Path) -> dict[str, bytes]:
    found = {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    return {str(name): content for name, content in found.items() if name.parts[0] in TOLD_APART}


def assert_same_models(folder: Path, other: Path) -> None:
    files, others = files_of(folder), files_of(other)
    assert {"tree/tree.safetensors", "clients.parquet"} <= files.keys()
    assert files.keys() == others.keys()
    assert [name for name in files if files[name] != others[name]] == []


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_finished_by_a_callback_is_a_run_of_fewer_rounds(name, tmp_path):
    """After a round that was not to be evaluated: so what methods do in evaluated rounds alone is done at the end."""
    number = last_round(name)
    finished = run_of(
        name, tmp_path / "long", rounds=9, evaluate_every=5, callbacks=[FinishAt(number)]
    )
    run_of(name, tmp_path / "short", rounds=number, evaluate_every=5)
    assert finished.summary["rounds"] == number
    assert finished.summary["stopped"]["by"] == "FinishAt"
    assert_same_models(tmp_path / "long", tmp_path / "short")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_keeps_the_best_round_also_if_it_is_interrupted(
    name, tmp_path, monkeypatch
):
    number = last_round(name)

    def chosen(rows, metric):
        return next((row for row in rows if row["round"] == number), None)

    monkeypatch.setattr(rounds_module, "chosen_round", chosen)
    monkeypatch.setattr(best_round_module, "chosen_round", chosen)
    settings = {"rounds": number + 2, "keep_best": True}
    with pytest.raises(RunInterrupted, match=f"interrupted after round {number + 1};"):
        run_of(name, tmp_path / "long", **settings, callbacks=[StopAfter(number + 1)])
    run = run_of(name, tmp_path / "long", **settings)
    run_of(name, tmp_path / "short", rounds=number)
    assert (run.summary["rounds"], run.model_round, run.summary["chosen"]["round"]) == (
        number + 2,
        number,
        number,
    )
    assert_same_models(tmp_path / "long", tmp_path / "short")
