"""Runs that diverge say so, and show no clusters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedclade import LocalTraining, Run, Task, federation, simulate
from fedclade.core import DataSpec
from fedclade.report import show_run
from fedclade.report.notebook import html_of
from fedclade.report.page import write_report
from fedclade.report.tables import run_table
from fedclade.runs.divergence import ADVICE, LossWatch
from fedclade.runs.history import History
from fedclade.tasks import TargetScale

BINARY = Task("binary").of(DataSpec("d", (2,), 1, "binary"))


def watch_of(task: Any = BINARY) -> LossWatch:
    return LossWatch(task, DataSpec("d", (2,), 1, task.kind))


def add(watch: LossWatch, *losses: float) -> list[int]:
    return watch.add_losses(np.arange(len(losses)), np.array(losses))


def test_a_loss_that_grows_a_thousandfold_is_reported_once() -> None:
    watch = watch_of()
    assert add(watch, 0.7, 0.5, 0.6) == []
    assert add(watch, 0.7, 499.0, 0.6) == []
    assert add(watch, 0.7, 501.0, 0.6) == [1]
    assert add(watch, 0.7, 5e9, 0.6) == []
    assert watch.counts == (1, 3)
    assert not watch.has_diverged
    assert add(watch, np.nan, 5e9, np.inf) == [0, 2]
    assert watch.has_diverged
    assert add(watch, 0.7, 0.6, 0.6) == []
    assert not watch.has_diverged


def test_clients_may_join_later() -> None:
    watch = watch_of()
    assert watch.add_losses(np.array([5, 3]), np.array([0.6, 0.5])) == []
    assert watch.add_losses(np.array([4, 3, 9]), np.array([0.6, 1e6, 1e9])) == [3, 9]
    assert watch.add_losses(np.array([5, 4]), np.array([np.nan, 0.6])) == [5]
    assert watch.counts == (3, 4)


def test_a_loss_of_nearly_zero_may_grow() -> None:
    watch = watch_of()
    assert add(watch, 1e-9, 0.5, 0.5) == []
    assert add(watch, 1.0, 0.5, 0.5) == []
    assert add(watch, 7.0, 0.5, 0.5) == [0]


def test_the_first_loss_is_compared_with_that_of_a_constant_prediction() -> None:
    assert add(watch_of(), 690.0, 694.0, 0.7) == [1]
    spec = DataSpec("d", (2,), 1, "regression")
    scaled = Task("regression").of(spec, target_scale=TargetScale((5.0,), (2.0,)))
    assert add(watch_of(scaled), 999.0, 1001.0, 0.1) == [1]
    unscaled = watch_of(Task("regression").of(spec))
    assert add(unscaled, 1e9, 1e9, 1e9) == []
    assert add(unscaled, 1e9, 1e12, 1e9) == [1]


def test_without_a_known_constant_loss_the_first_loss_of_a_client_takes_its_place() -> None:
    unscaled = watch_of(Task("regression").of(DataSpec("d", (2,), 1, "regression")))
    assert add(unscaled, np.nan, 4.0) == [0]
    assert add(unscaled, 9.0, 1e-8) == []
    assert add(unscaled, 1e-8, 1e-5) == []
    assert add(unscaled, 89.0, 41.0) == [1]
    assert unscaled.counts == (1, 2)
    assert add(unscaled, 91.0, 1.0) == []
    assert unscaled.counts == (1, 2)


def test_losses_that_may_be_negative_diverge_only_by_what_is_no_number() -> None:
    spec = DataSpec("d", (2,), 1, "regression")
    poisson = watch_of(Task("regression", loss="poisson_nll").of(spec))
    assert add(poisson, -1.0, 1e-3, 5.0) == []
    assert add(poisson, 1e6, 1e6, np.nan) == [2]


def data(scale: float = 1.0) -> Any:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=draw) * scale
    return federation(dict.fromkeys(("north", "south"), (x, x[:, 0])), seed=1)


def run_of(rounds: int = 4, lr: float = 0.01, **options: Any) -> Run:
    """Train on squared errors; the step size of 3 multiplies the loss in each round."""
    return simulate(
        "fedavg",
        "mclr",
        data(),
        rounds=rounds,
        local=LocalTraining(lr=lr, batch_size=40, steps=2),
        device="cpu",
        engine="loop",
        **options,
    )


@pytest.fixture(scope="module")
def diverged() -> Run:
    return run_of(lr=3.0)


def printed(show: Callable[[Console], None]) -> str:
    """Return what a function prints on a console."""
    console = Console(record=True, width=150)
    with console.capture() as shown:
        show(console)
    return shown.get()


def test_a_run_that_diverged_says_so_and_shows_no_clusters(diverged: Run, tmp_path: Path) -> None:
    told = diverged.summary["diverged"]
    assert (told["clients"], told["of"]) == (2, 2)
    (event,) = [row for row in diverged.events if row["kind"] == "diverged"]
    assert event == {"round": told["round"], "kind": "diverged", "node": 0, "clients": [0, 1]}
    assert diverged.summary["clusters"] == {
        "found": 0,
        "true": None,
        "ari": None,
        "nmi": None,
        "sizes": [],
    }
    text = printed(lambda console: show_run(diverged, console))
    assert text == printed(lambda console: console.print(run_table(diverged))), "and no tree"
    assert f"2 of 2 clients, from round {told['round']} on; no clusters are shown" in text
    assert "lower local.lr" in text
    assert "\nclusters  " not in text
    page = write_report(diverged, tmp_path / "report.html").read_text()
    assert ADVICE in page
    assert 'id="diverged"' in page
    assert 'id="tree"' not in page
    assert "north" in page
    assert "Diverged" in html_of(diverged)


def test_a_run_that_did_not_has_its_clusters_and_no_word_of_it(tmp_path: Path) -> None:
    run = run_of(rounds=2)
    assert "diverged" not in run.summary
    assert run.summary["clusters"]["found"] == 1
    text = printed(lambda console: show_run(run, console))
    table = printed(lambda console: console.print(run_table(run)))
    assert "\nclusters  1 found" in table
    assert text.startswith(table)
    assert text[len(table) :].startswith("0  2 clients"), "its tree"
    page = write_report(run, tmp_path / "report.html").read_text()
    assert 'id="tree"' in page
    assert 'id="diverged"' not in page


def test_the_log_gives_the_advice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedclade"):
        run_of(lr=3.0)
    (message,) = [text for text in caplog.messages if "training diverges" in text]
    assert "the loss of 2 of 2 clients grew a thousandfold, first of client 0" in message
    assert ADVICE in message


def test_a_continued_run_reports_the_same(diverged: Run, tmp_path: Path) -> None:
    run_of(rounds=2, lr=3.0, folder=tmp_path / "run", checkpoint_every=1)
    again = run_of(rounds=4, lr=3.0, folder=tmp_path / "run", checkpoint_every=1)
    assert again.summary["diverged"] == diverged.summary["diverged"]
    assert list(again.events) == list(diverged.events)
    assert Run.load(tmp_path / "run").summary["diverged"] == diverged.summary["diverged"]


def test_a_run_of_an_earlier_version_without_events_diverged_in_its_last_round() -> None:
    run = run_of(lr=3.0)
    federation = data()
    task = Task("regression").of(federation.pool.schema)
    history = History(
        federation.roster, task, metrics=[{"round": 4}], clients=list(run.client_rows)
    )
    assert history.divergence == {"round": 4, "clients": 2, "of": 2}
    reported = replace(history, events=list(run.events))
    assert reported.divergence == run.summary["diverged"]
