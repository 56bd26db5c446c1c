"""A client whose test data leave a metric undefined has no score, and every mean, table and file says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchmetrics import AUROC

from fedclade import (
    CFL,
    Adversary,
    Federation,
    LocalTraining,
    Run,
    RunInterrupted,
    Task,
    assign,
    export_model,
    simulate,
)
from fedclade.core import Evaluation
from fedclade.report import Comparison, SuiteComparison, newcomer_table
from fedclade.report.page import RunView, comparison_page, page_html, run_page
from fedclade.report.tables import cluster_table, run_table
from fedclade.runs.best_round import validation_columns
from fedclade.tasks import metric
from tests.report.page.test_document import figures_in
from tests.report.test_tables import lines
from tests.tiny import FEATURES, renamed, task_federation

TRUTH, WITHOUT = [0, 1] * 5, (3, 8)
SCORED = [client for client in range(10) if client not in WITHOUT]
LOCAL = LocalTraining(batch_size=8, lr=0.1)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(FEATURES, 1)


def federation(without: Sequence[int] = WITHOUT) -> Federation:
    """Return ten clients, some of which have only one class among their test and validation examples."""
    made = task_federation("binary", TRUTH)
    for client in without:
        made.pool.y[made.by_id[client].test] = 1.0
        made.pool.y[made.by_id[client].validation] = 1.0
    return made


def ran(
    algorithm: Any = "fedavg",
    folder: Path | None = None,
    without: Sequence[int] = WITHOUT,
    **more: Any,
) -> Run:
    settings = {"rounds": 3, "engine": "loop", "local": LOCAL, "target": {"auroc": 0.5}, **more}
    settings.setdefault("task", Task(metrics=["auroc", "accuracy"]))
    return simulate(algorithm, network, federation(without), folder=folder, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("missing") / "run"
    ran(CFL(split_rounds=(2,), eps2=1e-6), place)
    return place


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run.load(folder)


@pytest.fixture(scope="module")
def empty() -> Run:
    return ran(without=range(10))


def test_means_and_quantiles_are_of_the_clients_with_a_score(run: Run):
    last = {row["client"]: row["auroc"] for row in run.client_rows if row["round"] == 3}
    known = [last[client] for client in SCORED]
    found = run.summary["auroc"]
    assert found["mean"] == pytest.approx(sum(known) / len(known))
    assert (found["min"], found["worst10_mean"]) == (min(known), min(known))
    assert (found["clients"], found["without_score"]) == (8, 2)
    assert (run.summary["accuracy"]["clients"], run.summary["accuracy"]["without_score"]) == (10, 0)
    row = run.metric_rows[-1]
    assert (row["auroc_clients"], row["auroc_without_score"]) == (8, 2)
    assert row["auroc_weighted"] == pytest.approx(found["mean"])  # all have 20 test examples


def test_the_share_at_the_target_is_of_the_clients_with_a_score(run: Run):
    last = [
        row["auroc"] for row in run.client_rows if row["round"] == 3 and row["client"] in SCORED
    ]
    assert run.summary["target"]["share_of_clients"] == sum(score >= 0.5 for score in last) / 8
    assert run.summary["target"]["rounds_to_target"] is not None


def test_files_have_null_and_no_nan(folder: Path):
    def refused(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((folder / "summary.json").read_text(), parse_constant=refused)
    column = pq.read_table(folder / "clients.parquet")["auroc"]
    assert column.null_count == 3 * len(WITHOUT)
    means = [value for value in column.to_pylist() if value is not None]
    assert all(value == value for value in means)


def test_a_run_that_is_read_again_is_the_same(run: Run, folder: Path, tmp_path: Path):
    again = Run.load(run.save(tmp_path / "copy"))
    assert again.summary == run.summary
    assert again.clients["auroc"].isna().sum() == 3 * len(WITHOUT)
    assert again.metric_rows == run.metric_rows


def test_a_run_that_was_interrupted_goes_on_without_these_scores(tmp_path: Path):
    calls = iter([False, True])
    with pytest.raises(RunInterrupted):
        ran(folder=tmp_path / "run", stop=lambda: next(calls), checkpoint_every=1)
    again, whole = ran(folder=tmp_path / "run", checkpoint_every=1), ran()
    assert again.summary["auroc"] == whole.summary["auroc"]
    assert [row["auroc_mean"] for row in again.metric_rows] == [
        row["auroc_mean"] for row in whole.metric_rows
    ]


def test_clusters_have_the_mean_of_their_members_with_a_score(run: Run):
    table = lines(cluster_table(run))
    assert len(run.tree.leaves) == 2
    assert not any("nan" in line for line in table)
    last = {row["client"]: row["auroc"] for row in run.client_rows if row["round"] == 3}
    for leaf in run.tree.leaves:
        known = [last[client] for client in leaf.members if client in SCORED]
        assert any(f"{100 * sum(known) / len(known):.1f} %" in line for line in table)


def test_the_terminal_says_how_many_clients_have_a_score(run: Run):
    text = "\n".join(lines(run_table(run)))
    assert "over 8 of 10 clients" in text
    assert "over the clients" in text  # of the accuracy, which all have


def test_the_page_says_how_many_clients_have_a_score(run: Run):
    page = run_page(RunView(run))
    assert any("over 8 of 10 clients" in card.note for card in page.cards)
    clients = next(each for each in page.sections if each.id == "clients")
    assert "2 more clients have no score: it is undefined for their test data." in clients.caption
    assert "NaN" not in json.dumps(figures_in(page_html(page)))


def test_a_comparison_says_how_many_clients_have_a_score(run: Run, tmp_path: Path):
    whole = ran(without=())
    again = replace(run, summary={**run.summary, "seed": 1})
    comparison = Comparison({"some": [run, again], "all": [whole]})
    assert "(16 of 20)" in comparison.columns["AUROC, %"][0]
    assert "of" not in comparison.columns["AUROC, %"][1]
    assert "of" not in comparison.columns["accuracy, %"][0]
    told = (
        "A number such as (18 of 20) counts the clients with a score; it is undefined for the test "
        "data of all other clients."
    )
    assert told in comparison.note
    assert told in comparison.markdown()
    assert "(16 of 20)" in comparison.markdown()
    assert "(16 of 20)" in SuiteComparison({"one": comparison, "two": comparison}).markdown()
    some, every = json.loads(comparison.json())["rows"]
    assert (some["auroc_clients"], some["auroc_without_score"]) == (16, 4)
    assert "auroc_clients" not in every
    assert some["auroc"]["mean"] == run.summary["auroc"]["mean"]
    page = comparison_page([RunView(run), RunView(whole)], tmp_path)
    overview = page.sections[0]
    assert overview.open_tables[0].rows[0][1].endswith("% (8 of 10)")
    assert told in overview.caption


def test_a_run_in_which_no_client_has_a_score_ends_and_says_so(empty: Run, tmp_path: Path):
    assert empty.summary["auroc"]["mean"] is None
    assert empty.summary["auroc"]["without_score"] == 10
    assert empty.summary["target"]["share_of_clients"] is None
    assert empty.summary["target"]["rounds_to_target"] is None
    again = Run.load(empty.save(tmp_path / "run"))
    assert again.summary == empty.summary
    text = "\n".join(lines(run_table(again)))
    assert "no score: undefined for the test data of 10 clients" in text
    lines(cluster_table(again))
    page = page_html(run_page(RunView(again, again, "itself")))
    assert "undefined for 10 clients" in page
    whole = ran(without=())
    comparison = Comparison({"none": [again], "all": [whole]})
    assert comparison.columns["AUROC, %"][0] == "– (0 of 10)"
    comparison_page([RunView(again), RunView(whole)], tmp_path)
    comparison.save(tmp_path / "comparison")
    Comparison({"none": [again]}).save(tmp_path / "alone")


def test_a_metric_by_which_no_client_has_a_score_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
):
    ran(without=range(10))
    told = "round 1: no client has a score by auroc, which is undefined for the test data of all 10 clients; choose"
    assert sum(message.startswith(told) for message in caplog.messages) == 1
    assert not any("accuracy" in message for message in caplog.messages)
    caplog.clear()
    ran()
    assert not any("no client has a score" in message for message in caplog.messages)


def test_figures_of_a_run_without_scores_can_be_drawn(empty: Run, tmp_path: Path):
    from fedclade.report.figures import save_figures

    save_figures(empty, tmp_path)


def test_an_exported_model_says_how_many_have_a_score(run: Run, empty: Run, tmp_path: Path):
    leaf = next(leaf for leaf in run.tree.leaves if set(WITHOUT) & set(leaf.members))
    export_model(run, tmp_path / "some.safetensors", node=leaf.id)
    card = json.loads((tmp_path / "some.json").read_text())
    assert card["auroc"]["without_score"] >= 1
    assert card["auroc"]["clients"] + card["auroc"]["without_score"] == len(leaf.members)
    export_model(empty, tmp_path / "none.safetensors", node=0)
    assert "undefined for the test data of 10 clients" in (tmp_path / "none.md").read_text()


def test_validation_chooses_by_the_clients_with_a_score():
    run = ran(evaluate_validation=True)
    chosen = run.summary["chosen"]
    assert chosen["metric"] == "auroc"
    assert chosen["validation"]["auroc"] == max(row["validation_auroc"] for row in run.metric_rows)


def test_the_mean_on_validation_data_leaves_clients_without_a_score_out():
    scores = torch.tensor([[0.5], [float("nan")], [1.0]], dtype=torch.float64)
    evaluation = Evaluation((0, 1, 2), scores, torch.ones(3), torch.ones(3, dtype=torch.int64))
    auroc = metric("auroc", "binary", 1)
    assert validation_columns([auroc], evaluation)["validation_auroc"] == 0.75
    none = replace(evaluation, scores=torch.full_like(scores, torch.nan))
    assert validation_columns([auroc], none)["validation_auroc"] is None


def test_validation_without_a_score_chooses_no_round():
    assert "chosen" not in ran(evaluate_validation=True, without=range(10)).summary


def test_newcomers_without_a_score_are_left_out_of_means(run: Run, tmp_path: Path):
    late = federation()
    others = renamed(late, {client: client + 20 for client in late.ids})
    newcomers = assign(run, others, model=network, engine="loop")
    scores = {row["client"]: row["auroc"] for row in newcomers.rows}
    assert [client for client, score in scores.items() if score is None] == [23, 28]
    known = [score for score in scores.values() if score is not None]
    assert newcomers.summary["auroc"] == pytest.approx(sum(known) / len(known))
    assert newcomers.summary["without_score"] == 2
    text = " ".join(lines(newcomer_table(newcomers, run)))
    assert "2 of 10 newcomers have no score: undefined for their test data" in text
    written = json.loads(newcomers.save(tmp_path / "newcomers.json").read_text())
    assert written["newcomers"][3]["auroc"] is None
    newcomers.save(tmp_path / "newcomers.csv")
    page = page_html(run_page(RunView(run, newcomers=written)))
    assert "2 of 10 have no score: it is undefined for their test data." in page


@pytest.mark.parametrize("algorithm", ["cfl", "rcfl", "ditto", "flux", "feddrift", "finetune"])
def test_methods_that_choose_by_scores_go_on(algorithm: str):
    run = ran(algorithm, evaluate_validation=True, rounds=2)
    assert run.summary["auroc"]["without_score"] == 2
    assert run.summary["auroc"]["mean"] is not None


def test_an_object_of_torchmetrics_is_treated_alike():
    given = ran(task=Task(metrics=[AUROC(task="binary"), "auroc"]), target=None)
    found, named = given.summary["binary_auroc"], given.summary["auroc"]
    assert found == named


def test_adversaries_and_honest_clients_have_means_of_those_with_a_score():
    run = ran(adversary=Adversary(kind="sign_flip", share=0.2), seed=1)
    scores = run.summary["adversary"]["scores"]["auroc"]
    last = {row["client"]: row["auroc"] for row in run.client_rows if row["round"] == 3}
    liars = run.summary["adversary"]["ids"]
    known = [last[client] for client in SCORED if client not in liars]
    assert scores["honest"] == pytest.approx(sum(known) / len(known))
