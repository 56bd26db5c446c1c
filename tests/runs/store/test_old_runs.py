"""Run folders that earlier versions wrote still open, report, resume and predict."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

import fedclade
from fedclade import Run, RunError
from fedclade.cli import app

FOLDERS = Path(__file__).parents[2] / "data" / "old_runs"
FINISHED = ("format-1", "format-2", "format-3", "1.0.0-table")
LARGEST = 200_000
"""Bytes of all folders together."""


def copied(name: str, to: Path) -> Path:
    """Return a copy of a folder, since reports and resumed runs write into it."""
    return Path(shutil.copytree(FOLDERS / name, to / name))


def test_the_folders_are_small_and_every_one_is_tested():
    assert sum(path.stat().st_size for path in FOLDERS.rglob("*") if path.is_file()) < LARGEST
    assert {path.name for path in FOLDERS.iterdir() if path.is_dir()} == {
        *FINISHED,
        "1.0.0-unfinished",
    }


@pytest.mark.parametrize("name", FINISHED)
def test_an_old_run_loads_with_its_tables_and_its_tree(name: str):
    run = Run.load(FOLDERS / name)
    rounds = run.summary["rounds"]
    assert [row["round"] for row in run.metric_rows] == list(range(1, rounds + 1))
    assert {row["client"] for row in run.client_rows} == {0, 1, 2, 3}
    assert sorted(client for leaf in run.tree.leaves for client in leaf.members) == [0, 1, 2, 3]
    assert all(torch.isfinite(node.params).all() for node in run.tree.nodes)


@pytest.mark.parametrize("name", FINISHED)
def test_an_old_run_has_a_report(name: str, tmp_path: Path):
    folder = copied(name, tmp_path)
    assert not app(["report", str(folder)], standalone_mode=False)
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "</html>" in html
    mean = Run.load(folder).summary["accuracy"]["mean"]
    assert f"{100 * mean:.1f}" in html


def test_the_model_of_an_old_run_of_a_table_predicts_rows():
    run = Run.load(FOLDERS / "1.0.0-table")
    rows = pd.DataFrame({"ward": ["A", "B", "A"], "age": [25, 50, 88]})
    predictions = run.predict(rows, client="h0")
    assert set(predictions.columns["prediction"]) <= {"yes", "no"}
    assert torch.isfinite(predictions.outputs).all()


@pytest.mark.parametrize("name", ["format-2", "format-3"])
def test_a_run_that_lacks_the_number_of_outputs_predicts_with_a_given_model(name: str):
    run = Run.load(FOLDERS / name)
    images = fedclade.load_federation("digits", clients=4).pool.x[:5]
    with pytest.raises(RunError, match="did not record the number of the model's outputs"):
        run.predict(images, client=2)


def test_a_run_without_the_layout_of_its_model_says_so():
    with pytest.raises(RunError, match="did not record the layout of the model"):
        Run.load(FOLDERS / "format-1").predict(torch.zeros(1, 6), client=0)


def test_an_unfinished_run_of_an_earlier_release_resumes(tmp_path: Path):
    folder = copied("1.0.0-unfinished", tmp_path)
    assert Run.load(folder, unfinished=True).summary["rounds"] == 2
    assert not app(["resume", str(folder)], standalone_mode=False)
    run = Run.load(folder)
    assert run.summary["rounds"] == 3
    federation = fedclade.load_federation("digits", clients=4, samples_per_client=30)
    whole = fedclade.simulate("fedavg", "mclr", federation, rounds=3)
    # Rounding depends on the machine and on torch, and the folder comes from another one.
    torch.testing.assert_close(
        run.tree.nodes[0].params, whole.tree.nodes[0].params, atol=1e-4, rtol=0
    )
