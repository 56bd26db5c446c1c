"""What reports show of a run that stopped early and keeps the models of its best round."""

from __future__ import annotations

import json

import pytest

from fedclade import CFL, Callback, EarlyStopping, LocalTraining, Run, simulate
from fedclade.report import Comparison
from fedclade.report.estimates import CHOSEN, KEPT
from fedclade.report.page import Dashboard, write_report
from fedclade.report.tables import facts, tree_view
from fedclade.report.terminal import Terminal
from tests.runs.test_stopping import scripted
from tests.tiny import federation_of, linear

SCORES = (0.1, 0.4, 0.3, 0.2)


def run_of(monkeypatch: pytest.MonkeyPatch, **settings) -> Run:
    """A run that splits in rounds 1 and 3, whose second round is the best, and which stops after the fourth."""
    scripted(monkeypatch, *SCORES)
    spec = LocalTraining(epochs=2, batch_size=10, lr=0.2)
    settings = {
        "local": spec,
        "rounds": 6,
        "engine": "loop",
        "early_stopping": EarlyStopping(patience=2),
        **settings,
    }
    return simulate(
        CFL(eps2=1e-3, split_rounds=(1, 3)), linear(), federation_of([0, 1, 2, 3] * 2), **settings
    )


def test_the_terminal_says_why_it_stopped_and_which_round_is_kept(monkeypatch, capsys):
    run = run_of(monkeypatch, keep_best=True)
    said = [f"{name} {value}" for name, value in facts(run)]
    why = "validation_accuracy has not improved in 2 evaluations, since round 2"
    assert f"stopped after round 4 of 6: {why}" in said
    last = 100 * run.summary["last"]["test"]["accuracy"]
    assert any(
        line.startswith(f" its models are stored; the last round, 4, had accuracy {last:.1f}")
        for line in said
    )
    Terminal(width=100).print(tree_view(run.tree, run))
    shown = capsys.readouterr().out
    assert "rounds 2 to 2" in shown or "round 2" in shown
    assert "round 4" not in shown


def test_the_page_shows_the_kept_round(monkeypatch, tmp_path):
    run = run_of(monkeypatch, keep_best=True)
    assert len(run.tree.leaves) == 2
    page = write_report(run, tmp_path / "report.html").read_text()
    assert "its models are stored. Round 4:" in page
    assert "validation_accuracy has not improved in 2 evaluations, since round 2" in page


def test_a_comparison_says_what_its_numbers_are_of(monkeypatch):
    kept, plain = run_of(monkeypatch, keep_best=True), run_of(monkeypatch)
    assert Comparison({"plain": [plain]}).note.endswith(CHOSEN)
    assert Comparison({"plain": [plain], "kept": [kept]}).note.endswith(KEPT)


class Looking(Callback):
    """Looks at a dashboard after every round."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard, self.pages = dashboard, []

    def on_round(self, record, /):
        self.pages.append(json.dumps(json.loads(self.dashboard.state(""))["page"]))


def test_a_dashboard_ends_with_the_kept_round(monkeypatch, tmp_path):
    """Its page of the last round, which has been built by then, shows clusters that came later."""
    monkeypatch.setattr("fedclade.report.page.dashboard.TIMES_A_BUILD", 0)
    with Dashboard("mine", 6, tmp_path, 0) as dashboard:
        looking = Looking(dashboard)
        run_of(monkeypatch, keep_best=True, callbacks=[dashboard, looking])
        end = json.loads(dashboard.state(""))
    assert end["finished"]
    assert "its models are stored. Round 4:" in end["cards"]
    assert "cluster 3: " in looking.pages[-1]
    assert "cluster 2: " in json.dumps(end["page"])
    assert "cluster 3: " not in json.dumps(end["page"])
